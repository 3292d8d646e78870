"""Finds the row of the table that a user's function is equal to, such as another library's ``gelu``.

The function is then replaced by the row, with the row's kernels, derivatives and name. It is equal if its trace has the
same operations as the row's, or if its values and slopes agree with the row's in float64, to more digits than the
layer's dtype holds (``z * sigmoid(z)`` for silu). Values alone do not suffice: a straight-through estimator
(``z.detach() * sigmoid(z)``) has the values of another function. The comparison costs one forward and one backward pass
over 4300 numbers.

What it does not do: only smooth rows are compared by values, because the numbers compared may miss a kink.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..derivative.features import round_numbers
from ..utils.isolation import in_clean_state
from . import table
from .free_variables import find_variables
from .partition import example_shape, split
from .record import Activation
from .table import rows
from .tracing import NotPointwise

#: The accepted difference in float64 of values and slopes, times |z| where that is above 1, by the dtype that layers
#: compute in. Constants are often written with ten digits.
_TOLERANCE = {torch.float32: 2e-9, torch.float64: 4e-15}

#: The numbers compared are dense up to here. They reach as far as float32, because a function may be clamped.
NEAR = 40.0


def recognise(body: GraphModule, dtype: torch.dtype) -> Activation | None:
    """The activation of the table, with its default parameters, that the trace ``body`` is equal to; or None."""
    wide = torch.promote_types(dtype, torch.float32)
    return _programs(wide).get(body.code) or _equal(body, wide)


@functools.cache
def _programs(dtype: torch.dtype) -> dict[str, Activation]:
    """The traces of the table's functions and of torch's functions for them, by their code."""
    found = {}
    for row in rows():
        activation = table.by_name[row.name]
        if row.is_custom or activation.is_identity:
            continue
        for function in (activation.plain, activation.function):
            try:
                found[split(find_variables(function), example_shape((2, 3), ()), dtype).body.code] = activation
            except NotPointwise:
                continue  # torch's function cannot be traced, so no trace is equal to it
    return found


@in_clean_state
def _equal(body: GraphModule, dtype: torch.dtype) -> Activation | None:
    z, smooth = _smooth_rows()
    y = body(z)
    if y.dtype is not z.dtype or y.shape != z.shape or not y.requires_grad:
        return None
    found = _and_slopes(y, z)
    tolerance = _TOLERANCE[dtype] * z.detach().abs().clamp(min=1)
    # Far from zero some formulas overflow where the row does not, as ``z / (1 + exp(-z))`` does.
    overflowed = found.isnan() & (z.detach().abs() > NEAR)
    for activation, expected in smooth:
        if bool((((found - expected).abs() <= tolerance) | overflowed).all()):
            return activation
    return None


@functools.cache
def _smooth_rows() -> tuple[Tensor, list[tuple[Activation, Tensor]]]:
    """The numbers compared, and the values and slopes there of the table's smooth activations."""
    far = torch.logspace(math.log10(NEAR), 30, 120, dtype=torch.float64)
    near = torch.linspace(-NEAR, NEAR, 4001, dtype=torch.float64), torch.logspace(-9, 0, 50, dtype=torch.float64)
    z = torch.cat([*near, round_numbers(), far, -far])  # at which sums of pieces (clamp, relu) may have other slopes
    z.requires_grad_()
    smooth = [table.by_name[row.name] for row in rows() if row.derivative_given_output == "fold" and not row.is_custom]
    return z, [(activation, _and_slopes(activation.function(z), z)) for activation in smooth]


def _and_slopes(y: Tensor, z: Tensor) -> Tensor:
    return torch.stack([y.detach(), *torch.autograd.grad(y.sum(), z)])
