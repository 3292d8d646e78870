"""Batch norm and the activation behind it on a GPU, where the norm's input alone is kept.

Idea: forward is one pass behind torch's kernel for the statistics. Backward normalises x once more: one pass makes
``dz = dy f'(z)`` and its sums, and one makes dx of dz and x (Ioffe & Szegedy 2015). A tensor is a matrix as in
``elementwise.py``, and programs that sum walk along the axis without channels.

Cost: forward two reads of x and one write, backward four reads and two writes, where PyTorch's operations take three
reads and two writes, and six reads and two writes. Limit: contiguous and channels-last tensors of 16 or 32 bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...utils.bounded_cache import BoundedCache
from ...utils.layout import laid_out_as, other_dims
from .. import torch as reference
from ..operations import BatchNorm
from . import elementwise
from .codegen import computes, device_function
from .elementwise import OPTIONS, as_matrix, index_type, tile_of
from .fallback import or_reference
from .launch import Launch, cdiv, on
from .sums import add_up

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Channels that a program makes the factors of.
CHANNELS = 256

#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)
_gradient_launches: BoundedCache[_GradientLaunch] = BoundedCache(1024)


@triton.jit(do_not_specialize=["rows"])
def norm_act_kernel(
    x_ptr,
    mean_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    rows,
    columns,
    channels,
    FORWARD: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """y = f(z) with z = (x - mean) scale + shift, tile by tile."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    offset = row * columns + column
    channel = column if AXIS == "column" else row % channels
    mean = tl.load(mean_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    z = (tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) - mean) * scale + shift
    y = FORWARD(z, x_ptr, channel, channels)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def norm_gradient_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    scale_ptr,
    shift_ptr,
    dz_ptr,
    partial_ptr,
    rows,
    columns,
    channels,
    steps,
    GRADIENT: tl.constexpr,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = dy f'(z); the sums of dz and of dz (x - mean) over ``steps`` tiles along the axis without channels."""
    if AXIS == "row":
        row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(1).to(INDEX) * COLUMNS * steps + tl.arange(0, COLUMNS)[None, :]
        channel = row % channels
    else:
        row = tl.program_id(1).to(INDEX) * ROWS * steps + tl.arange(0, ROWS)[:, None]
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        channel = column
    mean = tl.load(mean_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) - mean
        products = GRADIENT(dy, centred * scale + shift, x_ptr, channel, channels)
        # What lies outside may have an infinite derivative; its product with 0 would be NaN.
        dz = tl.where(inside, products[0], 0.0)
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        total += dz
        product += dz * centred
        if AXIS == "row":
            column += COLUMNS
        else:
            row += ROWS
    if AXIS == "row":
        width = tl.num_programs(0) * ROWS
        place = tl.program_id(1) * width + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(partial_ptr + place, tl.sum(total, 1))
        tl.store(partial_ptr + tl.num_programs(1) * width + place, tl.sum(product, 1))
    else:
        width = tl.num_programs(0) * COLUMNS
        place = tl.program_id(1) * width + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(partial_ptr + place, tl.sum(total, 0))
        tl.store(partial_ptr + tl.num_programs(1) * width + place, tl.sum(product, 0))


@triton.jit
def norm_factors_kernel(
    mean_ptr,
    inverse_std_ptr,
    w_ptr,
    total_ptr,
    product_ptr,
    out_ptr,
    channels,
    count,
    HAS_W: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dw, and dx = scale dz + slope x + offset."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    mean = tl.load(mean_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    inverse_std = tl.load(inverse_std_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + channel, mask=inside, other=0.0)
    dw = tl.load(product_ptr + channel, mask=inside, other=0.0) * inverse_std
    scale = inverse_std
    if HAS_W:
        scale *= tl.load(w_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    slope = -scale * inverse_std * dw / count
    tl.store(out_ptr + channel, dw, mask=inside)
    tl.store(out_ptr + channels + channel, scale, mask=inside)
    tl.store(out_ptr + 2 * channels + channel, slope, mask=inside)
    tl.store(out_ptr + 3 * channels + channel, -scale * total / count - slope * mean, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    dz_ptr,
    x_ptr,
    scale_ptr,
    slope_ptr,
    offset_ptr,
    rows,
    columns,
    channels,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = scale dz + slope x + offset, tile by tile."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    place = row * columns + column
    channel = column if AXIS == "column" else row % channels
    scale = tl.load(scale_ptr + channel, mask=channel < channels, other=0.0)
    slope = tl.load(slope_ptr + channel, mask=channel < channels, other=0.0)
    offset = tl.load(offset_ptr + channel, mask=channel < channels, other=0.0)
    dz = tl.load(dz_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dx = scale * dz + (slope * x + offset)
    tl.store(dz_ptr + place, dx.to(dz_ptr.dtype.element_ty), mask=inside)


class InputPasses(NamedTuple):
    """``InputPasses`` of ``base.py``."""

    activation: Activation

    def statistics(self, x: Tensor, norm: BatchNorm, part: float) -> tuple[Tensor, Tensor]:
        """The mean of each channel of the batch, and ``1 / sqrt(var + eps)``; the running statistics take ``part``."""
        if x.is_cuda:
            mean, var = torch.batch_norm_update_stats(x, norm.running_mean, norm.running_var, part)
        else:  # interpreted: torch's kernel for CPUs has 16 bits for those of 16-bit x
            var, mean = torch.var_mean(x.float(), other_dims(x, 1), correction=0)
            count = x.numel() // len(mean)
            norm.update_running(mean, var * (count / (count - 1)), part)
        return mean, var.add_(norm.eps).rsqrt_()

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """``f(z)`` with ``z = (x - mean) scale + shift``."""
        return norm_act(x, mean, scale, shift, self.activation)

    def gradient(
        self, dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dz = dy * f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``."""
        dz, sums = norm_gradient(dy, x, mean, scale, shift, self.activation)
        return dz, sums[0], sums[1]

    def factors(
        self, mean: Tensor, inverse_std: Tensor, w: Tensor | None, total: Tensor, product: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of w, and the factors for ``combine``."""
        return norm_factors(mean, inverse_std, w, total, product, count)

    def combine(self, dz: Tensor, v: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """``scale dz + slope v + offset`` over dz, the factors along the channels."""
        return combine(dz, v, scale, slope, offset)


def input_passes(activation: Activation, dtype: torch.dtype) -> InputPasses | None:
    """The passes over x of this dtype, or None where torch's own kernels serve: of a norm alone they are as fast."""
    if activation.is_identity or activation.operand_dims or dtype not in DTYPES or not computes(activation):
        return None
    return InputPasses(activation)


@or_reference(reference.norm_act)
def norm_act(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation) -> Tensor:
    """``f(z)`` with ``z = (x - mean) scale + shift``."""
    y = torch.empty_like(x)
    function = device_function(activation, "forward", given="input", dtype=x.dtype)
    key = id(norm_act_kernel), id(function), elementwise.TILE, *_facts(x, shift)
    launch = _launches.get(key)
    if launch is None:
        matrix = as_matrix(x, 1)
        rows, columns = tile_of(matrix)
        constants = {"FORWARD": function, **_constants(x, matrix, rows, columns)}
        grid = [cdiv(matrix.rows, rows) * cdiv(matrix.columns, columns)]
        launch = _launches.put(key, Launch(norm_act_kernel, grid, matrix[:3], constants))
    with on(x):
        launch(x, mean, scale, shift.contiguous(), y)
    return y


@or_reference(reference.norm_gradient)
def norm_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``, (2, channels)."""
    dz, dy = torch.empty_like(x), laid_out_as(dy, x)
    function = device_function(activation, "gradient", given="input", dtype=x.dtype)
    key = *(id(norm_gradient_kernel), id(function), elementwise.TILE, elementwise.SUMMING_PROGRAMS), *_facts(x, shift)
    known = _gradient_launches.get(key)
    if known is None:
        known = _gradient_launches.put(key, _gradient_launch(x, function))
    partial = x.new_empty(known.partial, dtype=torch.float32)
    with on(x):
        known.launch(dy, x, mean, scale, shift.contiguous(), dz, partial)
        return dz, add_up(partial, known.channels, known.outer, torch.float32)


@or_reference(reference.norm_factors)
def norm_factors(
    mean: Tensor, inverse_std: Tensor, w: Tensor | None, total: Tensor, product: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of w, and the factors for ``combine``, of the sums over ``count`` numbers each."""
    channels = len(mean)
    out = mean.new_empty(4, channels, dtype=torch.float32)
    key = id(norm_factors_kernel), channels, count, mean.dtype, None if w is None else w.dtype, mean.get_device()
    launch = _launches.get(key)
    if launch is None:
        constants = {"HAS_W": w is not None, "CHANNELS": CHANNELS}
        grid = [cdiv(channels, CHANNELS)]
        launch = _launches.put(key, Launch(norm_factors_kernel, grid, (channels, float(count)), constants))
    with on(mean):
        launch(mean, inverse_std, mean if w is None else w.contiguous(), total, product, out)
    dw, scale, slope, offset = out.unbind()
    return dw, scale, slope, offset


@or_reference(reference.combine)
def combine(dz: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``scale dz + slope x + offset`` over dz."""
    key = id(combine_kernel), elementwise.TILE, *_facts(x, offset)
    launch = _launches.get(key)
    if launch is None:
        matrix = as_matrix(x, 1)
        rows, columns = tile_of(matrix)
        grid = [cdiv(matrix.rows, rows) * cdiv(matrix.columns, columns)]
        constants = _constants(x, matrix, rows, columns)
        launch = _launches.put(key, Launch(combine_kernel, grid, matrix[:3], constants))
    with on(x):
        launch(dz, x, scale, slope, offset)
    return dz


class _GradientLaunch(NamedTuple):
    launch: Launch
    #: The shape of the partial sums.
    partial: tuple[int, int, int]
    channels: int
    #: How many runs of the channels a program's sums are of.
    outer: int


def _gradient_launch(x: Tensor, function: Any) -> _GradientLaunch:
    matrix = as_matrix(x, 1)
    rows, columns = tile_of(matrix, sums=True)
    across, along = cdiv(matrix.columns, columns), cdiv(matrix.rows, rows)
    width = across * columns
    if matrix.axis == "row":
        across, along = along, across
        width = across * rows
    steps = cdiv(along, max(1, elementwise.SUMMING_PROGRAMS // across))
    programs = cdiv(along, steps)
    constants = {"GRADIENT": function, **_constants(x, matrix, rows, columns)}
    launch = Launch(norm_gradient_kernel, [across, programs], [*matrix[:3], steps], constants)
    outer = matrix.rows // matrix.channels if matrix.axis == "row" else 1
    return _GradientLaunch(launch, (2, programs, width), matrix.channels, outer)


def _facts(x: Tensor, parameter: Tensor) -> tuple[Any, ...]:
    return x.get_device(), x.shape, x.stride(), x.dtype, parameter.dtype


def _constants(x: Tensor, matrix: elementwise.Matrix, rows: int, columns: int) -> dict[str, Any]:
    return {"AXIS": matrix.axis, "ROWS": rows, "COLUMNS": columns, "INDEX": index_type(x), **OPTIONS}
