"""Triton kernels: the backend for GPUs."""

import torch

from ...activations import Activation
from .codegen import computes
from .elementwise import bias_act, gradient
from .gates import gate, gate_gradient
from .launch import missing_because

__all__ = [
    "ADDS_BIAS", "CHUNK_BYTES", "bias_act", "computes", "gate", "gate_gradient", "gradient",
    "missing_because", "slow_because",
]  # fmt: skip

#: The activation's pass adds the bias at no cost, and sums its gradient.
ADDS_BIAS = True
#: Each chunk launches kernels of its own: with so many hidden bytes their time on the device is longer than the host's.
CHUNK_BYTES = 32 << 20


def slow_because(activation: Activation, dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why backward from outputs of ``dtype`` takes several times PyTorch's time: it does not, a fit is one kernel."""
    return None
