"""Bias, activation and gradient on a GPU: one pass over memory each.

A tensor is seen as a matrix of rows and columns, contiguous along the columns; the bias runs along one of the two.
Dense layers and channels-last tensors have it along the columns, channels-first ones along the rows. Without a bias the
whole tensor is one row.

Arithmetic is float32; what is read and written may be any 16- or 32-bit float. The bias gradient is summed in a fixed
order: every program adds up its own rows, and the partial sums are added by torch.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...broadcast import is_dense
from .codegen import device_function

#: Elements per tile, and threads that share them: 8 each, which is one or two 16-byte loads of each operand. (With 16,
#: gelu's derivative in float32 spilled registers on sm_100.)
TILE = 2048
THREADS = 256
#: Programs per backward launch, about: enough to fill any device several times, few enough for short partial sums.
PROGRAMS = 2048


def options(warp_size: int) -> dict[str, Any]:
    """How the kernels are compiled for a device with warps of this size.

    FMAs keep the polynomials fast, and the branch bit is made with integers; stated because Triton's default changes.
    """
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}


OPTIONS = options(64 if torch.version.hip else 32)


@triton.jit
def bias_act_kernel(
    z_ptr,
    b_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    FORWARD: tl.constexpr,
    BIAS: tl.constexpr,  # "none", "column" or "row"
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """y = f(z + b), tile by tile; y_ptr may be z_ptr."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    offset = row * columns + column
    z = tl.load(z_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if BIAS == "column":
        z += tl.load(b_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if BIAS == "row":
        z += tl.load(b_ptr + row % channels, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, FORWARD(z).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    dy_ptr,
    saved_ptr,
    dz_ptr,
    partial_ptr,
    rows,
    columns,
    steps,
    DERIVATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = dy f', and the sums of dz along the axis without bias; dz_ptr may be saved_ptr.

    A program walks ``steps`` tiles along that axis: down the rows for a bias along the columns, along the columns else.
    """
    if BIAS == "row":
        first_row = tl.program_id(0).to(INDEX) * ROWS
        first_column = tl.program_id(1).to(INDEX) * COLUMNS * steps
    else:
        first_row = tl.program_id(1).to(INDEX) * ROWS * steps
        # Where a bias bounds the columns 64 bits would cost registers for nothing (a spill on sm_100).
        first_column = tl.program_id(0).to(INDEX if BIAS == "none" else tl.int32) * COLUMNS
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        saved = tl.load(saved_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dz = dy * DERIVATIVE(saved)
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        if BIAS != "none":
            # What lies outside may have an infinite derivative; its product with 0 would be NaN.
            total += tl.where(inside, dz, 0.0)
        if BIAS == "row":
            column += COLUMNS
        else:
            row += ROWS
    if BIAS == "column":
        column = first_column + tl.arange(0, COLUMNS)
        tl.store(partial_ptr + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)
    if BIAS == "row":
        row = first_row + tl.arange(0, ROWS)
        tl.store(partial_ptr + tl.program_id(1) * rows + row, tl.sum(total, 1), mask=row < rows)


class Matrix(NamedTuple):
    """How a tensor is seen: rows and columns, and along which of them the bias runs."""

    rows: int
    columns: int
    channels: int
    bias: Literal["none", "column", "row"]


def bias_act(
    z: Tensor, b: Tensor | None, activation: Activation, *, dim: int, encode: bool, out: Tensor | None
) -> Tensor:
    """``activation(z + b)``, b along ``dim``, in ``out`` (which may be z) or in a new buffer of z's memory format."""
    y = out if out is not None and is_dense(out) else torch.empty_like(z)
    if y.numel() == 0:
        return y if out is None else out
    matrix = _as_matrix(y, None if b is None else dim)
    rows, columns = _tile(matrix)
    grid = (triton.cdiv(matrix.rows, rows) * triton.cdiv(matrix.columns, columns),)
    forward = device_function(activation, "forward", given="output" if encode else "input", dtype=y.dtype)
    with _on(y):
        bias_act_kernel[grid](
            _as_laid_out(z, y), y if b is None else b.contiguous(), y, matrix.rows, matrix.columns, matrix.channels,
            FORWARD=forward, BIAS=matrix.bias, ROWS=rows, COLUMNS=columns, INDEX=_index_type(y), **OPTIONS,
        )  # fmt: skip
    if out is None or y is out:
        torch.autograd.graph.increment_version(y)
        return y
    return out.copy_(y)


def gradient(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    *,
    given: Literal["output", "input"],
    overwrite: bool,
    bias_dim: int | None,
) -> tuple[Tensor, Tensor | None]:
    """``dz = dy * f'``, over ``saved`` if ``overwrite``, and its sum over all but ``bias_dim``, if asked for."""
    dz = saved if overwrite and is_dense(saved) else torch.empty_like(saved)
    if dz.numel() == 0:
        return dz, None if bias_dim is None else dz.new_zeros(dz.shape[bias_dim])
    # A saved input is the user's: it may have gaps.
    dy, saved = _as_laid_out(dy, dz), _as_laid_out(saved, dz)
    matrix = _as_matrix(dz, bias_dim)
    rows, columns = _tile(matrix)
    across, along = triton.cdiv(matrix.columns, columns), triton.cdiv(matrix.rows, rows)
    if matrix.bias == "row":
        across, along = along, across
    steps = triton.cdiv(along, max(1, PROGRAMS // across))
    programs = triton.cdiv(along, steps)
    width = {"none": 0, "column": matrix.columns, "row": matrix.rows}[matrix.bias]
    partial = dz.new_empty((programs, width), dtype=torch.float32)
    derivative = device_function(activation, "derivative", given=given, dtype=saved.dtype)
    with _on(dz):
        gradient_kernel[across, programs](
            dy, saved, dz, partial, matrix.rows, matrix.columns, steps,
            DERIVATIVE=derivative, BIAS=matrix.bias, ROWS=rows, COLUMNS=columns, INDEX=_index_type(dz), **OPTIONS,
        )  # fmt: skip
    if dz is saved:
        torch.autograd.graph.increment_version(dz)
    return dz, None if bias_dim is None else partial.view(-1, matrix.channels).sum(0).to(dz.dtype)


def _as_laid_out(tensor: Tensor, out: Tensor) -> Tensor:
    """``tensor`` with the strides of ``out``: itself, or a copy."""
    return tensor if tensor.stride() == out.stride() else torch.empty_like(out).copy_(tensor)


def _as_matrix(tensor: Tensor, dim: int | None) -> Matrix:
    """A dense tensor as rows and columns, in the order of its memory."""
    if dim is None:
        return Matrix(1, tensor.numel(), 1, "none")
    channels = tensor.shape[dim]
    # Neighbours along dim are as far apart as there are elements inside of it, whatever the order of the dimensions.
    inner = tensor.stride(dim) if channels > 1 else tensor.numel()
    if inner == 1:
        return Matrix(tensor.numel() // channels, channels, channels, "column")
    return Matrix(tensor.numel() // inner, inner, channels, "row")


def _tile(matrix: Matrix) -> tuple[int, int]:
    columns = min(TILE, max(16, triton.next_power_of_2(matrix.columns)))
    if matrix.bias != "none":
        # A tile of several rows shares its bias, and its sums, among them.
        columns = min(columns, 256)
    return (1 if matrix.bias == "none" else min(TILE // columns, triton.next_power_of_2(matrix.rows))), columns


def _index_type(tensor: Tensor) -> Any:
    # A tile may reach past the end by its own size before the mask says so.
    return tl.int64 if tensor.numel() + TILE * PROGRAMS >= 2**31 else tl.int32


def _on(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's. (Interpreted tensors lie on none.)"""
    return torch.cuda.device_of(tensor)
