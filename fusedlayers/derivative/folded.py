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

What it does not do: the absolute tolerance leaves few correct digits of the derivative far out in the tail. Kinks, and
jumps of the second derivative, are not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.caching import in_clean_state
from .features import Features, Fold, Function, NeedsInput, find_features, value_and_slope
from .input_of import input_of
from .polynomial import PRECISIONS, TINY, Piece, Precision, fitted, longest, shortest, to_float32

#: Inputs up to this are looked at. Beyond, every such activation is flat or linear to within float32.
REACH = 40.0
#: The tail polynomial takes over where the output has returned to this fraction of the minimum: far enough from the
#: minimum for log(y_min / y) to be free of cancellation, far enough from 0 for sqrt(y - y_min) to resolve y.
TAIL_FRACTION = 0.4
#: The same for tails in y, which need fewer coefficients the later they begin.
LATER_FRACTIONS = (0.4, 0.2, 0.1)
#: Degrees that are tried: of the pieces around the minimum, of tails in u, and of tails in y. (To float32's tolerance
#: the latter take 17 for SiLU, with rounding errors as large as that.)
DEGREES, DEGREES_OF_U, DEGREES_OF_Y = range(4, 14), range(2, 21), range(2, 9)
#: The number of samples of the target.
SAMPLES = 8001
#: The most pieces around the minimum.
MAXIMUM_PIECES = 4
#: The approximate cost of a piece's selection and of u, in multiply-adds.
SELECTION, LOGARITHM = 2, 20


@dataclass(frozen=True)
class BranchFunction:
    """A function of the output and its branch: called with floating y and boolean ``marked``.

    ``of_distance(distance, y, marked)`` is the formula. ``distance`` is y's positive distance from the minimum.

    A stored float32 output errs by up to two units in the last place: by rounding and by the branch bit. It determines
    f' worst at the minimum, where f' is proportional to the root of the distance. There the largest error is smallest
    if outputs count as half a unit nearer to the minimum than stored, and at least half a unit from it (largest error
    for GELU 1.6e-4 without, 1.1e-4 with; SiLU 1.4e-4 and 1.2e-4; the rms over N(0, 1) falls by a tenth).
    """

    fold: Fold
    of_distance: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def margin(self) -> float:
        """Half a float32 unit in the last place of the minimum."""
        return 2.0 ** (math.frexp(self.fold.extremum)[1] - 25)

    @property
    def origin_parts(self) -> tuple[float, float]:
        """The origin of distances, as a float32 number and the rest, so that distances near it are exact."""
        high = to_float32(self.fold.extremum)
        return high, self.fold.extremum + self.margin - high

    def __call__(self, y: Tensor, marked: Tensor) -> Tensor:
        # `where` and not `clamp`, so that NaN stays NaN in every backend.
        distance = self._distance(y)
        return self.of_distance(torch.where(distance < self.margin, self.margin, distance), y, marked)

    def differentiable(self, y: Tensor, marked: Tensor) -> Tensor:
        """The same values, with a gradient that passes through the floor of the distance.

        f' grows like sqrt(distance), so d f'/dy is infinite at the minimum, while f'' = (d f'/dy) f' is finite. Their
        product is right if both factors are evaluated at the same floored distance. A floor that stops the gradient
        would make it 0.
        """
        distance = self._distance(y)
        lift = torch.where(distance < self.margin, self.margin - distance, 0.0).detach()
        return self.of_distance(distance + lift, y, marked)

    def _distance(self, y: Tensor) -> Tensor:
        high, low = self.origin_parts
        return (y - high) - low


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
    tail_fraction: float
    in_logarithm: bool
    vanishes: bool

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
        NeedsInput: the function has no fold, or no fit that meets the tolerance.
    """
    return fit_derivative(function, find_features(function), precision.tolerance)


def fit_derivative(function: Function, features: Features, tolerance: float) -> FoldedDerivative:
    """A fit of the derivative of a function with these features; raises as ``fit``."""
    found = _Fit(function, features, lambda z, y: value_and_slope(function, z)[1], tolerance)
    # Beyond this u the derivative is below a thousandth of the tolerance, whatever the clamped polynomial returns.
    farthest = math.sqrt(math.log(1e3 * REACH * -found.fold.extremum / tolerance))
    tails = [found.tail(TAIL_FRACTION, farthest, vanishes=True)]
    tails += [found.tail(fraction, None, vanishes=True) for fraction in LATER_FRACTIONS]
    programs = [
        Polynomials(found.fold.extremum, pieces, *tail, vanishes=True)
        for tail in tails
        for degree in DEGREES
        if tail is not None and (pieces := found.pieces(tail[1], degree))
    ]
    if not programs:
        raise NeedsInput(f"has a derivative that no polynomials up to degree {DEGREES[-1]} follow to {tolerance:.1g}")
    return FoldedDerivative(found.fold, min(programs, key=lambda program: program.cost))


#: The tolerance of the fit of the input, and its pieces' degree. A float32 output determines z no better.
INVERSE_TOLERANCE, INVERSE_DEGREE = 1e-7, 16
#: The smallest outputs with an inverse. Quotients by them are still normal numbers.
SMALLEST = 2.0**-96


@in_clean_state
def fit_inverse(function: Function) -> FoldedInverse:
    """The fold of ``function``, and a fit of its inverse on both branches, for outputs down to ``SMALLEST``. The error
    is ``INVERSE_TOLERANCE``, in the tail times |z|.

    Raises:
        NeedsInput: as ``fit``.
    """
    found = _Fit(function, find_features(function), lambda z, y: z - y, INVERSE_TOLERANCE)
    tail = found.tail(TAIL_FRACTION, math.sqrt(math.log(-found.fold.extremum / SMALLEST)), vanishes=False)
    pieces = found.pieces(TAIL_FRACTION, INVERSE_DEGREE)
    if tail is None or not pieces:
        raise NeedsInput(f"has an inverse that no polynomials of degree {INVERSE_DEGREE} follow")
    return FoldedInverse(found.fold, Polynomials(found.fold.extremum, pieces, *tail, vanishes=False))


#: A tail's polynomial, the fraction of the minimum where it begins, and whether its variable is u.
_Tail = tuple[Piece, float, bool]


class _Fit:
    """Polynomials for ``target(z, f(z))`` within a tolerance."""

    def __init__(
        self, function: Function, features: Features, target: Callable[[Tensor, Tensor], Tensor], tolerance: float
    ) -> None:
        if features.fold is None:
            raise NeedsInput("has no minimum")
        self.function, self.target, self.fold, self.tolerance = function, target, features.fold, tolerance
        # Sampled once, because solving for an input takes far longer than fitting a polynomial.
        self.v = torch.linspace(self._v(min(LATER_FRACTIONS)), self._settled(), SAMPLES, dtype=torch.float64)
        y = self.fold.extremum + self.v.square()
        self.values = target(input_of(function, y, self.fold, self.v < 0), y)

    def _v(self, fraction: float) -> float:
        """The v where a tail begins."""
        return -math.sqrt(-self.fold.extremum * (1.0 - fraction))

    def _settled(self) -> float:
        """The v past which the target is constant to within a quarter of the tolerance. (Of half of it gelu's slope in
        bfloat16 was 5 % beyond the tolerance for large inputs.)"""
        z = torch.linspace(self.fold.position, REACH, 40_001, dtype=torch.float64)
        value = self.target(z, self.function(z))
        unsettled = ((value - value[-1]).abs() > self.tolerance / 4).nonzero()
        last = int(unsettled.max()) + 1 if len(unsettled) else 1
        if last >= len(z) - 1:
            raise NeedsInput("does not settle to a line above its minimum")
        return math.sqrt(float(self.function(z[last])) - self.fold.extremum)

    def pieces(self, fraction: float, degree: int) -> tuple[Piece, ...]:
        """Pieces from the end of the tail to where the target has settled, each as long as possible; none where no few
        polynomials of this degree follow."""
        first, found = max(0, int((self.v < self._v(fraction)).sum()) - 1), list[Piece]()
        while first < SAMPLES - 1:
            first, piece = longest(lambda a, b: self._piece(a, b, degree), first, SAMPLES - 1)
            if piece is None or len(found) == MAXIMUM_PIECES:
                return ()
            found.append(piece)
        return tuple(found)

    def _piece(self, first: int, last: int, degree: int) -> Piece | None:
        """The polynomial for these samples, if it meets the tolerance at all of them."""
        v, values = self.v[first : last + 1], self.values[first : last + 1]
        piece = fitted(v, values, degree)
        return piece if piece is not None and float((piece(v) - values).abs().max()) <= self.tolerance else None

    def tail(self, fraction: float, farthest: float | None, *, vanishes: bool) -> _Tail | None:
        """The tail that begins at this fraction of the minimum: in u up to ``farthest``, or in y."""
        start = self.fold.extremum * fraction
        if farthest is None:  # as y goes to 0, f' / y grows without bound, but slower than any power
            y_of: Function = lambda y: y
            ends, last, degrees = (start, 0.0), start * 1e-3, DEGREES_OF_Y
        else:
            y_of = lambda u: self.fold.extremum * torch.exp(-u * u)
            ends, last, degrees = (math.sqrt(-math.log(fraction)), farthest), farthest, DEGREES_OF_U
        at = torch.linspace(ends[0], last, 2001, dtype=torch.float64)
        truth = self._left(y_of(at), vanishes)
        allowed = self.tolerance * (1 / -y_of(at) if vanishes else truth.abs().clamp_min(1.0))
        is_close: Callable[[Piece], bool] = lambda piece: bool(((piece(at) - truth).abs() <= allowed).all())
        piece = shortest(lambda v: self._left(y_of(v), vanishes), *ends, degrees, is_close)
        return None if piece is None else (piece, fraction, farthest is not None)

    def _left(self, y: Tensor, vanishes: bool) -> Tensor:
        z = input_of(self.function, y, self.fold, torch.ones_like(y, dtype=torch.bool))
        return self.target(z, y) / y if vanishes else self.target(z, y)
