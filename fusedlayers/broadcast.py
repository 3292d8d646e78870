"""Shapes and strides: a bias along one dimension, sums along one, buffers without gaps."""

from __future__ import annotations

import torch
from torch import Tensor


def along(b: Tensor, dim: int, dims: int) -> Tensor:
    """A 1-d tensor shaped to broadcast along ``dim`` of a tensor with ``dims`` dimensions."""
    trailing = dims - 1 - dim % dims
    return b.view(-1, *(1,) * trailing) if trailing else b


def sum_along(tensor: Tensor, dim: int) -> Tensor:
    """``tensor`` summed over all dimensions but ``dim``."""
    dims = tensor.dim()
    return tensor.sum([i for i in range(dims) if i != dim % dims]) if dims > 1 else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory in some order of the dimensions, without gaps or overlaps."""
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()
