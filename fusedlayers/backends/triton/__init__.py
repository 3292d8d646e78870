"""Triton kernels: the backend for GPUs."""

from .codegen import computes
from .dense import linear, linear_act, multiplies
from .elementwise import bias_act, gradient

__all__ = ["ADDS_BIAS", "bias_act", "computes", "gradient", "linear", "linear_act", "multiplies"]

#: The activation's pass adds it for nothing, and sums its gradient.
ADDS_BIAS = True
