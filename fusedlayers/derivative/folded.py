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

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.caching import in_clean_state
from .features import Features, Fold, Function, NeedsInput, find_features, value_and_slope
from .polynomial import PRECISIONS, TINY, Piece, Precision, fitted, longest, to_float32

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
    of_distance: Callable[..., Tensor]

    @property
    def margin(self) -> float:
        """Half a float32 unit in the last place of the minimum."""
        return 2.0 ** (math.frexp(self.fold.extremum)[1] - 25)

    @property
    def origin_parts(self) -> tuple[float, float]:
        """The origin of distances, as a float32 number and the rest, so that distances near it are exact."""
        high = to_float32(self.fold.extremum)
        return high, self.fold.extremum + self.margin - high

    def __call__(self, y: Tensor, marked: Tensor | None) -> Tensor:
        # `where` and not `clamp`, so that NaN stays NaN in every backend.
        distance = self._distance(y)
        return self.of_distance(torch.where(distance < self.margin, self.margin, distance), y, marked)

    def _distance(self, y: Tensor) -> Tensor:
        high, low = self.origin_parts
        return (y - high) - low


class FoldedDerivative(BranchFunction):
    """``f'`` as a function of the output and its branch."""


class FoldedInverse(BranchFunction):
    """``z`` as a function of the output and its branch; ``of_distance`` is ``z - y``."""

    def __call__(self, y: Tensor, marked: Tensor | None) -> Tensor:
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
    found = _Samples(function, features, lambda z, y, slope: slope, tolerance)
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
    found = _Samples(function, find_features(function), lambda z, y, slope: z - y, INVERSE_TOLERANCE)
    tail = found.tail(TAIL_FRACTION, math.sqrt(math.log(-found.fold.extremum / SMALLEST)), vanishes=False)
    pieces = found.pieces(TAIL_FRACTION, INVERSE_DEGREE)
    if tail is None or not pieces:
        raise NeedsInput(f"has an inverse that no polynomials of degree {INVERSE_DEGREE} follow")
    return FoldedInverse(found.fold, Polynomials(found.fold.extremum, pieces, *tail, vanishes=False))


class _Samples:
    """Outputs of both branches with a target, ``target(z, f(z), f'(z))``, and polynomials for it within a tolerance."""

    def __init__(self, function: Function, features: Features, target: Callable[..., Tensor], tolerance: float) -> None:
        if features.fold is None:
            raise NeedsInput("has no minimum")
        self.fold, self.tolerance = features.fold, tolerance
        offsets = torch.cat([-_FALLING.flip(0), _RISING])
        z = self.fold.position + offsets
        y, slope = value_and_slope(function, z)
        v = torch.sign(offsets) * (y - self.fold.extremum).clamp_min(0).sqrt()
        values = target(z, y, slope)
        # Past the last sample that is off by a quarter of the tolerance the target counts as constant. (Of half of it
        # gelu's slope in bfloat16 was 5 % beyond the tolerance for large inputs.)
        settled = int(((values - values[-1]).abs() > tolerance / 4).nonzero().max()) + 1
        if settled >= len(z) - 1:
            raise NeedsInput("does not settle to a line above its minimum")
        there = (y.isfinite() & values.isfinite())[: settled + 1]
        self.y, self.v, self.values = y[: settled + 1][there], v[: settled + 1][there], values[: settled + 1][there]

    def pieces(self, fraction: float, degree: int) -> tuple[Piece, ...]:
        """Pieces from the end of the tail to where the target has settled, each as long as possible; none where no few
        polynomials of this degree follow."""
        tail_ends, last = -math.sqrt(-self.fold.extremum * (1.0 - fraction)), len(self.v) - 1
        first, found = max(0, int((self.v < tail_ends).sum()) - 1), list[Piece]()

        def attempt(a: int, b: int) -> Piece | None:
            return fitted(self.v[a : b + 1], self.values[a : b + 1], degree, self.tolerance)

        while first < last:
            first, piece = longest(attempt, first, last)
            if piece is None or len(found) == MAXIMUM_PIECES:
                return ()
            found.append(piece)
        return tuple(found)

    def tail(self, fraction: float, farthest: float | None, *, vanishes: bool) -> tuple[Piece, float, bool] | None:
        """The tail that begins at this fraction of the minimum, in u up to ``farthest`` or in y: its polynomial, the
        fraction, and whether its variable is u."""
        start = self.fold.extremum * fraction
        # As y goes to 0, f' / y grows without bound, but slower than any power.
        end = start * 1e-3 if farthest is None else self.fold.extremum * math.exp(-farthest * farthest)
        inside = (self.v < 0) & (self.y >= start) & (self.y <= end)
        y, values = self.y[inside], self.values[inside]
        t = y if farthest is None else torch.sqrt(torch.log(self.fold.extremum / y))
        t, order = t.sort()
        y, values = y[order], values[order] / (y[order] if vanishes else 1.0)
        allowed = self.tolerance * (-1 / y if vanishes else values.abs().clamp_min(1.0))
        # In u relative errors are small too; the shortest polynomial in y follows where y is large.
        degrees, weight = (DEGREES_OF_U, None) if farthest is not None else (DEGREES_OF_Y, -y)
        pieces = (fitted(t, values, degree, allowed, weight) for degree in degrees)
        piece = next((piece for piece in pieces if piece is not None), None)
        return None if piece is None else (piece, fraction, farthest is not None)


#: Distances of the samples from the minimum: falling outputs far into the tail, where inverses are fitted too.
_RISING = torch.arange(1, 16_001, dtype=torch.float64) * (REACH / 16_000)
_FALLING = torch.cat([_RISING, torch.linspace(41, 128, 3000).double(), torch.logspace(2.2, 12, 2000).double()])
