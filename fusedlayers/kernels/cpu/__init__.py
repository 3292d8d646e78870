"""CPUs: compiled loops, and torch's operations for everything else."""

import torch

from ...activations import Activation
from .. import reference
from ..reference import ADDS_BIAS, CHUNK_BYTES, computes
from . import build
from .elementwise import bias_act, gate, gate_gradient, gradient, gradient_kernel

__all__ = [
    "ADDS_BIAS", "CHUNK_BYTES", "bias_act", "computes", "gate", "gate_gradient", "gradient", "slow_because",
]  # fmt: skip


def slow_because(activation: Activation, dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why backward from the output takes several times PyTorch's time, or None where it does not."""
    if not may_build:
        because = build.missing_because(may_build=False)
        # Whether a derivative must be fitted is asked last: fitting it takes long.
        return because if because is not None and activation.fitted_derivative(dtype) is not None else None
    if activation.fitted_derivative(dtype) is None or gradient_kernel(activation, dtype, "output") is not None:
        return None
    return build.missing_because() or reference.slow_because(activation, dtype)
