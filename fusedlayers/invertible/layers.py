"""Layers of torch that can be inverted: linear layers, convolutions, batch norms; and weights that stay orthogonal.

The weights of linear layers and convolutions begin orthogonal (Saxe et al. 2013), so that a layer preserves norms, and
a stack of them amplifies rounding no more than a single one does. Training may change that; ``orthogonal`` prevents it.
Backward inverts the weight, in float64: that is cubic in the number of features, however small the batch.

Batch norms save the mean and the deviation of the batch, two numbers for each channel. With an invertible activation
after it one is the pair of Rota Bulo et al. 2018, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs",
as two modules of a chain. The inverse divides by the weight, so that small weights amplify rounding.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .._torch import batch_norm_with_statistics, check_input_dim
from ..utils.formatting import described
from ..utils.layout import along
from .module import InvertibleModule

# --- linear layers and convolutions -----------------------------------------------------------------------------------


class _Orthogonal(InvertibleModule):
    """A layer of torch, the next base class, whose weight begins orthogonal."""

    def reset_parameters(self: Any) -> None:
        """Draw an orthogonal weight, one for each group; the bias becomes 0."""
        with torch.no_grad():
            for part in self.weight.chunk(getattr(self, "groups", 1)):
                nn.init.orthogonal_(part)
            if self.bias is not None:
                self.bias.zero_()


class InvertibleLinear(_Orthogonal, nn.Linear):
    """``nn.Linear`` with at least as many outputs as inputs. The inverse is that of the weight, or its pseudo-inverse.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.

    Shapes: (..., in_features) -> (..., out_features).

    Raises:
        ValueError: fewer outputs than inputs, which they cannot determine.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None, dtype: Any = None
    ) -> None:
        if in_features > out_features:
            raise ValueError(
                f"InvertibleLinear: {out_features} outputs do not tell {in_features} inputs; out_features must be at "
                "least in_features"
            )
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return self.in_features == self.out_features

    def function(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def inverse(self, y: Tensor) -> Tensor:
        with torch.autocast(y.device.type, enabled=False):
            y, inverse, bias = widened(y, left_inverse(self.weight), self.bias)
            return F.linear(y if bias is None else y - bias, inverse)


class _InvertibleConv(_Orthogonal):
    """The convolutions of one to three dimensions; the next base class is torch's. Patches do not overlap, so that each
    output determines the patch that it was computed from."""

    def __init__(
        self: Any,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        groups: int = 1,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        options = {"stride": kernel_size, "groups": groups, "bias": bias, "device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, kernel_size, **options)
        patch = in_channels // groups * math.prod(self.kernel_size)
        if patch > out_channels // groups:
            raise ValueError(
                f"{type(self).__name__}: {out_channels // groups} output channels of a group do not determine the "
                f"{patch} numbers that they are computed from; out_channels must be at least {patch * groups}"
            )

    @property
    def reversible(self: Any) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return bool(self.groups == 1 and self.out_channels == self.in_channels * math.prod(self.kernel_size))

    def function(self: Any, x: Tensor) -> Any:
        sizes = x.shape[-len(self.kernel_size) :]
        if any(size % kernel for size, kernel in zip(sizes, self.kernel_size, strict=True)):
            raise ValueError(
                f"{type(self).__name__}: sizes {tuple(sizes)} are no multiples of kernel_size={self.kernel_size}, and "
                "what is in no patch could not be computed again; pad the input"
            )
        return super(InvertibleModule, self).forward(x)

    def inverse(self: Any, y: Tensor) -> Tensor:
        dims = len(self.kernel_size)
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        with torch.autocast(y.device.type, enabled=False):
            parts = [left_inverse(part.flatten(1)).T for part in self.weight.chunk(self.groups)]
            y, inverse, bias = widened(y, torch.cat(parts).view_as(self.weight), self.bias)
            z = y if bias is None else y - bias.view(-1, *(1,) * dims)
            return transposed(z, inverse, None, self.kernel_size, groups=self.groups)


class InvertibleConv1d(_InvertibleConv, nn.Conv1d):
    """A convolution of patches that do not overlap, with at least as many output channels as a patch has numbers: the
    pseudo-inverse of the weight computes each patch from its output.

    With kernels of one value, as many outputs as inputs, and its orthogonal initial weight it is the 1x1 convolution of
    Glow (Kingma and Dhariwal 2018); with a larger kernel a learnt ``PixelUnshuffle``.

    Args:
        in_channels, out_channels, kernel_size, groups, bias, device, dtype: as for ``nn.Conv1d``; its stride is the
            kernel's size.

    Shapes: as of ``nn.Conv1d``; sizes must be multiples of the kernel's.

    Raises:
        ValueError: too few output channels; an input of another size.
    """


class InvertibleConv2d(_InvertibleConv, nn.Conv2d):
    """An ``InvertibleConv1d`` for images.

    >>> import torch, fusedlayers as fl
    >>> fl.InvertibleConv2d(8, 8, 1)(torch.randn(2, 8, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """


class InvertibleConv3d(_InvertibleConv, nn.Conv3d):
    """An ``InvertibleConv1d`` for volumes."""


def left_inverse(weight: Tensor) -> Tensor:
    """The matrix that gives x from ``weight @ x``, computed in float64, except on MPS, which has no float64."""
    wide = weight if weight.device.type == "mps" else weight.to(torch.promote_types(weight.dtype, torch.float64))
    found = torch.linalg.inv(wide) if wide.shape[0] == wide.shape[1] else torch.linalg.pinv(wide)
    inverse: Tensor = found.to(torch.promote_types(weight.dtype, torch.float32))
    return inverse


def widened(y: Tensor, *others: Tensor | None) -> list[Any]:
    """All in one dtype, of at least 32 bits."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return [None if tensor is None else tensor.to(dtype) for tensor in (y, *others)]


# --- batch norms ------------------------------------------------------------------------------------------------------


def at_least(weight: Tensor, least: float) -> Tensor:
    """Values nearer to zero than ``least`` are moved that far away from it, without a change of sign. Their gradient is
    that of the moved value, so that training can move them out."""
    moved = torch.where(weight.abs() < least, torch.copysign(torch.full_like(weight, least), weight), weight)
    return weight + (moved - weight).detach()


class _InvertibleBatchNorm(InvertibleModule):
    """The batch norms of one to three dimensions; the next base class is torch's."""

    num_outputs = 1

    #: The smallest absolute value of a weight, which the inverse divides by: below it, the rounding of an output would
    #: become thousands of times that of the input.
    least_weight = 1e-3

    def function(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check_input_dim(self, x)
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
        # The operator behind F.batch_norm, which does not return the statistics.
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
    """An ``InvertibleBatchNorm1d`` for images."""


class InvertibleBatchNorm3d(_InvertibleBatchNorm, nn.BatchNorm3d):
    """An ``InvertibleBatchNorm1d`` for volumes."""


# --- weights that stay orthogonal -------------------------------------------------------------------------------------

#: Torch's other choice for matrices that are not square, "householder", holds signs on a diagonal and truncates them to
#: integers: after a single step of weight decay, which makes 0.9999 of a 1, the weight is zero.
_MAP = "matrix_exp"


def orthogonal(module: nn.Module, name: str = "weight") -> nn.Module:
    """Hold a weight orthogonal while it is trained, and return the module.

    A layer with such a weight preserves norms, and so the errors of inputs that are computed from its outputs: a deep
    stack of them drifts by rounding alone. Weights of more than two dimensions, as those of convolutions, count as
    matrices of their first dimension and the rest.

    It is ``torch.nn.utils.parametrizations.orthogonal`` (Lezcano-Casado 2019).

    Raises:
        TypeError: ``module`` has no tensor of this name.
        ValueError: the weight has fewer than two dimensions.

    >>> import fusedlayers as fl
    >>> layer = fl.orthogonal(fl.InvertibleLinear(8, 8))
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"orthogonal: expected a module with a tensor {name!r}, got {described(module)}")
    if weight.dim() < 2:
        raise ValueError(f"orthogonal: {name} is no matrix, but has shape {tuple(weight.shape)}")
    if weight.dim() == 2:
        return parametrizations.orthogonal(module, name, _MAP)
    matrix = nn.Module()
    matrix.weight = nn.Parameter(weight.detach().flatten(1))
    of_matrix: Any = parametrizations.orthogonal(matrix, orthogonal_map=_MAP).parametrizations
    parametrize.register_parametrization(module, name, _OfMatrix(of_matrix.weight[0]))
    return module


class _OfMatrix(nn.Module):
    """A parametrization of matrices for weights of more dimensions."""

    def __init__(self, of_matrix: Any) -> None:
        super().__init__()
        self.of_matrix = of_matrix

    def forward(self, weight: Tensor) -> Tensor:
        found: Tensor = self.of_matrix(weight.flatten(1)).view_as(weight)
        return found

    def right_inverse(self, weight: Tensor) -> Tensor:
        found: Tensor = self.of_matrix.right_inverse(weight.flatten(1)).view_as(weight)
        return found
