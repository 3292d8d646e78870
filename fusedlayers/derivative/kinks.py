"""Finds kinks (jumps of the derivative) and corners (jumps of the second derivative) by bisection.

Intervals between samples where the slope changes more than in their neighbours are bisected 60 times, all at once.
Jumps of the function, vertical tangents, and a backward pass that does not return the derivative raise ``NeedsInput``.

What it does not do: of two kinks closer together than two samples only one is found. The fit then errs there, and its
measurement refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

#: A function with more kinks is refused, as a staircase.
MAXIMUM_KINKS = 16


class NeedsInput(ValueError):
    """Why a function's output does not determine its derivative: a predicate ("jumps at z = 0")."""


@dataclass(frozen=True)
class Kink:
    """A jump of the derivative from ``before`` to ``after``. ``slope`` is what autograd returns at the kink itself, and
    ``output`` the function's true (not canonical) value."""

    position: float
    output: float
    before: float
    after: float
    slope: float


def value_and_slope(function: Function, z: Tensor) -> tuple[Tensor, Tensor]:
    """The function's values and autograd's derivatives at z; 0 where autograd finds no dependence.

    Raises:
        NeedsInput: the function returns another shape or dtype than its argument's.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        y = function(z)
        if not isinstance(y, Tensor) or y.shape != z.shape:
            raise NeedsInput("does not map each element by itself")
        if y.dtype is not z.dtype:
            raise NeedsInput(f"returns {y.dtype}, whatever it is given")
        slope = None
        if y.requires_grad:
            (slope,) = torch.autograd.grad(y, z, torch.ones_like(y), allow_unused=True)
        return y.detach(), torch.zeros_like(z) if slope is None else slope.detach()


class _Brackets(NamedTuple):
    """Intervals around kinks and jumps: values and slopes at both ends, and the steepest slope met in each."""

    a: Tensor
    b: Tensor
    ya: Tensor
    yb: Tensor
    sa: Tensor
    sb: Tensor
    steep: Tensor


def find_kinks(function: Function, z: Tensor, y: Tensor, slope: Tensor, steepest: float) -> list[Kink]:
    """All kinks.

    Raises:
        NeedsInput: the function jumps, has a vertical tangent or too many kinks, or a wrong backward pass.
    """
    # The part of the difference of two values that the slopes at both ends do not explain.
    width = z.diff()
    off = (y.diff() - width * (slope[1:] + slope[:-1]) / 2).abs()
    _refuse_a_wrong_backward(function, z, y, off, steepest)
    found = _bisected(function, z, *_suspicious(z, slope, off, steepest))
    _refuse_jumps(found, steepest)
    kinks: dict[float, Kink] = {}
    for i in ((found.sa - found.sb).abs() > 1e-7 * steepest).nonzero().view(-1):
        position = rounded(float(found.b[i]))
        kinks[position] = _kink(function, position, 1e-9 * max(1.0, abs(position)))
    # For autograd sign(z) g(|z|) has the slope 0 at 0, and sums of relu(z - 1) have one of their own at 1, whatever the
    # slopes next to it. Such points are looked for at round numbers alone.
    for position in _lone_slopes(function, steepest):
        kinks.setdefault(position, _kink(function, position, 1e-9 * max(1.0, abs(position))))
    if len(kinks) > MAXIMUM_KINKS:
        raise NeedsInput(f"has at least {len(kinks)} kinks")
    if any(not math.isfinite(kink.slope) or not math.isfinite(kink.output) for kink in kinks.values()):
        raise NeedsInput("is not finite at a kink")
    return list(kinks.values())


def round_numbers() -> Tensor:
    """Multiples of an eighth and of a tenth, at which formulas have their kinks."""
    eighths, tenths = (torch.arange(-16 * n, 16 * n + 1, dtype=torch.float64) / n for n in (8, 10))
    return torch.cat([eighths, tenths]).sort().values


def _lone_slopes(function: Function, steepest: float) -> list[float]:
    """The round numbers at which autograd returns another slope than next to them."""
    z = round_numbers()
    step = 1e-9 * z.abs().clamp_min(1.0)
    before, at, after = (value_and_slope(function, z + side * step)[1] for side in (-1, 0, 1))
    is_lone = torch.maximum((at - before).abs(), (at - after).abs()) > 1e-6 * steepest
    return [float(position) for position in z[is_lone]]


def _kink(function: Function, position: float, step: float) -> Kink:
    around = torch.tensor([position - step, position, position + step], dtype=torch.float64)
    (_, output, _), (before, slope, after) = (t.tolist() for t in value_and_slope(function, around))
    return Kink(position, output, before, after, slope)


def _refuse_a_wrong_backward(function: Function, z: Tensor, y: Tensor, off: Tensor, steepest: float) -> None:
    width = z.diff()
    scale = steepest * width + 1e-13 * torch.maximum(y[1:].abs(), y[:-1].abs())
    near = (z[1:].abs() < 32) & (width > 1e-4)
    if float((off > 1e-2 * scale)[near].double().mean()) > 0.05:
        worst = torch.where(near, off / scale, 0.0).argmax().view(1)
        _refuse_jumps(_bisected(function, z, worst, torch.tensor([True])), steepest)
        raise NeedsInput("has a backward pass that does not return its derivative")


def _suspicious(z: Tensor, slope: Tensor, off: Tensor, steepest: float) -> tuple[Tensor, Tensor]:
    """Intervals where the slope changes abruptly, as at a kink, or the value, as at a jump or a vertical tangent; and
    for each whether it is the value."""
    bend = torch.nn.functional.pad(slope.diff().abs(), (1, 1))
    inner, neighbours = bend[1:-1], torch.maximum(bend[2:], bend[:-2])
    excess = torch.where((inner > 1e-7 * steepest) & (inner > neighbours), inner - neighbours, 0.0)
    slipped = torch.where((off > 1e-6 * steepest * z.diff().clamp_max(1.0)) & (z[1:].abs() < 1e4), off, 0.0)
    bent, torn = (weight.topk(64).indices for weight in (excess, slipped))
    bent, torn = bent[excess[bent] > 0], torn[slipped[torn] > 0]
    return torch.cat([bent, torn]), torch.arange(len(bent) + len(torn)) >= len(bent)


def _bisected(function: Function, z: Tensor, at: Tensor, by_value: Tensor) -> _Brackets:
    """The intervals that begin ``at`` these samples, narrowed to the abrupt change."""

    # With the smaller slope, because next to a vertical tangent the larger one explains too much.
    def unexplained(dy: Tensor, dz: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return (dy.abs() - dz * torch.minimum(one.abs(), other.abs())).abs()

    a, b = z[at], z[at + 1]
    (ya, sa), (yb, sb) = value_and_slope(function, a), value_and_slope(function, b)
    steep = torch.maximum(sa.abs(), sb.abs())
    for _ in range(60):
        middle = (a + b) / 2
        ym, sm = value_and_slope(function, middle)
        steep = torch.maximum(steep, sm.abs())
        first = torch.where(by_value, unexplained(ym - ya, middle - a, sa, sm), (sm - sa).abs())
        second = torch.where(by_value, unexplained(yb - ym, b - middle, sm, sb), (sb - sm).abs())
        in_first = ~(first < second)  # also where it is not finite
        a, ya, sa = (torch.where(in_first, old, new) for old, new in ((a, middle), (ya, ym), (sa, sm)))
        b, yb, sb = (torch.where(in_first, new, old) for old, new in ((b, middle), (yb, ym), (sb, sm)))
    return _Brackets(a, b, ya, yb, sa, sb, steep)


def _refuse_jumps(found: _Brackets, steepest: float) -> None:
    for a, b, ya, yb, _, _, steep in zip(*(t.tolist() for t in found), strict=True):
        if not (math.isfinite(ya) and math.isfinite(yb)):
            raise NeedsInput(f"is not finite at z = {b:.3g}")
        if abs(yb - ya) > 1e-8 * (1 + abs(ya)) + 4 * (b - a) * steepest:
            raise NeedsInput(f"jumps at z = {rounded(b):.3g}, from {ya:.3g} to {yb:.3g}")
        if not steep <= 100 * steepest:
            raise NeedsInput(f"has a vertical tangent at z = {rounded(b):.3g}")


def find_corners(function: Function, z: Tensor, slope: Tensor, steepest: float) -> list[float]:
    """Where the second derivative jumps, as ELU's does: polynomials must end there."""
    inner = (z.abs() < 32) & (z.abs() > 5e-4)
    z, slope = z[inner], slope[inner]
    curvature = slope.diff() / z.diff()
    leap = torch.nn.functional.pad(curvature.diff().abs(), (1, 1))
    excess = torch.where(leap[1:-1] >= torch.maximum(leap[2:], leap[:-2]), leap[1:-1], 0.0)
    found = excess.topk(16).indices
    found = found[excess[found] > 1e-3 * steepest]
    if len(found) == 0:
        return []
    a, b = z[found], z[found + 2]
    across = torch.linspace(0, 1, 17, dtype=torch.float64)
    for _ in range(7):
        at = a[:, None] + (b - a)[:, None] * across
        _, s = value_and_slope(function, at)
        leap = s.diff(n=2, dim=1).abs()
        step = (b - a) / 16
        best = leap.argmax(1)
        size = leap.gather(1, best[:, None])[:, 0] / step
        a = at.gather(1, best[:, None])[:, 0]
        b = at.gather(1, best[:, None] + 2)[:, 0]
    return sorted(
        {rounded(p, 1e-7) for p, j in zip(((a + b) / 2).tolist(), size.tolist(), strict=True) if j > 1e-3 * steepest}
    )


def bisect(function: Function, holds: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> float:
    """Where ``holds(slope)`` ceases to be true between ``low``, where it is, and ``high``."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if bool(holds(value_and_slope(function, middle.view(1))[1])) else (low, middle)
    return float(high)


def rounded(value: float, tolerance: float = 1e-11) -> float:
    """The round number close to ``value``, if there is one: bisection ends near it, and the formula's kink is at it."""
    for digits in (0, 1, 2, 3, 4):
        near = round(value, digits)
        if abs(value - near) <= tolerance * max(1.0, abs(value)):
            return near + 0.0
    return value
