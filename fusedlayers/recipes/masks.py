"""Masks, stored as bits: booleans take a byte each, and the noise of a dropout on a CPU four.

On CPUs ``F.dropout`` multiplies by noise, which is 0 or one number, and saves it; elsewhere it saves a boolean mask, as
``torch.where``, ``masked_fill`` and attention do. Eight elements are packed by one multiplication of an integer.

Cost: two passes over a mask, five over noise, beside the drawing of its random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import packed, unpacked
from .recipe import Hooks, Recipe, Stored

#: Smaller masks are saved as they are.
LEAST_BYTES = 1 << 16
#: Of noise so many elements are looked at before all are.
_SAMPLE = 64
#: How often ``F.dropout`` has written to its noise: random numbers, and the division by what is kept.
_WRITES = 2


class Mask(Recipe):
    """A mask of bits, or the noise that is ``factor`` where the mask is set, and 0 elsewhere."""

    made_by = "mask of bits"

    def __init__(self, keep: Tensor, like: Tensor, factor: float | None, hooks: Hooks | None, region: object) -> None:
        self.region, self.version, self._factor = region, like._version, factor
        self._shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes
        self.operands = (Stored(packed(keep), hooks, region),)

    def _make(self) -> Tensor:
        keep = unpacked(self.operands[0].get(), self._shape)
        return keep if self._factor is None else keep.to(self.dtype).mul_(self._factor)


def mask_of(tensor: Tensor, hooks: Hooks | None, region: object) -> Mask | None:
    """The bits of a large contiguous mask, or of noise; None for other tensors."""
    if tensor.nbytes < LEAST_BYTES or not tensor.is_contiguous():
        return None
    if tensor.dtype is torch.bool:
        return Mask(tensor, tensor, None, hooks, region)
    sample = tensor.view(-1)[:_SAMPLE].tolist()
    factor = max(sample)
    if factor <= 0 or any(value not in (0, factor) for value in sample):
        return None
    keep = tensor.ne(0)
    mask = Mask(keep, tensor, factor, hooks, region)
    return mask if torch.equal(keep.to(tensor.dtype).mul_(factor), tensor) else None


def may_be_mask(tensor: Tensor) -> bool:
    """Whether a tensor is a mask, or may be noise, which no parameter and no view is."""
    if tensor.dtype is torch.bool:
        return type(tensor) is Tensor
    is_fresh = tensor._version == _WRITES and type(tensor) is Tensor and tensor._base is None
    return is_fresh and tensor.is_cpu and tensor.is_floating_point() and not tensor.requires_grad
