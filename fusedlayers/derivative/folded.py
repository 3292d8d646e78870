"""Fits for functions like GELU: they fall from 0 to one negative minimum and then rise.

``fit`` fits the derivative, and ``fit_inverse`` the input, as functions of the output and the branch
(``branch_bit.py``):

* Around the minimum and on the rising branch the variable is ``v = +-sqrt(y - y_min)``. Derivative and input are
  analytic in v *through* the minimum, so one polynomial serves both sides of it. The input is fitted as ``z - y``,
  which settles to 0.
* On the falling branch's tail, where y returns to 0, the variable is ``u = sqrt(log(y_min / y))``: ``f' = y P(u)``, so
  that the derivative vanishes with y, and ``z - y = P(u)``. For a coarse tolerance ``f' = y P(y)`` suffices, without
  logarithm and root, because the tolerance is absolute.

The shortest program that meets the tolerance is taken, because arithmetic would else bound 16-bit derivatives on GPUs.
A fit takes a fraction of a second in float64; no coefficient is written down anywhere.

What it does not do: the absolute tolerance leaves few correct digits of the derivative far out in the tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from .features import Fold
from .kinks import Function, bisect, value_and_slope
from .piecewise import TINY, to_float32
from .polynomial import MAXIMUM_DEGREE, PRECISIONS, Piece, Precision, chebyshev, interpolate, powers_of

#: Inputs up to this are searched for the fold. Beyond, every such activation is flat or linear to within float32.
REACH = 40.0
#: The tail polynomial takes over where the output has returned to this fraction of the minimum: far enough from the
#: minimum for log(y_min / y) to be free of cancellation, far enough from 0 for sqrt(y - y_min) to resolve y.
TAIL_FRACTION = 0.4
#: The same for tails in y, which need fewer coefficients the later they begin.
LATER_FRACTIONS = (0.4, 0.2, 0.1)
#: Degrees of the pieces around the minimum that are tried.
DEGREES = range(4, 14)
#: The largest degree of tails in y. (To float32's tolerance SiLU takes 17, with rounding errors as large as that.)
MOST_OF_Y = 8
#: The number of samples of the target.
SAMPLES = 8001
#: The approximate cost of a piece's selection and of u, in multiply-adds.
SELECTION, LOGARITHM = 2, 20


@dataclass(frozen=True)
class BranchFunction:
    """A function of the output and its branch: called with floating y and boolean ``marked``.

    ``of_distance(distance, y, marked)`` is the formula. ``distance`` is y's positive distance from the extremum.

    A stored float32 output errs by up to two units in the last place: by rounding and by the branch bit. It determines
    f' worst at the extremum, where f' is proportional to the root of the distance. There the largest error is smallest
    if outputs count as half a unit nearer to the extremum than stored, and at least half a unit from it (largest error
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
        """The origin of distances, as a float32 number and the rest, so that distances near it are exact."""
        high = to_float32(self.fold.extremum)
        return high, self.fold.extremum + (-self.margin if self.fold.is_maximum else self.margin) - high

    def __call__(self, y: Tensor, marked: Tensor) -> Tensor:
        # `where` and not `clamp`, so that NaN stays NaN in every backend.
        distance = self._distance(y)
        return self.of_distance(torch.where(distance < self.margin, self.margin, distance), y, marked)

    def differentiable(self, y: Tensor, marked: Tensor) -> Tensor:
        """The same values, with a gradient that passes through the floor of the distance.

        f' grows like sqrt(distance), so d f'/dy is infinite at the extremum, while f'' = (d f'/dy) f' is finite. Their
        product is right if both factors are evaluated at the same floored distance. A floor that stops the gradient
        would make it 0.
        """
        distance = self._distance(y)
        lift = torch.where(distance < self.margin, self.margin - distance, 0.0).detach()
        return self.of_distance(distance + lift, y, marked)

    def _distance(self, y: Tensor) -> Tensor:
        high, low = self.origin_parts
        distance = (y - high) - low
        return -distance if self.fold.is_maximum else distance


class FoldedDerivative(BranchFunction):
    """``f'`` as a function of the output and its branch."""


class FoldedInverse(BranchFunction):
    """``z`` as a function of the output and its branch; ``of_distance`` is ``z - y``."""

    def __call__(self, y: Tensor, marked: Tensor) -> Tensor:
        return y + super().__call__(y, marked)


@dataclass(frozen=True)
class Polynomials:
    """A fitted ``of_distance``.

    Attributes:
        minimum: the function's minimum.
        pieces: polynomials in ``v = +-sqrt(distance)`` without gaps; the first reaches across the minimum.
        tail: the falling branch's polynomial where y is above ``tail_fraction`` times the minimum.
        tail_fraction: see ``tail``.
        in_logarithm: whether the tail's variable is ``u = sqrt(log(y_min / y))``, else y.
        vanishes: whether the tail is multiplied by y, so that the result vanishes with y.
    """

    minimum: float
    pieces: tuple[Piece, ...]
    tail: Piece
    tail_fraction: float = TAIL_FRACTION
    in_logarithm: bool = True
    vanishes: bool = True

    @property
    def cost(self) -> int:
        """The length of the program, in multiply-adds."""
        pieces = sum(len(piece.coefficients) for piece in self.pieces) + SELECTION * (len(self.pieces) - 1)
        return pieces + len(self.tail.coefficients) + LOGARITHM * self.in_logarithm

    def __call__(self, distance: Tensor, y: Tensor, left: Tensor) -> Tensor:
        s = torch.sqrt(distance)
        s = torch.where(s > self.pieces[-1].stop, self.pieces[-1].stop, s)
        v = torch.where(left, -s, s)
        value = self.pieces[0](v)
        for piece in self.pieces[1:]:
            value = torch.where(v > piece.start, piece(v), value)

        in_tail = v < self.pieces[0].start
        y_tail = torch.where(in_tail, y, self.minimum * self.tail_fraction)
        u = y_tail
        if self.in_logarithm:
            # Of 0 the logarithm would have no finite derivative.
            u = torch.sqrt(math.log(-self.minimum) - torch.log(torch.where(y_tail > -TINY, TINY, -y_tail)))
            u = torch.where(u > self.tail.stop, self.tail.stop, u)
        tail = y_tail * self.tail(u) if self.vanishes else self.tail(u)
        return torch.where(in_tail, tail, value)


@in_clean_state
def fit(function: Function, precision: Precision = PRECISIONS[torch.float32]) -> FoldedDerivative:
    """The fold of ``function``, and a fit of its derivative on both branches.

    Raises:
        ValueError: the function has no minimum below zero, more than one fold, or no fit that meets the tolerance.
    """
    fold = find_fold(function)
    found = _Fit(function, lambda z, y: value_and_slope(function, z)[1], fold, precision.tolerance)
    # Beyond this u the derivative is below a thousandth of the tolerance, whatever the clamped polynomial returns.
    farthest = math.sqrt(math.log(1e3 * REACH * -fold.extremum / precision.tolerance))
    tails = [found.tail_in_logarithm(farthest, vanishes=True), *map(found.tail, LATER_FRACTIONS)]
    programs = [
        Polynomials(fold.extremum, tuple(pieces), *tail, vanishes=True)
        for tail in tails
        for degree in DEGREES
        if tail is not None and (pieces := found.pieces(tail.fraction, degree)) is not None
    ]
    if not programs:
        raise ValueError(
            f"fit: no polynomials up to degree {DEGREES[-1]} follow the derivative to {precision.tolerance:g}"
        )
    return FoldedDerivative(fold, min(programs, key=lambda program: program.cost))


#: The tolerance of the fit of the input, and its pieces' degree. A float32 output determines z no better.
INVERSE_TOLERANCE, INVERSE_DEGREE = 1e-7, 16
#: The smallest outputs with an inverse. Quotients by them are still normal numbers.
SMALLEST = 2.0**-96


@in_clean_state
def fit_inverse(function: Function) -> FoldedInverse:
    """The fold of ``function``, and a fit of its inverse on both branches, for outputs down to ``SMALLEST``. The error
    is ``INVERSE_TOLERANCE``, in the tail times |z|.

    Raises:
        ValueError: as ``fit``.
    """
    fold = find_fold(function)
    found = _Fit(function, lambda z, y: z - y, fold, INVERSE_TOLERANCE)
    tail = found.tail_in_logarithm(math.sqrt(math.log(-fold.extremum / SMALLEST)), vanishes=False)
    pieces = found.pieces(TAIL_FRACTION, INVERSE_DEGREE)
    if tail is None or pieces is None:
        raise ValueError(f"fit_inverse: no polynomials of degree {INVERSE_DEGREE} follow the input")
    return FoldedInverse(fold, Polynomials(fold.extremum, tuple(pieces), *tail, vanishes=False))


class Tail(NamedTuple):
    """A tail's polynomial, the fraction of the minimum where it begins, and whether its variable is u."""

    piece: Piece
    fraction: float
    in_logarithm: bool


class _Fit:
    """Polynomials for ``target(z, f(z))`` within a tolerance."""

    def __init__(
        self, function: Function, target: Callable[[Tensor, Tensor], Tensor], fold: Fold, tolerance: float
    ) -> None:
        self.function, self.target, self.fold, self.tolerance = function, target, fold, tolerance
        start, stop = self._v(min(LATER_FRACTIONS)), _settled(function, target, fold, tolerance)
        # Sampled once, because solving for an input takes far longer than fitting a polynomial.
        self.v = torch.linspace(start, stop, SAMPLES, dtype=torch.float64)
        y = fold.extremum + self.v.square()
        self.values = target(_solve(function, y, fold, left=self.v < 0), y)

    def _v(self, fraction: float) -> float:
        """The v where a tail begins."""
        return -math.sqrt(-self.fold.extremum * (1.0 - fraction))

    def pieces(self, fraction: float, degree: int) -> list[Piece] | None:
        """Pieces from the end of the tail to where the target has settled, each as long as possible; or None."""
        first, last = max(0, int((self.v < self._v(fraction)).sum()) - 1), SAMPLES - 1
        found = []
        while first < last:
            longest, good, bad, end = None, first, SAMPLES, last
            while bad - good > 1 and good < last:
                piece = self._piece(first, end, degree)
                if piece is None:
                    bad = end
                else:
                    longest, good = piece, end
                end = (good + bad) // 2
            if longest is None:
                return None
            found.append(longest)
            first = good
        return found

    def _piece(self, first: int, last: int, degree: int) -> Piece | None:
        """The polynomial through samples near the Chebyshev nodes, if it meets the tolerance at all samples."""
        if last - first < 4 * degree:
            return None
        v, values = self.v[first : last + 1], self.values[first : last + 1]
        start, stop = float(v[0]), float(v[-1])
        t = (v - (start + stop) / 2) * (2 / (stop - start))
        nodes = torch.cos((torch.arange(degree + 1, dtype=torch.float64) + 0.5) * (math.pi / (degree + 1)))
        index = ((nodes + 1) / 2 * (last - first)).round().long()
        coefficients = torch.linalg.solve(chebyshev(t[index], degree), values[index])
        piece = Piece(start, stop, powers_of(coefficients.tolist()))
        return piece if float((piece(v) - values).abs().max()) <= self.tolerance else None

    def tail_in_logarithm(self, farthest: float, *, vanishes: bool) -> Tail | None:
        """The tail in u, up to ``farthest``."""
        minimum = self.fold.extremum
        nearest = math.sqrt(-math.log(TAIL_FRACTION))

        def of_u(u: Tensor) -> Tensor:
            return self._left(minimum * torch.exp(-u * u), vanishes)

        u = torch.linspace(nearest, farthest, 2001, dtype=torch.float64)
        truth = of_u(u)
        weight = -minimum * torch.exp(-u * u) if vanishes else truth.abs().clamp_min(1.0).reciprocal()
        piece = self._lowest(of_u, nearest, farthest, u, truth, weight, MAXIMUM_DEGREE)
        return None if piece is None else Tail(piece, TAIL_FRACTION, True)

    def tail(self, fraction: float) -> Tail | None:
        """The tail in y."""
        start = self.fold.extremum * fraction
        # As y goes to 0, f' / y grows without bound, but slower than any power.
        y = start * torch.linspace(1e-3, 1.0, 2001, dtype=torch.float64)
        truth = self._left(y, True)
        piece = self._lowest(lambda y: self._left(y, True), start, 0.0, y, truth, -y, MOST_OF_Y)
        return None if piece is None else Tail(piece, fraction, False)

    def _left(self, y: Tensor, vanishes: bool) -> Tensor:
        z = _solve(self.function, y, self.fold, left=torch.ones_like(y, dtype=torch.bool))
        return self.target(z, y) / y if vanishes else self.target(z, y)

    def _lowest(
        self, function: Function, start: float, stop: float, at: Tensor, truth: Tensor, weight: Tensor, most: int
    ) -> Piece | None:
        """The polynomial of lowest degree that meets the tolerance, if any does."""
        for degree in range(2, most + 1):
            piece = interpolate(function, start, stop, degree)
            if float((weight * (piece(at) - truth).abs()).max()) <= self.tolerance:
                return piece
        return None


def find_fold(function: Function) -> Fold:
    """The only minimum of ``function``, to float64 accuracy.

    Raises:
        ValueError: no minimum below zero, or more than one fold.
    """
    z = torch.linspace(-REACH, REACH, 80_001, dtype=torch.float64)
    y, slope = value_and_slope(function, z)
    lowest = int(y.argmin())
    step = float(z[1] - z[0])
    noise = 1e-12
    if not 0 < lowest < len(z) - 1 or float(y[lowest]) >= 0:
        raise ValueError("find_fold: the function has no minimum below zero")
    if bool((slope[:lowest] > noise).any()) or bool((slope[lowest + 1 :] < -noise).any()):
        raise ValueError("find_fold: the function turns more than once")
    position = bisect(function, lambda slope: slope < 0, z[lowest] - step, z[lowest] + step)
    return Fold(position, float(function(torch.tensor(position, dtype=torch.float64))))


def _solve(function: Function, y: Tensor, fold: Fold, *, left: Tensor) -> Tensor:
    """The input on the given branch with output ``y``, by bisection: slow, but right on any monotone branch."""
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
