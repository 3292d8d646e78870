"""The operation before an activation: a matmul, a convolution or a bias, ``z = operation(x, w, b)``, by torch; and a
block, which has its activation inside."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..utils.layout import along

Sizes = tuple[int, ...]
Weight = Any
"""A tensor; of ``Pointwise`` None."""


class Matmul:
    """``x w^T + b``: (..., in), (out, in), (out,) -> (..., out)."""

    function = "dense_bias_act"
    #: Whether autocast casts x, w and b.
    is_cast = True
    #: The dimension of z, from the end, along which the bias runs.
    dim = -1

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """The shape of z."""
        return *x.shape[:-1], w.shape[0]

    def returns_view(self, x: Tensor) -> bool:
        """Whether z is a view of the result."""
        return x.dim() != 2

    def flattened(self, x: Tensor) -> Tensor:
        """x in two dimensions: the result of ``F.linear`` with more is a view, and overwriting a view costs autograd a
        copy. z and what is added to it are folded alike."""
        return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
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
    is_cast: bool = True

    @property
    def function(self) -> str:
        return "conv_bias_act"

    @property
    def dim(self) -> int:
        """The dimension of z, from the end, along which the bias runs."""
        return -len(self.stride) - 1

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        return call(x, w, b, self.stride, self.padding, self.dilation, self.groups)

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """The shape of z. A size may be negative, if the kernel is larger than what it is moved over."""
        dims = len(self.stride)
        *leading, _ = x.shape[:-dims]
        if self.padding == "same":
            return *leading, w.shape[0], *x.shape[-dims:]
        padding = (0,) * dims if isinstance(self.padding, str) else self.padding
        moved = zip(x.shape[-dims:], w.shape[-dims:], self.stride, padding, self.dilation, strict=True)
        found = [(size + 2 * p - d * (kernel - 1) - 1) // s + 1 for size, kernel, s, p, d in moved]
        return *leading, w.shape[0], *found

    def returns_view(self, x: Tensor) -> bool:
        """Whether z is a view of the result."""
        return x.dim() != len(self.stride) + 2

    def flattened(self, x: Tensor) -> Tensor:
        """x with a batch: without, the result is a view."""
        return x if x.dim() == len(self.stride) + 2 else x.unsqueeze(0)

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.dim() == y.dim() else y.squeeze(0)


class Pointwise(NamedTuple):
    """``x + b``, b along ``dim``: what comes before an activation that stands alone."""

    dim: int
    function: str = "bias_act"
    is_cast: bool = False

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        return x if b is None else x + along(b, self.dim, x.dim())

    def returns_view(self, x: Tensor) -> bool:
        return False

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        return tuple(x.shape)


class Mlp(NamedTuple):
    """``linear(dropout(activation(linear(x, w1, b1))), w2, b2)``; gated: ``activation(gate) * up`` of two first layers,
    or of both halves of a packed one."""

    function: str
    dropout: float
    #: None leaves it to the plan.
    chunks: int | None
    is_gated: bool = False
    is_packed: bool = False
    is_cast: bool = True

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """The shape of z, which the activation is given."""
        return *x.shape[:-1], w.shape[0] // (2 if self.is_packed else 1)


Operation = Matmul | Convolution | Pointwise | Mlp
