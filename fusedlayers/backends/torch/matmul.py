"""Matmuls, and what comes with them, by torch's default."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from ..operations import Operation, Weight
from .elementwise import bias_act


def has_faster_linear(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear``, which it is here."""
    return False


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer."""
    y = F.linear(x, w, b)
    return y if out is None else out.copy_(y)


faster_linear = F.linear


def add_linear(total: Tensor, x: Tensor, w: Tensor) -> None:
    """``total + x w^T`` over ``total``."""
    total.add_(linear(x, w, None))


def operation_act(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    encode: bool = False,
) -> Tensor:
    """``activation(operation(x, w, b), *operands)`` in one new buffer; ``encode`` puts the branch in it."""
    z = operation(x, w, b)
    return bias_act(z, None, activation, operands, dim=operation.dim, encode=encode, out=z)
