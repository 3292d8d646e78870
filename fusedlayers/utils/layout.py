"""Shapes and strides: a bias along one dimension, sums along one, buffers without gaps."""

from typing import NamedTuple

import torch
from torch import Tensor


def along(b: Tensor, dim: int, dims: int) -> Tensor:
    """A 1-d tensor shaped to broadcast along ``dim`` of a tensor with ``dims`` dimensions."""
    trailing = dims - 1 - dim % dims
    return b.view(-1, *(1,) * trailing) if trailing else b


def operand_along(operand: Tensor, dim: int, dims: int) -> Tensor:
    """A tensor of one element, or of one for each index of ``dim``, shaped to broadcast along ``dim``."""
    return operand.reshape(()) if operand.numel() == 1 else along(operand.reshape(-1), dim, dims)


def sum_along(tensor: Tensor, dim: int) -> Tensor:
    """``tensor`` summed over all dimensions but ``dim``."""
    others = [*range(tensor.dim())]
    if len(others) < 2:
        return tensor
    del others[dim]
    return tensor.sum(others)


class Layout(NamedTuple):
    """A dense tensor as (outer, channels, inner), in the order of its memory."""

    outer: int
    channels: int
    inner: int


def layout_along(tensor: Tensor, dim: int) -> Layout:
    """The layout of a dense tensor with ``dim`` as its channels."""
    channels = tensor.shape[dim] if tensor.dim() else 1
    # Neighbours along dim are as far apart as there are elements inside of it, whatever the order of the dimensions.
    inner = tensor.stride(dim) if channels > 1 else tensor.numel() // channels
    return Layout(tensor.numel() // (channels * inner), channels, inner)


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """A view of a dense tensor with three dimensions, in the order of its memory."""
    return tensor.as_strided(layout, (layout.channels * layout.inner, layout.inner, 1))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory in some order of the dimensions, without gaps or overlaps."""
    if tensor.is_contiguous() or channels_last_format(tensor) is not None:
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != filled:
                return False
            filled *= size
    return True


def laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` with the strides of dense ``like``: itself, or a copy."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def channels_last_format(tensor: Tensor) -> torch.memory_format | None:
    """The channels-last format of ``tensor``, or None if it has none or is contiguous as well."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    # Contiguity first: under vmap the other question raises, but for contiguous tensors.
    is_last = last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)
    return last if is_last else None
