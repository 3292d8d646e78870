"""Dense layers on a GPU: the vendor's matmul into a buffer, which the elementwise kernels overwrite."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from .elementwise import bias_act


def multiplies(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these: it is the same."""
    return False


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x w^T + b`` in a new buffer."""
    return F.linear(x, w, b)


def linear_act(x: Tensor, w: Tensor, b: Tensor | None, activation: Activation) -> Tensor:
    """``activation(x w^T + b)`` in one new buffer, exact: for calls without gradients."""
    z = F.linear(x, w)
    return bias_act(z, b, activation, dim=-1, encode=False, out=z)
