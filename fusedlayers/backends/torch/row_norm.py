"""Layer norm and RMS norm, and their gradients from the output."""

from __future__ import annotations

import torch
from torch import Tensor

from ..norms import Kept, RowNorm, RowNormResult
from .chunks import LEAST, MOST, PARTS


def row_norm(norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None) -> RowNormResult:
    """The norm of contiguous x, and its statistics."""
    if norm.is_centred:
        y, mean, inverse_std = torch.native_layer_norm(x, norm.shape, w, b, norm.epsilon(x.dtype))
        return RowNormResult(y, inverse_std.flatten(), mean.flatten())
    wide = torch.promote_types(x.dtype, torch.float32)
    size = torch.linalg.vector_norm(x.view(-1, norm.columns), dim=1, dtype=wide)
    return RowNormResult(norm(x, w, b), (size.square() / norm.columns + norm.epsilon(x.dtype)).rsqrt())


def row_norm_gradient(
    norm: RowNorm,
    dy: Tensor,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
    *,
    needs_x: bool,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x, in y if ``overwrite``, and of the rows that w and b are, in float32 or wider.

    With ``g = dy (offset + w)`` and means over the row, ``dx = inverse_std (g - mean(g) - xhat mean(g xhat))``, of RMS
    norms without ``mean(g)``.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y.view(-1, norm.columns)
    dx = (rows if overwrite else torch.empty_like(rows)) if needs_x else None
    gain = norm.gain(w, wide)
    of_w, of_b = torch.zeros(2, norm.columns, dtype=wide, device=y.device).unbind()
    height = max(1, min(MOST, max(LEAST, y.numel() // PARTS)) // norm.columns)
    for start in range(0, len(rows), height):
        part = slice(start, start + height)
        xhat = norm.xhat(rows[part], w, b, None if kept is None else kept.of_rows(part))
        g = dy.view(-1, norm.columns)[part].to(wide)
        of_w += (g * xhat).sum(0)
        of_b += g.sum(0)
        if dx is not None:
            g = g if gain is None else g * gain
            slope = (g * xhat).mean(1, keepdim=True)
            g = g - g.mean(1, keepdim=True) if norm.is_centred else g
            dx[part] = (g - xhat * slope) * inverse_std[part].unsqueeze(1).to(wide)
    return None if dx is None else dx.view(y.shape), of_w, of_b


def inexact_columns(gain: Tensor, b: Tensor | None, ratio: float, least: float, most: float) -> Tensor | None:
    """The columns whose factor is too small, too large, or much smaller than b; None where there is none."""
    size = gain.abs()
    good = (size >= least) & (size <= most)
    if b is not None:
        good &= b.abs() <= ratio * size
    return None if bool(good.all()) else (~good).nonzero().view(-1)


def row_norm_slow_because(dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why ``row_norm_gradient`` takes several times PyTorch's time, or None where it does not."""
    return f"a norm's gradients from its {dtype} output take a dozen torch operations, and more time than PyTorch's own"
