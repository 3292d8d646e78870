"""Norms by torch whose output determines their input: over the last dimensions, each row by statistics of its own
(layer norm and RMS norm), and over groups of channels."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.layout import has_torchs_layout


class Kept(NamedTuple):
    """xhat of the columns, or channels, whose output does not tell it."""

    columns: Tensor
    #: (rows, columns), or (samples, channels, ...), in x's dtype.
    xhat: Tensor

    def of_rows(self, rows: slice) -> Kept:
        return self._replace(xhat=self.xhat[rows])

    def places(self, columns: int) -> Tensor:
        """Of each of all columns its place among these, or -1."""
        found = torch.full((columns,), -1, dtype=torch.int32, device=self.columns.device)
        found[self.columns] = torch.arange(len(self.columns), dtype=torch.int32, device=found.device)
        return found


def in_a_row(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in one contiguous dimension, in ``dtype`` and apart from the graph."""
    if p.dtype is dtype and p.dim() == 1 and p.is_contiguous():  # most are: each call asks
        return p.detach()
    return p.detach().reshape(-1).to(dtype).contiguous()


class RowNorm(NamedTuple):
    """``xhat (offset + w) + b`` over the last dimensions, which together are a row.

    Layer norm (Ba et al. 2016): ``xhat = (x - mean) / sqrt(var + eps)``. RMS norm (Zhang & Sennrich 2019):
    ``xhat = x / sqrt(mean(x^2) + eps)``, and no b.
    """

    function: str
    shape: tuple[int, ...]
    #: None stands for the spacing of numbers at 1 in float32, or in float64 for float64, as in ``F.rms_norm``.
    eps: float | None
    #: Whether the mean is subtracted.
    is_centred: bool
    #: What is added to the weight; 1 in Gemma.
    offset: float = 0.0
    #: Whether xhat is rounded to x's dtype before the weight multiplies it, as in LLaMA and T5.
    rounds_first: bool = False

    def sizes(self, x: Tensor) -> Hashable:
        """What of x's layout the checks and a plan depend on."""
        return x.shape[-len(self.shape) :] if self.shape else ()

    @property
    def columns(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.shape)

    def epsilon(self, dtype: torch.dtype) -> float:
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def __call__(self, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        """By PyTorch's own operations, which autograd differentiates."""
        if self.is_centred:
            return F.layer_norm(x, self.shape, w, b, self.epsilon(x.dtype))
        if not self.offset and not self.rounds_first:
            return F.rms_norm(x, self.shape, w, self.epsilon(x.dtype))
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(tuple(range(-len(self.shape), 0)), keepdim=True)
        xhat = wide * (mean_square + self.epsilon(x.dtype)).rsqrt()
        return self.scaled(xhat, x.dtype, w)

    def scaled(self, xhat: Tensor, dtype: torch.dtype, w: Tensor | None) -> Tensor:
        """``xhat (offset + w)`` of RMS norms, in x's dtype; xhat in float32 or float64."""
        if self.rounds_first:
            xhat = xhat.to(dtype)
        if w is None:
            return xhat.to(dtype)
        return (xhat * (w.to(xhat.dtype) + self.offset if self.offset else w)).to(dtype)

    def gain(self, w: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """``offset + w``, all in a row and in ``dtype``; None for 1."""
        if w is None:
            return None
        gain = in_a_row(w, dtype)
        return gain + self.offset if self.offset else gain

    def xhat(self, y: Tensor, w: Tensor | None, b: Tensor | None, kept: Kept | None) -> Tensor:
        """xhat from rows of y: (rows, columns), in float32 or wider."""
        found = y.to(torch.promote_types(y.dtype, torch.float32), copy=True)
        if b is not None:
            found -= in_a_row(b, found.dtype)
        gain = self.gain(w, found.dtype)
        if gain is not None:
            found /= gain
        return found if kept is None else found.index_copy_(1, kept.columns, kept.xhat.to(found.dtype))


class RowNormResult(NamedTuple):
    """Of a ``RowNorm``."""

    y: Tensor
    #: By what each row was multiplied: (rows,), in float32 or x's dtype.
    inverse_std: Tensor
    #: What was subtracted from each row: (rows,), in the same dtype; None of RMS norms.
    mean: Tensor | None = None


class GroupNorm(NamedTuple):
    """``xhat w + b`` with ``xhat = (x - mean) / sqrt(var + eps)``, statistics of each group of channels of a sample (Wu
    & He 2018)."""

    groups: int
    eps: float
    function: str = "group_norm"

    def __call__(self, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        """By PyTorch's own operations, which autograd differentiates."""
        return F.group_norm(x, self.groups, w, b, self.eps)

    def sizes(self, x: Tensor) -> Hashable:
        """What of x's layout the checks and a plan depend on."""
        return x.dim() and x.shape[0], x.shape[1] if x.dim() > 1 else None, self.reads(x)

    def extents(self, x: Tensor) -> tuple[int, int, int]:
        """The samples, the channels, and the elements of each."""
        samples, channels = x.shape[:2]
        return samples, channels, x.numel() // (samples * channels)

    def of_channels(self, of_groups: Tensor, x: Tensor) -> Tensor:
        """A number for each channel of each sample, in float32 or wider, from one for each group."""
        samples, channels, _ = self.extents(x)
        wide = of_groups.to(torch.promote_types(x.dtype, torch.float32)).view(samples, self.groups)
        return wide.repeat_interleave(channels // self.groups, 1).view(samples, channels, *(1,) * (x.dim() - 2))

    def reads(self, x: Tensor) -> bool:
        """Whether torch's kernels read x as it is laid out."""
        return has_torchs_layout(x)
