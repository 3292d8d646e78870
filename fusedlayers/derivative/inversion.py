"""Finds the input of a monotone function, or of one with a fold, from its output.

A derivative of a derivative needs it. A fit of f' in terms of y cannot be differentiated twice: next to a fold f'' is
``(d f' / dy) f'``, infinity times 0, and f''' the difference of two such numbers. The output still determines the
input, nearly as well as f', and at the input autograd differentiates the function itself.

It takes a dozen evaluations of the function. What it does not do: next to a kink, within rounding, it may find an input
on the other side.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from .features import Fold, sample_points
from .kinks import Function

#: How often the distance between two samples is halved, before a straight line is drawn through the rest.
HALVINGS = 10
#: Where evaluations in the dtype and in float64 differ by more, the formula breaks down: it overflows, or cancels.
SOUND = 1e-2


class _Branch(NamedTuple):
    """A branch's samples, their outputs, times ``sign``, which makes them rise."""

    samples: Tensor
    rising: Tensor
    sign: float


def input_of(function: Function, y: Tensor, fold: Fold | None, marked: Tensor | None) -> Tensor:
    """z with ``function(z) = y``, where ``marked`` on the branch that the fold marks. Where many have that output (on a
    flat part, or beyond what the function reaches) the one of its samples there that is nearest to 0."""
    here, there = _branches(function, fold, y.dtype, y.device)
    z = _search(function, y, here)
    if there is not None and marked is not None:
        z = torch.where(marked, _search(function, y, there), z)
    return torch.where(y.isnan(), y, z)


@functools.lru_cache(64)
@in_clean_state
def _branches(
    function: Function, fold: Fold | None, dtype: torch.dtype, device: torch.device
) -> tuple[_Branch, _Branch | None]:
    """The branch that is not marked, and the one that is."""
    points = sample_points()
    outputs, exact = function(points.to(dtype)).double(), function(points)
    is_sound = (outputs - exact).abs() <= SOUND * (1 + exact.abs())  # not where it is not finite
    lost, middle = (~is_sound).nonzero().view(-1), len(points) // 2
    first = int(lost[lost < middle].max()) + 1 if bool((lost < middle).any()) else 0
    last = int(lost[lost >= middle].min()) if bool((lost >= middle).any()) else len(points)
    points, outputs = points[first:last], outputs[first:last]
    parts = [points == points] if fold is None else [~fold.marks(points), fold.marks(points)]
    branches = []
    for part in parts:
        y = outputs[part]
        sign = 1.0 if float(y[-1]) >= float(y[0]) else -1.0
        rising = (sign * y).cummax(0).values
        branches.append(_Branch(points[part].to(device, dtype), rising.to(device, dtype), sign))
    return branches[0], branches[1] if len(branches) > 1 else None


def _search(function: Function, y: Tensor, branch: _Branch) -> Tensor:
    samples, rising, sign = branch
    last = len(samples) - 1
    wanted = torch.minimum(torch.maximum(sign * y, rising[0]), rising[last]).contiguous()
    first_not_below = torch.searchsorted(rising, wanted).clamp(max=last)
    last_not_above = (torch.searchsorted(rising, wanted, right=True) - 1).clamp(min=0)
    has_sample = first_not_below <= last_not_above
    ends = samples[first_not_below], samples[last_not_above]
    nearest = torch.where(ends[0].abs() < ends[1].abs(), *ends)

    after = first_not_below.clamp(min=1)
    low, high = samples[after - 1], samples[after]
    for _ in range(HALVINGS):
        middle = low + (high - low) / 2
        is_below = sign * function(middle) < wanted
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    below, above = (sign * function(end) for end in (low, high))
    part = torch.where(above > below, (wanted - below) / (above - below), 0.5).clamp(0, 1)
    return torch.where(has_sample, nearest, torch.lerp(low, high, part))
