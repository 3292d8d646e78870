"""Torch operations: the readable reference, which computes everything anywhere.

The backends for CPUs and GPUs leave to it what they have no loops or kernels for.
"""

import torch

from ...activations import Activation
from .dropout_bits import (
    drawn,
    drop_marked,
    drop_marked_gradient,
    factor_of,
    gradient_of_marked,
    is_kept,
    packed,
    scaled,
    slope,
    unpacked,
)
from .elementwise import bias_act, derivative, gate, gate_gradient, gradient, inverse, sum_of
from .rms_norm import rms_norm, rms_norm_gradient

__all__ = [
    "ADDS_BIAS",
    "CHUNK_BYTES",
    "bias_act",
    "computes",
    "derivative",
    "drawn",
    "drop_marked",
    "drop_marked_gradient",
    "factor_of",
    "gate",
    "gate_gradient",
    "gradient",
    "gradient_of_marked",
    "inverse",
    "is_kept",
    "packed",
    "rms_norm",
    "rms_norm_gradient",
    "scaled",
    "slope",
    "slow_because",
    "sum_of",
    "unpacked",
]

#: torch's matmuls add it on the way.
ADDS_BIAS = False
CHUNK_BYTES = 0


def computes(activation: Activation) -> bool:
    """Whether there is code for the activation: torch computes everything."""
    return True


def slow_because(activation: Activation, dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why backward from the output takes several times PyTorch's time, or None where it does not."""
    if activation.fitted_derivative(dtype) is None:
        return None
    return f"a fit of {activation.name}'s derivative takes dozens of operations, several times PyTorch's time"
