"""Fits a derivative as a function of the output, in segments: each is a polynomial in a variable that suits it.

No variable suits everywhere. Where the function is steep, its derivative is smooth in y. Where it has a fold at y_0,
the derivative is smooth in the root of the distance to y_0. Where it flattens towards a limit L, ``f' = d P(u)`` with
``d = |y - L|`` and ``u = sqrt(log(reach / d))`` suits exponential, Gaussian and algebraic tails, and vanishes with d.
Towards infinity a derivative that settles algebraically is a polynomial in ``1 / (1 + y)``.

Each ``Stretch`` is covered greedily: the next segment takes the variable whose polynomial reaches farthest within the
tolerance. Only the stretch's samples are used, which is fast and needs no inverse of the function. A device evaluates
every segment for every number.

What it does not do: an inflection with slope 0 (z^3), where the derivative is a fractional power of y. No variable here
has it, so the segments are used up and the function is refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .features import Features, Stretch
from .kinks import NeedsInput
from .polynomial import Piece, Precision, chebyshev, powers_of

#: The most segments of a derivative, all branches together.
MAXIMUM_SEGMENTS = 10
#: Degrees that are added while there are too many segments.
MORE_DEGREES = (0, 4, 8)
#: A tail's variable is used only for distances below this part of ``reach``: above it log(reach / d) cancels.
TAIL_PART = 0.5
#: The floor of distances, the smallest normal float32 number: at 0 a root has no derivative.
TINY = 2.0**-126


def to_float32(value: float) -> float:
    """The float32 number next to a value."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Variable:
    """The variable of a polynomial: the output itself, or a function of its distance d to ``anchor``.

    "root": sqrt(d); "tail": sqrt(log(reach / d)), with the polynomial times d; "inverse": reach / (reach + d).
    """

    kind: Literal["output", "root", "tail", "inverse"]
    anchor: float = 0.0
    reach: float = 1.0
    is_above: bool = True  # whether outputs are above the anchor

    def distance(self, y: Tensor) -> Tensor:
        # The anchor as a float32 number and the rest, so that distances near it are exact.
        high = to_float32(self.anchor)
        d = (y - high) - (self.anchor - high)
        d = d if self.is_above else -d
        return torch.where(d < TINY, TINY, d)

    def __call__(self, y: Tensor, distance: Tensor) -> Tensor:
        if self.kind == "output":
            return y
        if self.kind == "root":
            return torch.sqrt(distance)
        if self.kind == "inverse":
            return self.reach / (distance + self.reach)
        logarithm = math.log(self.reach) - torch.log(distance)
        return torch.sqrt(torch.where(logarithm < 1e-6, 1e-6, logarithm))


@dataclass(frozen=True)
class Segment:
    """``polynomial(variable)`` for one branch's outputs from ``start`` on. The last segment that begins below y counts.

    ``owns_start``: whether the output ``start`` itself belongs to the segment. ``polynomial`` may be a constant.
    """

    start: float
    stop: float
    marked: bool
    owns_start: bool
    variable: Variable
    polynomial: Piece | float

    def __call__(self, y: Tensor, distance_to_fold: Tensor | None) -> Tensor | float:
        if isinstance(self.polynomial, float):
            return self.polynomial
        variable, piece = self.variable, self.polynomial
        # Every segment is computed for every output: for outputs outside of it at its ends, so that neither values nor
        # gradients that are not selected become NaN or infinite. `where` and not `clamp`, so that NaN stays NaN.
        y = torch.where(y < self.start, self.start, y)
        y = torch.where(y > self.stop, self.stop, y)
        distance = y
        if variable.kind != "output":
            distance = variable.distance(y) if distance_to_fold is None else distance_to_fold
        v = variable(y, distance)
        v = torch.where(v < piece.start, piece.start, torch.where(v > piece.stop, piece.stop, v))
        value = piece(v)
        return value * distance if variable.kind == "tail" else value

    def begins_below(self, y: Tensor) -> Tensor:
        return y >= self.start if self.owns_start else y > self.start


@dataclass(frozen=True)
class Flat:
    """Outputs from ``low`` to ``high``, of one branch, that have exactly this slope."""

    low: float
    high: float
    slope: float
    marked: bool

    def holds(self, y: Tensor) -> Tensor:
        if self.low == -math.inf:
            return y <= self.high
        return y >= self.low if self.high == math.inf else (y >= self.low) & (y <= self.high)


@dataclass(frozen=True)
class Segments:
    """A derivative on both branches, from canonical outputs (``features.py``): ``(distance, y, marked) -> f'``.

    ``distance`` is the floored distance to the fold's output; None without a fold.
    """

    segments: tuple[Segment, ...]
    flats: tuple[Flat, ...] = ()
    fold: float | None = None
    is_falling: bool = False

    def __call__(self, distance: Tensor | None, y: Tensor, marked: Tensor | None) -> Tensor:
        y = -y if self.is_falling else y
        value = self._branch(distance, y, marked=False)
        if marked is not None:
            value = torch.where(marked, self._branch(distance, y, marked=True), value)
        return value

    def _branch(self, distance: Tensor | None, y: Tensor, *, marked: bool) -> Tensor:
        value: Tensor | None = None
        for segment in self.segments:
            if segment.marked != marked:
                continue
            at_fold = segment.variable.kind == "root" and segment.variable.anchor == self.fold
            this = segment(y, distance if at_fold else None)
            if value is not None:
                value = torch.where(segment.begins_below(y), this, value)
            else:
                value = torch.full_like(y, this) if isinstance(this, float) else this
        assert value is not None
        for flat in self.flats:
            if flat.marked == marked:
                value = torch.where(flat.holds(y), flat.slope, value)
        return torch.where(y != y, y, value)


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit_segments(features: Features, precision: Precision) -> Segments:
    """The derivative of a function with these features, flat parts left out.

    Raises:
        NeedsInput: too many segments, or a place where no polynomial meets the tolerance.
    """
    tolerance = precision.tolerance * features.steepest
    problem = NeedsInput("has no stretch to be fitted")
    for more in MORE_DEGREES:
        try:
            degree = precision.degree + more
            segments = [
                segment for stretch in features.stretches for segment in _cover(stretch, features, tolerance, degree)
            ]
            if len(segments) <= MAXIMUM_SEGMENTS:
                extremum = None if features.fold is None else features.fold.extremum
                fold = None if extremum is None else -extremum if features.is_falling else extremum
                segments.sort(key=lambda segment: segment.start)
                return Segments(tuple(segments), (), fold, features.is_falling)
            problem = NeedsInput(f"needs {len(segments)} polynomials, more than {MAXIMUM_SEGMENTS}")
        except NeedsInput as error:
            problem = error
    raise problem


def _cover(stretch: Stretch, features: Features, tolerance: float, degree: int) -> Iterator[Segment]:
    y, slope = stretch.y, stretch.slope
    count = len(y)
    first, last = 0, count - 1
    # A constant covers where the slope has settled.
    constants: list[tuple[int, float]] = []
    if stretch.upper in ("infinity", "kink"):
        settled = (slope - slope[-1]).abs() <= tolerance / 2
        last = int((~settled).nonzero().max()) + 1 if not bool(settled.all()) else 0
        last = min(last, count - 1)
        if stretch.upper == "kink" and float(y[-1] - y[last]) < 0.05 * float(y[-1] - y[0]):
            last = count - 1
        constants.append((last, float(slope[-1])))
    if stretch.lower == "infinity" and last > 0:
        settled = (slope - slope[0]).abs() <= tolerance / 2
        first = min(int((~settled).nonzero().min()), last) if not bool(settled.all()) else last
        if first > 0:
            yield _segment(stretch, features, 0, first, Variable("output"), float(slope[0]))
    if last < count - 1 or stretch.upper == "infinity":
        tail = constants
    else:
        last, tail = count - 1, []
    here, segments = first, 0
    while here < last:
        reached, variable, piece = _farthest(stretch, here, last, tolerance, degree)
        segments += 1
        if variable is None or piece is None:
            raise _uncovered(stretch, features, here, degree)
        if segments > MAXIMUM_SEGMENTS:
            raise NeedsInput(f"needs more than {MAXIMUM_SEGMENTS} polynomials")
        yield _segment(stretch, features, here, reached, variable, piece)
        here = reached
    for index, value in tail:
        yield _segment(stretch, features, index, count - 1, Variable("output"), value)


def _farthest(
    stretch: Stretch, here: int, last: int, tolerance: float, degree: int
) -> tuple[int, Variable | None, Piece | None]:
    """How far a polynomial in any of the variables reaches; the variable, and the polynomial."""
    reached, variable, piece = here, None, None
    for candidate in _variables(stretch, here):
        end, found = _longest(candidate, stretch, here, last, tolerance, degree)
        if end > reached:
            reached, variable, piece = end, candidate, found
        if reached == last:
            break
    return reached, variable, piece


def _uncovered(stretch: Stretch, features: Features, here: int, degree: int) -> NeedsInput:
    """Why nothing covers what comes after a sample."""
    where = float(stretch.y[here]) * (-1 if features.is_falling else 1)
    if float(stretch.slope[here].abs()) < 1e-2 * features.steepest:
        return NeedsInput(f"is too flat to be inverted where its output is {where:.3g}")
    return NeedsInput(f"has a derivative that no polynomial of degree {degree} follows where y = {where:.3g}")


def _segment(
    stretch: Stretch, features: Features, first: int, last: int, variable: Variable, polynomial: Piece | float
) -> Segment:
    y = stretch.y
    start = stretch.start if first == 0 and math.isfinite(stretch.start) else float(y[first])
    stop = stretch.stop if last == len(y) - 1 and math.isfinite(stretch.stop) else float(y[last])
    owns_start = True
    if first == 0:
        for kink in features.kinks:
            if abs((-kink.output if features.is_falling else kink.output) - start) <= 1e-12 * max(1.0, abs(start)):
                # The kink belongs to the side whose slope autograd returns at it.
                owns_start = abs(kink.slope - float(stretch.slope[0])) < 1e-4 * features.steepest
    if first == 0 and stretch.lower == "infinity":
        start = -math.inf if first == 0 else start
    # Stored outputs are float32: so are the numbers they are compared with, in whatever arithmetic.
    return Segment(to_float32(max(start, -3.4e38)), min(stop, 3.4e38), stretch.marked, owns_start, variable, polynomial)


def _variables(stretch: Stretch, here: int) -> Iterator[Variable]:
    y = stretch.y
    yield Variable("output")
    if stretch.lower in ("fold", "limit"):
        yield Variable("root", stretch.start)
    if stretch.upper == "limit":
        whole = stretch.stop - (
            stretch.start if math.isfinite(stretch.start) else min(float(y[here]), stretch.stop - 1)
        )
        reach = max(whole, (stretch.stop - float(y[here])) * 1.01)
        if stretch.stop - float(y[here]) <= TAIL_PART * reach:
            yield Variable("tail", stretch.stop, reach, is_above=False)
        reach = (stretch.stop - float(y[here])) / TAIL_PART
        yield Variable("tail", stretch.stop, reach, is_above=False)
        yield Variable("root", stretch.stop, is_above=False)
    if stretch.lower == "limit" and here == 0:
        middle = float(y[int(stretch.slope.abs().argmax())])
        if middle > stretch.start:
            yield Variable("tail", stretch.start, (middle - stretch.start) / TAIL_PART)
    if stretch.upper == "infinity":
        base = stretch.start if math.isfinite(stretch.start) else float(y[here])
        yield Variable("inverse", base, 1.0)
        yield Variable("inverse", base, 4.0)
    if stretch.lower == "infinity":
        base = stretch.stop if math.isfinite(stretch.stop) else 0.0
        if base > float(y[here]):
            yield Variable("inverse", base, 1.0, is_above=False)
            yield Variable("inverse", base, 4.0, is_above=False)


def _longest(
    variable: Variable, stretch: Stretch, here: int, last: int, tolerance: float, degree: int
) -> tuple[int, Piece | None]:
    end = last
    if variable.kind in ("tail", "inverse"):
        y = stretch.y
        if variable.kind == "tail" and variable.is_above:
            end = min(last, int((y - variable.anchor <= TAIL_PART * variable.reach * 1.0001).sum()) - 1)
        elif not variable.is_above and variable.kind == "inverse":
            end = min(last, int((y < variable.anchor).sum()) - 1)
    if end <= here:
        return here, None
    piece = _attempt(variable, stretch, here, end, tolerance, degree)
    if piece is not None:
        return end, piece
    low, high, best = here, end, None
    while high - low > max(1, (low - here) // 64):
        middle = (low + high) // 2
        piece = _attempt(variable, stretch, here, middle, tolerance, degree)
        if piece is not None:
            low, best = middle, piece
        else:
            high = middle
    return (low, best) if best is not None and low - here >= 8 else (here, None)


def _attempt(
    variable: Variable, stretch: Stretch, first: int, last: int, tolerance: float, degree: int
) -> Piece | None:
    y, slope = stretch.y[first : last + 1], stretch.slope[first : last + 1]
    y, slope = _with_end(y, slope, stretch, first)
    distance = (y - variable.anchor) if variable.is_above else (variable.anchor - y)
    if variable.kind == "tail":
        # Further out the polynomial keeps its last value, and the factor ``distance`` vanishes.
        keep = (distance > 1e-13 * max(abs(variable.anchor), 1e-3 * variable.reach)) & (slope.abs() > 1e-3 * tolerance)
        y, slope, distance = y[keep], slope[keep], distance[keep]
        if len(y) < 4:
            return None
    distance = distance.clamp_min(0.0)
    v = variable(y, distance)
    start, stop = sorted((float(v[0]), float(v[-1])))
    if not stop > start or not math.isfinite(start + stop):
        return None
    t = (2 * v - (start + stop)) / (stop - start)
    ratio = slope / distance if variable.kind == "tail" else slope
    if float(v[-1]) < float(v[0]):
        t, ratio = t.flip(0), ratio.flip(0)
        distance, slope = distance.flip(0), slope.flip(0)
    nodes = torch.cos(torch.arange(3 * degree, -1, -1, dtype=torch.float64) * (math.pi / (3 * degree)))
    index = torch.searchsorted(t.contiguous(), nodes).clamp_max(len(t) - 1)
    before = (index - 1).clamp_min(0)
    index = torch.where((t[before] - nodes).abs() < (t[index] - nodes).abs(), before, index).unique_consecutive()
    if len(index) < degree + 3:
        return None
    basis = chebyshev(t[index], degree)
    coefficients = torch.linalg.lstsq(basis, ratio[index][:, None], driver="gelsd").solution[:, 0]
    piece = Piece(start, stop, powers_of(coefficients.tolist()))
    check = torch.cat([torch.arange(0, len(t), max(1, len(t) // 400)), index, torch.tensor([len(t) - 1])])
    value = piece.of_t(t[check])
    value = value * distance[check] if variable.kind == "tail" else value
    good = float((value - slope[check]).abs().max()) <= tolerance
    return piece if good else None


def _with_end(y: Tensor, slope: Tensor, stretch: Stretch, first: int) -> tuple[Tensor, Tensor]:
    """The samples with the start of the stretch added, where its slope is known to be 0."""
    if first == 0 and stretch.lower in ("fold", "limit") and float(y[0]) > stretch.start:
        smooth_fold = stretch.lower == "limit" or abs(float(slope[0])) < 1e-2 * float(slope.abs().max())
        if smooth_fold:
            zero = torch.zeros(1, dtype=torch.float64)
            y, slope = torch.cat([torch.full_like(zero, stretch.start), y]), torch.cat([zero, slope])
    return y, slope
