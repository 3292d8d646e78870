"""Gates for blocks of one's own, and the matrix products behind them: two hidden buffers where PyTorch keeps four."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import validation
from .activations import Activation, resolve
from .backends.operations import GATE
from .call import followed_by, needs_gradient, plan_for
from .ops import gate as gates
from .ops.buffer_reuse import hooks_move_tensors
from .ops.dropout import dropped_product_of
from .ops.gate import Gate, Packing
from .ops.product import factors_of, saving_factors
from .sizes import is_small
from .utils.compiled_checkpoint import compiled_checkpoint


def gated_act(
    gate: Tensor, up: Tensor | None = None, activation: object = "silu", *, packing: Packing = "gate_up"
) -> Tensor:
    """``activation(gate) * up`` in one pass, that keeps its two factors, and not ``activation(gate)`` as well.

    A product does not determine its factors, so these are kept. What multiplies the result by a weight needs it for the
    weight's gradient: ``fusedlayers.linear``, ``matmul``, ``bmm`` and ``grouped_mm`` compute it from the factors once
    more, and do not keep it. A block of both keeps two hidden buffers.

    Args:
        gate: (..., hidden), float16, bfloat16, float32, or float64 (by PyTorch); or both halves,
            (..., 2 hidden), without ``up``.
        up: of the shape and dtype of ``gate``, or None.
        activation: as for ``fusedlayers.dense_bias_act``; None for a bilinear gate.
        packing: how both lie in ``gate``: "gate_up" and "up_gate", one behind the other; "interleaved", in turn, the
            gate's first.

    Returns:
        (..., hidden), of the same dtype.

    Raises:
        TypeError: something that is not a tensor, or not of a floating dtype.
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation or packing.

    Saved: ``gate`` and ``up``. Results of less than 512 KiB (on GPUs 128 KiB for each multiprocessor), and gates of
    which only one half needs a gradient, are left to PyTorch.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".

    >>> import torch, fusedlayers as fl
    >>> fl.gated_act(torch.tensor([[-1.0, 2.0, 3.0, 4.0]]), activation="relu")
    tensor([[0., 8.]])
    """
    record = resolve(activation, "gated_act")
    given = (gate,) if up is None else (gate, up)
    is_usual = validation.are_usual((gate,), (up,))
    if not is_usual:
        validation.check_tensors("gated_act", {"gate": gate}, up=up)
        if has_torch_function(given):
            if not record.is_fusible:  # it has no name in a graph
                return _composite(gate, up, record, packing)
            return handle_torch_function(gated_act, given, gate, up, record, packing=packing)
    validation.check_gate(gate, up, packing, get_args(Packing))
    y = _in_one_node(gate, up, record, packing, is_usual)
    return _composite(gate, up, record, packing) if y is None else y


def multiply(input: Tensor, other: Tensor) -> Tensor:
    """``input * other``; where one of them is what ``F.silu`` or ``F.gelu`` returned, and has not been edited, in one
    node that keeps the activation's input, as ``gated_act``. The activation's own node is then freed with its result.
    """
    for gated, up in ((input, other), (other, input)) if not torch.compiler.is_compiling() else ():
        gate = gate_of(gated, up)
        if gate is not None:
            y = _in_one_node(gate[0], up, gate[1], "gate_up", True)
            if y is not None:
                return y
    return torch.mul(input, other)


def gate_of(gated: object, up: object) -> tuple[Tensor, Activation] | None:
    """The input and the activation of which ``gated`` is the result, by PyTorch's own node."""
    node: Any = getattr(gated, "grad_fn", None)
    if node is None or node.name() not in ("SiluBackward0", "GeluBackward0"):
        return None
    if not isinstance(gated, Tensor) or not isinstance(up, Tensor) or gated._version or gated._backward_hooks:
        return None
    is_alike = gated.shape == up.shape and gated.dtype is up.dtype and up.requires_grad
    if not is_alike or gated.retains_grad or not validation.are_usual((gated, up), ()) or hooks_move_tensors():
        return None
    name = "silu" if node.name() == "SiluBackward0" else {"none": "gelu", "tanh": "gelu_tanh"}[node._saved_approximate]
    try:
        return node._saved_self, resolve(name)
    except RuntimeError:  # freed, or edited in place, which backward will refuse
        return None


def _in_one_node(
    gate: Tensor, up: Tensor | None, record: Activation, packing: Packing, is_usual: bool
) -> Tensor | None:
    """None where PyTorch's own operations are to compute it."""
    half, other = gates.split(gate, packing) if up is None else (gate, up)
    if half.dtype is not other.dtype:
        return None
    sizes = GATE, half.shape
    plan, traced, operands = plan_for(GATE, half, None, None, None, record, "auto", sizes, None, False, is_usual)
    given = (gate,) if up is None else (gate, up)
    if plan.path == "compiled" and needs_gradient(*given):
        # Else the compiler saves activation(gate) beside both.
        product: Tensor = compiled_checkpoint(_composite, gate, up, record, packing)
        return product
    is_whole = needs_gradient(half) and needs_gradient(other) and validation.unusual_because(other) is None
    if plan.path != "fused" or not is_whole or plan.dim != -1 or not gates.reads(half, other):
        return None
    return gates.gated_act(Gate(traced, plan.backend, packing if up is None else None), *given, *operands)


def _composite(gate: Tensor, up: Tensor | None, activation: Activation, packing: Packing) -> Tensor:
    """By PyTorch's own operations."""
    half, other = gates.split(gate, packing) if up is None else (gate, up)
    return validation.activated("gated_act", activation, half) * other


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` that does not keep an ``input`` whose factors are kept: what ``gated_act``, ``a * b`` or ``F.glu``
    returned.

    Backward multiplies the factors once more for the weight's gradient, with the same result.

    Args:
        input, weight, bias: as for ``F.linear``.

    Returns, Raises: as ``F.linear``.

    Saved: ``weight``; of an input that is the unchanged product of saved tensors nothing more, else ``input``.
    Of products of less than 512 KiB (on GPUs 128 KiB for each multiprocessor), or that were reshaped, and under
    saved-tensor hooks and ``torch.compile``, what ``F.linear`` saves. Writes past the version counter (``.data``,
    NumPy, collectives) to the input, after it was multiplied, are not noticed.

    >>> import torch, fusedlayers as fl
    >>> fl.linear(fl.gated_act(torch.ones(1, 2), torch.ones(1, 2), None), torch.ones(3, 2))
    tensor([[2., 2., 2.]])
    """
    return keeping_factors(F.linear, input, weight, bias)


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """``torch.matmul`` that does not keep an ``input`` whose factors are kept, as ``fusedlayers.linear``.

    Args:
        input: (..., n, in) with at least two dimensions.
        other: (in, out), or (..., in, out) with the leading dimensions of ``input``. Others are left to PyTorch.

    Returns, Raises: as ``torch.matmul``. Saved: as ``fusedlayers.linear``.

    >>> import torch, fusedlayers as fl
    >>> fl.matmul(torch.ones(1, 2) * 2, torch.ones(2, 3))
    tensor([[4., 4., 4.]])
    """
    return keeping_factors(torch.matmul, input, other)


def bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """``torch.bmm`` that does not keep an ``input`` whose factors are kept, as ``fusedlayers.linear``: for experts that
    are multiplied as a batch.

    >>> import torch, fusedlayers as fl
    >>> fl.bmm(torch.ones(4, 1, 2), torch.ones(4, 2, 3)).shape
    torch.Size([4, 1, 3])
    """
    return keeping_factors(torch.bmm, input, mat2)


def grouped_mm(input: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:
    """``F.grouped_mm`` of rows in groups that does not keep an ``input`` whose factors are kept, as
    ``fusedlayers.linear``: for experts whose tokens lie one behind the other.

    Args:
        input: (tokens, in).
        mat2: (groups, in, out).
        offs: (groups,), int32: where each group's tokens end.

    Returns, Raises: as ``F.grouped_mm``, which has kernels for bfloat16 on GPUs and for all floating dtypes on CPUs.

    Saved: as ``fusedlayers.linear``.

    >>> import torch, fusedlayers as fl
    >>> fl.grouped_mm(torch.ones(4, 16), torch.ones(2, 16, 16), torch.tensor([1, 4], dtype=torch.int32)).shape
    torch.Size([4, 16])
    """
    return keeping_factors(F.grouped_mm, input, mat2, offs=offs)


def keeping_factors(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function(input, *args, **kwargs)``, a product with a weight, or a convolution, that does not keep an ``input``
    whose factors are kept."""
    product = dropped_product_of(input) if validation.are_usual((input,)) else None
    if product is None or not input.numel() or is_small(input):
        return function(input, *args, **kwargs)
    is_ours = followed_by() is None and validation.unusual_because(input) is None
    factors = factors_of(product) if is_ours else None
    if factors is None:
        return function(input, *args, **kwargs)
    return saving_factors(input, product, factors, functools.partial(function, input, *args, **kwargs))
