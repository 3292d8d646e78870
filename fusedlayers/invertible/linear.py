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
    """What the convolutions of one to three dimensions share. Patches do not overlap, so that each output determines
    the patch that it was computed from."""

    dims: ClassVar[int]
    convolve: ClassVar[Callable[..., Tensor]]
    transposed: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        groups: int = 1,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = (kernel_size,) * self.dims if isinstance(kernel_size, int) else tuple(kernel_size)
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

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return self.groups == 1 and self.out_channels == self.in_channels * math.prod(self.kernel_size)

    def function(self, x: Tensor) -> Tensor:
        sizes = x.shape[-self.dims :]
        if any(size % kernel for size, kernel in zip(sizes, self.kernel_size, strict=True)):
            raise ValueError(
                f"{type(self).__name__}: sizes {tuple(sizes)} are no multiples of kernel_size={self.kernel_size}, and "
                "what is in no patch could not be computed again; pad the input"
            )
        return type(self).convolve(x, self.weight, self.bias, self.kernel_size, groups=self.groups)

    def inverse(self, y: Tensor) -> Tensor:
        with torch.autocast(y.device.type, enabled=False):
            parts = [left_inverse(part.flatten(1)).T for part in self.weight.chunk(self.groups)]
            y, inverse, bias = widened(y, torch.cat(parts).view_as(self.weight), self.bias)
            z = y if bias is None else y - bias.view(-1, *(1,) * self.dims)
            return type(self).transposed(z, inverse, None, self.kernel_size, groups=self.groups)

    def described(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, groups={self.groups}"


class InvertibleConv1d(_InvertibleConv):
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
