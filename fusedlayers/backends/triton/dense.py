"""Dense layers on a GPU: the vendor's matmul into a buffer, which the elementwise kernels overwrite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from .elementwise import bias_act


def linear_act(x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, *, encode: bool) -> Tensor:
    """``activation(x w^T + b)`` in one new buffer, with the branch bit if ``encode``."""
    z = F.linear(x, w)
    return bias_act(z, b, activation, dim=-1, encode=encode, out=z)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x w^T + b`` in a new buffer."""
    return F.linear(x, w, b)


def input_gradient(dz: Tensor, w: Tensor) -> Tensor:
    """``dz w``: (..., out), (out, in) -> (..., in)."""
    return torch.matmul(dz, w)


def weight_gradient(dz: Tensor, x: Tensor) -> Tensor:
    """``dz^T x``: (..., out), (..., in) -> (out, in)."""
    return dz.reshape(-1, dz.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
