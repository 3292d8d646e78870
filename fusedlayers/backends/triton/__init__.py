"""Triton kernels: the backend for GPUs."""

from .dense import input_gradient, linear, linear_act, weight_gradient
from .elementwise import bias_act, gradient

__all__ = ["bias_act", "gradient", "input_gradient", "linear", "linear_act", "weight_gradient"]
