"""Norms by ``loops.c``: its structures and addresses. Those whose rows, or groups of channels, have statistics of their
own, and what a batch norm has along its channels."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from ...activations import InverseError, inverse_error
from ...utils.layout import Layout
from ...utils.storages import is_plain
from ..norms import GroupNorm, RowNorm
from ..operations import BatchNorm
from .loops import DTYPES, GRAIN, Kernel, call, channel_vector, functions, no_memory, plain_kernel


class _RowNorm(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("dtype", "is_centred", "rounds_first", "threads")),
        *((name, c_int64) for name in ("rows", "columns")),
        *((name, c_void_p) for name in ("gain", "shift", "kept_columns", "kept")),
        ("kept_count", c_int64),
    )


class _GroupNorm(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("dtype", "threads")),
        *((name, c_int64) for name in ("samples", "groups", "channels", "count")),
        *((name, c_void_p) for name in ("gain", "shift")),
    )


def rms_norm(norm: RowNorm, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """The RMS norm of contiguous x in a new tensor, and by what each row was multiplied, in float32."""
    y, inverse_std = torch.empty_like(x), x.new_empty(x.numel() // norm.columns, dtype=torch.float32)
    gain = norm.gain(w, torch.float32)
    described = _row_norm(norm, x, gain, None, None)
    failed = functions()["rms_forward"](
        ctypes.addressof(described), x.data_ptr(), y.data_ptr(), inverse_std.data_ptr(), norm.epsilon(x.dtype)
    )
    if failed:
        raise no_memory("rms_norm")
    return y, inverse_std


def row_norm_gradient(
    norm: RowNorm,
    dy: Tensor,
    y: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    inverse_std: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    dx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of x in dx, which may be y; those of w and b, in float32. All are contiguous; ``kept``: columns, and
    their xhat."""
    of_w, of_b = y.new_empty(2, norm.columns, dtype=torch.float32).unbind()
    described = _row_norm(norm, y, gain, shift, kept)
    failed = functions()["row_norm_gradient"](
        ctypes.addressof(described),
        *(t.data_ptr() for t in (dy, y, inverse_std)),
        None if dx is None else dx.data_ptr(),
        *(of_w.data_ptr(), of_b.data_ptr()),
    )
    if failed:
        raise no_memory("row_norm_gradient")
    if dx is not None:
        torch.autograd.graph.increment_version(dx)
    return of_w, of_b


def group_norm_gradient(
    norm: GroupNorm, dy: Tensor, y: Tensor, gain: Tensor, shift: Tensor, inverse_std: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of x in dx, which may be y; those of w and b, of each sample, in float32. All are contiguous."""
    samples, channels, count = norm.extents(y)
    of_w, of_b = y.new_empty(2, samples, channels, dtype=torch.float32).unbind()
    threads = 1 if y.numel() <= GRAIN else torch.get_num_threads()
    sizes = samples, norm.groups, channels // norm.groups, count
    described = _GroupNorm(DTYPES[y.dtype], threads, *sizes, gain.data_ptr(), shift.data_ptr())
    functions()["group_norm_gradient"](
        ctypes.addressof(described),
        *(t.data_ptr() for t in (dy, y, inverse_std)),
        None if dx is None else dx.data_ptr(),
        *(of_w.data_ptr(), of_b.data_ptr()),
    )
    if dx is not None:
        torch.autograd.graph.increment_version(dx)
    return of_w, of_b


class _InverseError(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("largest", "acceptable")),
        *((name, c_double) for name in ("cell", "cells", "limit")),
        *((name, c_float) for name in ("steps", "octaves", "offset")),
    )


@functools.lru_cache(64)
def _described(error: InverseError) -> _InverseError:
    """Its tables, which live as long as it: the cache holds it."""
    largest, acceptable = error.largest.data_ptr(), error.acceptable.data_ptr()
    sizes = inverse_error.STEPS, inverse_error.OCTAVES, inverse_error.OFFSET
    return _InverseError(largest, acceptable, inverse_error.CELL, inverse_error.CELLS, error.limit, *sizes)


def settle_statistics(mean: Tensor, var: Tensor, norm: BatchNorm, part: float, count: int) -> Tensor | None:
    """``1 / sqrt(var + eps)``, from the float32 moments of ``count`` numbers in each channel. The running statistics
    become ``1 - part`` of themselves and ``part`` of the batch's. Returns None, and does nothing, where a variance is
    not finite, or the running statistics are not plain contiguous tensors of float32."""
    addresses: tuple[int | None, int | None] = (None, None)
    if norm.running_mean is not None and norm.running_var is not None:
        for running in (norm.running_mean, norm.running_var):
            if running.dtype is not torch.float32 or not (running.is_contiguous() and is_plain(running)):
                return None
        # Their versions stay, as with torch's own kernels.
        addresses = norm.running_mean.data_ptr(), norm.running_var.data_ptr()
    inverse_std = torch.empty_like(mean)
    failed = functions()["settle_statistics"](
        mean.data_ptr(), var.data_ptr(), *addresses, part, norm.eps, mean.numel(), count, inverse_std.data_ptr()
    )
    return None if failed else inverse_std


def inexact_channels(
    error: InverseError,
    mean: Tensor,
    inverse_std: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    ends: tuple[Tensor, Tensor],
    count: int,
    centred: float,
    eps: float,
) -> Tensor | None:
    """``NormPasses.inexact_channels``."""
    channels = mean.numel()
    found = mean.new_empty(channels, dtype=torch.int64)
    described = _described(error)
    rows = [None if t is None else channel_vector(t) for t in (mean, inverse_std, w, b, *ends)]
    addresses = [None if t is None else t.data_ptr() for t in rows]
    inexact = functions()["inexact_channels"](
        ctypes.addressof(described), *addresses, channels, count, centred, eps, found.data_ptr()
    )
    return found[:inexact].clone() if inexact else None  # which is saved


def norm_factors(
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
    """A batch norm's gradient of w, and the factors of ``dx = scale dz + slope v + offset``, from the sums of dz and of
    ``dz (v - center)`` over the ``count`` numbers of each channel. ``kept``: the channels whose v is x, in order."""
    kept_count = 0 if kept is None else kept.numel()
    return _factors((mean, inverse_std, w, b, total, product), kept, kept_count, count, rounds_shift)


def input_norm_factors(
    mean: Tensor, inverse_std: Tensor, w: Tensor | None, total: Tensor, product: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same where v is x in all channels."""
    return _factors((mean, inverse_std, w, None, total, product), None, mean.numel(), count, False)


def _factors(
    of_channels: tuple[Tensor | None, ...], kept: Tensor | None, kept_count: int, count: int, rounds_shift: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = of_channels[0]
    assert mean is not None
    channels = mean.numel()
    dw, scale, slope, offset = (mean.new_empty(channels, dtype=torch.float32) for _ in range(4))
    rows = [None if t is None else channel_vector(t) for t in of_channels]
    functions()["norm_factors"](
        *[None if t is None else t.data_ptr() for t in (*rows, kept)],
        kept_count,
        channels,
        count,
        rounds_shift,
        *[t.data_ptr() for t in (dw, scale, slope, offset)],
    )
    return dw, scale, slope, offset


def inexact_columns(gain: Tensor, b: Tensor | None, ratio: float, least: float, most: float) -> Tensor | None:
    """The columns, in a row of float32 factors, that are too small, too large, or much smaller than b; None where none
    is."""
    columns, look = len(gain), functions()["inexact_columns"]
    given = gain.data_ptr(), None if b is None else b.data_ptr(), columns, ratio, least, most
    count = look(*given, None)
    if not count:  # as nearly always
        return None
    found = gain.new_empty(count, dtype=torch.int64)
    look(*given, found.data_ptr())
    return found


def _row_norm(
    norm: RowNorm, x: Tensor, gain: Tensor | None, shift: Tensor | None, kept: tuple[Tensor, Tensor] | None
) -> _RowNorm:
    rows, columns = x.numel() // norm.columns, norm.columns
    threads = 1 if x.numel() <= GRAIN else torch.get_num_threads()
    addresses = (None if t is None else t.data_ptr() for t in (gain, shift, *(kept or (None, None))))
    return _RowNorm(
        *(DTYPES[x.dtype], norm.is_centred, norm.rounds_first, threads, rows, columns),
        *addresses,
        0 if kept is None else len(kept[0]),
    )


# --- along channels ---------------------------------------------------------------------------------------------------


def moments(x: Tensor, along: Layout) -> tuple[Tensor, Tensor]:
    """The mean and the variance, without Bessel's correction, of each channel of x, in float32."""
    mean = x.new_empty(along.channels, dtype=torch.float32)
    var = torch.empty_like(mean)  # apart, because one of them is saved
    call("moments", plain_kernel(x.dtype), x, along, x.data_ptr(), mean.data_ptr(), var.data_ptr(), writes=False)
    return mean, var


def norm_forward(
    kernel: Kernel,
    x: Tensor,
    factors: tuple[Tensor, Tensor, Tensor] | None,
    y: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    along: Layout,
) -> None:
    """The activation of z in y, which may be x; the smallest and the largest z of each channel in ``ends``. z is
    ``(x - mean) scale + shift`` by ``factors``, or x."""
    vectors = (None,) * 3 if factors is None else [channel_vector(t, along) for t in factors]
    addresses = [None if t is None else t.data_ptr() for t in (x, *vectors, y, *(ends or (None, None)))]
    call("norm_forward", kernel, y, along, *addresses)


def norm_gradient(
    kernel: Kernel, dy: Tensor, y: Tensor, z: Tensor, center: Tensor, along: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """``dz = dy * f'`` in a new tensor and the activation's input in z, which may be y; for each channel the sums of dz
    and of ``dz (z - center)``."""
    dz, total, product = torch.empty_like(y), y.new_empty(along.channels), y.new_empty(along.channels)
    center = channel_vector(center, along)
    addresses = [t.data_ptr() for t in (dy, y, center, dz, z, total, product)]
    call("norm_gradient", kernel, z, along, *addresses)
    return dz, total, product


def norm_input_gradient(
    kernel: Kernel, dy: Tensor, x: Tensor, factors: tuple[Tensor, Tensor, Tensor], along: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """``dz = dy * f'`` at ``z = (x - mean) scale + shift`` in a new tensor; for each channel the sums of dz and of
    ``dz (x - mean)``, in float32."""
    dz, (total, product) = torch.empty_like(x), x.new_empty(2, along.channels, dtype=torch.float32).unbind()
    vectors = [channel_vector(t, along) for t in factors]
    addresses = (t.data_ptr() for t in (dy, x, *vectors, dz, total, product))
    call("norm_input_gradient", kernel, dz, along, *addresses)
    return dz, total, product


def products(dy: Tensor, y: Tensor, center: Tensor, along: Layout) -> tuple[Tensor, Tensor]:
    """For each channel the sums of dy and of ``dy (y - center)``, in float32."""
    total, product = y.new_empty(2, along.channels, dtype=torch.float32).unbind()
    vector = channel_vector(center, along)
    addresses = (t.data_ptr() for t in (dy, y, vector, total, product))
    call("products", plain_kernel(y.dtype), y, along, *addresses, writes=False)
    return total, product


def combine(a: Tensor, b: Tensor, scale: Tensor, slope: Tensor, offset: Tensor, along: Layout, out: Tensor) -> Tensor:
    """``scale a + slope b + offset`` in ``out``, which may be either, the factors along the channels."""
    vectors = [channel_vector(t, along) for t in (scale, slope, offset)]
    addresses = [t.data_ptr() for t in (a, b, *vectors, out)]
    call("combine", plain_kernel(a.dtype), out, along, *addresses)
    return out
