"""Batch norm and the activation behind it in float32: two passes forward and two backward, one over memory each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...activations import Activation
from ...utils.layout import is_dense, layout_along
from . import build, loops, norm_loops
from .elementwise import KERNELS
from .loops import Kernel
from .table import FoldTable, derivative_table, inverse_table


@dataclass(frozen=True)
class NormPasses:
    """The passes of a batch norm whose activation has an inverse."""

    forward: Kernel
    backward: Kernel

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and the variance, without Bessel's correction, of each channel of x."""
        return loops.moments(x, layout_along(x, 1))

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``y = f(z)`` with ``z = (x - mean) scale + shift``, y with its branch; the smallest and the largest z of each
        channel."""
        y = torch.empty_like(x)
        return y, loops.norm_forward(self.forward, x, (mean, scale, shift), y, layout_along(x, 1))

    def act(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """``f(z)`` with its branch in y, which may be z; the smallest and the largest z of each channel."""
        return loops.norm_forward(self.forward, z, None, y, layout_along(z, 1))

    def gradient(self, dy: Tensor, y: Tensor, center: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dz = dy * f'`` and z from y, over which z may be written; for each channel the sums of dz and of
        ``dz (z - center)``."""
        dy = dy if dy.stride() == y.stride() else torch.empty_like(y).copy_(dy)
        z = y if overwrite else torch.empty_like(y)
        dz, total, product = loops.norm_gradient(self.backward, dy, y, z, center, layout_along(y, 1))
        return dz, z, total, product

    #: The channels that are inexact, and the factors of the gradient of x.
    inexact_channels = staticmethod(norm_loops.inexact_channels)
    factors = staticmethod(norm_loops.norm_factors)

    def combine(self, dz: Tensor, z: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """``scale dz + slope z + offset`` over dz, the factors along the channels."""
        return loops.combine(dz, z, scale, slope, offset, layout_along(dz, 1), dz)


def norm_passes(tensor: Tensor, activation: Activation) -> NormPasses | None:
    """The passes over x or y, or None where torch's own kernels serve."""
    return _passes(activation, tensor.dtype) if tensor.numel() and is_dense(tensor) else None


@functools.lru_cache(KERNELS)
def _passes(activation: Activation, dtype: torch.dtype) -> NormPasses | None:
    loop = activation.native.loop
    if loop is None or dtype is not torch.float32 or not activation.has_inverse or build.shared_object() is None:
        return None
    function = loop(**activation.parameters)
    forward, inverse = Kernel(dtype, function, activation.fold), inverse_table(activation)
    if inverse is None:
        return NormPasses(forward, Kernel(dtype, function)) if function[0] in loops.INVERTED else None
    slope = derivative_table(activation)
    # One look-up finds the intervals of both.
    assert isinstance(slope, FoldTable) and slope.numbers == inverse.numbers
    return NormPasses(forward, Kernel(dtype, slope=slope, inverse=inverse))
