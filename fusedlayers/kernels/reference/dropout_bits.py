"""Dropout that saves a bit for each element: the mask, eight elements a byte."""

import torch
from torch import Tensor


def drawn(x: Tensor, p: float) -> Tensor:
    """The mask of what ``F.dropout(x, p)`` would keep; its generator goes on as it would."""
    if x.is_cpu:
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return torch.native_dropout(x, p, True)[1]


def packed(keep: Tensor) -> Tensor:
    """The bits of a contiguous mask: the first element is the lowest bit of the first byte."""
    eights = torch.nn.functional.pad(keep.view(-1).view(torch.uint8), (0, -keep.numel() % 8)).view(torch.int64)
    # Each of eight bytes, 0 or 1, is added into the highest one at a bit of its own.
    return (eights * 0x0102040810204080 >> 56).to(torch.uint8)


def unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """The mask of these bits."""
    # A copy of the byte in each of eight, of which each keeps one bit, and moves it to the lowest.
    eights = bits.to(torch.int64).mul_(0x0101010101010101).bitwise_and_(0x8040201008040201 - 2**64)
    eights.add_(0x7F7F7F7F7F7F7F7F).bitwise_right_shift_(7).bitwise_and_(0x0101010101010101)
    return eights.view(torch.uint8).view(torch.bool)[: shape.numel()].view(shape)
