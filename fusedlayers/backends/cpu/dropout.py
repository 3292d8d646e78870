"""An activation and the dropout behind it on a CPU: the reference's chunks, with the loops for what takes long.

Functions of 16-bit numbers are tables of all 65,536, which hold the factor ``1 / (1 - p)`` and what a dropped output
means. For float32 the loops know neither: each chunk is scaled before and after.
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
from .elementwise import KERNELS, all_values, bias_act, gradient, gradient_kernel
from .loops import Kernel

#: The bits of -0.
DROPPED = -(2**31)
#: Smaller outputs are taken for those before the factor.
TINY = 2.0**-120


def act_dropout(z: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The output, in ``out``, which may be z; all are dense and laid out alike."""
    if z.dtype is torch.float64 or build.shared_object() is None:
        return reference.act_dropout(z, keep, activation, p, out)
    if z.dtype.itemsize == 2:
        stored, dropped = _stored_kernels(activation, z.dtype, p)

        def look_up(part: Tensor, kept: Tensor, result: Tensor) -> None:
            lost = loops.forward(dropped, part, None, None, torch.empty_like(part), None)
            loops.forward(stored, part, None, None, result, None)
            result.copy_(torch.where(kept, result, lost))

        for_each(look_up, z, keep, out)
        return out
    mark = None if not activation.is_folded else Kernel(z.dtype, fold=activation.fold)

    def store(part: Tensor, kept: Tensor, result: Tensor) -> None:
        values = bias_act(part, None, activation, dim=-1, encode=False, out=None if mark is not None else result)
        lost = reference.dropped(values)
        values.mul_(1 / (1 - p))
        if mark is not None:
            loops.encode(mark, part, values, result)
        result.copy_(torch.where(kept, reference.plain_zeros(result), lost))

    if mark is None and out is not z:
        z = out.copy_(z)  # so that the activation is computed in place
    for_each(store, z, keep, out)
    return out


def act_dropout_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if y.dtype.itemsize == 2 and build.shared_object() is not None:
        return loops.gradient(_slope_kernel(activation, y.dtype, p), dy, y, out, None, None)
    if y.dtype is torch.float64 or (activation.is_folded and gradient_kernel(activation, y.dtype, "output") is None):
        return reference.act_dropout_gradient(dy, y, activation, p, out)
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
    """What is stored for every input: if it is kept, and if it is dropped."""
    z = all_values(dtype)
    kept = reference.plain_zeros(reference.stored(activation, z, dtype, p).to(dtype))
    return Kernel(dtype, values=kept), Kernel(dtype, values=reference.dropped(activation.function(z).to(dtype)))


@functools.lru_cache(KERNELS)
@in_clean_state
def _slope_kernel(activation: Activation, dtype: torch.dtype, p: float) -> Kernel:
    y = all_values(dtype)
    slopes = reference.slope(activation, y, dtype, p) * (1 / (1 - p))
    return Kernel(dtype, slopes=torch.where(reference.is_kept(y), slopes, 0.0).float())
