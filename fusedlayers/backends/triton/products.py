"""Matmuls and convolutions on a GPU: the vendor's, into a buffer that the elementwise kernels overwrite."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from ...products import Product
from .elementwise import bias_act


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these: it is the same."""
    return False


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x w^T + b`` in a new buffer."""
    return F.linear(x, w, b)


def product_act(product: Product, x: Tensor, w: Tensor, b: Tensor | None, activation: Activation) -> Tensor:
    """``activation(product(x, w, b))`` in one new buffer, exact: for calls without gradients."""
    z = product(x, w, None)
    return bias_act(z, b, activation, dim=product.dim, encode=False, out=z)
