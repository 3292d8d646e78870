"""Layouts of tensors, and along which of their dimensions a bias runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from conftest import SPLITS
from gpu import DEVICE
from torch import Tensor

#: Name -> a tensor, and the dimension of its channels.
LAYOUTS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "rows": (lambda: torch.randn(37, 300), 1),
    "short rows, joined": (lambda: torch.randn(301, 7), 1),
    "columns": (lambda: torch.randn(300, 37).t(), 1),
    "a bias along the rows": (lambda: torch.randn(37, 300), 0),
    "one dimension": (lambda: torch.randn(1000), 0),
    "three dimensions, along the middle": (lambda: torch.randn(3, 40, 50), 1),
    "channels first": (lambda: torch.randn(3, 5, 17, 19), 1),
    "channels last": (lambda: torch.randn(3, 5, 17, 19).contiguous(memory_format=torch.channels_last), 1),
    "channels last, many": (lambda: torch.randn(2, 700, 3, 5).contiguous(memory_format=torch.channels_last), 1),
    "channels last in three": (lambda: torch.randn(2, 5, 7, 3, 9).contiguous(memory_format=torch.channels_last_3d), 1),
    "one plane in several pieces": (lambda: torch.randn(1, 1, 200, 301), 1),
    "planes in several pieces": (lambda: torch.randn(2, 2, 130, 131), 1),
    "one pixel": (lambda: torch.randn(9, 33, 1, 1), 1),
    "one channel": (lambda: torch.randn(50, 1), 1),
    "gaps": (lambda: torch.randn(37, 600)[:, ::2], 1),
    "expanded": (lambda: torch.randn(1, 300).expand(37, 300), 1),
    "no rows": (lambda: torch.randn(0, 5), 1),
    "no columns": (lambda: torch.randn(3, 0), 1),
    "no dimension": (lambda: torch.randn(()), -1),
    "three dimensions, along the last": (lambda: torch.randn(4, 20, 30), 2),
    "five dimensions": (lambda: torch.randn(2, 6, 3, 4, 5), -4),
    "permuted": (lambda: torch.randn(4, 5, 6, 7).permute(3, 1, 0, 2), 2),
    "large": (lambda: torch.randn(40, 64, 100), 1),
}


# --- of Triton's kernels ----------------------------------------------------------------------------------------------

Make = Callable[[Tensor], Tensor]

#: A shape, the dimension of the bias, and what rearranges a contiguous tensor.
TRITONS: dict[str, tuple[tuple[int, ...], int, Make]] = {
    "matrix": ((37, 53), -1, lambda t: t),
    "first dimension": ((37, 53), 0, lambda t: t),
    "one row": ((1, 53), -1, lambda t: t),
    "one column": ((37, 1), -1, lambda t: t),
    "one element": ((1, 1), -1, lambda t: t),
    "vector": ((53,), 0, lambda t: t),
    "empty": ((0, 5), -1, lambda t: t),
    "no channels": ((5, 0), -1, lambda t: t),
    "many columns": ((3, 701), -1, lambda t: t),
    "many rows": ((301, 3), -1, lambda t: t),
    "channels first": ((2, 7, 5, 11), 1, lambda t: t),
    "channels first, several column blocks": ((2, 3, 401), 1, lambda t: t),
    "one channel": ((3, 1, 41), 1, lambda t: t),
    "channels last": ((2, 7, 5, 11), 1, lambda t: t.contiguous(memory_format=torch.channels_last)),
    "channels last, several rows in one": ((8, 24, 4, 3), 1, lambda t: t.contiguous(memory_format=torch.channels_last)),
    "channels last, 3-d": ((2, 7, 3, 5, 3), 1, lambda t: t.contiguous(memory_format=torch.channels_last_3d)),
    "transposed": ((53, 37), -1, lambda t: t.t().contiguous().t()),
    "permuted": ((5, 11, 7), 0, lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
}


def way(layout: str, split: str) -> tuple[bool, bool]:
    """Two choices. A layout meets all four pairs of them, each with a split of its own, and so does a split."""
    ways = list(itertools.product((False, True), repeat=2))
    return ways[(list(TRITONS).index(layout) + list(SPLITS).index(split)) % len(ways)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype).to(DEVICE)


def integers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape).to(torch.float32).to(DEVICE)


def along(p: Tensor, dim: int, like: Tensor) -> Tensor:
    return p.view([-1 if i == dim % like.dim() else 1 for i in range(like.dim())]) if p.dim() else p


def sum_along(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).flatten(1).sum(1) if tensor.dim() > 1 else tensor
