"""Functions like GELU: they fall to one negative minimum and then rise, and the falling branch begins at 0.

``fit`` finds the minimum and fits the derivative, ``fit_inverse`` the input, as functions of the output and the branch
(``branch.py``):

* around the minimum and on the rising branch, in ``v = +-sqrt(y - y_min)``. Both are analytic in v *through* the
  minimum, so one polynomial serves both sides of it. That of the input is of ``z - y``, which settles to 0;
* on the falling branch's tail, where y returns to 0, in ``u = sqrt(log(y_min / y))``: ``f' = y P(u)``, so that the
  derivative vanishes with y, and ``z - y = P(u)``.

Everything is in float64, in a fraction of a second; no coefficient is written down anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..clean import in_clean_state
from .polynomial import MAXIMUM_DEGREE, PRECISIONS, Piece, Precision, interpolate
from .segments import TINY, to_float32
from .shape import Fold

Function = Callable[[Tensor], Tensor]

#: Inputs searched for the fold. Beyond it every activation of this kind is flat or straight to within float32.
REACH = 40.0
#: The tail polynomial takes over where the output has returned to this fraction of the minimum: far enough from the
#: minimum for log(y_min / y) to be free of cancellation, far enough from 0 for sqrt(y - y_min) to resolve y.
TAIL_FRACTION = 0.4


@dataclass(frozen=True)
class ByBranch:
    """What the output and the branch tell: ``by_branch(y, marked)``, for floating y and boolean ``marked``.

    ``of_distance(distance, y, marked)`` is the formula, ``distance`` being that from the extremum, always positive.

    A float32 output is stored with an error of up to two units in its last place: of its own, and of the branch bit. It
    tells least at the extremum, where f' goes with the root of the distance. There the largest error is smallest if
    outputs are taken to lie half a unit nearer than stored, and at least half a unit from the extremum (largest error
    for GELU 1.6e-4 without, 1.1e-4 with; SiLU 1.4e-4 and 1.2e-4; the rms over N(0, 1) falls by a tenth).
    """

    fold: Fold
    of_distance: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def margin(self) -> float:
        """Half a float32 unit in the last place of the extremum."""
        return 2.0 ** (math.frexp(self.fold.extremum)[1] - 25) if self.fold.extremum else TINY

    @property
    def origin_parts(self) -> tuple[float, float]:
        """Where distances are counted from, as a float32 number and the rest: they are then exact near it."""
        high = to_float32(self.fold.extremum)
        return high, self.fold.extremum + (-self.margin if self.fold.is_maximum else self.margin) - high

    def __call__(self, y: Tensor, marked: Tensor) -> Tensor:
        # `where` and not `clamp`, so that NaN stays NaN in every backend.
        distance = self._distance(y)
        return self.of_distance(torch.where(distance < self.margin, self.margin, distance), y, marked)

    def differentiable(self, y: Tensor, marked: Tensor) -> Tensor:
        """The same with a gradient that passes through the floor.

        f' grows like sqrt(distance), so d f'/dy is infinite at the extremum, while f'' = (d f'/dy) f' is finite. With
        both factors taken at the same distance, floored, their product is right; a floor that stopped the gradient
        would make it 0.
        """
        distance = self._distance(y)
        lift = torch.where(distance < self.margin, self.margin - distance, 0.0).detach()
        return self.of_distance(distance + lift, y, marked)

    def _distance(self, y: Tensor) -> Tensor:
        high, low = self.origin_parts
        distance = (y - high) - low
        return -distance if self.fold.is_maximum else distance


class FoldedDerivative(ByBranch):
    """``f'``."""


class FoldedInverse(ByBranch):
    """``z``; ``of_distance`` is ``z - y``."""

    def __call__(self, y: Tensor, marked: Tensor) -> Tensor:
        return y + super().__call__(y, marked)


@dataclass(frozen=True)
class Polynomials:
    """A fitted ``of_distance``: ``pieces`` in ``v = +-sqrt(distance)`` without gaps, the first across the minimum, and
    ``tail`` in ``u = sqrt(log(y_min / y))``, which is multiplied by y where the result ``vanishes`` with it."""

    minimum: float
    pieces: tuple[Piece, ...]
    tail: Piece
    vanishes: bool = True

    def __call__(self, distance: Tensor, y: Tensor, left: Tensor) -> Tensor:
        s = torch.sqrt(distance)
        s = torch.where(s > self.pieces[-1].stop, self.pieces[-1].stop, s)
        v = torch.where(left, -s, s)
        value = self.pieces[0](v)
        for piece in self.pieces[1:]:
            value = torch.where(v > piece.start, piece(v), value)

        in_tail = v < self.pieces[0].start
        y_tail = torch.where(in_tail, y, self.minimum * TAIL_FRACTION)
        u = torch.sqrt(math.log(-self.minimum) - torch.log(-y_tail))
        u = torch.where(u > self.tail.stop, self.tail.stop, u)
        tail = y_tail * self.tail(u) if self.vanishes else self.tail(u)
        return torch.where(in_tail, tail, value)


@in_clean_state
def fit(function: Function, precision: Precision = PRECISIONS[torch.float32]) -> FoldedDerivative:
    """Find the fold of ``function``, and fit its derivative on both branches.

    Raises:
        ValueError: the function has no minimum below zero, more than one fold, or no fit that meets the tolerance.
    """
    fold = find_fold(function)

    def target(z: Tensor, y: Tensor) -> Tensor:
        return derivative(function, z)

    # Past this u the derivative is below a thousandth of the tolerance, whatever the clamped polynomial says.
    farthest = math.sqrt(math.log(1e3 * REACH * -fold.extremum / precision.tolerance))
    return FoldedDerivative(fold, _polynomials(function, target, fold, precision, farthest, vanishes=True))


#: How closely inputs are fitted. Float32 knows the output, and with it z, no better.
INVERSE_PRECISION = Precision(1e-7, 16)
#: The smallest outputs that are told apart: what is divided by them, or scaled down, still is a normal number.
SMALLEST = 2.0**-96


@in_clean_state
def fit_inverse(function: Function) -> FoldedInverse:
    """Find the fold of ``function``, and fit its inverse on both branches: to ``INVERSE_PRECISION``, times |z| in the
    tail, as far as outputs of ``SMALLEST``.

    Raises:
        ValueError: as ``fit``.
    """
    fold = find_fold(function)

    def target(z: Tensor, y: Tensor) -> Tensor:
        return z - y

    farthest = math.sqrt(math.log(-fold.extremum / SMALLEST))
    return FoldedInverse(fold, _polynomials(function, target, fold, INVERSE_PRECISION, farthest, vanishes=False))


def _polynomials(
    function: Function,
    target: Callable[[Tensor, Tensor], Tensor],
    fold: Fold,
    precision: Precision,
    farthest: float,
    *,
    vanishes: bool,
) -> Polynomials:
    """``target(z, f(z))``, the tail up to u = ``farthest``."""
    tolerance = precision.tolerance
    root = math.sqrt(-fold.extremum)

    def of_v(v: Tensor) -> Tensor:
        y = fold.extremum + v * v
        return target(_solve(function, y, fold, left=v < 0), y)

    def of_u(u: Tensor) -> Tensor:
        y = fold.extremum * torch.exp(-u * u)
        value = target(_solve(function, y, fold, left=torch.ones_like(u, dtype=torch.bool)), y)
        return value / y if vanishes else value

    start = -root * math.sqrt(1.0 - TAIL_FRACTION)
    stop = _settled(function, target, fold, tolerance)
    pieces: list[Piece] = []
    while start < stop:
        piece = _longest_piece(of_v, start, stop, precision)
        pieces.append(piece)
        start = piece.stop

    nearest = math.sqrt(-math.log(TAIL_FRACTION))
    u = torch.linspace(nearest, farthest, 2001, dtype=torch.float64)
    truth = of_u(u)
    weight = -fold.extremum * torch.exp(-u * u) if vanishes else truth.abs().clamp_min(1.0).reciprocal()
    for degree in range(precision.degree, MAXIMUM_DEGREE + 1):
        tail = interpolate(of_u, nearest, farthest, degree)
        if float((weight * (tail(u) - truth).abs()).max()) <= tolerance:
            return Polynomials(fold.extremum, tuple(pieces), tail, vanishes)
    raise ValueError(f"fit: no polynomial up to degree {MAXIMUM_DEGREE} follows the falling branch to {tolerance:g}")


def find_fold(function: Function) -> Fold:
    """The single minimum of ``function``, to float64 accuracy."""
    z = torch.linspace(-REACH, REACH, 80_001, dtype=torch.float64)
    y = function(z)
    lowest = int(y.argmin())
    step = float(z[1] - z[0])
    slope = derivative(function, z)
    noise = 1e-12
    if not 0 < lowest < len(z) - 1 or float(y[lowest]) >= 0:
        raise ValueError("find_fold: the function has no minimum below zero")
    if bool((slope[:lowest] > noise).any()) or bool((slope[lowest + 1 :] < -noise).any()):
        raise ValueError("find_fold: the function turns more than once")
    low, high = z[lowest] - step, z[lowest] + step
    for _ in range(80):
        middle = (low + high) / 2
        if float(derivative(function, middle)) < 0:
            low = middle
        else:
            high = middle
    return Fold(float(high), float(function(high)))


def derivative(function: Function, z: Tensor) -> Tensor:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(function(z).sum(), z)[0]


def _solve(function: Function, y: Tensor, fold: Fold, *, left: Tensor) -> Tensor:
    """The input on the given branch with output ``y``, by bisection: slow, and right on any monotone branch."""
    near = torch.full_like(y, fold.position)
    far = torch.where(left, fold.position - 20 * REACH, fold.position + 20 * REACH)
    for _ in range(64):
        middle = (near + far) / 2
        above = function(middle) > y
        near, far = torch.where(above, near, middle), torch.where(above, middle, far)
    return near


def _settled(function: Function, target: Callable[[Tensor, Tensor], Tensor], fold: Fold, tolerance: float) -> float:
    """The v past which the target is constant to within half the tolerance."""
    z = torch.linspace(fold.position, REACH, 40_001, dtype=torch.float64)
    value = target(z, function(z))
    unsettled = (value - value[-1]).abs() > tolerance / 2
    last = int(unsettled.nonzero().max()) + 1 if bool(unsettled.any()) else 1
    if last >= len(z) - 1:
        raise ValueError("fit: it does not settle to a constant on the rising branch")
    return math.sqrt(float(function(z[last])) - fold.extremum)


def _longest_piece(function: Function, start: float, stop: float, precision: Precision) -> Piece:
    def attempt(end: float) -> tuple[Piece, bool]:
        piece = interpolate(function, start, end, precision.degree)
        v = torch.linspace(start, end, 301, dtype=torch.float64)
        return piece, float((piece(v) - function(v)).abs().max()) <= precision.tolerance

    piece, good = attempt(stop)
    if good:
        return piece
    low, high = start, stop
    best = None
    for _ in range(12):
        middle = (low + high) / 2
        piece, good = attempt(middle)
        if good:
            low, best = middle, piece
        else:
            high = middle
    if best is None:
        raise ValueError(f"fit: no polynomial of degree {precision.degree} follows the derivative near v = {start:.3g}")
    return best
