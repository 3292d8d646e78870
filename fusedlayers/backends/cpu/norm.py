"""Batch norm and the activation behind it: two passes forward and two backward, one over memory each."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.layout import has_torchs_layout, laid_out_as, layout_along, other_dims
from ..operations import BatchNorm
from . import loops, norm_loops
from .elementwise import KERNELS, input_kernel
from .loops import Kernel
from .table import FoldTable, derivative_table, inverse_table


class _ChannelPasses:
    """Statistics, and the gradient of x."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance, without Bessel's correction, of each channel of x."""
        return norm_loops.moments(x, layout_along(x, 1))

    def statistics(self, x: Tensor, norm: BatchNorm, part: float) -> tuple[Tensor, Tensor]:
        """The mean of each channel, and ``1 / sqrt(var + eps)``; the running statistics take ``part``."""
        mean, var = self.moments(x)
        count = x.numel() // mean.numel()
        inverse_std = norm_loops.settle_statistics(mean, var, norm, part, count)
        if inverse_std is not None:
            return mean, inverse_std
        if not math.isfinite(float(var.sum())):  # one value out of the range of float32, or so far out that it shows
            exact, dims = x.double(), other_dims(x, 1)
            mean, var = exact.mean(dims).to(mean.dtype), exact.var(dims, correction=0).to(mean.dtype)
        norm.update_running(mean, var * (count / (count - 1)), part)
        return mean, (var + norm.eps).rsqrt_()

    def combine(self, dz: Tensor, v: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """``scale dz + slope v + offset`` over dz, the factors along the channels."""
        return norm_loops.combine(dz, v, scale, slope, offset, layout_along(dz, 1), dz)


@dataclass(frozen=True)
class InputPasses(_ChannelPasses):
    """The passes of a batch norm that saves x."""

    kernel: Kernel

    #: The gradient of w, and the factors of ``combine``.
    factors = staticmethod(norm_loops.input_norm_factors)

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """``f(z)`` with ``z = (x - mean) scale + shift``, of 16 bits rounded as x."""
        y = torch.empty_like(x)
        norm_loops.norm_forward(self.kernel, x, (mean, scale, shift), y, None, layout_along(x, 1))
        return y

    def gradient(
        self, dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dz = dy * f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``."""
        return norm_loops.norm_input_gradient(
            self.kernel, laid_out_as(dy, x), x, (mean, scale, shift), layout_along(x, 1)
        )


@dataclass(frozen=True)
class NormPasses(_ChannelPasses):
    """The passes of a batch norm in float32 that saves y, whose activation has an inverse."""

    forward: Kernel
    backward: Kernel

    #: The channels that are inexact; the gradient of w, and the factors of ``combine``.
    inexact_channels = staticmethod(norm_loops.inexact_channels)
    factors = staticmethod(norm_loops.norm_factors)

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``y = f(z)`` with ``z = (x - mean) scale + shift``, y with its branch; the smallest and the largest z of each
        channel."""
        y = torch.empty_like(x)
        return y, self._forward(x, (mean, scale, shift), y)

    def act(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """``f(z)`` with its branch in y, which may be z; the smallest and the largest z of each channel."""
        return self._forward(z, None, y)

    def _forward(self, x: Tensor, factors: tuple[Tensor, Tensor, Tensor] | None, y: Tensor) -> tuple[Tensor, Tensor]:
        along = layout_along(x, 1)
        smallest, largest = x.new_empty(along.channels), x.new_empty(along.channels)
        norm_loops.norm_forward(self.forward, x, factors, y, (smallest, largest), along)
        return smallest, largest

    def gradient(self, dy: Tensor, y: Tensor, center: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dz = dy * f'`` and z from y, over which z may be written; for each channel the sums of dz and of
        ``dz (z - center)``."""
        z = y if overwrite else torch.empty_like(y)
        dz, total, product = norm_loops.norm_gradient(
            self.backward, laid_out_as(dy, y), y, z, center, layout_along(y, 1)
        )
        return dz, z, total, product


def norm_passes(tensor: Tensor, activation: Activation) -> NormPasses | None:
    """The passes over x or y, or None where torch's own kernels serve."""
    return _passes(activation, tensor.dtype) if tensor.numel() and has_torchs_layout(tensor) else None


@functools.lru_cache(KERNELS)
def _passes(activation: Activation, dtype: torch.dtype) -> NormPasses | None:
    function = loops.function_of(activation)
    if function is None or dtype is not torch.float32 or not activation.has_inverse or not loops.serve(dtype):
        return None
    forward, inverse = Kernel(dtype, function, activation.fold), inverse_table(activation)
    if inverse is None:
        return NormPasses(forward, Kernel(dtype, function)) if function[0] in loops.INVERTED else None
    slope = derivative_table(activation)
    return NormPasses(forward, Kernel(dtype, slope=slope, inverse=inverse)) if isinstance(slope, FoldTable) else None


@functools.lru_cache(KERNELS)
def input_passes(activation: Activation, dtype: torch.dtype) -> InputPasses | None:
    """The passes over dense x of this dtype, or None where torch's own kernels serve."""
    kernel = input_kernel(activation, dtype)
    return None if kernel is None else InputPasses(kernel)
