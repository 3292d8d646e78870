"""Linear layers and convolutions that can be inverted.

Their weights begin orthogonal (Saxe et al. 2013), so that a layer preserves norms, and a stack of them amplifies
rounding no more than a single one does. Training may change that; ``orthogonal`` (``orthogonal.py``) prevents it.

Backward inverts the weight, in float64: that is cubic in the number of features, however small the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .module import InvertibleModule

_Sizes = int | Sequence[int]


class _Weighted(InvertibleModule):
    """A weight, and perhaps a bias."""

    bias: nn.Parameter | None

    def _set_parameters(self, shape: Sequence[int], bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__}: dtype must be a real floating-point one, got {dtype}")
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw an orthogonal weight, one for each group; the bias becomes 0."""
        with torch.no_grad():
            for part in self.weight.chunk(getattr(self, "groups", 1)):
                nn.init.orthogonal_(part)
            if self.bias is not None:
                self.bias.zero_()


class InvertibleLinear(_Weighted):
    """``nn.Linear`` with at least as many outputs as inputs. The inverse is that of the weight, or its pseudo-inverse.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.

    Shapes: (..., in_features) -> (..., out_features).

    Raises:
        ValueError: fewer outputs than inputs, which they cannot determine.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if in_features > out_features:
            raise ValueError(
                f"InvertibleLinear: {out_features} outputs do not tell {in_features} inputs; out_features must be at "
                "least in_features"
            )
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._set_parameters((out_features, in_features), bias, device, dtype)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return self.in_features == self.out_features

    def function(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def inverse(self, y: Tensor) -> Tensor:
        with torch.autocast(y.device.type, enabled=False):
            y, inverse, bias = widened(y, left_inverse(self.weight), self.bias)
            return F.linear(y if bias is None else y - bias, inverse)

    def described(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _InvertibleConv(_Weighted):
    """What the convolutions of one to three dimensions share."""

    dims: ClassVar[int]
    convolve: ClassVar[Callable[..., Tensor]]
    transposed: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        stride: _Sizes | None = None,
        padding: _Sizes = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self._each(kernel_size)
        self.stride = self.kernel_size if stride is None else self._each(stride)
        self.padding, self.dilation = self._each(padding), self._each(dilation)
        name = type(self).__name__
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{name}: in_channels={in_channels} and out_channels={out_channels} must be divisible by "
                f"groups={groups}"
            )
        patch = in_channels // groups * math.prod(self.kernel_size)
        if patch > out_channels // groups:
            raise ValueError(
                f"{name}: {out_channels // groups} output channels of a group do not determine the {patch} numbers "
                f"that they are computed from; out_channels must be at least {patch * groups}"
            )
        self._set_parameters((out_channels, in_channels // groups, *self.kernel_size), bias, device, dtype)

    def _each(self, sizes: _Sizes) -> tuple[int, ...]:
        return (sizes,) * self.dims if isinstance(sizes, int) else tuple(sizes)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        is_square = self.out_channels == self.in_channels * math.prod(self.kernel_size)
        return is_square and self.groups == 1 and self.stride == self.kernel_size and not any(self.padding)

    def function(self, x: Tensor) -> Tensor:
        self._check(x)
        convolve = type(self).convolve
        return convolve(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def inverse(self, y: Tensor) -> Tensor:
        # Each output determines the patch that it was computed from; where patches overlap, their mean is taken.
        with torch.autocast(y.device.type, enabled=False):
            parts = [left_inverse(part.flatten(1)).T for part in self.weight.chunk(self.groups)]
            inverse = torch.cat(parts).view_as(self.weight)
            y, inverse, bias = widened(y, inverse, self.bias)
            z = y if bias is None else y - bias.view(-1, *(1,) * self.dims)
            x = self._transpose(z, inverse, self.groups)
            if self.stride == self.kernel_size and not any(self.padding):
                return x
            one = y.new_ones(1, 1, *y.shape[-self.dims :])
            return x / self._transpose(one, y.new_ones(1, 1, *self.kernel_size), 1)

    def _transpose(self, y: Tensor, weight: Tensor, groups: int) -> Tensor:
        transposed = type(self).transposed
        return transposed(y, weight, None, self.stride, self.padding, 0, groups, self.dilation)

    def _check(self, x: Tensor) -> None:
        for dim in range(self.dims):
            kernel, stride, padding, dilation = (
                sizes[dim] for sizes in (self.kernel_size, self.stride, self.padding, self.dilation)
            )
            size = x.shape[dim - self.dims]
            over = (size + 2 * padding - dilation * (kernel - 1) - 1) % stride
            # Each tap of the kernel reads every stride-th value; together they must read all.
            reached = {(k * dilation) % stride for k in range(kernel)}
            if over > padding or len(reached) < stride:
                fix = f"pad it by {stride - over}" if over > padding else "use a smaller stride"
                raise ValueError(
                    f"{type(self).__name__}: of {size} values along dimension {dim - self.dims} some are in no patch, "
                    f"and could not be computed again; {fix}"
                )

    def described(self) -> str:
        shown = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        parts = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, {parts}"


class InvertibleConv1d(_InvertibleConv):
    """A convolution that can be inverted: it has at least as many output channels as a patch has numbers.

    The pseudo-inverse of the weight computes each patch from its output; overlapping patches are averaged. With kernels
    of one value, as many outputs as inputs, and its orthogonal initial weight it is the 1x1 convolution of Glow (Kingma
    and Dhariwal 2018); with a larger kernel and stride a learnt ``PixelUnshuffle``.

    Args:
        in_channels, out_channels, kernel_size, padding, dilation, groups, bias, device, dtype: as for ``nn.Conv1d``.
        stride: by default the kernel's size, so that patches do not overlap.

    Shapes: as of ``nn.Conv1d``.

    Raises:
        ValueError: too few output channels; an input of which some values are in no patch.
    """

    dims = 1
    convolve = F.conv1d
    transposed = F.conv_transpose1d


class InvertibleConv2d(_InvertibleConv):
    """As ``InvertibleConv1d``, for images.

    >>> import torch, fusedlayers as fl
    >>> fl.InvertibleConv2d(8, 8, 1)(torch.randn(2, 8, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """

    dims = 2
    convolve = F.conv2d
    transposed = F.conv_transpose2d


class InvertibleConv3d(_InvertibleConv):
    """As ``InvertibleConv1d``, for volumes."""

    dims = 3
    convolve = F.conv3d
    transposed = F.conv_transpose3d


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
