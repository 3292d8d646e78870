"""Torch operations: the readable reference, and the backend for CPUs."""

from .dense import linear, linear_act, multiplies
from .elementwise import bias_act, gradient

__all__ = ["ADDS_BIAS", "bias_act", "gradient", "linear", "linear_act", "multiplies"]

#: torch's matmuls add it on the way.
ADDS_BIAS = False
