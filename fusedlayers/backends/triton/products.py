"""Matmuls and convolutions on a GPU: the vendor's, into a buffer that the elementwise kernels overwrite."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from ...products import Product, Weight
from .elementwise import bias_act


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these: it is the same."""
    return False


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x w^T + b`` in a new buffer."""
    return F.linear(x, w, b)


def product_act(product: Product, x: Tensor, w: Weight, b: Tensor | None, activation: Activation) -> Tensor:
    """``activation(product(x, w, b))`` in one new buffer, exact: for calls without gradients."""
    z, kernel_b = (product(x, w, None), b) if product.leaves_bias else (product(x, w, b), None)
    return bias_act(z, kernel_b, activation, dim=product.dim, encode=False, out=z)
