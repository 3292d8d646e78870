"""Dropout on a CPU, alone and behind an activation, by the loops.

Functions of 16-bit numbers are tables of all 65,536, which hold the factor ``1 / (1 - p)`` and what a dropped output
means. The loops' derivatives from float32 outputs know neither: there each chunk is scaled before and after.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.isolation import in_clean_state
from .. import torch as reference
from ..base import GradientRequest
from ..torch.chunks import for_each
from . import build, loops
from .elementwise import KERNELS, all_values, gradient, gradient_kernel
from .loops import Kernel

#: The bits of -0.
DROPPED = -(2**31)
#: Smaller outputs are taken for those before the factor.
TINY = 2.0**-120


def drop(x: Tensor, keep: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """``x factor`` where ``keep`` says so, else ``x 0``, in a new tensor; and the bits of ``keep``. Both are dense and
    laid out alike."""
    if x.dtype is torch.float64 or build.shared_object() is None:
        return reference.drop(x, keep, factor)
    return loops.drop(x, keep, factor)


def drop_gradient(dy: Tensor, bits: Tensor, factor: float) -> Tensor:
    """The gradient of x, in a new tensor, for dense dy, laid out like x."""
    if dy.dtype is torch.float64 or build.shared_object() is None:
        return reference.drop_gradient(dy, bits, factor)
    return loops.drop_gradient(dy, bits, factor)


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if y.dtype is torch.float64 or build.shared_object() is None:
        return reference.drop_marked(y, keep, activation, p, out)
    if y.dtype.itemsize == 2:
        stored, dropped = _stored_kernels(activation, y.dtype, p)

        def look_up(part: Tensor, kept: Tensor, result: Tensor) -> None:
            lost = loops.forward(dropped, part, None, None, torch.empty_like(part), None)
            loops.forward(stored, part, None, None, result, None)
            result.copy_(torch.where(kept, result, lost))

        for_each(look_up, y, keep, out)
        return out
    return loops.drop_marked(y, keep, 1 / (1 - p), activation.fold, out)


def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if y.dtype.itemsize == 2 and build.shared_object() is not None:
        return loops.gradient(_slope_kernel(activation, y.dtype, p), dy, y, out, None, None)
    if y.dtype is torch.float64 or (activation.is_folded and gradient_kernel(activation, y.dtype, "output") is None):
        return reference.drop_marked_gradient(dy, y, activation, p, out)
    request = GradientRequest("output", True, False)

    def multiply(of_y: Tensor, part: Tensor, result: Tensor) -> None:
        bits = part.view(torch.int32)
        is_kept = bits != DROPPED
        given = of_y * is_kept
        given.mul_(1 / (1 - p))
        # A mark that has underflowed is next to the subnormal numbers, which a processor may be told to flush.
        value = torch.where(part.abs() < TINY, part, part * (1 - p))
        if activation.is_folded:  # the product has lost the branch
            value.view(torch.int32).bitwise_and_(-2).bitwise_or_(bits & 1)
        found, *_ = gradient(given, value, activation, (), request, dim=-1)
        assert found is not None
        result.copy_(torch.where(is_kept, found, given))

    for_each(multiply, dy, y, out)
    return out


@functools.lru_cache(KERNELS)
@in_clean_state
def _stored_kernels(activation: Activation, dtype: torch.dtype, p: float) -> tuple[Kernel, Kernel]:
    """What is stored for every output: if it is kept, and if it is dropped."""
    y = all_values(dtype)
    kept = reference.plain_zeros(reference.scaled(activation, y.float(), dtype, 1 - p).to(dtype))
    return Kernel(dtype, values=kept), Kernel(dtype, values=reference.dropped(y.to(dtype)))


@functools.lru_cache(KERNELS)
@in_clean_state
def _slope_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    y = all_values(dtype)
    slopes = reference.slope(activation, y, dtype, 1 - p) * (1 / (1 - p))
    return Kernel(dtype, slopes=torch.where(reference.is_kept(y), slopes, 0.0).float())
