"""How a tensor is cut into tiles, and how programs walk over them.

Idea: a tensor is a matrix of rows and columns, contiguous along the columns, and channels run along one of the two:
along the columns in dense layers and channels-last tensors, along the rows in channels-first tensors. Without channels
the whole tensor is one row. A program that sums over channels walks along the axis without them: down the rows where
channels are columns, along the columns else.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...utils.layout import layout_along
from .launch import cdiv, next_power_of_2

#: Elements per tile, and threads that share them: 8 each, which is one or two 16-byte loads of each operand. (With 16,
#: gelu's derivative in float32 spilled registers on sm_100.)
TILE = 2048
THREADS = 256
#: Programs per backward launch, about: with a quarter of them an H100 took 2 to 7 % longer.
PROGRAMS = 8192
#: The same where they sum, and the columns of a tile then: all partial sums take 128 KiB. An H100 took a third longer
#: with half as many (GELU's gradient and a bias), and as long with twice or four times as many.
SUMMING_PROGRAMS, SUMMED_COLUMNS = 512, 64
#: The fewest columns that a tile gets so that fewer lie beyond the end of a row: 128 bytes of 16-bit numbers. With half
#: of that an H100 took half as long again to add two tensors of 144 channels.
NARROWEST = 64


def options(warp_size: int) -> dict[str, Any]:
    """How the kernels are compiled for a device with warps of this size.

    FMAs keep the polynomials fast, and the branch bit is made with integers; stated because Triton's default changes.
    """
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}


OPTIONS = options(64 if torch.version.hip else 32)


class Matrix(NamedTuple):
    """A tensor as rows and columns, and along which of these channels run."""

    rows: int
    columns: int
    channels: int
    axis: Literal["none", "column", "row"]


@triton.jit
def first_tile(steps, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr):
    """The rows and columns where a program's walk over ``steps`` tiles begins."""
    if AXIS == "row":
        first_row = tl.program_id(0).to(INDEX) * ROWS
        first_column = tl.program_id(1).to(INDEX) * COLUMNS * steps
    else:
        first_row = tl.program_id(1).to(INDEX) * ROWS * steps
        # Where channels bound the columns 64 bits would cost registers for nothing (a spill on sm_100).
        first_column = tl.program_id(0).to(INDEX if AXIS == "none" else tl.int32) * COLUMNS
    return first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def next_tile(row, column, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows and columns one step further."""
    if AXIS == "row":
        column += COLUMNS
    else:
        row += ROWS
    return row, column


@triton.jit
def channel_of(
    row,
    column,
    channels,
    AXIS: tl.constexpr,  # along which channels run: "none", "column" or "row"
    FOLDED: tl.constexpr,  # whether a row of the matrix is several rows of channels
):
    """The channel of each row of a tile, or of each column."""
    return row % channels if AXIS != "column" else column % channels if FOLDED else column


@triton.jit
def store_by_channel(partial_ptr, i, values):
    """Write a program's numbers of the channels of its tiles; they are the i-th of several for each channel."""
    LENGTH: tl.constexpr = values.shape[0]
    program = (i * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + program * LENGTH + tl.arange(0, LENGTH), values)


def as_matrix(tensor: Tensor, dim: int | None) -> Matrix:
    """A dense tensor as rows and columns, in the order of its memory."""
    if dim is None:
        return Matrix(1, tensor.numel(), 1, "none")
    outer, channels, inner = layout_along(tensor, dim)
    if inner == 1:
        fold = _fold(outer, channels)
        return Matrix(outer // fold, channels * fold, channels, "column")
    return Matrix(outer * channels, inner, channels, "row")


def tile_of(matrix: Matrix, *, sums: bool = False) -> tuple[int, int]:
    """The rows and columns of a tile; ``sums``: of a launch that sums over each channel."""
    columns = min(TILE, max(16, next_power_of_2(matrix.columns)))
    if matrix.axis != "none":
        # A tile of several rows shares its bias, and its sums, among them.
        columns = min(columns, SUMMED_COLUMNS if sums and matrix.axis == "column" else 256)
        columns = _narrowed(matrix.columns, columns)
    return (1 if matrix.axis == "none" else min(TILE // columns, next_power_of_2(matrix.rows))), columns


def _narrowed(columns: int, width: int) -> int:
    """The widest tile that computes least beyond the end of a row; up to an eighth of all does not count."""
    best, least = width, math.inf
    while width >= NARROWEST:
        computed = cdiv(columns, width) * width
        if _is_little(computed - columns, computed):
            return width
        if computed < least:
            best, least = width, computed
        width //= 2
    return best


def _fold(rows: int, columns: int) -> int:
    """How many rows are one row of a matrix, so that little lies beyond its end: 16 of 144 channels are nine tiles of
    256 columns."""
    for fold in (1, 2, 4, 8, 16, 32, 64):
        if rows % fold:
            break
        computed = cdiv(columns * fold, NARROWEST) * NARROWEST
        if _is_little(computed - columns * fold, computed):
            return fold
    return 1


def _is_little(beyond: int, computed: int) -> bool:
    return 8 * beyond <= computed


class Walk(NamedTuple):
    """How programs walk in tiles along the axis without channels."""

    rows: int
    columns: int
    #: The programs across that axis, and along it; the tiles that each of these takes.
    across: int
    along: int
    steps: int
    #: How many channels a tile has, or rows of channels.
    channels: int
    #: How many runs of the channels the rows of a matrix are.
    outer: int


def walk_of(matrix: Matrix, *, sums: bool) -> Walk:
    """``sums``: of a launch that sums over each channel."""
    rows, columns = tile_of(matrix, sums=sums)
    across, along = cdiv(matrix.columns, columns), cdiv(matrix.rows, rows)
    is_row = matrix.axis == "row"
    if is_row:
        across, along = along, across
    most = min(PROGRAMS, SUMMING_PROGRAMS) if sums else PROGRAMS
    steps = cdiv(along, max(1, most // across))
    outer = (matrix.rows if is_row else matrix.columns) // matrix.channels if matrix.axis != "none" else 1
    return Walk(rows, columns, across, cdiv(along, steps), steps, rows if is_row else columns, outer)


def constants_of(tensor: Tensor, matrix: Matrix, rows: int, columns: int) -> dict[str, Any]:
    """The constants of all kernels that walk in tiles."""
    is_folded = matrix.axis == "column" and matrix.columns != matrix.channels
    tile = {"ROWS": rows, "COLUMNS": columns, "INDEX": index_of(tensor.numel())}
    return {"AXIS": matrix.axis, "FOLDED": is_folded, **tile, **OPTIONS}


def index_of(extent: int) -> Any:
    """The integers for offsets below ``extent``."""
    # A tile may reach past the end by its own size before it is masked.
    return tl.int64 if extent + TILE * PROGRAMS >= 2**31 else tl.int32
