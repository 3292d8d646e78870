"""The second half of a sum over rows: kernels write what each of their programs has summed, and this adds that up.

Idea: one launch reads the float32 partial sums, adds them in a fixed order, and writes the result in its dtype, where
``torch.sum`` and a cast are two. Programs side by side share no channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...utils.caching import BoundedCache
from .launch import Launch, cdiv, next_power_of_2

#: Partial sums that a program holds at a time, of at most ``CHANNELS`` channels: 128 bytes are read in a row.
TILE, CHANNELS = 2048, 32


_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit(do_not_specialize=["programs", "outer"])
def sums_kernel(
    partial_ptr,
    out_ptr,
    programs,
    outer,
    channels,
    sum_stride,
    program_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """out = the sums over programs and over ``outer`` runs of the channels; a sum for each of the grid's rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    own_ptr = partial_ptr + tl.program_id(1) * sum_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, programs * outer, ROWS):
        run = (first + tl.arange(0, ROWS)[:, None]).to(INDEX)
        place = (run // outer) * program_stride + (run % outer) * channels + column[None, :]
        inside = (run < programs * outer) & (column < channels)[None, :]
        total += tl.load(own_ptr + place, mask=inside, other=0.0)
    result = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(1) * channels + column, result, mask=column < channels)


class Sum(NamedTuple):
    """A sum of a gradient's kernel: one number for each channel, or one in all; and the dtype of the result."""

    by_channel: bool
    dtype: torch.dtype


def add_up(partial: Tensor, channels: int, outer: int, dtype: torch.dtype) -> Tensor:
    """(sums, programs, outer x channels or more) -> (sums, channels), in ``dtype``. It is launched on the current
    device."""
    count, programs, width = partial.shape
    out = partial.new_empty(count, channels, dtype=dtype)
    key = id(sums_kernel), count, programs, width, channels, outer, dtype, partial.get_device(), partial.stride()
    launch = _launches.get(key)
    if launch is None:
        columns = min(CHANNELS, next_power_of_2(channels))
        numbers = programs, outer, channels, partial.stride(0), partial.stride(1)
        index = tl.int64 if partial.numel() + TILE * channels >= 2**31 else tl.int32
        constants = {"ROWS": TILE // columns, "COLUMNS": columns, "INDEX": index, "num_warps": 8}
        launch = _launches.put(key, Launch(sums_kernel, [cdiv(channels, columns), count], numbers, constants))
    launch(partial, out)
    return out


def each(wanted: Sequence[Sum], partial: Tensor, channels: int, outer: int, width: int) -> list[Tensor]:
    """The sums that were wanted, from (sums, programs, ...): of ``outer`` runs of the channels, or of ``width`` numbers
    that each program has written. Where there is one sum, by one program, it is that."""
    if len(wanted) == 1 and wanted[0].by_channel and partial.shape[1] * outer == 1:
        return [partial[0, 0, :channels].to(wanted[0].dtype)]
    return [
        add_up(own, *((channels, outer) if one.by_channel else (1, width)), one.dtype)[0]
        for one, own in zip(wanted, [partial] if len(wanted) == 1 else partial.unsqueeze(1), strict=True)
    ]
