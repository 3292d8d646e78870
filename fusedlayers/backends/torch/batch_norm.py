"""Batch norm and the activation behind it, in torch operations: what the kernels for GPUs compute."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ...activations import Activation, InverseError
from ...utils.layout import along, other_dims, sum_along
from ..base import GradientRequest
from .elementwise import bias_act, gradient
from .inverse import inverse


def norm_act(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation) -> Tensor:
    """``f(z)`` with ``z = (x - mean) scale + shift`` along the second dimension."""
    z, _ = _normalised(x, mean, scale, shift)
    return bias_act(z, None, activation, dim=1, encode=False, out=z).to(x.dtype)


def norm_act_between(
    x: Tensor, factors: tuple[Tensor, Tensor, Tensor] | None, y: Tensor, activation: Activation
) -> Tensor:
    """``f(z)`` with its branch in y, which may be x, z being x or ``(x - mean) scale + shift``; the smallest z and the
    smallest -z of each channel, (2, channels)."""
    z = x if factors is None else _normalised(x, *factors)[0].to(x.dtype)
    dims = other_dims(z, 1)
    ends = torch.stack([z.amin(dims), z.amax(dims).neg()])
    bias_act(z, None, activation, dim=1, encode=True, out=y)
    return ends


def norm_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``, (2, channels)."""
    z, centred = _normalised(x, mean, scale, shift)
    dz, *_ = gradient(dy.to(z.dtype), z, activation, (), GradientRequest("input", True, False), dim=1)
    assert dz is not None
    return dz.to(x.dtype), torch.stack([sum_along(dz, 1), sum_along(dz * centred, 1)])


def norm_output_gradient(
    dy: Tensor, y: Tensor, shift: Tensor, z: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'`` and z, which may be y, from y; for each channel the sums of dz and of ``dz (z - shift)``."""
    of_output = not activation.is_folded
    dz = None
    if of_output:
        dz, *_ = gradient(dy, y, activation, (), GradientRequest("output", False, False), dim=1)
    inverse(y, activation, z)
    if not of_output:
        dz, *_ = gradient(dy, z, activation, (), GradientRequest("input", False, False), dim=1)
    assert dz is not None
    return dz, torch.stack([sum_along(dz, 1), sum_along(dz * (z - along(shift, 1, z.dim())), 1)])


def norm_factors(
    mean: Tensor,
    inverse_std: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    total: Tensor,
    product: Tensor,
    kept: Tensor | Literal["all"] | None,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of w, and the factors of that of x for ``combine``, from the sums over ``count`` numbers each;
    ``kept``: of which channels they are of x, and not of z."""
    scale = inverse_std if w is None else inverse_std * w
    gain, center = inverse_std, mean
    if kept != "all":
        gain = torch.ones_like(mean) if w is None else w.to(mean.dtype).reciprocal()
        center = torch.zeros_like(mean) if b is None else b.to(mean.dtype)
        if kept is not None:
            gain = gain.index_copy(0, kept, inverse_std[kept])
            center = center.index_copy(0, kept, mean[kept])
    dw = product * gain
    slope = scale * gain * dw / -count
    return dw, scale, slope, scale * total / -count - slope * center


def combine(dz: Tensor, v: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``scale dz + slope v + offset`` over dz, the factors along the second dimension."""
    of_dz, of_v, constant = (along(t, 1, v.dim()) for t in (scale, slope, offset))
    return dz.copy_(of_dz * dz + of_v * v + constant)


def inexact_channels(
    error: InverseError,
    mean: Tensor,
    inverse_std: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    ends: tuple[Tensor, Tensor],
    count: int,
    centred: float,
    eps: float,
) -> Tensor | None:
    """As ``NormPasses.inexact_channels``; the ends may be those of all channels together."""
    size = (1 - eps * inverse_std.square()).clamp_(min=0).sqrt_()  # of xhat: 0 where variances are far below eps
    if w is not None:
        size = size * w.abs()
    good = (mean * inverse_std).abs() <= centred
    if w is not None:
        good &= error.is_acceptable(torch.zeros_like(w) if b is None else b, size)
    # No value alone may err by more than all of them may together.
    allowed = error.limit * math.sqrt(count) * size.double()
    good = good & (error.worst(torch.stack(ends)) <= allowed).all(0)
    return None if bool(good.all()) else (~good).nonzero().squeeze(1)  # on a GPU the host waits


def _normalised(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    centred = x.to(mean.dtype) - along(mean, 1, x.dim())
    return centred * along(scale, 1, x.dim()) + along(shift, 1, x.dim()), centred
