"""Batch norm, alone or with an activation, in one node that saves its input alone.

Forward computes statistics and then the output, and backward two passes over x and dy: ``dz = dy f'(z)`` and its sums,
z being normalised x once more, and ``dx = scale (dz - mean(dz) - xhat mean(dz xhat))`` with means over a channel (Ioffe
& Szegedy 2015). PyTorch takes three passes for each, and keeps z. A norm alone takes the two passes forward, and
PyTorch's kernel backward, which is quicker then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..activations import Activation, resolve
from ..backends import InputPasses
from ..backends.operations import BatchNorm, BatchNormRecompute
from ..utils.layout import along, has_torchs_layout
from ..utils.profile_ranges import profile_range, range_name
from ..utils.storages import is_plain
from .batch_norm import Known, differentiable_norm_gradients
from .pointwise import needs_composite

IDENTITY = resolve(None)


@profile_range(lambda norm, x, w, b, activation, *_: range_name("batch_norm", activation.name))
def norm_act_of_input(
    norm: BatchNorm, x: Tensor, w: Tensor | None, b: Tensor | None, activation: Activation, passes: InputPasses
) -> Tensor:
    """``activation(norm(x, w, b))`` for contiguous or channels-last x, which is kept."""
    y: Tensor = NormActOfInput.apply(x, w, b, norm, activation, passes)
    return y


@profile_range(lambda *_: "batch_norm")
def norm_of_input(norm: BatchNorm, x: Tensor, w: Tensor | None, b: Tensor | None, passes: InputPasses) -> Tensor:
    """``norm(x, w, b)`` in training for contiguous or channels-last x, which is kept; ``passes`` are those of the
    identity."""
    z: Tensor = NormOfInput.apply(x, w, b, norm, passes)
    return z


class NormOfInput(Node):
    """``norm(x, w, b)``. Saved are x and the statistics. Who makes one node of this and the next operation reads
    ``statistics``, which saved-tensor hooks do not see."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, norm: BatchNorm, passes: InputPasses
    ) -> Tensor:
        known = Known(*norm.statistics(x, passes), w)
        ctx.save_for_backward(x, w, known.mean, known.inverse_std)
        ctx.norm, ctx.statistics = norm.without_tensors(), (known.mean, known.inverse_std)
        ctx.set_materialize_grads(False)
        return passes.norm_act(x, known.mean, known.scale, known.shift(b))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        if dy is None:
            return (None,) * 5
        norm, needs = ctx.norm, ctx.needs_input_grad[:3]
        x, w, mean, inverse_std = ctx.saved_tensors
        if needs_composite(dy):
            again = BatchNormRecompute(mean, inverse_std, norm.eps, True)
            b = torch.zeros_like(mean) if needs[2] else None  # b is not saved, and no gradient depends on it
            return *differentiable_norm_gradients(dy, x, w, b, again, IDENTITY, norm.dim, needs), None, None
        return *norm.gradients(dy, x, w, mean, inverse_std, needs), None, None


class NormActOfInput(Node):
    """``activation(norm(x, w, b))``. Saved are x and the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        norm: BatchNorm,
        activation: Activation,
        passes: InputPasses,
    ) -> Tensor:
        known = Known(*norm.statistics(x, passes), w)
        ctx.save_for_backward(x, w, b, known.mean, known.inverse_std)
        ctx.settings = norm.without_tensors(), activation, passes
        return passes.norm_act(x, known.mean, known.scale, known.shift(b))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        norm, activation, passes = ctx.settings
        x, w, b, mean, inverse_std = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        is_composite = needs_composite(dy)
        if is_composite or not (is_plain(dy) and has_torchs_layout(x) and x.dtype is dy.dtype):  # hooks bring x back
            again = BatchNormRecompute(mean, inverse_std, norm.eps, norm.training)
            found = differentiable_norm_gradients(
                dy, x, w, b, again, activation, norm.dim, needs, create_graph=is_composite
            )
            return *found, None, None, None
        known = Known(mean, inverse_std, w)
        dz, db, product = passes.gradient(dy, x, mean, known.scale, known.shift(b))
        dw, *factors = passes.factors(*known, db, product, x.numel() // len(mean))
        if not needs[0]:
            dx = None
        elif norm.training:
            dx = passes.combine(dz, x, *factors)
        else:  # the statistics are constants
            dx = dz.mul_(along(known.scale, 1, dz.dim()))
        return dx, dw if needs[1] else None, db if needs[2] else None, None, None, None
