"""Dropout on a CPU, alone and behind an activation, by the loops.

Functions of 16-bit numbers are tables of all 65,536, which hold the factor ``1 / (1 - p)`` and what a dropped output
means.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.isolation import in_clean_state
from ...utils.storages import is_plain
from .. import torch as reference
from . import loops
from .elementwise import KERNELS, all_values, gradient_kernel
from .loops import Kernel


def drop(x: Tensor, keep: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """``x factor`` where ``keep`` says so, else ``x 0``, in a new tensor; and the bits of ``keep``. Both are dense and
    laid out alike."""
    if not loops.serve(x.dtype):
        return reference.drop(x, keep, factor)
    return loops.drop(x, keep, factor)


def drop_gradient(dy: Tensor, bits: Tensor, factor: float) -> Tensor:
    """The gradient of x, in a new tensor, for dense dy, laid out like x."""
    if not loops.serve(dy.dtype):
        return reference.drop_gradient(dy, bits, factor)
    return loops.drop_gradient(dy, bits, factor)


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if not loops.serve(y.dtype):
        return reference.drop_marked(y, keep, activation, p, out)
    if y.dtype.itemsize == 2:
        return loops.drop_marked(_stored_kernel(activation, y.dtype, p), y, keep, out)
    return loops.drop_marked(loops.dropping(y.dtype, 1 / (1 - p), activation.fold), y, keep, out)


def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if is_plain(dy) and loops.serve(y.dtype) and y.dtype.itemsize == 2:
        return loops.gradient(_slope_kernel(activation, y.dtype, p), dy, y, out, None, None)
    kernel = _gradient_kernel(activation) if y.dtype is torch.float32 else None
    if kernel is None or not is_plain(dy):
        return reference.drop_marked_gradient(dy, y, activation, p, out)
    return loops.drop_marked_gradient(kernel, dy, y, 1 - p, activation.is_folded, out)


@functools.lru_cache(KERNELS)
def _gradient_kernel(activation: Activation) -> Kernel | None:
    """That of float32 outputs; also where ATen has one, which knows nothing of what was dropped."""
    kernel = gradient_kernel(activation, torch.float32, "output")
    if kernel is not None or activation.operand_dims or not loops.serve(torch.float32):
        return kernel
    function = loops.function_of(activation)
    return Kernel(torch.float32, function) if function is not None and function[0] in loops.BY_FORMULA else None


@functools.lru_cache(KERNELS)
@in_clean_state
def _stored_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    """What is stored for every output that is kept."""
    stored = reference.scaled(activation, all_values(dtype).float(), dtype, 1 - p)
    return Kernel(dtype, values=reference.plain_zeros(stored.to(dtype)))


@functools.lru_cache(KERNELS)
@in_clean_state
def _slope_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    y = all_values(dtype)
    slopes = reference.slope(activation, y, dtype, 1 - p) * (1 / (1 - p))
    return Kernel(dtype, slopes=torch.where(reference.is_kept(y), slopes, 0.0).float())
