"""Batch norms that can be inverted: they save the mean and the deviation of the batch, two numbers for each channel.

With an invertible activation after it this is the pair of Rota Bulo et al. 2018, "In-Place Activated BatchNorm for
Memory-Optimized Training of DNNs", as two modules of a chain. The inverse divides by the weight, so that small weights
amplify rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import batch_norm_with_statistics
from ..utils.layout import along
from .module import InvertibleModule


def at_least(weight: Tensor, least: float) -> Tensor:
    """Values nearer to zero than ``least`` are moved that far away from it, without a change of sign. Their gradient is
    that of the moved value, so that training can move them out."""
    moved = torch.where(weight.abs() < least, torch.copysign(torch.full_like(weight, least), weight), weight)
    return weight + (moved - weight).detach()


class _InvertibleBatchNorm(InvertibleModule):
    """What the batch norms of one to three dimensions share; the next base class is torch's."""

    num_outputs = 1

    #: The smallest absolute value of a weight, which the inverse divides by: below it, the rounding of an output would
    #: become thousands of times that of the input.
    least_weight = 1e-3

    def function(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_input_dim(x)
        w = None if self.weight is None else at_least(self.weight, self.least_weight)
        mean, var, part = self.running_mean, self.running_var, self.momentum or 0.0
        if not self.training and mean is not None:
            y = F.batch_norm(x, mean, var, w, self.bias, False, 0.0, self.eps)
            return y, mean.clone(), (var + self.eps).rsqrt_()
        if x.numel() == x.shape[1]:
            raise ValueError(f"{type(self).__name__}: one value per channel has no variance, got {tuple(x.shape)}")
        if not (self.training and self.track_running_stats):
            mean = var = None
        elif self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            part = 1 / float(self.num_batches_tracked) if self.momentum is None else part
        # What F.batch_norm calls, which keeps the statistics to itself.
        y, mean, inverse_std, *_ = batch_norm_with_statistics(
            x, w, self.bias, mean, var, True, part, self.eps, torch.backends.cudnn.enabled
        )
        return y, mean, inverse_std

    def inverse(self: Any, y: Tensor, mean: Tensor | None = None, inverse_std: Tensor | None = None) -> Tensor:
        if mean is None or inverse_std is None:  # the module is reversed
            mean, inverse_std = self.running_mean, (self.running_var + self.eps).rsqrt()
        scale = inverse_std.reciprocal()
        if self.weight is not None:
            scale = scale / at_least(self.weight, self.least_weight)
        z = y if self.bias is None else y - along(self.bias, 1, y.dim())
        return z * along(scale, 1, y.dim()) + along(mean, 1, y.dim())

    @property
    def reversible(self: Any) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return not self.training and self.running_mean is not None


class InvertibleBatchNorm1d(_InvertibleBatchNorm, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` that can be inverted: with its parameters, statistics and ``state_dict`` keys.

    In training the statistics of the batch are saved, and the backward pass differentiates through them as eager
    PyTorch's does; the running ones advance once for each forward pass. Weights nearer to zero than ``least_weight``
    count as if they were that far from it, because the inverse divides by them. In evaluation the module is reversible.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for ``nn.BatchNorm1d``.
    """


class InvertibleBatchNorm2d(_InvertibleBatchNorm, nn.BatchNorm2d):
    """As ``InvertibleBatchNorm1d``, for images."""


class InvertibleBatchNorm3d(_InvertibleBatchNorm, nn.BatchNorm3d):
    """As ``InvertibleBatchNorm1d``, for volumes."""
