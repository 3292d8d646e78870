"""The gradients of group norm from its output, by torch's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.layout import along
from ..norms import GroupNorm, Kept
from ..operations import Gradients

#: Elements of 16-bit numbers that are computed in float32 at once.
PIECE = 1 << 18


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
) -> Gradients:
    """The gradients of x, of w and of b; y may be overwritten, and dy is laid out like it."""
    x = centred(norm, y, w, b, inverse_std, kept, y if overwrite else None)
    if w is None:
        w = torch.ones(y.shape[1], dtype=y.dtype, device=y.device)
    zero, backward = torch.zeros_like(inverse_std), torch.ops.aten.native_group_norm_backward.default
    found: Gradients = backward(dy, x, zero, inverse_std, w, *norm.extents(y), norm.groups, [needs_x, True, True])
    return found


def centred(
    norm: GroupNorm,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
    out: Tensor | None,
) -> Tensor:
    """x less the means of its groups, from y, over which it may be written."""
    std = norm.of_channels(inverse_std, y).reciprocal()
    scale = std if w is None else std / along(w.detach().to(std.dtype), 1, y.dim())
    shift = torch.zeros_like(scale) if b is None else scale * -along(b.detach().to(std.dtype), 1, y.dim())
    x = torch.empty_like(y) if out is None else out
    if scale.dtype is y.dtype:
        torch.addcmul(shift, y, scale, out=x)
    else:
        step = max(1, PIECE // max(1, y[0].numel()))
        for i in range(0, len(y), step):
            part = slice(i, i + step)
            x[part] = torch.addcmul(shift[part], y[part].to(scale.dtype), scale[part])
    if kept is not None:
        x.index_copy_(1, kept.columns, (kept.xhat * std.index_select(1, kept.columns)).to(x.dtype))
    return x
