"""Triton kernels: the backend for GPUs."""

from .codegen import computes
from .elementwise import bias_act, gate, gate_gradient, gradient, inverse
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

#: The activation's pass adds it for nothing, and sums its gradient.
ADDS_BIAS = True
