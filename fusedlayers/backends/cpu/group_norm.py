"""The gradients of group norm from its output: one pass of the loops over each group, which is read twice, the second
time from the cache; two passes, one for sums and one for the gradient of x, where channels lie side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.layout import Layout
from .. import torch as reference
from ..norms import GroupNorm, Kept, in_a_row
from . import loops
from .row_norm import has_loops


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
    samples, channels, count = norm.extents(y)
    if not has_loops(y.dtype) or count < 2 or type(dy) is not Tensor or dy.is_neg() or not dy.data_ptr():
        return reference.group_norm_gradient(
            norm, dy, y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )  # fmt: skip
    gain, center = torch.ones(channels) if w is None else in_a_row(w, torch.float32), torch.zeros(channels)
    center = center if b is None else in_a_row(b, torch.float32)
    dx = (y if overwrite else torch.empty_like(y)) if needs_x else None
    if kept is None and y.is_contiguous():
        of_w, of_b = loops.group_norm_gradient(norm, dy, y, gain, center, inverse_std.float(), dx)
        return dx, of_w.sum(0), of_b.sum(0)
    of_y, of_product = _sums(dy, y, center)
    of_xhat = of_product / gain
    if kept is not None:
        own, xhat = dy.index_select(1, kept.columns).float(), kept.xhat.float()
        of_xhat[:, kept.columns] = (own * xhat).flatten(2).sum(2)
    dw, db = of_xhat.sum(0), of_y.sum(0)
    if dx is None:
        return None, dw, db
    of_groups = lambda sums: norm.of_channels((sums * gain).view(samples, norm.groups, -1).sum(2), y).flatten(1)  # noqa: E731
    size = count * channels // norm.groups
    std = norm.of_channels(inverse_std, y).flatten(1)
    mean, slope = of_groups(of_y) / size, of_groups(of_xhat) / size
    scale, of_value = std * gain, -std * slope / gain
    offset = -std * mean - of_value * center
    if kept is not None:
        shaped = lambda t: t[:, kept.columns].view(samples, -1, *(1,) * (y.dim() - 2))  # noqa: E731
        of_kept = shaped(scale) * own - shaped(std) * (shaped(mean) + xhat * shaped(slope))
        of_value[:, kept.columns] = offset[:, kept.columns] = 0.0
    for part, layout in _parts(y):
        factor, slope, shift = (t[part].flatten() for t in (scale, of_value, offset))
        loops.combine(dy[part], y[part], factor, slope, shift, layout, dx[part])
    if kept is not None:
        dx.index_copy_(1, kept.columns, of_kept.to(dx.dtype))
    return dx, dw, db


def _sums(dy: Tensor, y: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """For each channel of each sample the sums of dy and of ``dy (y - center)``, in float32."""
    found = torch.empty(2, *y.shape[:2])
    for part, layout in _parts(y):
        centers = center if layout.inner == 1 else center.repeat(len(y))
        for of_all, of_part in zip(found, loops.products(dy[part], y[part], centers, layout), strict=True):
            of_all[part] = of_part.view(-1, y.shape[1])
    return found[0], found[1]


def _parts(y: Tensor) -> list[tuple[slice, Layout]]:
    """The samples that are walked at once, and their layout: all of a contiguous tensor, one of a channels-last one."""
    samples, channels = y.shape[:2]
    count = y.numel() // (samples * channels)
    if y.is_contiguous():
        return [(slice(0, samples), Layout(1, samples * channels, count))]
    return [(slice(i, i + 1), Layout(count, channels, 1)) for i in range(samples)]
