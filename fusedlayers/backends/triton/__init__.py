"""Triton kernels: the backend for GPUs."""

from .codegen import computes
from .elementwise import bias_act, gate, gate_gradient, gradient, inverse
from .operations import describe_matmuls, has_epilogue, has_faster_linear, linear, linear_gradient, operation_act

__all__ = [
    "ADDS_BIAS",
    "bias_act",
    "computes",
    "describe_matmuls",
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

#: The activation's pass adds the bias at no cost, and sums its gradient.
ADDS_BIAS = True
