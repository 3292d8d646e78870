"""Matrix products that save the factors of what they multiply, if that is itself a product of saved factors. (So do
convolutions, in ``conv.py``.)

The weight's gradient needs the matmul's input, h. Where h is ``f(gate) * up``, or ``a * b`` by torch, the factors are
saved already, by the node that multiplied them. Backward multiplies them once more, the same way and so with the same
result, and h itself is freed after the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._torch import unsafe_view
from ..backends import Backend
from ..utils.autograd_graph import RAW
from ..utils.profile_ranges import profile_range
from .buffer_reuse import hooks_move, hooks_move_tensors
from .gate import GatedAct
from .pointwise import needs_composite


class Product(NamedTuple):
    """What a tensor is the product of."""

    #: The factors, as its node has saved them, or None where it has not saved them all. It fails once they were freed,
    #: or edited in place.
    read: Callable[[], tuple[Tensor, ...] | None]
    #: The product of the factors, and the same in operations that autograd can differentiate.
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
    if node is None or h._version or node.name() != "MulBackward0":
        return None
    if any(hooks_move(getattr(node, f"{RAW}{name}").unpack_hook) for name in ("self", "other")):
        return None
    dims, dtype = h.dim(), h.dtype

    def read() -> tuple[Tensor, ...] | None:
        # One of them may be a number for each channel of each image, but no weight that all rows share: that is a norm.
        factors = node._saved_self, node._saved_other
        is_whole = all(t is not None and t.dim() == dims and t.dtype is dtype for t in factors)
        return factors if is_whole else None

    return Product(read, torch.mul, torch.mul)


def factors_of(product: Product) -> tuple[Tensor, ...] | None:
    """Its factors; None where they are not to be had, or saved-tensor hooks would have to bring them back."""
    if hooks_move_tensors():
        return None
    try:
        return product.read()
    except RuntimeError:  # freed by a backward pass, or edited in place, which backward will refuse
        return None


class MatrixProduct(NamedTuple):
    """A product of h with w: ``h w^T + b``, ``h w``, or that of groups of rows."""

    name: str
    backend: Backend
    #: Where each group of rows ends.
    ends: Tensor | None = None

    def __call__(self, h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if self.name == "linear":
            return self.backend.linear(h, w, b)
        return torch.matmul(h, w) if self.ends is None else F.grouped_mm(h, w, offs=self.ends)

    def of_h(self, dy: Tensor, w: Tensor, *, differentiable: bool) -> Tensor:
        if self.name == "linear":
            return dy @ w if differentiable else self.backend.linear(dy, w.t(), None)
        w = w.mT
        return torch.matmul(dy, w) if self.ends is None else F.grouped_mm(dy, w, offs=self.ends)

    def of_w(self, dy: Tensor, h: Tensor, w: Tensor) -> Tensor:
        if self.ends is not None:
            return F.grouped_mm(h.t(), dy, offs=self.ends)
        if w.dim() == 2:
            dy, h = dy.reshape(-1, dy.shape[-1]), h.reshape(-1, h.shape[-1])  # flatten has no rule for batches
        return dy.t() @ h if self.name == "linear" else h.mT @ dy


@profile_range(lambda h, w, b, matmul, *_: matmul.name)
def of_product(
    h: Tensor, w: Tensor, b: Tensor | None, matmul: MatrixProduct, product: Product, factors: Sequence[Tensor]
) -> Tensor:
    """``matmul(h, w, b)`` for an h whose factors are saved in its place."""
    y: Tensor = OfProduct.apply(h, w, b, matmul, product, factors)
    return y


class OfProduct(Function):
    """``of_product`` in one node."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        matmul: MatrixProduct,
        product: Product,
        factors: Sequence[Tensor],
    ) -> Tensor:
        # Another node has saved the factors as well, so that nothing is kept for this one alone.
        ctx.save_for_backward(w, matmul.ends, *factors)
        ctx.matmul, ctx.multiply, ctx.composite = matmul._replace(ends=None), product.multiply, product.composite
        y = matmul(h, w, b)
        # With more than two dimensions it is a view of its own buffer, which autograd lets nobody write over.
        return unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        needs_h, needs_w, needs_b, *_ = ctx.needs_input_grad
        w, ends, *factors = ctx.saved_tensors
        matmul, of_h, of_w, of_b = ctx.matmul._replace(ends=ends), None, None, None
        differentiable = needs_composite(dy)
        if needs_w:
            h = ctx.composite(*factors) if differentiable else ctx.multiply(*factors)
            of_w = matmul.of_w(dy, h, w)
            del h
        if needs_h:
            of_h = matmul.of_h(dy, w, differentiable=differentiable)
        if needs_b:
            of_b = dy.reshape(-1, dy.shape[-1]).sum(0)
        return of_h, of_w, of_b, None, None, None


def multiplies(h: Tensor, w: Tensor, others: Sequence[Tensor | None] = ()) -> bool:
    """Whether ``OfProduct`` computes a product with w by these, which are plain tensors of one dtype and device."""
    if not (w.requires_grad and h.dtype.is_floating_point and h.dim() >= 2 and h.numel() and w.numel()):
        return False
    return all(t is None or (t.dtype is h.dtype and t.device == h.device) for t in (w, *others))
