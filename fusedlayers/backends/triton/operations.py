"""Matmuls and convolutions on a GPU with the activation after them: the vendor's result goes into a buffer that an
elementwise kernel overwrites."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from ..operations import Operation, Weight
from .elementwise import bias_act


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer."""
    if out is None:
        return F.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def add_linear(total: Tensor, x: Tensor, w: Tensor) -> None:
    """``total + x w^T`` over ``total``, by the matmul itself."""
    torch.addmm(total, x, w.t(), out=total)


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
    z, kernel_b = (operation(x, w, None), b) if operation.leaves_bias else (operation(x, w, b), None)
    return bias_act(z, kernel_b, activation, operands, dim=operation.dim, encode=encode, out=z)
