"""Fits the derivative of a monotone function as a function of its output, in segments: each is a polynomial in a
variable that suits it.

No variable suits everywhere. Where the function is steep, its derivative is smooth in y. Where it flattens towards a
limit L, ``f' = d P(u)`` with ``d = |y - L|`` and ``u = sqrt(log(reach / d))`` suits exponential, Gaussian and algebraic
tails, and vanishes with d. Towards infinity a derivative that settles algebraically is a polynomial in ``r / (r + d)``.

The function is cut at its kinks. Each stretch between two of these is covered greedily: the next segment
takes the variable whose polynomial reaches farthest within the tolerance. Only samples are used, which is fast and
needs no inverse of the function. A device evaluates every segment for every number.

What it does not do: an inflection with slope 0 (z^3), where the derivative is a fractional power of y. No variable here
has it, so the segments are used up and the function is refused.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .features import NOISE, Features, Function, NeedsInput, value_and_slope
from .polynomial import TINY, Piece, Precision, fitted, longest, to_float32

#: The most segments of a derivative.
MAXIMUM_SEGMENTS = 10
#: Degrees that are added while there are too many segments.
MORE_DEGREES = (0, 4, 8)
#: Outputs beyond this count as infinite.
FAR = to_float32(3.4e38)


@dataclass(frozen=True)
class Variable:
    """The variable of a polynomial: the output itself, or a function of its distance d to ``anchor``.

    "tail": sqrt(log(reach / d)), with the polynomial times d; "inverse": reach / (reach + d).
    """

    kind: Literal["output", "tail", "inverse"]
    anchor: float = 0.0
    is_above: bool = True  # whether outputs are above the anchor
    reach: float = 1.0

    def distance(self, y: Tensor) -> Tensor:
        # The anchor as a float32 number and the rest, so that distances near it are exact.
        high = to_float32(self.anchor)
        d = (y - high) - (self.anchor - high)
        d = d if self.is_above else -d
        return torch.where(d < TINY, TINY, d)

    def __call__(self, y: Tensor, distance: Tensor) -> Tensor:
        if self.kind == "output":
            return y
        if self.kind == "inverse":
            return self.reach / (distance + self.reach)
        logarithm = math.log(self.reach) - torch.log(distance)
        return torch.sqrt(torch.where(logarithm < 1e-6, 1e-6, logarithm))


@dataclass(frozen=True)
class Segment:
    """``polynomial(variable)`` for outputs from ``start`` on. ``polynomial`` may be a constant."""

    start: float
    stop: float
    variable: Variable
    polynomial: Piece | float

    def __call__(self, y: Tensor) -> Tensor:
        if isinstance(self.polynomial, float):
            return torch.full_like(y, self.polynomial)
        piece = self.polynomial
        # Every segment is computed for every output: for outputs outside of it at its ends, so that neither values nor
        # gradients that are not selected become NaN or infinite. `where` and not `clamp`, so that NaN stays NaN.
        y = torch.where(y < self.start, self.start, torch.where(y > self.stop, self.stop, y))
        distance = y if self.variable.kind == "output" else self.variable.distance(y)
        v = self.variable(y, distance)
        value = piece(torch.where(v < piece.start, piece.start, torch.where(v > piece.stop, piece.stop, v)))
        return value * distance if self.variable.kind == "tail" else value


@dataclass(frozen=True)
class Level:
    """Outputs from ``low`` to ``high`` that have exactly this slope: of a flat part, or of a kink."""

    low: float
    high: float
    slope: float

    def holds(self, y: Tensor) -> Tensor:
        return (y >= self.low) & (y <= self.high)


@dataclass(frozen=True)
class MonotoneDerivative:
    """``f'`` as a function of the output of a monotone function. Segments and levels are those of the rising function:
    of ``-f`` where f is falling."""

    segments: tuple[Segment, ...]
    levels: tuple[Level, ...]
    is_falling: bool

    @property
    def ends(self) -> tuple[float, float]:
        """The outputs, of the rising function, between which the derivative is neither flat nor settled to 0."""
        bottom = [level.high for level in self.levels if level.low == -math.inf]
        top = [level.low for level in self.levels if level.high == math.inf]
        return max([self.segments[0].start, *bottom]), min([self.segments[-1].stop, *top])

    def __call__(self, y: Tensor, marked: Tensor | None = None) -> Tensor:
        y = -y if self.is_falling else y
        value = self.segments[0](y)
        for segment in self.segments[1:]:
            value = torch.where(y >= segment.start, segment(y), value)
        for level in self.levels:
            value = torch.where(level.holds(y), level.slope, value)
        return torch.where(y != y, y, value)


# --- stretches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stretch:
    """Samples between two cuts: rising outputs, and slopes. ``lower`` and ``upper`` are the outputs that end it, or
    infinite where the last slope continues."""

    y: Tensor
    slope: Tensor
    lower: float
    upper: float

    @property
    def is_flat(self) -> bool:
        return not bool(self.slope.any())

    def segment(self, first: int, last: int, variable: Variable, polynomial: Piece | float) -> Segment:
        """The segment from one sample to another; the first and the last sample stand for the ends."""
        start = max(self.lower, -FAR) if first == 0 else float(self.y[first])
        stop = min(self.upper, FAR) if last == len(self.y) - 1 else float(self.y[last])
        # Stored outputs are float32: so are the numbers they are compared with, in whatever arithmetic.
        return Segment(to_float32(start), stop, variable, polynomial)


def stretches(function: Function, features: Features) -> list[Stretch]:
    """The stretches of a monotone function, in the order of its inputs."""
    sign = -1.0 if features.is_falling else 1.0
    cuts = [kink.position for kink in features.kinks]
    found = []
    for a, b in itertools.pairwise([-math.inf, *cuts, math.inf]):
        z = features.z[(features.z > a) & (features.z < b)]
        near = min(0.5, (b - a) / 2) * torch.logspace(-8, 0, 160, dtype=torch.float64)
        z = torch.cat([z, *(end + side * near for end, side in ((a, 1.0), (b, -1.0)) if math.isfinite(end))]).unique()
        y, slope = value_and_slope(function, z)
        y = (sign * y).cummax(0).values  # between neighbours float64's rounding may fall
        at_ends = (sign * value_and_slope(function, torch.tensor([a, b], dtype=torch.float64))[0]).tolist()
        lower, upper = (value if math.isfinite(end) else end for end, value in zip((a, b), at_ends, strict=True))
        # An infinite end becomes a limit where outputs hardly change any more, and what lies there is left out.
        first = _arrived(y, slope, features.steepest) if math.isinf(lower) else 0
        last = len(y) - (_arrived(y.flip(0), slope.flip(0), features.steepest) if math.isinf(upper) else 0)
        lower, upper = float(y[0]) if first else lower, float(y[-1]) if last < len(y) else upper
        found.append(Stretch(y[first:last], slope[first:last], lower, upper))
    return found


def _arrived(y: Tensor, slope: Tensor, steepest: float) -> int:
    """How many of the first samples lie at a limit: the slope vanishes, and outputs hardly change (those of a root
    do)."""
    moving = (slope.abs() > NOISE * steepest).nonzero().view(-1)
    first = int(moving[0]) if len(moving) else 0
    return first if float((y[0] - y[first]).abs()) <= 1e-3 * max(1.0, abs(float(y[first]))) else 0


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit_segments(parts: list[Stretch], steepest: float, precision: Precision) -> tuple[Segment, ...]:
    """The derivative on these stretches, flat ones left out.

    Raises:
        NeedsInput: too many segments, or a place where no polynomial meets the tolerance.
    """
    problem = NeedsInput("is flat everywhere")
    for more in MORE_DEGREES:
        degree, tolerance = precision.degree + more, precision.tolerance * steepest
        covers = (_cover(stretch, tolerance, degree) for stretch in parts if not stretch.is_flat)
        try:
            found = tuple(itertools.islice(itertools.chain.from_iterable(covers), MAXIMUM_SEGMENTS + 1))
        except NeedsInput as error:
            problem = error
            continue
        if 0 < len(found) <= MAXIMUM_SEGMENTS:
            return found
        problem = NeedsInput(f"has a derivative that {MAXIMUM_SEGMENTS} polynomials do not follow")
    raise problem


def _cover(stretch: Stretch, tolerance: float, degree: int) -> Iterator[Segment]:
    """Segments from below to above. Towards infinity a constant covers where the slope has settled."""
    slope, end = stretch.slope, len(stretch.y) - 1
    here = _settled(slope, tolerance) if math.isinf(stretch.lower) else 0
    last = max(here, end - _settled(slope.flip(0), tolerance) if math.isinf(stretch.upper) else end)
    if here > 0:
        yield stretch.segment(0, here, Variable("output"), float(slope[0]))
    while here < last:
        reached, found = here, None
        for variable, furthest in _variables(stretch, here):
            attempt = functools.partial(_piece, stretch, variable, tolerance, degree)
            to, piece = longest(attempt, here, min(furthest, last))
            if piece is not None and to > reached:
                reached, found = to, stretch.segment(here, to, variable, piece)
        if found is None:
            where = f"where outputs are {float(stretch.y[here]):.3g}"
            raise NeedsInput(f"has a derivative that no polynomial of degree {degree} follows {where}")
        yield found
        here = reached
    if last < end:
        yield stretch.segment(last, end, Variable("output"), float(slope[-1]))


def _settled(slope: Tensor, tolerance: float) -> int:
    """How many of the first slopes are the same."""
    moving = ((slope - slope[0]).abs() > tolerance / 2).nonzero().view(-1)
    return int(moving[0]) if len(moving) else len(slope) - 1


def _variables(stretch: Stretch, here: int) -> Iterator[tuple[Variable, int]]:
    """The variables that may suit from sample ``here`` on, and how far."""
    y, slope, end = stretch.y, stretch.slope, len(stretch.y) - 1
    yield Variable("output"), end
    # Distances are told apart where the function is steepest, or, since an infinite end may be that, bends most.
    size = slope.abs()
    if math.isinf(stretch.upper - stretch.lower):
        size = slope.diff().abs() / y.diff().clamp_min(1e-9)
    middle = next((i for i in (-1, 0) if float(size[i]) >= (1 - 1e-6) * float(size.max())), int(size.argmax()))
    middle = middle % len(y)
    for limit, place, is_above in ((stretch.lower, 0, True), (stretch.upper, -1, False)):
        if is_above != (here < middle):
            continue
        furthest = middle if is_above else end
        if math.isinf(limit):
            for reach in (1.0, 4.0):
                yield Variable("inverse", float(y[middle]), not is_above, reach), furthest
        elif float(slope[place].abs()) <= 1e-2 * float(slope.abs().max()):  # the slope vanishes at the end
            # So that log(reach / d) is not cancelled.
            yield Variable("tail", limit, is_above, 2 * abs(float(y[middle]) - limit)), furthest


def _piece(stretch: Stretch, variable: Variable, tolerance: float, degree: int, first: int, last: int) -> Piece | None:
    """The polynomial for these samples, if it meets the tolerance at all of them."""
    y, slope = stretch.y[first : last + 1], stretch.slope[first : last + 1]
    distance = (y - variable.anchor if variable.is_above else variable.anchor - y).clamp_min(TINY)
    if variable.kind == "tail":
        # Further out the polynomial keeps its last value, and the factor ``distance`` vanishes.
        keep = distance > 1e-13 * max(abs(variable.anchor), 1e-3 * variable.reach)
        keep &= slope.abs() > 1e-3 * tolerance
        if int(keep.sum()) < 4:
            return None
        y, slope, distance = y[keep], slope[keep], distance[keep]
    factor = distance if variable.kind == "tail" else torch.ones_like(y)
    v, values = variable(y, distance), slope / factor
    if float(v[0]) > float(v[-1]):
        v, values, factor = v.flip(0), values.flip(0), factor.flip(0)
    return fitted(v, values, degree, tolerance / factor)
