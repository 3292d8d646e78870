"""Finds the row of the table that a user's function is equal to, such as another library's ``gelu``.

The function is then replaced by the row, with the row's kernels, derivatives and name. It is equal if its values and
slopes in float64 agree with the row's, to more digits than float32 holds (``z * sigmoid(z)`` for silu), also at round
numbers, where rows have their kinks. Values alone do not suffice: a straight-through estimator (``z.detach() *
sigmoid(z)``) has the values of another function. The comparison costs one forward and one backward pass over 5200
numbers.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..derivative.features import round_numbers
from ..utils.caching import in_clean_state
from . import table
from .record import Activation
from .table import rows

#: The accepted difference of values and slopes, times |z| where that is above 1. Constants are often written with ten
#: digits.
_TOLERANCE = 2e-9
#: The numbers compared are dense up to here. They reach as far as float32, because a function may be clamped.
NEAR = 40.0


@in_clean_state
def recognise(body: GraphModule) -> Activation | None:
    """The activation of the table, with its default parameters, that the trace ``body`` is equal to; or None."""
    z, known = _table()
    y = body(z)
    if y.dtype is not z.dtype or y.shape != z.shape or not y.requires_grad:
        return None
    found = _and_slopes(y, z)
    tolerance = _TOLERANCE * z.detach().abs().clamp(min=1)
    # Far from zero some formulas overflow where the row does not, as ``z / (1 + exp(-z))`` does.
    overflowed = found.isnan() & (z.detach().abs() > NEAR)
    for activation, expected in known:
        is_same = ((found - expected).abs() <= tolerance) | (found == expected) | (found.isnan() & expected.isnan())
        if bool((is_same | overflowed).all()):
            return activation
    return None


@functools.cache
def _table() -> tuple[Tensor, list[tuple[Activation, Tensor]]]:
    """The numbers compared, and the values and slopes there of the table's own activations."""
    far = torch.logspace(math.log10(NEAR), 30, 120, dtype=torch.float64)
    small = torch.logspace(-30, 0, 150, dtype=torch.float64)
    near = torch.linspace(-NEAR, NEAR, 4001, dtype=torch.float64), small, -small, torch.tensor([math.nan]).double()
    z = torch.cat([*near, round_numbers(), far, -far]).requires_grad_()
    known = [table.by_name[row.name] for row in rows() if not row.is_custom and row.name != "identity"]
    return z, [(activation, _and_slopes(activation.plain(z), z)) for activation in known]


def _and_slopes(y: Tensor, z: Tensor) -> Tensor:
    return torch.stack([y.detach(), *torch.autograd.grad(y.sum(), z)])
