"""Operations that save the factors of what they multiply, if that is itself a product of saved factors.

The weight's gradient needs the input of a matmul or a convolution, h. Where h is ``f(gate) * up``, or ``a * b`` or
``F.glu`` by torch, the factors are saved already, by the node that multiplied them. Backward multiplies them once more,
the same way and so with the same result, and h itself is freed after the forward pass.

The operation and its gradients are torch's own: saved-tensor hooks put the factors in the place of h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_are_enabled,
    saved_tensors_hooks_on_top,
)
from ..utils.autograd_graph import RAW
from .buffer_reuse import hooks_move, hooks_move_tensors
from .edits import held, unedited
from .gate import GatedAct
from .pointwise import needs_composite

Factors = tuple[Tensor, ...]
#: What torch's nodes of products save, by the names that they give it: of ``F.glu`` the tensor that has both factors.
_SAVED_AS: dict[str, tuple[str, ...]] = {"MulBackward0": ("self", "other"), "GluBackward0": ("self",)}


class Product(NamedTuple):
    """What a tensor is the product of."""

    #: The factors, as its node has saved them, or None where it has not saved them all. It fails once they were freed,
    #: or edited in place.
    read: Callable[[], Factors | None]
    #: The product of the factors, and the same in torch's own operations, which traces and transforms can follow.
    multiply: Callable[..., Tensor]
    composite: Callable[..., Tensor]


def product_of(h: Tensor) -> Product | None:
    """What h is the product of; None where it is none, or was edited since, or where saved-tensor hooks got the
    factors: to read them would bring them back, or compute them once more."""
    node: Any = h.grad_fn
    if getattr(node, "_forward_cls", None) is GatedAct:
        gate, count = node.gate, node.count
        if h._version != node.version or node.is_moved:
            return None
        return Product(
            lambda: node.saved_tensors,
            lambda *saved: gate.product(saved[:count], saved[count:]),
            lambda *saved: gate.composite(saved[:count], saved[count:]),
        )
    saved_as = _SAVED_AS.get(node.name(), ()) if node is not None and not h._version else ()
    if not saved_as or any(hooks_move(getattr(node, f"{RAW}{name}").unpack_hook) for name in saved_as):
        return None
    dims, dtype = h.dim(), h.dtype
    if node.name() == "GluBackward0":
        dim = node._saved_dim  # which torch shows without its sign
        glu = functools.partial(F.glu, dim=dim if dim < dims else dim - 2**64)
        return Product(lambda: (node._saved_self,), glu, glu)

    def read() -> Factors | None:
        # One of them may be a number for each channel of each image, but no weight that all rows share: that is a norm.
        factors = node._saved_self, node._saved_other
        is_whole = all(t is not None and t.dim() == dims and t.dtype is dtype for t in factors)
        return factors if is_whole else None

    return Product(read, torch.mul, torch.mul)


def factors_of(product: Product) -> Factors | None:
    """Its factors; None where the node does not have them, or saved-tensor hooks would have to bring them back."""
    if hooks_move_tensors() or not saved_tensors_hooks_are_enabled():
        return None
    try:
        return product.read()
    except RuntimeError:  # freed by a backward pass, or edited in place, which backward will refuse
        return None


class _Packed(NamedTuple):
    """What is saved in the place of a product, and how what was to be saved is laid out."""

    factors: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]


def saving_factors(h: Tensor, product: Product, factors: Factors, run: Callable[[], Tensor]) -> Tensor:
    """``run()``, an operation of h whose node saves these factors in the place of h."""
    place, size, shape, strides, bits = h.data_ptr(), h.numel(), h.shape, h.stride(), _bits(h)
    # ``factors_of`` has refused hooks that move what they get. Others count what is saved: they get the factors.
    pack, unpack = saved_tensors_hooks_on_top(True) or (held, unedited)

    def pack_factors(saved: Tensor) -> Any:
        is_h = saved.layout is torch.strided and saved.data_ptr() == place and saved.numel() == size
        if not is_h or _bits(saved) != bits:
            return pack(saved)
        return _Packed(tuple(map(pack, factors)), saved.shape, saved.stride())

    def unpack_factors(packed: Any) -> Tensor:
        if type(packed) is not _Packed:
            unpacked: Tensor = unpack(packed)
            return unpacked
        found = tuple(map(unpack, packed.factors))
        with torch.no_grad():  # torch puts the result at h's place in the graph
            made = product.composite(*found) if needs_composite(found[0]) else product.multiply(*found)
        if made.stride() != strides:
            made = made.new_empty_strided(shape, strides).copy_(made)
        is_alike = packed.shape == shape and packed.strides == strides
        return made if is_alike else made.as_strided(packed.shape, packed.strides)

    push_saved_tensors_hooks(pack_factors, unpack_factors)
    try:
        return run()
    finally:
        pop_saved_tensors_hooks()


def _bits(tensor: Tensor) -> tuple[object, ...]:
    """How a tensor's memory is read."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()
