"""Layer norm and RMS norm on a CPU: torch's layer norm forward, and one pass of the loops for everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from ...utils.storages import is_plain
from .. import torch as reference
from ..norms import Kept, RowNorm, RowNormResult, in_a_row
from . import build, loops, norm_loops


def row_norm(norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None) -> RowNormResult:
    """The norm of contiguous x, and its statistics."""
    if norm.is_centred or not loops.serve(x.dtype):
        return reference.row_norm(norm, x, w, b)
    return RowNormResult(*norm_loops.rms_norm(norm, x, w))


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
    """The gradients of x, in y if ``overwrite``, and of the rows that w and b are, in float32 or wider."""
    if not is_plain(dy) or not loops.serve(y.dtype):
        return reference.row_norm_gradient(
            norm, dy, y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )  # fmt: skip
    dx = (y if overwrite else torch.empty_like(y)) if needs_x else None
    shift = None if b is None else in_a_row(b, torch.float32)
    wide = None if kept is None else kept._replace(xhat=kept.xhat.float())
    return dx, *norm_loops.row_norm_gradient(
        norm, dy, y, norm.gain(w, torch.float32), shift, inverse_std.float(), wide, dx
    )


def inexact_columns(gain: Tensor, b: Tensor | None, ratio: float, least: float, most: float) -> Tensor | None:
    """The columns whose factor is too small, too large, or much smaller than b; None where there is none."""
    if gain.dtype is not torch.float32 or not loops.serve(gain.dtype):
        return reference.inexact_columns(gain, b, ratio, least, most)
    return norm_loops.inexact_columns(gain, b, ratio, least, most)


def row_norm_slow_because(dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why ``row_norm_gradient`` takes several times PyTorch's time, or None where it does not."""
    return build.missing_because(may_build=may_build)
