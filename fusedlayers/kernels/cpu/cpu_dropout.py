"""Dropout behind an activation on a CPU, by the loops.

Functions of 16-bit numbers are tables of all 65,536, which hold the factor ``1 / (1 - p)`` and what a dropped output
means.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.isolation import in_clean_state
from ...utils.storages import is_plain
from .. import reference
from . import loops
from .cpu_elementwise import KERNELS, all_values, formula_kernel, gradient_kernel
from .loops import Kernel


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if not loops.serve(y.dtype):
        return reference.drop_marked(y, keep, activation, p, out)
    addresses = y.data_ptr(), keep.data_ptr(), out.data_ptr()
    loops.call("drop_marked", _stored_kernel(activation, y.dtype, p), out, None, *addresses)
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
    """What is stored for every output that is kept: of float32 by the factor, of 16 bits by a table."""
    if dtype is torch.float32:
        return Kernel(dtype, ("relu", 1 / (1 - p)), activation.fold)  # any function, with the factor as its parameter
    stored = reference.scaled(activation, all_values(dtype).float(), dtype, 1 - p)
    return Kernel(dtype, values=stored.to(dtype))


@functools.lru_cache(KERNELS)
@in_clean_state
def _slope_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    y = all_values(dtype)
    slopes = reference.slope(activation, y, dtype, 1 - p) * (1 / (1 - p))
    return Kernel(dtype, slopes=torch.where(reference.is_kept(y), slopes, 0.0).float())
