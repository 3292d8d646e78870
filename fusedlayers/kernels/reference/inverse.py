"""The input of an activation from its output, by the formula of the activation's row or its fit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...utils.layout import is_dense
from .chunks import for_each


def inverse(y: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
    """z with ``activation(z) = y``, in ``out`` (which may be y) or in a new buffer; y carries the branch."""
    z = out if out is not None and is_dense(out) else torch.empty_like(y)
    if not (is_dense(y) and y.stride() == z.stride()):
        y = torch.empty_like(z).copy_(y)
    for_each(lambda y, z: z.copy_(activation.input_given_output(upcast(y), z.dtype)), y, z)
    return z if out is None or z is out else out.copy_(z)
