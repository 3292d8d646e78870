"""Batch norm and the activation behind it on a GPU, from the norm's input, or from the output where that tells it.

Idea: forward is one pass for the statistics (``norm_statistics.py``) and one more. Backward computes z again: one pass
makes ``dz = dy f'(z)`` and its sums, and one makes dx of dz and of x or z (Ioffe & Szegedy 2015). A tensor is a matrix
as in ``tiles.py``, and programs that sum walk along the axis without channels.

Cost: forward two reads of x and one write; backward four reads and two writes, and one write more from the output.
PyTorch's operations take three reads and two writes, and six reads and two writes. Limit: contiguous and channels-last
tensors of 16 or 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...utils.bounded_cache import BoundedCache
from ...utils.layout import has_torchs_layout, laid_out_as
from .. import torch as reference
from . import tiles
from .codegen import computes, device_function
from .fallback import or_reference
from .launch import Launch, cdiv, on
from .norm_statistics import statistics
from .sums import add_up
from .tiles import (
    as_matrix,
    channel_of,
    constants_of,
    factor_of,
    first_tile,
    next_tile,
    store_by_channel,
    walk_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Channels that a program makes the factors of.
CHANNELS = 256

#: By what they depend on; with the shape of what its programs write, and how many runs of the channels these are of.
_launches: BoundedCache[tuple[Launch, tuple[int, int, int], int]] = BoundedCache(1024)
_factor_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit(do_not_specialize=["rows", "steps"])
def norm_act_kernel(
    x_ptr,
    mean_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    ends_ptr,
    rows,
    columns,
    channels,
    steps,
    FORWARD: tl.constexpr,
    NORMALISES: tl.constexpr,  # else x is z
    HAS_ENDS: tl.constexpr,
    AXIS: tl.constexpr,
    FOLDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """y = f(z) with z = (x - mean) scale + shift; the smallest z of each channel and of -z over ``steps`` tiles."""
    row, column = first_tile(steps, AXIS, ROWS, COLUMNS, INDEX)
    channel = channel_of(row, column, channels, AXIS, FOLDED)
    if NORMALISES:
        mean = factor_of(mean_ptr, channel, channels)
        scale = factor_of(scale_ptr, channel, channels)
        shift = factor_of(shift_ptr, channel, channels)
    if HAS_ENDS:
        smallest = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
        negated = tl.full((ROWS, COLUMNS), float("inf"), tl.float32)
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        z = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if NORMALISES:
            z = (z - mean) * scale + shift
        if HAS_ENDS:
            smallest = tl.where(inside, tl.minimum(smallest, z), smallest)
            negated = tl.where(inside, tl.minimum(negated, -z), negated)
        y = FORWARD(z, x_ptr, channel, channels)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)
        row, column = next_tile(row, column, AXIS, ROWS, COLUMNS)
    if HAS_ENDS:
        axis: tl.constexpr = 1 if AXIS == "row" else 0
        store_by_channel(ends_ptr, 0, tl.min(smallest, axis))
        store_by_channel(ends_ptr, 1, tl.min(negated, axis))


@triton.jit(do_not_specialize=["rows", "steps"])
def norm_gradient_kernel(
    dy_ptr,
    saved_ptr,
    mean_ptr,
    scale_ptr,
    shift_ptr,
    dz_ptr,
    z_ptr,
    partial_ptr,
    rows,
    columns,
    channels,
    steps,
    GRADIENT: tl.constexpr,
    INVERSE: tl.constexpr,  # of outputs; None where inputs were saved
    OF_OUTPUT: tl.constexpr,  # whether GRADIENT reads the output, and not z
    AXIS: tl.constexpr,
    FOLDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = dy f'(z); the sums of dz and of dz (x - mean) over ``steps`` tiles along the axis without channels. From
    outputs also z, which may be written over them, and the sums of dz (z - shift)."""
    row, column = first_tile(steps, AXIS, ROWS, COLUMNS, INDEX)
    channel = channel_of(row, column, channels, AXIS, FOLDED)
    shift = factor_of(shift_ptr, channel, channels)
    if INVERSE is None:
        mean = factor_of(mean_ptr, channel, channels)
        scale = factor_of(scale_ptr, channel, channels)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        saved = tl.load(saved_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if INVERSE is None:
            centred = saved - mean
            products = GRADIENT(dy, centred * scale + shift, dy_ptr, channel, channels)
        else:
            z = INVERSE(saved, dy_ptr, channel, channels)
            centred = z - shift
            products = GRADIENT(dy, saved if OF_OUTPUT else z, dy_ptr, channel, channels)
            tl.store(z_ptr + offset, z.to(z_ptr.dtype.element_ty), mask=inside)
        # What lies outside may have an infinite derivative; its product with 0 would be NaN.
        dz = tl.where(inside, products[0], 0.0)
        tl.store(dz_ptr + offset, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        total += dz
        product += tl.where(inside, dz * centred, 0.0)
        row, column = next_tile(row, column, AXIS, ROWS, COLUMNS)
    axis: tl.constexpr = 1 if AXIS == "row" else 0
    store_by_channel(partial_ptr, 0, tl.sum(total, axis))
    store_by_channel(partial_ptr, 1, tl.sum(product, axis))


@triton.jit
def norm_factors_kernel(
    mean_ptr,
    inverse_std_ptr,
    w_ptr,
    b_ptr,
    kept_ptr,
    total_ptr,
    product_ptr,
    out_ptr,
    channels,
    count,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    KEPT: tl.constexpr,  # of which channels x is known, and not z: "all", "some" or "none"
    CHANNELS: tl.constexpr,
):
    """dw, and dx = scale dz + slope v + offset, v being x or z; xhat is (v - center) gain."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    center = tl.load(mean_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    inverse_std = tl.load(inverse_std_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    w = tl.full((CHANNELS,), 1.0, tl.float32)
    if HAS_W:
        w = tl.load(w_ptr + channel, mask=inside, other=1.0).to(tl.float32)
    gain = inverse_std
    if KEPT != "all":
        of_z, of_x = 1.0 / w, center
        center = tl.zeros((CHANNELS,), tl.float32)
        if HAS_B:
            center = tl.load(b_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        if KEPT == "some":
            kept = tl.load(kept_ptr + channel, mask=inside, other=0) != 0
            center = tl.where(kept, of_x, center)
            gain = tl.where(kept, inverse_std, of_z)
        else:
            gain = of_z
    total = tl.load(total_ptr + channel, mask=inside, other=0.0)
    dw = tl.load(product_ptr + channel, mask=inside, other=0.0) * gain
    scale = inverse_std * w
    slope = -scale * gain * dw / count
    tl.store(out_ptr + channel, dw, mask=inside)
    tl.store(out_ptr + channels + channel, scale, mask=inside)
    tl.store(out_ptr + 2 * channels + channel, slope, mask=inside)
    tl.store(out_ptr + 3 * channels + channel, -scale * total / count - slope * center, mask=inside)


@triton.jit(do_not_specialize=["rows", "steps"])
def combine_kernel(
    dz_ptr,
    v_ptr,
    scale_ptr,
    slope_ptr,
    offset_ptr,
    rows,
    columns,
    channels,
    steps,
    AXIS: tl.constexpr,
    FOLDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dz = scale dz + slope v + offset, over ``steps`` tiles."""
    row, column = first_tile(steps, AXIS, ROWS, COLUMNS, INDEX)
    channel = channel_of(row, column, channels, AXIS, FOLDED)
    scale = factor_of(scale_ptr, channel, channels)
    slope = factor_of(slope_ptr, channel, channels)
    constant = factor_of(offset_ptr, channel, channels)
    for _ in range(steps):
        inside = (row < rows) & (column < columns)
        offset = row * columns + column
        dz = tl.load(dz_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dx = scale * dz + (slope * v + constant)
        tl.store(dz_ptr + offset, dx.to(dz_ptr.dtype.element_ty), mask=inside)
        row, column = next_tile(row, column, AXIS, ROWS, COLUMNS)


@dataclass(frozen=True)
class _Passes:
    activation: Activation

    #: The mean of each channel, and ``1 / sqrt(var + eps)``; the running statistics take their part.
    statistics = staticmethod(statistics)

    def combine(self, dz: Tensor, v: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """``scale dz + slope v + offset`` over dz, the factors along the channels."""
        return combine(dz, v, scale, slope, offset)


class InputPasses(_Passes):
    """The passes of a batch norm that saves x."""

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
        return norm_factors(mean, inverse_std, w, None, total, product, "all", count)


class NormPasses(_Passes):
    """The passes of a batch norm in float32 that saves y, whose activation has an inverse."""

    #: The channels that y does not tell.
    inexact_channels = staticmethod(reference.inexact_channels)

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``y = f(z)`` with ``z = (x - mean) scale + shift``, y with its branch; the smallest and the largest z of each
        channel."""
        y = torch.empty_like(x)
        return y, _both(norm_act_between(x, (mean, scale, shift), y, self.activation))

    def act(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """``f(z)`` with its branch in y, which may be z; the smallest and the largest z of each channel."""
        return _both(norm_act_between(z, None, y, self.activation))

    def gradient(self, dy: Tensor, y: Tensor, center: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dz = dy * f'`` and z from y, over which z may be written; for each channel the sums of dz and of
        ``dz (z - center)``."""
        z = y if overwrite else torch.empty_like(y)
        dz, sums = norm_output_gradient(dy, y, center, z, self.activation)
        if overwrite:
            torch.autograd.graph.increment_version(y)
        return dz, z, sums[0], sums[1]

    def factors(
        self,
        mean: Tensor,
        inverse_std: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        total: Tensor,
        product: Tensor,
        kept: Tensor | None,
        count: int,
        rounds_shift: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of w, and the factors for ``combine``. (torch's kernels for GPUs do not round a shift.)"""
        return norm_factors(mean, inverse_std, w, b, total, product, kept, count)


def _both(ends: Tensor) -> tuple[Tensor, Tensor]:
    return ends[0], ends[1].neg()


def input_passes(activation: Activation, dtype: torch.dtype) -> InputPasses | None:
    """The passes over x of this dtype, or None where torch's own kernels serve: of a norm alone they are as fast."""
    if activation.is_identity or activation.operand_dims or dtype not in DTYPES or not computes(activation):
        return None
    return InputPasses(activation)


def norm_passes(tensor: Tensor, activation: Activation) -> NormPasses | None:
    """The passes over x or y, or None where torch's own kernels serve."""
    is_served = tensor.dtype is torch.float32 and activation.has_inverse and not activation.operand_dims
    return NormPasses(activation) if is_served and tensor.numel() and has_torchs_layout(tensor) else None


@or_reference(reference.norm_act)
def norm_act(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation) -> Tensor:
    """``f(z)`` with ``z = (x - mean) scale + shift``."""
    y = torch.empty_like(x)
    function = device_function(activation, "forward", given="input", dtype=x.dtype)
    constants = {"FORWARD": function, "NORMALISES": True, "HAS_ENDS": False}
    launch, *_ = _launch(norm_act_kernel, x, constants, shift.dtype)
    with on(x):
        launch(x, mean, scale, shift.contiguous(), y, y)
    return y


@or_reference(reference.norm_act_between)
def norm_act_between(
    x: Tensor, factors: tuple[Tensor, Tensor, Tensor] | None, y: Tensor, activation: Activation
) -> Tensor:
    """``f(z)`` with its branch in y, which may be x, z being x or ``(x - mean) scale + shift``; the smallest z and the
    smallest -z of each channel, (2, channels)."""
    function = device_function(activation, "forward", given="output", dtype=x.dtype)
    constants = {"FORWARD": function, "NORMALISES": factors is not None, "HAS_ENDS": True}
    mean, scale, shift = factors or (x, x, x)
    launch, written, outer = _launch(norm_act_kernel, x, constants, shift.dtype)
    ends = x.new_empty(written, dtype=torch.float32)
    with on(x):
        launch(x, mean, scale, shift.contiguous(), y, ends)
    torch.autograd.graph.increment_version(y)
    return ends[..., : outer * x.shape[1]].reshape(2, -1, x.shape[1]).amin(1)


@or_reference(reference.norm_gradient)
def norm_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``, (2, channels)."""
    dz = torch.empty_like(x)
    function = device_function(activation, "gradient", given="input", dtype=x.dtype)
    constants = {"GRADIENT": function, "INVERSE": None, "OF_OUTPUT": False}
    return dz, _sums(constants, laid_out_as(dy, x), x, mean, scale, shift, dz, dz)


@or_reference(reference.norm_output_gradient)
def norm_output_gradient(
    dy: Tensor, y: Tensor, shift: Tensor, z: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """``dz = dy f'`` and z, which may be y, from y; for each channel the sums of dz and of ``dz (z - shift)``."""
    dz = torch.empty_like(y)
    of_output = not activation.is_folded  # else the derivative at z is the more exact one
    given = "output" if of_output else "input"
    constants = {
        "GRADIENT": device_function(activation, "gradient", given=given, dtype=y.dtype),
        "INVERSE": device_function(activation, "inverse", given="output", dtype=y.dtype),
        "OF_OUTPUT": of_output,
    }
    return dz, _sums(constants, laid_out_as(dy, y), y, shift, shift, shift, dz, z)


def _sums(constants: dict[str, Any], dy: Tensor, saved: Tensor, *others: Tensor) -> Tensor:
    """Launch ``norm_gradient_kernel``; its sums."""
    mean, scale, shift, dz, z = others
    launch, written, outer = _launch(norm_gradient_kernel, saved, constants, shift.dtype)
    partial = saved.new_empty(written, dtype=torch.float32)
    with on(saved):
        launch(dy, saved, mean, scale, shift.contiguous(), dz, z, partial)
        return add_up(partial, saved.shape[1], outer, torch.float32)


@or_reference(reference.norm_factors)
def norm_factors(
    mean: Tensor,
    inverse_std: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    total: Tensor,
    product: Tensor,
    kept: Tensor | Literal["all"] | None,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of w, and the factors for ``combine``, from the sums over ``count`` numbers each; ``kept``: of which
    channels they are of x, and not of z."""
    channels = len(mean)
    which, mask = "none" if kept is None else "all", mean
    if isinstance(kept, Tensor):
        which, mask = "some", torch.zeros(channels, dtype=torch.int8, device=mean.device).index_fill_(0, kept, 1)
    out = mean.new_empty(4, channels, dtype=torch.float32)
    dtypes = (None if t is None else t.dtype for t in (mean, w, b))
    key = id(norm_factors_kernel), channels, count, which, mean.get_device(), *dtypes
    launch = _factor_launches.get(key)
    if launch is None:
        constants = {"HAS_W": w is not None, "HAS_B": b is not None, "KEPT": which, "CHANNELS": CHANNELS}
        grid = [cdiv(channels, CHANNELS)]
        launch = Launch(norm_factors_kernel, grid, (channels, float(count)), constants)
        _factor_launches.put(key, launch)
    w, b = (mean if t is None else t.contiguous() for t in (w, b))
    with on(mean):
        launch(mean, inverse_std, w, b, mask, total, product, out)
    dw, scale, slope, offset = out.unbind()
    return dw, scale, slope, offset


@or_reference(reference.combine)
def combine(dz: Tensor, x: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``scale dz + slope x + offset`` over dz."""
    launch, *_ = _launch(combine_kernel, x, {}, offset.dtype)
    with on(x):
        launch(dz, x, scale, slope, offset)
    return dz


def _launch(
    kernel: Any, x: Tensor, constants: dict[str, Any], parameter: torch.dtype
) -> tuple[Launch, tuple[int, int, int], int]:
    """A launch over x; the shape of two numbers of each channel that each program writes, and of how many runs of the
    channels these are."""
    functions = (id(value) if callable(value) else value for value in constants.values())
    key = id(kernel), tiles.TILE, *functions, x.get_device(), x.shape, x.stride(), x.dtype, parameter
    known = _launches.get(key)
    if known is None:
        matrix = as_matrix(x, 1)
        walk = walk_of(matrix, sums="GRADIENT" in constants or constants.get("HAS_ENDS", False))
        constants = constants | constants_of(x, matrix, walk.rows, walk.columns)
        launch = Launch(kernel, walk.grid, [*matrix[:3], walk.steps], constants)
        known = launch, (2, walk.along, walk.across * walk.channels), walk.outer
        _launches.put(key, known)
    return known
