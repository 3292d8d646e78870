"""Torch operations: the readable reference, and the backend for CPUs."""

from ...activations import Activation
from .elementwise import bias_act, gradient
from .gated import gate, gate_gradient
from .inverse import inverse
from .operations import (
    describe_matmuls,
    faster_linear,
    has_epilogue,
    has_faster_linear,
    linear,
    linear_gradient,
    operation_act,
)

__all__ = [
    "ADDS_BIAS",
    "HAS_EPILOGUES",
    "bias_act",
    "computes",
    "describe_matmuls",
    "faster_linear",
    "gate",
    "gate_gradient",
    "gradient",
    "has_epilogue",
    "has_faster_linear",
    "inverse",
    "linear",
    "linear_gradient",
    "operation_act",
]

#: torch's matmuls add it on the way.
ADDS_BIAS = False
#: oneDNN's epilogues do not know the branch bit.
HAS_EPILOGUES = False


def computes(activation: Activation) -> bool:
    """Whether there is code for the activation: torch computes everything."""
    return True
