"""An activation and the dropout behind it in one node that saves its output, and no mask.

A dropped output is a zero with a sign that no other zero has (``backends/torch/dropout.py``). The derivative is that at
the output times ``1 - p``. The mask is torch's own: for the same seed the same numbers are dropped as by ``F.dropout``,
and the generator goes on from the same state.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..activations import Activation, upcast
from ..backends import Backend
from ..backends import torch as reference
from ..utils.isolation import in_clean_state
from ..utils.layout import is_dense
from .buffer_reuse import is_ours_alone, saved_under_hooks
from .pointwise import is_batched


class ActDropout(Function):
    """``F.dropout(activation(z), p)``, over z where that is the caller's to overwrite."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Activation, p: float, backend: Backend, overwrites: bool) -> Tensor:
        keep = torch.empty_like(z, dtype=torch.bool).bernoulli_(1 - p)
        y = backend.act_dropout(z, keep, activation, p, z if overwrites else torch.empty_like(z))
        if overwrites:
            ctx.mark_dirty(z)
        ctx.save_for_backward(y)
        ctx.settings = activation, p, backend, saved_under_hooks()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        (y,) = ctx.saved_tensors
        activation, p, backend, hooked = ctx.settings
        if torch.is_grad_enabled() or is_batched(dy):
            wide = upcast(y)
            is_kept = reference.is_kept(wide)
            slope = reference.slope(activation, wide, y.dtype, p, differentiable=True)
            given = upcast(dy) * is_kept
            dz = torch.where(is_kept, given * (slope * (1 / (1 - p))), given)
            return dz.to(y.dtype), None, None, None, None
        overwrite = not hooked and is_ours_alone(y)
        out = y if overwrite else torch.empty_like(y)
        if dy.stride() != y.stride():
            dy = torch.empty_like(y).copy_(dy)
        dz = backend.act_dropout_gradient(dy, y, activation, p, out)
        return dz.detach() if dz is y else dz, None, None, None, None


def serves(z: Tensor, activation: Activation, p: float) -> bool:
    """Whether ``ActDropout`` computes it: outputs tell the derivative after a factor too, and the mask is torch's."""
    if not 0 < p < 1 or not is_dense(z) or activation.operand_dims or not tells_scaled(activation, z.dtype):
        return False
    return z.is_cpu and _has_torchs_mask(z.dtype)


@functools.lru_cache(256)
@in_clean_state
def tells_scaled(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether an output that has lost a unit by a factor and its inverse tells the derivative as well. An output on a
    flat part does not, unless that is 0 (ReLU6, hard sigmoid)."""
    z = torch.linspace(-12.0, 12.0, 2049, dtype=torch.float64) + 0.0137
    z = z.to(dtype)
    y = upcast(activation.encoded(upcast(z), dtype).to(dtype))
    expected = reference.derivative(activation, upcast(z).double())
    unit = torch.finfo(dtype).eps
    allowed = 4 * unit**0.5  # next to a fold the derivative is the root of what the output is off by
    for factor in (1 - unit, 1 + unit):
        error = (reference.slope(activation, y, dtype, 1 - factor) - expected).abs()
        if not float(error.max()) <= allowed * float(expected.abs().max()):
            return False
    return True


@functools.cache
@in_clean_state
def _has_torchs_mask(dtype: torch.dtype) -> bool:
    """Whether this build of torch drops by the numbers that ``ActDropout`` draws."""
    ones = torch.ones(4099, dtype=dtype)
    generator = torch.default_generator  # torch.manual_seed would seed those of GPUs too
    before = generator.get_state()
    try:
        generator.manual_seed(0)
        dropped = torch.nn.functional.dropout(ones, 0.3) == 0
        after = generator.get_state()
        generator.manual_seed(0)
        keep = torch.empty_like(ones, dtype=torch.bool).bernoulli_(0.7)
        return torch.equal(dropped, ~keep) and torch.equal(after, generator.get_state())
    finally:
        generator.set_state(before)
