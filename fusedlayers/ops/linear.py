"""``x w^T + b`` for blocks in chunks: into a part of the result, or added to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer: (rows, in), (out, in), (out,) -> (rows, out)."""
    if out is None:
        return F.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def add_linear(total: Tensor, x: Tensor, w: Tensor) -> None:
    """``total + x w^T`` over ``total``, by the matmul itself."""
    torch.addmm(total, x, w.t(), out=total)
