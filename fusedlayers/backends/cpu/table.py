"""Fits on float32 outputs as tables of cubics, for ``loops.c``: any derivative, and the inverse around a minimum.

Functions like GELU have a table of their own (``FoldTable``). For all others the intervals are uniform in a variable
("coordinate", then "scale") that is cheap to compute and in which the derivative bends little. The coordinate s is the
output or, with a fold, the root of the distance to the extremum, negative on the marked branch. The scale is s itself;
or the root of its distance to one end of the range; or s over its size plus a constant, for derivatives that settle
slowly. The first scale whose table is accurate enough on sampled outputs is taken.

Cost: 1,024 cubics take 16 KiB, which stay in a core's first cache. A table is made when an activation first runs a
backward pass in float32.

Kinks: the derivative may jump. An interval then ends there, and each has a cubic of its own, so that none mixes the
two sides. The side of a jump comes from the sign of an exact difference. Where two jumps are closer than float32
resolves in the variable, flat pieces are filled in by comparison.

Limits: tables add up to ``ADDED`` to the error of the fit. Where none is accurate enough ``derivative_table`` returns
None.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.analysis import MonotoneDerivative, analyse
from ...derivative.features import Fold
from ...derivative.folded import TAIL_FRACTION, FoldedDerivative, FoldedInverse, Polynomials
from ...derivative.kinks import round_numbers
from ...derivative.piecewise import TINY, Flat, Segments
from ...derivative.polynomial import PRECISIONS
from ...utils.isolation import in_clean_state
from . import loops
from .cubics import PLACES, cubics

#: How many intervals are tried.
INTERVALS = 1024, 8192
#: What a table may add to the error of the fit, rms over N(0, 1) and at most, in units of the steepest slope.
ADDED_RMS = PRECISIONS[torch.float32].tolerance
ADDED = 1e-5
#: So many of the inputs that tables are tried on are of N(0, 1).
NORMAL = 1 << 14

Bend = Literal["straight", "root from below", "root from above", "ratio"]


@dataclass(frozen=True)
class Scale:
    """The variable ``(g(s) - zero) scale``, with g as ``kind`` says: s, the root of the distance to one end, or
    s / (|s| + half).

    The interval of s is the integer below that. A negative scale makes ``zero`` belong to the interval below it in s.
    """

    kind: Bend
    low: float
    high: float
    zero: float
    scale: float
    half: float = 1.0

    def bend(self, s: Tensor) -> Tensor:
        """g, in float64."""
        if self.kind == "straight":
            return s
        if self.kind == "ratio":
            return s / (s.abs() + self.half)
        return (s - self.low).sqrt() if self.kind == "root from below" else (self.high - s).sqrt()

    def unbend(self, c: Tensor) -> Tensor:
        if self.kind == "straight":
            return c
        if self.kind == "ratio":
            return self.half * c / (1 - c.abs()).clamp_min(1e-9)
        return self.low + c * c if self.kind == "root from below" else self.high - c * c


class DerivativeTable:
    """The derivative from (encoded) float32 outputs."""

    def __init__(self, fitted: FoldedDerivative | MonotoneDerivative, scale: Scale, flats: tuple[Flat, ...]) -> None:
        #: With a fold: the fold, the origin of distances in two parts, and the range of distances.
        self.fold: Fold | None = None
        self.origin = (0.0, 0.0)
        self.nearest = self.farthest = 0.0
        #: The derivative at a marked zero, which may be that of a flat part.
        self.at_zero = 0.0
        if isinstance(fitted, FoldedDerivative):
            self.fold = fitted.fold
            self.origin = fitted.origin_parts
            self.nearest = fitted.margin
            self.farthest = max(scale.low * scale.low, scale.high * scale.high)
            self.at_zero = float(_expected(fitted, torch.tensor(-0.0)))
        self.scale = scale
        # As float32, so that what is tried is what is computed.
        ends = scale.bend(torch.tensor([scale.low, scale.high], dtype=torch.float64))
        ends = ((ends - scale.zero) * scale.scale).sort().values
        self.first, self.last = (int(end) for end in ends.floor())
        #: Flat pieces that are filled in by comparison, because float32 does not separate them from their neighbours.
        self.flats = torch.tensor([(flat.low, flat.high, flat.slope) for flat in flats], dtype=torch.float32)
        self.cubics = self._evaluate(fitted, ends)

    def _evaluate(self, fitted: FoldedDerivative | MonotoneDerivative, ends: Tensor) -> Tensor:
        """The cubics. Those of the first and the last interval run through values within the range, whose ends are
        ``ends``: beyond it there is no such output, and the fit may jump."""
        c = torch.arange(self.first, self.last + 1, dtype=torch.float64).unsqueeze(1)
        from_, to = ((end - c).clamp(0, 1) for end in ends)
        places = from_ + (to - from_) * PLACES
        s = self.scale.unbend((c + places) / self.scale.scale + self.scale.zero)
        if self.fold is not None and self.fold.ambiguous == ("positive" if self.fold.is_maximum else "negative"):
            # The marked branch ends at 0.
            s = s.clamp_min(-math.sqrt(max(0.0, abs(self.fold.extremum) - 1e-12)))
        return cubics(_at(fitted, s), places).contiguous()


@functools.lru_cache(64)
@in_clean_state
def derivative_table(activation: Activation) -> DerivativeTable | FoldTable | None:
    """The table for an activation whose derivative is fitted, or None if none is good enough."""
    fitted = activation.fitted_derivative()
    if fitted is None:
        return None
    if isinstance(fitted, FoldedDerivative) and isinstance(fitted.of_distance, Polynomials):
        fold_table, y = FoldTable(fitted), activation.encoded(_inputs(), torch.float32)
        y = y[y.isfinite()]
        return fold_table if _is_exact(loops.slopes(None, fold_table, y), _expected(fitted, y), NORMAL) else None
    segments = _segments(activation, fitted)
    y, normal = _outputs(activation, segments)
    expected = _expected(fitted, y)
    steepest = float(expected.abs().max())
    s = _coordinate(fitted, y)
    jumps = _jumps(fitted, segments, steepest)
    hard = [jump for jump in jumps if not jump.is_corner]
    flats = _as_stored(segments.flats, segments)
    if isinstance(fitted, FoldedDerivative):
        # Which are found by a comparison of outputs. That tells the branches apart only at 0 and on one side of it.
        zero = tuple(flat for flat in flats if flat.low == flat.high == 0 and not flat.marked)
        compared = [(), zero, (*_constants(segments, fitted.fold), *zero)]
    else:
        compared = [(), flats, (*_at_kinks(fitted, segments), *flats)]
    tried: list[Scale] = []
    for intervals in INTERVALS:
        tried += _scales(s, expected, jumps, steepest, intervals)
        if len(hard) < len(jumps):
            tried += _scales(s, expected, hard, steepest, intervals)
    for scale in tried:
        for chosen in dict.fromkeys(compared):
            table = DerivativeTable(fitted, scale, chosen)
            if _is_exact(loops.slopes(table, None, y), expected, normal):
                return table
    return None


def _is_exact(found: Tensor, expected: Tensor, normal: int) -> bool:
    """Whether these derivatives, of which the first, ``normal``, are of outputs of N(0, 1), are what is expected."""
    error = (found.double() - expected).abs() / expected.abs().max()
    return float(error.max()) <= ADDED and float(error[:normal].square().mean().sqrt()) <= ADDED_RMS


def _segments(activation: Activation, fitted: FoldedDerivative | MonotoneDerivative) -> Segments:
    """Where the derivative may jump."""
    if isinstance(fitted, MonotoneDerivative):
        return fitted.segments
    if isinstance(fitted.of_distance, Segments):
        return fitted.of_distance
    found = analyse(activation.function).derivative(torch.float32)  # a formula does not say
    assert isinstance(found, FoldedDerivative) and isinstance(found.of_distance, Segments)
    return found.of_distance


def _outputs(activation: Activation, segments: Segments) -> tuple[Tensor, int]:
    """Outputs to try a table on, and how many of them, the first, are those of N(0, 1). Outputs so close to a kink that
    either side is right are left out."""
    y = activation.encoded(_inputs(), torch.float32)
    starts = [segment.start for segment in segments.segments if abs(segment.start) < 3e38]
    ends = [end for flat in segments.flats for end in (flat.low, flat.high) if math.isfinite(end)]
    sign = -1.0 if segments.is_falling else 1.0
    edges = sign * torch.tensor(starts + ends, dtype=torch.float32)
    y = torch.cat([y, *_near(edges, y, activation.fold)])
    # What is stored of a kink's output is tried, though it may be a unit away.
    at_kinks = edges
    if activation.fold is not None:
        at_kinks = torch.cat([_marked(edges, is_marked, activation.fold) for is_marked in (False, True)])
    else:
        for direction in (-math.inf, math.inf):
            step = edges
            for _ in range(3):
                step = torch.nextafter(step, torch.full_like(step, direction))
                y = torch.cat([y, step])
    # Next to a kink's output, but not at it, either side is right, unless one is flat, or that output is 0.
    undecided = torch.zeros_like(y, dtype=torch.bool)
    for start in starts:
        if start != 0:
            unit = 2.0 ** (math.frexp(start)[1] - 1) * torch.finfo(torch.float32).eps
            apart = (sign * y.double() - start).abs()
            undecided |= (apart <= unit * (1 if activation.fold is None else 2)) & (apart > 0)
    for flat in segments.flats:
        undecided &= ~flat.holds(sign * y)
    keep = y.isfinite() & ~undecided
    return torch.cat([y[keep], at_kinks]), int(keep[:NORMAL].sum())


def _near(edges: Tensor, y: Tensor, fold: Fold | None) -> Iterator[Tensor]:
    """Outputs at several distances from each edge, on both branches, as far as a branch's outputs ``y`` reach."""
    steps = torch.logspace(-7, 0, 57) * edges.abs().clamp_min(1e-3).unsqueeze(1)
    near = torch.cat([edges.unsqueeze(1) - steps, edges.unsqueeze(1) + steps]).flatten()
    for is_marked in (False, True) if fold is not None else (False,):
        own = y[branch_bit.decode(y, torch.float32, fold.ambiguous) == is_marked] if fold is not None else y
        own = own[own.isfinite()]
        found = near[(near >= own.min()) & (near <= own.max())]
        yield found if fold is None else _marked(found, is_marked, fold)


def _marked(y: Tensor, is_marked: bool, fold: Fold) -> Tensor:
    """Outputs as they are stored of one branch."""
    marks = torch.full_like(y, is_marked, dtype=torch.bool)
    return branch_bit.encode(y, marks, torch.float32, fold.ambiguous, bounded=fold.bounded)


def _inputs() -> Tensor:
    """Those that tables are tried on, of which the first, ``NORMAL``, are of N(0, 1)."""
    normal = torch.special.ndtri((torch.arange(NORMAL, dtype=torch.float64) + 0.5) / NORMAL)
    sizes = torch.logspace(-44, 38, 4001, dtype=torch.float64)
    wide = torch.linspace(-32, 32, 65_537, dtype=torch.float64) + 1e-4
    return torch.cat([normal, wide, round_numbers(), sizes, -sizes]).float()


def _expected(fitted: FoldedDerivative | MonotoneDerivative, y: Tensor) -> Tensor:
    """The derivative by the polynomials, in float64, from (encoded) float32 outputs."""
    if isinstance(fitted, FoldedDerivative):
        return fitted(y.double(), branch_bit.decode(y, torch.float32, fitted.fold.ambiguous))
    return fitted(y.double())


def _at(fitted: FoldedDerivative | MonotoneDerivative, s: Tensor) -> Tensor:
    """The same from the coordinate."""
    if not isinstance(fitted, FoldedDerivative):
        return fitted(s)
    distance = s.square().clamp_min(TINY)
    sign = -1.0 if fitted.fold.is_maximum else 1.0
    return fitted.of_distance(distance, fitted.fold.extremum + sign * distance, s < 0)


def _coordinate(fitted: FoldedDerivative | MonotoneDerivative, y: Tensor) -> Tensor:
    if not isinstance(fitted, FoldedDerivative):
        return y.double()
    root = fitted._distance(y.double()).clamp_min(fitted.margin).sqrt()
    return torch.where(branch_bit.decode(y, torch.float32, fitted.fold.ambiguous), -root, root)


def _as_stored(flats: Iterable[Flat], segments: Segments) -> tuple[Flat, ...]:
    """Flat pieces in outputs; segments hold those of the rising function, whose negative a falling one is."""
    if not segments.is_falling:
        return tuple(flats)
    return tuple(Flat(-flat.high, -flat.low, flat.slope, flat.marked) for flat in flats)


def _constants(segments: Segments, fold: Fold) -> tuple[Flat, ...]:
    """The unmarked branch's last segment, if it has a constant slope, and outputs of a sign that the other has not."""
    last = segments.segments[-1]
    is_of_one = fold.ambiguous == ("positive" if segments.is_falling else "negative")
    if not (is_of_one and isinstance(last.polynomial, float) and not last.marked and last.start >= 0):
        return ()
    start = torch.tensor(last.start, dtype=torch.float32)
    low = start if last.owns_start else start.nextafter(torch.tensor(math.inf))
    return _as_stored([Flat(float(low), math.inf, last.polynomial, False)], segments)


def _at_kinks(fitted: MonotoneDerivative, segments: Segments) -> Iterator[Flat]:
    """The outputs at which segments begin, with the slopes that the fit gives them: of one side or the other."""
    starts = torch.tensor([s.start for s in segments.segments if abs(s.start) < 3e38], dtype=torch.float64)
    stored = (-starts if segments.is_falling else starts).float()
    for y, slope in zip(stored.tolist(), _expected(fitted, stored).tolist(), strict=True):
        yield Flat(y, y, slope, False)


@dataclass(frozen=True)
class Jump:
    """Where the derivative jumps, or has a corner, in the table's coordinate.

    ``is_above``: whether its value at ``s`` itself is that of the side above.
    """

    s: float
    is_above: bool
    is_corner: bool


def _jumps(fitted: FoldedDerivative | MonotoneDerivative, segments: Segments, steepest: float) -> list[Jump]:
    """Those ends of segments and flats where a line across would err by more than a table may."""
    places = {(segment.start, segment.marked) for segment in segments.segments}
    flats = [flat for flat in segments.flats if not (flat.marked and flat.low == flat.high == 0)]
    places |= {(end, flat.marked) for flat in flats for end in (flat.low, flat.high)}
    jumps: dict[float, Jump] = {}
    for y, marked in sorted(places):
        if abs(y) > 1e30:
            continue
        true = -y if segments.is_falling else y
        s = true
        if isinstance(fitted, FoldedDerivative):
            s = math.sqrt(abs(true - fitted.fold.extremum)) * (-1 if marked else 1)
        step = 1e-5 * max(1.0, abs(s))
        at = s + step * torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
        farther, below, here, above, beyond = _at(fitted, at).tolist()
        left, right = 2 * below - farther, 2 * above - beyond
        bend = abs((beyond - above) - (below - farther)) / step
        jumped = abs(right - left) > 10 * ADDED * steepest
        if jumped or bend > 1e-2 * steepest:
            jumps.setdefault(round(s, 6), Jump(s, abs(here - right) < abs(here - left), not jumped))
    return list(jumps.values())


def _scales(s: Tensor, expected: Tensor, jumps: list[Jump], steepest: float, intervals: int) -> Iterator[Scale]:
    """The scales to try, the cheapest first, over the range in which the derivative is not constant."""
    order = s.argsort()
    s, expected = s[order], expected[order]
    moving = ((expected - expected[0]).abs() > 1e-7 * steepest).nonzero().view(-1)
    low = float(s[max(0, int(moving[0]) - 1)]) if len(moving) else float(s[0])
    moving = ((expected - expected[-1]).abs() > 1e-7 * steepest).nonzero().view(-1)
    high = float(s[min(len(s) - 1, int(moving[-1]) + 1)]) if len(moving) else float(s[-1])
    at = [jump.s for jump in jumps]
    low, high = min(low, high - 1e-3), max(high, low + 1e-3)
    margin = 0.01 * max(1e-3, min(max([high, *at]) - min([low, *at]), 100.0))
    low, high = min([low, *(a - margin for a in at)]), max([high, *(a + margin for a in at)])
    low, high = _float32(low), _float32(high)
    if high - low < 1e30:
        yield from _placed("straight", low, high, jumps, intervals)
        if len(jumps) <= 1:
            yield from _placed("root from below", low, high, jumps, intervals)
            yield from _placed("root from above", low, high, jumps, intervals)
    for half in (1.0, 4.0, 0.25):
        yield from _placed("ratio", low, high, jumps, intervals, half)


def _placed(
    kind: Bend,
    low: float,
    high: float,
    jumps: list[Jump],
    intervals: int,
    half: float = 1.0,
) -> Iterator[Scale]:
    """The scale of this kind that has the jumps on integers; none where there is no such scale."""
    bare = Scale(kind, low, high, 0.0, 1.0, half)
    bend: Callable[[float], float] = lambda x: float(bare.bend(torch.tensor(x, dtype=torch.float64)))
    ends = sorted((bend(low), bend(high)))
    if not ends[1] > ends[0]:  # float64 does not separate them
        return
    scale = (intervals - 4) / (ends[1] - ends[0])
    first = min(jumps, key=lambda jump: abs(jump.s), default=None)
    upwards = (first is None or first.is_above) != (kind == "root from above")
    if kind not in ("straight", "ratio"):
        zero = _float32(bend(first.s)) if first is not None else ends[0]
    else:
        # Counted from 0, so that nothing is lost next to a jump: at 0 the sign is exact, and elsewhere a unit in the
        # last place stays one.
        zero = 0.0
        at = sorted((abs(bend(jump.s)) for jump in jumps if jump.s != 0), reverse=True)
        for steps in range(round(at[0] * scale), 0, -1) if at else ():
            tried = steps / at[0]
            if all(abs(a * tried - round(a * tried)) < 1e-6 + 3e-7 * a * tried for a in at):
                scale = tried
                break
        else:
            if at:
                return
    yield Scale(kind, low, high, zero, _float32(scale if upwards else -scale), half)


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


# --- functions around a minimum ---------------------------------------------------------------------------------------


class FoldTable:
    """A short fit of a folded activation (``folded.py``) as a table of cubics: its derivative, or its input less the
    output, from encoded float32 outputs (``look_up_fold`` in ``loops.c``).

    Intervals lie closest where the fit bends most: at the minimum, where ``d = y - y_min`` is small, and in the tail,
    where y is small. Floating-point numbers are spaced like this. The variable is a float32 number w: d, with its sign
    set on the falling branch; in the tail of that branch, y times a power of two that keeps it apart from all d. An
    interval is all numbers with the same sign, exponent and leading bits, which takes no root and no division to find.
    All cubics take 128 KiB; outputs of ordinary size need a tenth of them.
    """

    #: The last bits of w, which are the place in the interval.
    REST = 19

    def __init__(self, fitted: FoldedDerivative | FoldedInverse) -> None:
        polynomials = fitted.of_distance
        assert isinstance(polynomials, Polynomials) and fitted.fold.ambiguous == "negative"
        nearest, tail = fitted.margin, polynomials.minimum * TAIL_FRACTION
        # The factor of the tail: all of it is then below half the smallest distance. It is 2^-24 or 2^-25, because the
        # distance is a unit in the last place of the minimum.
        down = 2.0 ** (math.frexp(nearest)[1] - 2 - math.frexp(tail)[1])
        #: Numbers of ``loops.c``'s structure.
        self.numbers = (*fitted.origin_parts, nearest, tail, down)
        start = torch.arange(-(2**31), 2**31, 2**self.REST, dtype=torch.int64).to(torch.int32).view(torch.float32)
        following = (start.view(torch.int32) + (2**self.REST - 1)).view(torch.float32)
        low, high = (t.double().unsqueeze(1) for t in (start, following))
        w = low + (high - low) * (2**self.REST / (2**self.REST - 1)) * PLACES
        size, falling = w.abs(), w.signbit()
        in_tail = falling & (size < nearest / 2)
        distance = torch.where(in_tail, 1.0, size.clamp_min(nearest))
        y = torch.where(in_tail, -size / down, fitted.fold.extremum + distance)
        distance = torch.where(in_tail, y - fitted.fold.extremum, distance)
        values = polynomials(distance, y, falling)
        # The last finite interval stands for infinity too. Numbers that are none stay that, whatever is found.
        settled = values[int((start == math.inf).nonzero()) - 1]
        self.cubics = cubics(torch.where(w.isfinite() & ~values.isnan(), values, settled)).contiguous()


@functools.lru_cache(64)
@in_clean_state
def inverse_table(activation: Activation) -> FoldTable | None:
    """The table for an activation whose inverse is fitted, or None."""
    fitted = activation.fitted_inverse()
    return None if fitted is None else FoldTable(fitted)
