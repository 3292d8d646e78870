"""Bias and activation, and the gradients of both on a GPU: one pass over memory each.

Idea: a tensor is a matrix (``tiles.py``), and the bias runs along its channels.

Arithmetic is float32; inputs and outputs are 16- or 32-bit floats. The gradients of the bias and of the tensors that an
activation reads (its operands) are summed in a fixed order: every program adds up its own rows, and ``sums.py`` adds
the partial sums.

Cost: one read of each input and one write of each output, and some partial sums. Limits: tensors with gaps, or with
other strides than their result, are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...utils.caching import BoundedCache
from ...utils.layout import is_dense, laid_out_as
from ..interface import GradientRequest
from . import tiles
from .codegen import device_function, pack
from .launch import Launch, cdiv, on
from .sums import Sum, each
from .tiles import as_matrix, channel_of, constants_of, first_tile, next_tile, store_by_channel, tile_of, walk_of

#: Neighbours that are added before they join a running sum. A thread has at least four, so a sum takes a quarter of the
#: registers: with ten operands 100 to 130 in all instead of 170 to 210, where six spill on sm_100.
GROUP = tl.constexpr(4)


@triton.jit(do_not_specialize=["rows"])
def bias_act_kernel(
    z_ptr,
    b_ptr,
    residual_ptr,
    operand_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    FORWARD: tl.constexpr,
    AXIS: tl.constexpr,
    FOLDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """y = f(z + b + residual), tile by tile; y_ptr may be z_ptr."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    offset = row * columns + column
    channel = channel_of(row, column, channels, AXIS, FOLDED)
    z = tl.load(z_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(b_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        z += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    y = FORWARD(z, operand_ptr, channel, channels)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.constexpr_function
def _group(sum_, axis):
    """How many neighbours in a row are added before they join the running sum."""
    # Not where neighbours are of different channels; and a bias alone, the result 0, has registers enough.
    result, by_channel = sum_
    return GROUP.value if result > 0 and (axis == "row" or not by_channel) else 1


@triton.constexpr_function
def _written(sums, channels):
    """How many numbers a program writes of each sum, at most."""
    return channels if any(by_channel for _, by_channel in sums) else 1


@triton.jit(do_not_specialize=["rows", "steps"])
def gradient_kernel(
    dy_ptr,
    saved_ptr,
    operand_ptr,
    dz_ptr,
    partial_ptr,
    rows,
    columns,
    channels,
    steps,
    GRADIENT: tl.constexpr,
    AXIS: tl.constexpr,
    FOLDED: tl.constexpr,
    SUMS: tl.constexpr,  # for each sum: of which result of GRADIENT, and whether there is one for each channel
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = dy f' and other products, and their sums along the axis without channels; dz_ptr may be saved_ptr.

    A program walks ``steps`` tiles along that axis. A sum that is not by channel is written once for each program.
    """
    row, column = first_tile(steps, AXIS, ROWS, COLUMNS, INDEX)
    totals = ()  # whose length changes, which mypy does not expect
    for i in tl.static_range(len(SUMS)):
        totals += (tl.zeros((ROWS, COLUMNS // _group(SUMS[i], AXIS)), dtype=tl.float32),)  # type: ignore[assignment]
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        channel = channel_of(row, column, channels, AXIS, FOLDED)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        saved = tl.load(saved_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        products = GRADIENT(dy, saved, operand_ptr, channel, channels)
        tl.store(dz_ptr + offset, products[0].to(dz_ptr.dtype.element_ty), mask=inside)
        added = ()
        for i in tl.static_range(len(SUMS)):
            # What lies outside may have an infinite derivative; its product with 0 would be NaN.
            share = tl.where(inside, products[SUMS[i][0]], 0.0)
            if _group(SUMS[i], AXIS) > 1:
                share = tl.sum(tl.reshape(share, (ROWS, COLUMNS // GROUP, GROUP)), 2)
            added += (totals[i] + share,)  # type: ignore[assignment]  # likewise
        totals = added
        row, column = next_tile(row, column, AXIS, ROWS, COLUMNS)
    for i in tl.static_range(len(SUMS)):
        if SUMS[i][1]:
            store_by_channel(partial_ptr, i, tl.sum(totals[i], 1 if AXIS == "row" else 0))
        else:
            width = tl.num_programs(0) * _written(SUMS, ROWS if AXIS == "row" else COLUMNS)
            start = partial_ptr + (i * tl.num_programs(1) + tl.program_id(1)) * width
            tl.store(start + tl.program_id(0), tl.sum(totals[i]))


#: By what they depend on. The kernels and functions in a key are held by its launch.
_launches: BoundedCache[Launch] = BoundedCache(1024)
_gradient_launches: BoundedCache[_GradientLaunch] = BoundedCache(1024)


def bias_act(
    z: Tensor,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    residual: Tensor | None = None,
    dim: int,
    encode: bool,
    out: Tensor | None,
) -> Tensor:
    """``Backend.bias_act`` by one launch."""
    function = device_function(activation, "forward", given="output" if encode else "input", dtype=z.dtype)
    y = out if out is not None and is_dense(out) else torch.empty_like(z)
    if y.numel() == 0:
        return y if out is None else out
    # All that the launch depends on, for that is kept. (The sizes of tiles are tests' to change.)
    has_channels = b is not None or _run(operands)
    key = (
        *(id(bias_act_kernel), id(function), tiles.TILE, y.get_device(), y.shape, y.stride(), y.dtype, z.dtype),
        *(dim, has_channels, *(None if t is None else t.dtype for t in (b, residual))),
    )
    launch = _launches.get(key)
    if launch is None:
        matrix = as_matrix(y, dim if has_channels else None)
        rows, columns = tile_of(matrix)
        grid = [cdiv(matrix.rows, rows) * cdiv(matrix.columns, columns)]
        constants = constants_of(y, matrix, rows, columns)
        constants |= {"FORWARD": function, "HAS_BIAS": b is not None, "HAS_RESIDUAL": residual is not None}
        launch = _launches.put(key, Launch(bias_act_kernel, grid, matrix[:3], constants))
    with on(y):
        launch(
            laid_out_as(z, y), y if b is None else b.contiguous(),
            y if residual is None else laid_out_as(residual, y), pack(operands, y), y,
        )  # fmt: skip
    if out is None or y is out:
        torch.autograd.graph.increment_version(y)
        return y
    return out.copy_(y)


def gradient(
    dy: Tensor, saved: Tensor, activation: Activation, operands: Sequence[Tensor], request: GradientRequest, *, dim: int
) -> tuple[Tensor | None, ...]:
    """``Backend.gradient`` by one launch, and one more for each sum."""
    dz = saved if request.overwrite and is_dense(saved) else torch.empty_like(saved)
    needs = request.needs_operands
    if not dz.numel():
        db = dz.new_zeros(dz.shape[dim]) if request.needs_bias else None
        return dz, db, *(torch.zeros_like(p) if need else None for p, need in zip(operands, needs, strict=True))
    wanted = [Sum(True, dz.dtype)] * request.needs_bias
    wanted += [Sum(p.numel() > 1, p.dtype) for p, need in zip(operands, needs, strict=True) if need]
    # A saved input is the user's tensor: it may have gaps.
    dy, saved_alike = laid_out_as(dy, dz), laid_out_as(saved, dz)
    function = device_function(activation, "gradient", given=request.saved, dtype=saved.dtype, needs=needs)
    has_channels = request.needs_bias or _run(operands)
    key = (
        *(id(gradient_kernel), id(function), tiles.TILE, tiles.PROGRAMS, dz.get_device(), dz.shape, dz.stride()),
        *(dy.dtype, saved.dtype, dim, has_channels, request.needs_bias, *wanted),
    )
    known = _gradient_launches.get(key)
    if known is None:
        known = _gradient_launch(function, dz, dim if has_channels else None, wanted, 0 if request.needs_bias else 1)
        _gradient_launches.put(key, known)
    partial = dz.new_empty(known.partial, dtype=torch.float32)
    with on(dz):
        known.launch(dy, saved_alike, pack(operands, dz), dz, partial)
        sums = iter(each(wanted, partial, *known.runs))
    if dz is saved:
        torch.autograd.graph.increment_version(dz)
    return dz, *(next(sums) if need else None for need in (request.needs_bias, *needs))


class _GradientLaunch(NamedTuple):
    launch: Launch
    #: The shape of the partial sums.
    partial: tuple[int, int, int]
    #: Of each: how many channels there are, in how many runs; and how many numbers that are no channels'.
    runs: tuple[int, int, int]


def _gradient_launch(function: Any, dz: Tensor, dim: int | None, wanted: Sequence[Sum], first: int) -> _GradientLaunch:
    """``first``: which of the function's results is summed first."""
    matrix = as_matrix(dz, dim)
    walk = walk_of(matrix, sums=bool(wanted))
    sums = tuple((i, one.by_channel) for i, one in enumerate(wanted, first))
    width = walk.across * _written(sums, walk.channels)
    constants = {"GRADIENT": function, "SUMS": sums, **constants_of(dz, matrix, walk.rows, walk.columns)}
    launch = Launch(gradient_kernel, [walk.across, walk.along], [*matrix[:3], walk.steps], constants)
    return _GradientLaunch(launch, (len(wanted), walk.along, width), (matrix.channels, walk.outer, walk.across))


def _run(operands: Sequence[Tensor]) -> bool:
    """Whether any has a number for each channel."""
    return any(p.numel() > 1 for p in operands)
