"""Torch operations: the readable reference, which computes everything anywhere.

The backends for CPUs and GPUs leave to it what they have no loops or kernels for.
"""

import torch

from ...activations import Activation
from .dropout_bits import drawn, packed, unpacked
from .elementwise import bias_act, derivative, gate, gate_gradient, gradient, of_output, sum_of

__all__ = [
    "ADDS_BIAS", "CHUNK_BYTES", "bias_act", "computes", "derivative", "drawn", "gate", "gate_gradient", "gradient",
    "of_output", "packed", "slow_because", "sum_of", "unpacked",
]  # fmt: skip

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
