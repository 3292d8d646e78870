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
    """Decompositions of operations that return more than one result, or that fill the elements that a mask selects."""
    return {**decompositions_of([aten.log_sigmoid_forward]), **_FILLING}


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


def _zeros(size: Any, **options: Any) -> Tensor:
    # For uninitialised memory, where any number will do, and for autograd's zero gradients.
    return torch.full(size, 0, dtype=options.get("dtype"))


_OWN: Table = {
    EFFICIENT_ZEROS.default: _zeros,
    aten.empty.memory_format: _zeros,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.hardshrink_backward.default: lambda grad, x, lambd: torch.where((x >= -lambd) & (x <= lambd), 0.0, grad),
    aten.logical_and.default: lambda x, y: _truth(x) & _truth(y),
    aten.logical_not.default: lambda x: ~_truth(x),
    aten.logical_or.default: lambda x, y: _truth(x) | _truth(y),
    aten.logical_xor.default: lambda x, y: _truth(x) ^ _truth(y),
}
