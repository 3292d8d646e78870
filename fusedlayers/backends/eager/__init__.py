"""Torch operations: the readable reference, and the backend for CPUs."""

from ...activations import Activation
from .dense import linear, linear_act, multiplies
from .elementwise import bias_act, gradient

__all__ = ["ADDS_BIAS", "bias_act", "computes", "gradient", "linear", "linear_act", "multiplies"]

#: torch's matmuls add it on the way.
ADDS_BIAS = False


def computes(activation: Activation) -> bool:
    """Whether there is code for the activation: torch computes everything."""
    return True
