"""A user's function that is a row of the table in other words, such as another library's ``gelu``: it is that row then,
with the kernels, the derivatives and the name that it has there.

Either it computes what the row computes operation by operation, or it is written differently (``z * sigmoid(z)``) and
has the same values and slopes in float64, to more digits than the layer's dtype shows. Values alone do not do:
straight-through estimators (``z.detach() * sigmoid(z)``) share theirs with another function. The comparison goes for
smooth rows only: no number of the sweep need be the one where a function has its kink.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..utils.isolation import in_clean_state
from . import record
from .free_variables import find_variables
from .partition import example_shape, split
from .record import Activation, rows
from .tracing import NotPointwise

#: How far these may be apart in float64, in relation to z where that is above 1; by the dtype computed in. Constants
#: are often written with ten digits.
_APART = {torch.float32: 2e-9, torch.float64: 4e-15}

#: Up to here the sweep is dense; it goes as far as float32, because functions may be clamped.
NEAR = 40.0


def recognise(body: GraphModule, dtype: torch.dtype) -> Activation | None:
    """The activation of the table that a trace for ``dtype`` is of, with the parameters it has by default; or None."""
    wide = torch.promote_types(dtype, torch.float32)
    return _programs(wide).get(body.code) or _equal(body, wide)


@functools.cache
def _programs(dtype: torch.dtype) -> dict[str, Activation]:
    """The table's functions as traces: as torch has them, and as they are written there."""
    found = {}
    for row in rows():
        activation = record.by_name[row.name]
        if row.is_custom or activation.is_identity:
            continue
        for function in (activation.plain, activation.function):
            try:
                found[split(find_variables(function), example_shape((2, 3), ()), dtype).body.code] = activation
            except NotPointwise:
                continue  # a function of torch's that does not trace: nobody's trace is like it
    return found


@in_clean_state
def _equal(body: GraphModule, dtype: torch.dtype) -> Activation | None:
    z, table = _sweeps()
    y = body(z)
    if y.dtype is not z.dtype or y.shape != z.shape or not y.requires_grad:
        return None
    found = _and_slopes(y, z)
    apart = _APART[dtype] * z.detach().abs().clamp(min=1)
    # Far from zero some formulas overflow, as ``z / (1 + exp(-z))`` does: the row does not.
    is_nothing = found.isnan() & (z.detach().abs() > NEAR)
    is_row = (bool((((found - known).abs() <= apart) | is_nothing).all()) for _, known in table)
    return next((activation for (activation, _), is_it in zip(table, is_row, strict=True) if is_it), None)


@functools.cache
def _sweeps() -> tuple[Tensor, list[tuple[Activation, Tensor]]]:
    far = torch.logspace(math.log10(NEAR), 30, 120, dtype=torch.float64)
    near = torch.linspace(-NEAR, NEAR, 4001, dtype=torch.float64), torch.logspace(-9, 0, 50, dtype=torch.float64)
    z = torch.cat([*near, far, -far])
    z.requires_grad_()
    smooth = [record.by_name[row.name] for row in rows() if row.derivative_given_output == "fold" and not row.is_custom]
    return z, [(activation, _and_slopes(activation.function(z), z)) for activation in smooth]


def _and_slopes(y: Tensor, z: Tensor) -> Tensor:
    return torch.stack([y.detach(), *torch.autograd.grad(y.sum(), z)])
