"""Decompositions of ATen operations, so that code printers and the splitter of users' functions need few of them.

Torch has most decompositions. This file adds those of operations that torch keeps whole, that compute in mixed dtypes,
or that torch decomposes with less accuracy than the kernel has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import EFFICIENT_ZEROS, PRELU_BACKWARD, core_decompositions, decompositions_of, elementwise_dtypes

aten = torch.ops.aten

Table = dict[Any, Callable[..., Any]]

#: Core ATen keeps these whole. Torch's decompositions of them save the printers from knowing them.
_MORE_DECOMPOSITIONS = (
    aten.celu,
    aten.clamp,
    aten.elu,
    aten.elu_backward,
    aten.hardtanh,
    aten.hardtanh_backward,
    aten.leaky_relu,
    aten.relu,
    aten.softshrink,
    aten.threshold,
    aten.threshold_backward,
)


class NotPointwise(ValueError):
    """A function that does not map each element by itself."""


@functools.cache
def to_core() -> Table:
    """Decompositions down to the operations that printers know."""
    promotions = {
        overload: _in_one_type(overload, kind)
        for kind, operators in _PROMOTED.items()
        for operator in operators
        for overload in (getattr(operator, name) for name in operator.overloads())
    }
    return {**core_decompositions(), **decompositions_of(_MORE_DECOMPOSITIONS), **promotions, **_OWN}


@functools.cache
def to_single_results() -> Table:
    """Decompositions of operations that return more than one result, that take unused noise, or that fill the elements
    that a mask selects."""
    rrelu = {operator: own for operator, own in _OWN.items() if "rrelu" in str(operator)}
    return {**decompositions_of([aten.log_sigmoid_forward]), **rrelu, **_FILLING}


@functools.cache
def slow_kernels() -> Table:
    """Decompositions of operations whose CPU kernels are not vectorised: their parts run faster."""
    return decompositions_of([PRELU_BACKWARD])


#: Operations of core ATen that convert their arguments themselves, by torch's rule of type promotion. Here explicit
#: casts do, so that printers need no rules for mixed dtypes. float16 and bfloat16 are computed in float32, as kernels
#: do.
_PROMOTED = {
    "DEFAULT": (
        aten.abs, aten.add, aten.ceil, aten.copysign, aten.floor, aten.fmax, aten.fmin, aten.fmod,
        aten.maximum, aten.minimum, aten.mul, aten.pow, aten.remainder, aten.round, aten.sign, aten.sub, aten.trunc,
    ),
    "INT_TO_FLOAT": (
        aten.asinh, aten.atan, aten.atanh, aten.cos, aten.cosh,
        aten.div, aten.erf, aten.erfc, aten.exp, aten.exp2, aten.expm1,
        aten.log, aten.log10, aten.log1p, aten.log2, aten.reciprocal, aten.rsqrt, aten.sigmoid, aten.sin, aten.sinh,
        aten.sqrt, aten.tanh,
    ),
}  # fmt: skip


def _in_one_type(overload: Any, kind: Any) -> Callable[..., Any]:
    def decomposition(*arguments: Any, **options: Any) -> Any:
        numbers = [a for a in arguments if isinstance(a, (Tensor, bool, int, float))]
        computed, result = elementwise_dtypes(*numbers, promotion=kind)
        if all(a.dtype == computed for a in arguments if isinstance(a, Tensor)):
            return NotImplemented
        converted = [a.to(computed) if isinstance(a, Tensor) else a for a in arguments]
        return overload(*converted, **options).to(result)

    return decomposition


def _truth(value: Any) -> Any:
    return value if value.dtype == torch.bool else value != 0


def _divide(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = torch.true_divide(x, y)
    if rounding_mode is None:
        return quotient
    _refuse_integers(x, y)
    return torch.trunc(quotient)


def _floor_divide(x: Any, y: Any) -> Any:
    # As torch's kernels do, from the exact remainder: a quotient may be rounded up to a whole number that it is below.
    _refuse_integers(x, y)
    quotient = torch.true_divide(x, y)
    remainder = torch.fmod(x, y) if isinstance(x, Tensor) else torch.fmod(torch.full_like(y, x), y)
    whole = (x - remainder) / y
    whole = torch.where((remainder != 0) & ((remainder < 0) != (y < 0)), whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole != 0, floor, torch.copysign(torch.zeros_like(quotient), quotient))
    if isinstance(y, Tensor):
        return torch.where(y == 0, quotient, floor)
    return floor if y else quotient


def _refuse_integers(*arguments: Any) -> None:
    if not any(isinstance(a, Tensor) and a.is_floating_point() for a in arguments):
        raise NotPointwise("a rounded division of integers has no decomposition here")


def _round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    if decimals < 0:
        return torch.round(x / 10.0**-decimals) * 10.0**-decimals
    return torch.round(x * 10.0**decimals) / 10.0**decimals


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return x * _gate(x, approximate)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    gate = _gate(x, approximate)
    if approximate == "tanh":
        slope = gate * (1 - gate) * _TANH_SCALE * (1 + 3 * 0.044715 * x * x)
    else:
        slope = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (gate + x * slope)


_TANH_SCALE = 2 * math.sqrt(2 / math.pi)


def _gate(x: Tensor, approximate: str) -> Tensor:
    # As in builtin.py: 1 + erf(x) and 1 + tanh(x) cancel where gelu falls to zero.
    if approximate == "tanh":
        return torch.sigmoid(x * _TANH_SCALE * (1 + 0.044715 * x * x))
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    (mask, *others) = indices
    if others or accumulate or mask is None or mask.dtype != torch.bool or mask.shape != x.shape or values.dim():
        return NotImplemented
    return torch.where(mask, values, x)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    return source.to(x.dtype, copy=True) if source.shape == x.shape else NotImplemented


_FILLING: Table = {
    aten.copy.default: _copy,
    aten.index_put.default: _index_put,
    aten.masked_fill.Tensor: lambda x, mask, value: torch.where(mask, value.to(x.dtype), x),
}


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    return NotImplemented if training else torch.where(x > 0, x, x * ((lower + upper) / 2))


def _rrelu_and_noise(x: Tensor, noise: Tensor, *arguments: Any, **options: Any) -> Any:
    result = _rrelu(x, noise, *arguments, **options)
    return result if result is NotImplemented else (result, noise)


def _rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> Any:
    return NotImplemented if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))


def _logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    outside = math.nan if eps is None else 0.0
    return torch.where((x >= low) & (x <= high), grad / (x * (1 - x)), outside)


def _zeros(size: Any, **options: Any) -> Tensor:
    # For uninitialised memory, where any number will do, and for autograd's zero gradients.
    return torch.full(size, 0, dtype=options.get("dtype"))


_OWN: Table = {
    EFFICIENT_ZEROS.default: _zeros,
    aten.angle.default: lambda x: torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0)),
    aten.div.Scalar_mode: _divide,
    aten.div.Tensor_mode: _divide,
    aten.empty.memory_format: _zeros,
    aten.floor_divide.Scalar: _floor_divide,
    aten.floor_divide.default: _floor_divide,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.hardshrink_backward.default: lambda grad, x, lambd: torch.where((x >= -lambd) & (x <= lambd), 0.0, grad),
    aten.ldexp.Tensor: lambda x, exponent: x * torch.pow(2.0, exponent),
    aten.logical_and.default: lambda x, y: _truth(x) & _truth(y),
    aten.logical_not.default: lambda x: ~_truth(x),
    aten.logical_or.default: lambda x, y: _truth(x) | _truth(y),
    aten.logical_xor.default: lambda x, y: _truth(x) ^ _truth(y),
    aten.logit_backward.default: _logit_backward,
    aten.round.decimals: _round_decimals,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.rrelu_with_noise_functional.default: _rrelu_and_noise,
}
