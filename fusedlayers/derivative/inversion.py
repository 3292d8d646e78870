"""Finds the input of a monotone function, or of one with a fold, from its output.

A derivative of a derivative needs it. A fit of f' in terms of y cannot be differentiated twice: next to a fold f'' is
``(d f' / dy) f'``, infinity times 0, and f''' the difference of two such numbers. The output still determines the
input, nearly as well as f', and at the input autograd differentiates the function itself.

What it does not do: it is not fast. It evaluates the function a dozen times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .features import Fold, sample_points
from .kinks import Function

#: How often the distance between two samples is halved, before a straight line is drawn through the rest: to 2e-6.
HALVINGS = 10


def input_of(function: Function, y: Tensor, fold: Fold | None, marked: Tensor | None) -> Tensor:
    """z with ``function(z) = y``, where ``marked`` on the branch that the fold marks. Where many have that output (on a
    flat part) one of the samples there; for outputs that the function has nowhere, the input whose output is nearest.
    """
    samples = sample_points().to(y.device, y.dtype)
    outputs = function(samples)
    samples, outputs = samples[outputs.isfinite()], outputs[outputs.isfinite()]
    if fold is None or marked is None:
        return _search(function, y, samples, outputs)
    on_marked = fold.marks(samples.double())
    there, here = (_search(function, y, samples[part], outputs[part]) for part in (on_marked, ~on_marked))
    return torch.where(marked, there, here)


def _search(function: Function, y: Tensor, samples: Tensor, outputs: Tensor) -> Tensor:
    """On a branch: outputs rise or fall over its samples."""
    sign = 1.0 if float(outputs[-1]) >= float(outputs[0]) else -1.0
    wanted, rising = (sign * y).contiguous(), (sign * outputs).cummax(0).values
    last = len(samples) - 1
    first_not_below = torch.searchsorted(rising, wanted)
    last_not_above = torch.searchsorted(rising, wanted, right=True) - 1
    has_sample = first_not_below <= last_not_above
    ends = samples[first_not_below.clamp_max(last)], samples[last_not_above.clamp_min(0)]
    inner = torch.where(ends[0].abs() < ends[1].abs(), *ends)  # far from 0 derivatives may overflow

    after = first_not_below.clamp(1, last)
    low, high = samples[after - 1], samples[after]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_below = sign * function(middle) < wanted
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    below, above = (sign * function(end) for end in (low, high))
    part = torch.where(above > below, (wanted - below) / (above - below), 0.5).clamp(0, 1)
    return torch.where(has_sample, inner, torch.lerp(low, high, part))
