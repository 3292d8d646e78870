"""Batch norm and the activation behind it, from the norm's input: what the kernels for GPUs compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.layout import along, sum_along
from ..base import GradientRequest
from .elementwise import bias_act, gradient


def norm_act(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation) -> Tensor:
    """``f(z)`` with ``z = (x - mean) scale + shift`` along the second dimension."""
    z, _ = _normalised(x, mean, scale, shift)
    return bias_act(z, None, activation, dim=1, encode=False, out=z).to(x.dtype)


def norm_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``, (2, channels)."""
    z, centred = _normalised(x, mean, scale, shift)
    dz, *_ = gradient(dy.to(z.dtype), z, activation, (), GradientRequest("input", True, False), dim=1)
    assert dz is not None
    return dz.to(x.dtype), torch.stack([sum_along(dz, 1), sum_along(dz * centred, 1)])


def norm_factors(
    mean: Tensor, inverse_std: Tensor, w: Tensor | None, total: Tensor, product: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of w, and the factors of that of x for ``combine``, of the sums over ``count`` numbers each."""
    dw = product * inverse_std
    scale = inverse_std if w is None else inverse_std * w
    slope = scale * inverse_std * dw / -count
    return dw, scale, slope, scale * total / -count - slope * mean


def combine(dz: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``scale dz + slope x + offset`` over dz, the factors along the second dimension."""
    of_dz, of_x, constant = (along(t, 1, x.dim()) for t in (scale, slope, offset))
    return dz.copy_(of_dz * dz + of_x * x + constant)


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    centred = x.to(mean.dtype) - along(mean, 1, x.dim())
    return centred * along(scale, 1, x.dim()) + along(shift, 1, x.dim()), centred
