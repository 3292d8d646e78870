"""RMS norm over the last dimension (Zhang & Sennrich 2019): its options, and its definition in plain operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RmsNormOptions(NamedTuple):
    """``y = xhat (offset + w)`` with ``xhat = x / sqrt(mean(x^2) + eps)``, computed in float32 or wider."""

    eps: float
    #: 1 in Gemma's norm.
    offset: float = 0.0
    #: Whether xhat is rounded to x's dtype before the weight multiplies it, as in the norms of LLaMA and T5.
    rounds_first: bool = False

    def __call__(self, x: Tensor, w: Tensor | None) -> Tensor:
        """By PyTorch's operations, which autograd differentiates; in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        xhat = x.to(wide)
        xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            xhat = xhat.to(x.dtype).to(wide)
        gain = self.gain(w, wide)
        return (xhat if gain is None else xhat * gain).to(x.dtype)

    def gain(self, w: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """``offset + w`` in ``dtype``; None for 1."""
        if w is None:
            return None
        return w.to(dtype) + self.offset if self.offset else w.to(dtype)
