"""Finds the input of a monotone function, or of one with a fold, from its output.

A derivative of a derivative needs it. A fit of f' in terms of y cannot be differentiated twice: next to a fold f'' is
``(d f' / dy) f'``, infinity times 0, and f''' the difference of two such numbers. The output still determines the
input, nearly as well as f', and at the input autograd differentiates the function itself.

It takes three evaluations of the function. What it does not do: next to a kink, within rounding, it may find an input
on the other side.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from .features import Fold, sample_points
from .kinks import Function, round_numbers

#: How many straight lines are drawn between two samples, each through what the last one met.
STEPS = 3
#: Where evaluations in the dtype and in float64 differ by more, the formula breaks down: it overflows, or cancels.
SOUND = 1e-2
#: The distances from a fold of more samples: there a function is no straight line between two of the others.
NEAR_FOLD = torch.logspace(-5.5, -2.5, 48, dtype=torch.float64, device="cpu")


class _Branch(NamedTuple):
    """Part of a table: its samples from ``first`` to ``last``. Outputs are multiplied by ``sign``, and rise."""

    first: int
    last: int
    sign: float


class _Table(NamedTuple):
    """Samples of a function, branch by branch: the one that is not marked, and the one that is.

    Attributes:
        chosen: for each sample that of those with its output that stands for all: within a flat part, and near 0, for
            far from it derivatives may overflow.
    """

    samples: Tensor
    outputs: Tensor
    chosen: Tensor
    branches: list[_Branch]


def input_of(function: Function, y: Tensor, fold: Fold | None, marked: Tensor | None) -> Tensor:
    """z with ``function(z) = y``, where ``marked`` on the branch that the fold marks. Where many have that output (on a
    flat part, or beyond what the function reaches) one of its samples there."""
    table = _table(function, fold, y.dtype, y.device)
    found = [_find(table, branch, y) for branch in table.branches]
    wanted, at, after, sign = found[0]
    if marked is not None and len(found) > 1:
        wanted, at, after, sign = (torch.where(marked, b, a) for a, b in zip(*found, strict=True))
    low, high = table.samples[after - 1], table.samples[after]
    below, above = table.outputs[after - 1] - wanted, table.outputs[after] - wanted
    for _ in range(STEPS):
        middle = _between(low, high, below, above)
        off = sign * function(middle) - wanted
        is_below = off < 0
        # The other end counts half (the Illinois method), so that it does not stay for ever.
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        below, above = torch.where(is_below, off, below / 2), torch.where(is_below, above / 2, off)
    z = torch.where(table.outputs[at] == wanted, table.samples[table.chosen[at]], _between(low, high, below, above))
    return torch.where(y.isnan(), y, z)


def _between(low: Tensor, high: Tensor, below: Tensor, above: Tensor) -> Tensor:
    """Where the straight line through both ends crosses 0."""
    part = torch.where(above > below, -below / (above - below), 0.5)
    return low + part * (high - low)


def _find(table: _Table, branch: _Branch, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y as the branch's outputs are, the first sample that is not below it, the same with one before it, and the
    sign."""
    first, last, sign = branch
    outputs = table.outputs[first : last + 1]
    wanted = torch.minimum(torch.maximum(sign * y, outputs[0]), outputs[-1])
    at = torch.searchsorted(outputs, wanted.contiguous()).clamp(max=last - first) + first
    return wanted, at, at.clamp(min=first + 1), wanted.new_full((), sign)


@functools.lru_cache(64)
@in_clean_state
def _table(function: Function, fold: Fold | None, dtype: torch.dtype, device: torch.device) -> _Table:
    points = [sample_points(), round_numbers()]
    if fold is not None:
        points += [fold.position - NEAR_FOLD, fold.position + NEAR_FOLD]
    z = torch.cat(points).to(dtype).double().unique()
    y, exact = function(z.to(dtype)).double(), function(z)
    lost = (~((y - exact).abs() <= SOUND * (1 + exact.abs()))).nonzero().view(-1)  # those, too, that are not finite
    zero = int(torch.searchsorted(z, 0.0))
    start = int(lost[lost < zero].max()) + 1 if bool((lost < zero).any()) else 0
    stop = int(lost[lost >= zero].min()) if bool((lost >= zero).any()) else len(z)
    z, y = z[start:stop], y[start:stop]
    on_marked = torch.zeros_like(z, dtype=torch.bool) if fold is None else fold.marks(z)
    branches: list[_Branch] = []
    samples, outputs, chosen = list[Tensor](), list[Tensor](), list[Tensor]()
    for part in (~on_marked, on_marked)[: 1 if fold is None else 2]:
        first, own = sum(len(of_branch) for of_branch in samples), y[part]
        sign = 1.0 if float(own[-1]) >= float(own[0]) else -1.0
        samples.append(z[part])
        outputs.append((sign * own).cummax(0).values)
        chosen.append(_standing_for(samples[-1], outputs[-1]) + first)
        branches.append(_Branch(first, first + len(own) - 1, sign))
    return _Table(
        torch.cat(samples).to(device, dtype), torch.cat(outputs).to(device, dtype), torch.cat(chosen).to(device),
        branches,
    )  # fmt: skip


def _standing_for(samples: Tensor, outputs: Tensor) -> Tensor:
    """``_Table.chosen``: not the end of a run of equal outputs, which may be a kink, but what is next to it."""
    _, run, counts = outputs.unique_consecutive(return_inverse=True, return_counts=True)
    last = counts.cumsum(0) - 1
    first, is_long = last - counts + 1, (counts > 1).long()
    inner = torch.where(samples[first].abs() < samples[last].abs(), first + is_long, last - is_long)
    return inner[run]
