"""An activation and the dropout behind it in one node, that keeps the output alone.

A dropped output of an activation is a zero with a sign of its own (``kernels/reference/dropout_bits.py``).
The derivative is that at the output times ``1 - p``. The mask is torch's own: for the same seed the same numbers are
dropped as by ``F.dropout``, and the generator goes on from the same state.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..activations import Activation, upcast
from ..kernels import Backend, reference
from ..utils.caching import in_clean_state
from ..utils.layout import is_dense, laid_out_as
from .pointwise import place_of
from .saved_buffers import expected_from_hooks, saved_output, take_over
from .second_derivatives import SavedOutput, needs_composite


def act_dropout(z: Tensor, activation: Activation, p: float, backend: Backend, overwrites: bool) -> Tensor:
    """``F.dropout(activation(z), p)``, over z where that is the caller's to overwrite."""
    place = place_of(z) if z.requires_grad else None
    dropped: Tensor = ActDropout.apply(z, activation, p, backend, overwrites)
    node: Any = dropped.grad_fn
    if node is not None:
        node.saved = SavedOutput(activation, backend, (place,), p=p)
    return dropped


class ActDropout(Node):
    """``act_dropout`` in one node."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Activation, p: float, backend: Backend, overwrites: bool) -> Tensor:
        keep = reference.drawn(z, p)
        out = backend.bias_act(z, None, activation, dim=-1, encode=True, out=z if overwrites else None)
        y = backend.drop_marked(out, keep, activation, p, out)
        if overwrites:
            ctx.mark_dirty(z)
        ctx.save_for_backward(y)
        ctx.expected = expected_from_hooks(y, is_dirty=overwrites)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        activation, backend, _, _, p = ctx.saved
        saved = saved_output(ctx, "dropout", activation)
        if needs_composite(dy):
            return ctx.saved.differentiable(dy, saved[0]), None, None, None, None
        (may_overwrite,) = take_over(ctx, saved)
        (y,) = saved
        out = y if may_overwrite else torch.empty_like(y)
        return backend.drop_marked_gradient(laid_out_as(dy, y), y, activation, p, out), None, None, None, None


def serves(z: Tensor, activation: Activation, p: float) -> bool:
    """Whether ``ActDropout`` computes it: outputs determine the derivative after a factor too."""
    return 0 < p < 1 and is_dense(z) and not activation.operand_dims and tells_scaled(activation, z.dtype)


@functools.lru_cache(256)
@in_clean_state
def tells_scaled(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether an output that has lost a unit by a factor and its inverse determines the derivative as well. An output
    on a flat part does not, unless that is 0 (ReLU6, hard sigmoid)."""
    if activation.output_refusal(dtype) is not None:
        return False
    if dtype.itemsize == 2 and not tells_scaled(activation, torch.float32):
        return False  # a kink is found where a root is small
    z = torch.cat([torch.linspace(-12.0, 12.0, 2049, dtype=torch.float64) + 0.0137, torch.arange(-24, 25) / 2]).to(
        dtype
    )
    y = upcast(activation.encoded(upcast(z), dtype).to(dtype))
    expected = reference.derivative(activation, upcast(z).double())
    unit = torch.finfo(dtype).eps
    allowed = 4 * unit**0.5  # next to a fold the derivative is the root of what the output is off by
    for factor in (1 - unit, 1 + unit):
        error = (reference.slope(activation, y, dtype, factor) - expected).abs()
        if not float(error.max()) <= allowed * float(expected.abs().max()):
            return False
    return True
