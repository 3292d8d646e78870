"""Finds the input of a monotone function, or of one with a fold, from its output, by bisection.

Fits are made of it, and derivatives of derivatives where a row states no inverse: a fit of f' in terms of y cannot be
differentiated, but at the input autograd differentiates the function itself.

It takes 64 evaluations of the function in float32, 128 in float64. Next to a kink, within rounding, it may find an
input on the other side.
"""

import torch
from torch import Tensor

from .features import Fold, Function

#: Where evaluations in the dtype and in float64 differ by more, the formula breaks down: it overflows, or cancels.
SOUND = 1e-2


def input_of(function: Function, y: Tensor, fold: Fold | None, marked: Tensor | None) -> Tensor:
    """z with ``function(z) = y``, where ``marked`` on the branch that the fold marks. Where many have that output (on a
    flat part) it is the one nearest to 0, or to the fold, that is not an end, which may be a kink. Outputs that the
    function does not reach count as the nearest that it does."""
    low, high = _reach(function, y)
    center = torch.zeros_like(y) if fold is None else torch.full_like(y, fold.position)
    if fold is None:
        low, high = low.expand_as(y), high.expand_as(y)
        is_rising = function(high) >= function(low)
    else:
        assert marked is not None
        low, high = torch.where(marked, low, center), torch.where(marked, center, high)
        is_rising = ~marked
    ends = function(low), function(high)
    wanted = torch.maximum(torch.minimum(y, torch.maximum(*ends)), torch.minimum(*ends))
    sign = torch.where(is_rising, 1.0, -1.0).to(y.dtype)
    ends_of_run = []
    for finds_last in (False, True):
        below, above = _key(low) - 1, _key(high) + 1
        for _ in range(8 * y.itemsize):
            middle = (below >> 1) + (above >> 1) + (below & above & 1)  # no sum overflows
            off = sign * (function(_number(middle, y.dtype)) - wanted)
            is_above = off > 0 if finds_last else off >= 0
            below, above = torch.where(is_above, below, middle), torch.where(is_above, middle, above)
        ends_of_run.append(below if finds_last else above)
    first, last = ends_of_run
    inside = (last - first >= 2).long()
    found = torch.minimum(torch.maximum(_key(center), first + inside), last - inside)
    return torch.where(y.isnan(), y, _number(found, y.dtype))


def within_reach(z: Tensor, y: Tensor) -> Tensor:
    """z, which follows from y, as a number that f' can be computed at: y may be rounded past the function's limit."""
    return torch.where(z.isnan(), y.sign() * 1e9, z).clamp(-1e9, 1e9)


def _reach(function: Function, y: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs between which the formula holds in y's dtype: powers of two, and their negatives."""
    found = []
    for side in (-1.0, 1.0):
        z = side * 2.0 ** torch.arange(-1, 127, dtype=torch.float64, device=y.device)
        exact = function(z)
        lost = ~((function(z.to(y.dtype)).double() - exact).abs() <= SOUND * (1 + exact.abs()))
        found.append(z[max(0, int(lost.cumsum(0).eq(0).sum()) - 1)].to(y.dtype))
    return found[0], found[1]


def _key(z: Tensor) -> Tensor:
    """An integer for each number, in the order of numbers: one for each number of the dtype."""
    size = z.abs().view(_BITS[z.dtype]).long()
    return torch.where(z < 0, -size, size)


def _number(key: Tensor, dtype: torch.dtype) -> Tensor:
    size = key.abs().to(_BITS[dtype]).view(dtype)
    return torch.where(key < 0, -size, size)


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
