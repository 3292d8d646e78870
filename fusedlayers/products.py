"""What comes before an activation: a matmul or a convolution, ``z = product(x, w, b)``, as torch computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = tuple[int, ...]


class Matmul:
    """``x w^T + b``: (..., in), (out, in), (out,) -> (..., out)."""

    function = "dense_bias_act"
    #: The dimension of z, from the end, along which the bias runs.
    dim = -1

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def shape(self, x: Tensor, w: Tensor) -> Sizes:
        """Of z."""
        return *x.shape[:-1], w.shape[0]

    def folded(self, x: Tensor) -> Tensor:
        """x in two dimensions: the result of ``F.linear`` with more is a view, and overwriting a view costs autograd a
        copy. z and what is added to it are folded alike."""
        return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)

    def unfolded(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


MATMUL = Matmul()


class Convolution(NamedTuple):
    """``conv(x, w) + b`` with one to three spatial dimensions: (batch, in, ...), (out, in / groups, ...), (out,) ->
    (batch, out, ...), or all of it without the batch."""

    stride: Sizes
    #: Numbers, or "same" or "valid".
    padding: Sizes | str
    dilation: Sizes
    groups: int

    @property
    def function(self) -> str:
        return "conv_bias_act"

    @property
    def dim(self) -> int:
        """The dimension of z, from the end, along which the bias runs."""
        return -len(self.stride) - 1

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        return call(x, w, b, self.stride, self.padding, self.dilation, self.groups)

    def shape(self, x: Tensor, w: Tensor) -> Sizes:
        """Of z. A size may be negative, if the kernel is larger than what it is moved over."""
        dims = len(self.stride)
        *leading, _ = x.shape[:-dims]
        if self.padding == "same":
            return *leading, w.shape[0], *x.shape[-dims:]
        padding = (0,) * dims if isinstance(self.padding, str) else self.padding
        found = (
            (size + 2 * around - apart * (kernel - 1) - 1) // step + 1
            for size, kernel, step, around, apart in zip(
                x.shape[-dims:], w.shape[-dims:], self.stride, padding, self.dilation, strict=True
            )
        )
        return *leading, w.shape[0], *found

    def padding_in_numbers(self, w: Tensor) -> Sizes | None:
        """What both ends of each dimension are padded by; None where "same" pads one end more than the other."""
        if not isinstance(self.padding, str):
            return self.padding
        spare = [apart * (kernel - 1) for kernel, apart in zip(w.shape[2:], self.dilation, strict=True)]
        if self.padding == "valid":
            return (0,) * len(spare)
        return None if any(size % 2 for size in spare) else tuple(size // 2 for size in spare)

    def gradients(self, dz: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Of x, w and b; None where not needed. Needs a padding in numbers, and of x and w what the others are of."""
        padding = self.padding_in_numbers(w)
        sizes = self.stride, padding, self.dilation, False, (0,) * len(self.stride), self.groups
        return torch.ops.aten.convolution_backward(dz, x, w, (w.shape[0],), *sizes, needs)

    def folded(self, x: Tensor) -> Tensor:
        """x with a batch: without, the result is a view."""
        return x if x.dim() == len(self.stride) + 2 else x.unsqueeze(0)

    def unfolded(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.dim() == y.dim() else y.squeeze(0)


Product = Matmul | Convolution


def elements(shape: Sizes) -> int:
    return math.prod(shape)
