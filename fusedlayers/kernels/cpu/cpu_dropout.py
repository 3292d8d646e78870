"""Dropout on a CPU, alone and behind an activation, by the loops.

Functions of 16-bit numbers are tables of all 65,536, which hold the factor ``1 / (1 - p)`` and what a dropped output
means.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative.features import Fold
from ...utils.caching import in_clean_state
from ...utils.storages import is_plain
from .. import reference
from . import loops
from .cpu_elementwise import KERNELS, all_values, formula_kernel, gradient_kernel
from .loops import Kernel


def drop(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """``F.dropout(x, p)`` of dense x, in a new tensor, and a bit for each element that is kept."""
    if not loops.serve(x.dtype):
        return reference.drop(x, p)
    keep, factor = reference.drawn(x, p), reference.factor_of(p, x.dtype, "cpu")
    y, bits = torch.empty_like(x), x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    loops.call("drop", _dropping(x.dtype, factor), y, None, *(t.data_ptr() for t in (x, keep, y, bits)))
    return y, bits


def drop_gradient(dy: Tensor, bits: Tensor, factor: float) -> Tensor:
    """The gradient of x, in a new tensor, for dense dy, laid out like x."""
    if not loops.serve(dy.dtype):
        return reference.drop_gradient(dy, bits, factor)
    dx = torch.empty_like(dy)
    loops.call("drop_gradient", _dropping(dy.dtype, factor), dx, None, *(t.data_ptr() for t in (dy, bits, dx)))
    return dx


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if not loops.serve(y.dtype):
        return reference.drop_marked(y, keep, activation, p, out)
    is_table = y.dtype.itemsize == 2
    kernel = _stored_kernel(activation, y.dtype, p) if is_table else _dropping(y.dtype, 1 / (1 - p), activation.fold)
    loops.call("drop_marked", kernel, out, None, y.data_ptr(), keep.data_ptr(), out.data_ptr())
    return out


def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if is_plain(dy) and loops.serve(y.dtype) and y.dtype.itemsize == 2:
        return loops.gradient(_slope_kernel(activation, y.dtype, p), dy, y, out, None, None)
    kernel = _gradient_kernel(activation) if y.dtype is torch.float32 else None
    if kernel is None or not is_plain(dy):
        return reference.drop_marked_gradient(dy, y, activation, p, out)
    rest = ctypes.c_float(1 - p)
    of_rest = ctypes.addressof(rest)
    addresses = dy.data_ptr(), y.data_ptr(), out.data_ptr(), of_rest, of_rest if activation.is_folded else None
    loops.call("drop_marked_gradient", kernel, out, None, *addresses)
    return out


@functools.lru_cache(64)
def _dropping(dtype: torch.dtype, factor: float, fold: Fold | None = None) -> Kernel:
    """The kernel that multiplies what is kept."""
    return Kernel(dtype, ("relu", factor), fold)


@functools.lru_cache(KERNELS)
def _gradient_kernel(activation: Activation) -> Kernel | None:
    """That of float32 outputs; also where ATen has one, which knows nothing of what was dropped."""
    kernel = gradient_kernel(activation, torch.float32, "output")
    if kernel is not None or activation.operand_dims or not loops.serve(torch.float32):
        return kernel
    return formula_kernel(activation, torch.float32)


@functools.lru_cache(KERNELS)
@in_clean_state
def _stored_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    """What is stored for every output that is kept."""
    stored = reference.scaled(activation, all_values(dtype).float(), dtype, 1 - p)
    return Kernel(dtype, values=stored.to(dtype))


@functools.lru_cache(KERNELS)
@in_clean_state
def _slope_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    y = all_values(dtype)
    slopes = reference.slope(activation, y, dtype, 1 - p) * (1 / (1 - p))
    return Kernel(dtype, slopes=torch.where(reference.is_kept(y), slopes, 0.0).float())
