"""Torch operations: the readable reference, and the backend for CPUs."""

from ...activations import Activation
from .elementwise import bias_act, gradient
from .gated import gate, gate_gradient
from .inverse import inverse
from .products import decided, has_epilogue, linear, linear_gradient, multiplies, product_act

__all__ = [
    "ADDS_BIAS",
    "bias_act",
    "computes",
    "decided",
    "gate",
    "gate_gradient",
    "gradient",
    "has_epilogue",
    "inverse",
    "linear",
    "linear_gradient",
    "multiplies",
    "product_act",
]

#: torch's matmuls add it on the way.
ADDS_BIAS = False


def computes(activation: Activation) -> bool:
    """Whether there is code for the activation: torch computes everything."""
    return True
