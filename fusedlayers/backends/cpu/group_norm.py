"""The gradients of group norm from its output: one pass of the loops over each group, which is read twice, the second
time from the cache; two passes, one for sums and one for the gradient of x, where channels lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.layout import Layout
from ...utils.storages import is_plain
from .. import torch as reference
from ..norms import GroupNorm, Kept, in_a_row
from . import loops, norm_loops


def group_norm_gradient(
    norm: GroupNorm,
    dy: Tensor,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
    *,
    needs_x: bool,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of w and of b; y may be overwritten, and dy is laid out like it.

    With ``g = dy w`` and means over a group, ``dx = inverse_std (g - mean(g) - xhat mean(g xhat))``; y, with
    ``xhat = (y - b) / w``, is read as it is.
    """
    channels, count = y.shape[1], norm.extents(y)[2]
    if not loops.serve(y.dtype) or count < 2 or not is_plain(dy):
        return reference.group_norm_gradient(
            norm, dy, y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )  # fmt: skip
    gain = y.new_ones(channels, dtype=torch.float32) if w is None else in_a_row(w, torch.float32)
    shift = y.new_zeros(channels, dtype=torch.float32) if b is None else in_a_row(b, torch.float32)
    dx = (y if overwrite else torch.empty_like(y)) if needs_x else None
    if kept is None and y.is_contiguous():
        of_w, of_b = norm_loops.group_norm_gradient(norm, dy, y, gain, shift, inverse_std.float(), dx)
        return dx, of_w.sum(0), of_b.sum(0)
    of_b, of_w = _sums(dy, y, shift)
    of_w /= gain
    if kept is not None:
        of_w[:, kept.columns] = (dy.index_select(1, kept.columns).float() * kept.xhat).flatten(2).sum(2)
    if dx is not None:
        _write_dx(norm, dy, y, gain, shift, inverse_std, kept, of_w, of_b, dx)
    return dx, of_w.sum(0), of_b.sum(0)


def _sums(dy: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """For each channel of each sample the sums of dy and of ``dy (y - shift)``, in float32."""
    found = y.new_empty(2, *y.shape[:2], dtype=torch.float32)
    for part, layout in _parts(y):
        shifts = shift if layout.inner == 1 else shift.repeat(len(y))
        for whole, computed in zip(found, norm_loops.products(dy[part], y[part], shifts, layout), strict=True):
            whole[part] = computed.view(-1, y.shape[1])
    return found[0], found[1]


def _write_dx(
    norm: GroupNorm,
    dy: Tensor,
    y: Tensor,
    gain: Tensor,
    shift: Tensor,
    inverse_std: Tensor,
    kept: Kept | None,
    of_w: Tensor,
    of_b: Tensor,
    dx: Tensor,
) -> None:
    """dx, which may be y, from the sums of ``dy xhat`` and of dy for each channel of each sample."""
    samples, channels, count = norm.extents(y)

    def means(sums: Tensor) -> Tensor:
        of_groups = (sums * gain).view(samples, norm.groups, -1).sum(2) / (count * channels // norm.groups)
        return norm.of_channels(of_groups, y).flatten(1)

    std, mean, slope = norm.of_channels(inverse_std, y).flatten(1), means(of_b), means(of_w)
    # dx = of_dy dy + of_y y + rest
    of_dy, of_y = std * gain, -std * slope / gain
    rest = -std * mean - of_y * shift
    own = None
    if kept is not None:
        shape = samples, len(kept.columns), *(1,) * (y.dim() - 2)
        of_own, own_std, own_mean, own_slope = (t[:, kept.columns].view(shape) for t in (of_dy, std, mean, slope))
        own = of_own * dy.index_select(1, kept.columns) - own_std * (own_mean + kept.xhat * own_slope)
        of_y[:, kept.columns] = rest[:, kept.columns] = 0.0
    for part, layout in _parts(y):
        factor, slope_of_y, offset = (t[part].flatten() for t in (of_dy, of_y, rest))
        norm_loops.combine(dy[part], y[part], factor, slope_of_y, offset, layout, dx[part])
    if kept is not None and own is not None:
        dx.index_copy_(1, kept.columns, own.to(dx.dtype))


def _parts(y: Tensor) -> list[tuple[slice, Layout]]:
    """The samples that are walked at once, and their layout: all of a contiguous tensor, one of a channels-last one."""
    samples, channels = y.shape[:2]
    count = y.numel() // (samples * channels)
    if y.is_contiguous():
        return [(slice(0, samples), Layout(1, samples * channels, count))]
    return [(slice(i, i + 1), Layout(count, channels, 1)) for i in range(samples)]
