"""The features of a function: its fold, kinks, flat parts, and limits at infinity.

The function and autograd's derivative are sampled at some ten thousand float64 numbers from -3e38 to 3e38. Bisection
follows where two neighbours differ more than theirs do.

What it does not do: a feature is found only if it shows at a distance of 1/512 (1/64 beyond 8, 5 % beyond 32). The fit
that is built on a missed feature errs there; ``analysis.py`` measures the fit and refuses it.

Features are described in *canonical* orientation: outputs are reflected so that the function rises, or has a minimum.
Slopes are the true ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .branch_bit import Ambiguous
from .kinks import Function, Kink, NeedsInput, bisect, find_corners, find_kinks, rounded, value_and_slope

#: Slopes below this part of the steepest count as 0.
NOISE = 1e-12
#: A fold must lie within this distance from 0: the fit of a function that is stretched further would be measured at too
#: few samples, which are dense only around 0.
FARTHEST_TURN = 8.0
#: A function must be finite up to here. Further out PyTorch's own derivative may overflow.
FINITE_WITHIN = 30.0
#: Standard deviations of the normal inputs that fits are measured on: of small ones many lie next to a kink at 0.
SCALES = (1.0, 0.1, 0.01)


@dataclass(frozen=True)
class Fold:
    """The fold of a function: its only extremum, ``f(position) = extremum``.

    Attributes:
        is_maximum: whether the extremum is a maximum.
        ambiguous: the signs of the outputs that both branches take.
        marked: the branch on which the branch bit is set. All its outputs are ambiguous.
        bounded: whether ambiguous outputs stay far from overflow.
    """

    position: float
    extremum: float
    is_maximum: bool = False
    ambiguous: Ambiguous = "negative"
    marked: Literal["left", "right"] = "left"
    bounded: bool = True

    def marks(self, z: Tensor) -> Tensor:
        """Whether inputs lie on the marked branch."""
        return z < self.position if self.marked == "left" else z > self.position


@dataclass(frozen=True)
class Stretch:
    """Samples of a part of a branch without kinks: canonical outputs, rising, and slopes. A fit runs through them.

    ``lower`` and ``upper`` say what ends the part: a "kink", the "fold", a "limit" that is approached with slope 0, or
    "infinity", where the last slope continues. ``start`` and ``stop`` are the outputs at these ends.
    """

    y: Tensor
    slope: Tensor
    marked: bool
    lower: str
    upper: str
    start: float
    stop: float


@dataclass(frozen=True)
class Level:
    """Outputs with exactly this slope: those ``<= y`` ("bottom"), ``>= y`` ("top") or ``== y`` ("point", "kink").

    ``position`` is an input with such an output: the only one at a "kink", else one of many.
    """

    place: Literal["bottom", "top", "point", "kink"]
    y: float
    slope: float
    marked: bool
    position: float


@dataclass(frozen=True)
class Features:
    """The features of a function that is monotone or has one fold.

    Attributes:
        fold: the fold, or None.
        is_falling: whether canonical outputs are the negatives of the true ones.
        stretches: the parts to be fitted.
        levels: the outputs with a slope of their own.
        kinks: the jumps of the derivative.
        steepest: the largest absolute slope.
        reach: the inputs between which the function's formula holds.
    """

    fold: Fold | None
    is_falling: bool
    stretches: tuple[Stretch, ...]
    levels: tuple[Level, ...]
    kinks: tuple[Kink, ...]
    steepest: float
    reach: tuple[float, float]


def find_features(function: Function) -> Features:
    """The features of ``function``.

    Raises:
        NeedsInput: its output does not determine its derivative.
    """
    z, y, slope, astray = _sample(function)
    inner = z.abs() < FINITE_WITHIN
    steepest = float(slope[z.abs() > 5e-4].abs().max())
    if steepest == 0:
        raise NeedsInput("has the derivative 0 everywhere")
    _refuse_unsettled_slopes(z, slope, float(slope[inner].abs().max()))
    turn = _find_turn(function, z, slope, steepest)
    kinks = find_kinks(function, z, y, slope, steepest)
    corners = find_corners(function, z, slope, steepest)
    if astray is not None:  # the formula may break down there, or the function jump
        raise NeedsInput(f"does not follow its derivative beyond z = {astray:.3g}")
    if turn is not None and abs(turn[0]) > FARTHEST_TURN:
        raise NeedsInput(f"turns at z = {turn[0]:.4g}, too far from 0 to be followed closely")
    return _assemble(function, z, y, slope, steepest, turn, kinks, corners)


# --- sampling ---------------------------------------------------------------------------------------------------------


def sample_points() -> Tensor:
    """Some ten thousand numbers from -3e38 to 3e38, in float64 and in order."""
    # The shift keeps samples off the round numbers where kinks are.
    fine = (torch.arange(-4096, 4096, dtype=torch.float64) + 0.3819) / 512
    coarse = torch.arange(8 * 64, 32 * 64, dtype=torch.float64).add(0.3819) / 64
    far = 32 * torch.logspace(0, 37, 1750, dtype=torch.float64)
    tiny = torch.logspace(-12, -3, 91, dtype=torch.float64)
    return torch.cat([fine, coarse, -coarse, far, -far, tiny, -tiny]).sort().values


def _sample(function: Function) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Inputs, outputs and slopes as far as they are finite and fit together; and where they cease to fit, or None."""
    z = sample_points()
    y, slope = value_and_slope(function, z)
    some = torch.arange(0, len(z), 37)
    repeated, _ = value_and_slope(function, z[some].flip(0).view(1, -1, 1))
    repeated = repeated.view(-1).flip(0)
    same = (repeated - y[some]).abs() <= 1e-9 * (1 + y[some].abs())
    if not bool((same | ~y[some].isfinite() | ~repeated.isfinite()).all()):
        raise NeedsInput("is random, or does not map each element by itself")
    bad = ~(y.isfinite() & slope.isfinite())
    # Far from 0 a formula may break down by cancellation.
    off = (y.diff() - z.diff() * (slope[1:] + slope[:-1]) / 2).abs()
    lost = ~(off <= 0.02 * (1 + torch.maximum(y[1:].abs(), y[:-1].abs()))) & (z[1:] * z[:-1] > FINITE_WITHIN**2)
    lost &= ~(bad[1:] | bad[:-1])
    astray = z[1:][lost]
    bad[1:] |= lost & (z[1:] > 0)
    bad[:-1] |= lost & (z[1:] < 0)
    if bool((bad & (z.abs() < FINITE_WITHIN)).any()):
        raise NeedsInput(f"is not finite at z = {float(z[bad & (z.abs() < FINITE_WITHIN)][0]):.3g}")
    middle = len(z) // 2
    outside = bad.nonzero().view(-1)
    first = int(outside[outside < middle].max()) + 1 if bool((outside < middle).any()) else 0
    last = int(outside[outside > middle].min()) if bool((outside > middle).any()) else len(z)
    where = float(astray[astray.abs().argmin()]) if len(astray) else None
    return z[first:last], y[first:last], slope[first:last], where


def _refuse_unsettled_slopes(z: Tensor, slope: Tensor, steepest: float) -> None:
    for side, end in (("-inf", z[0]), ("+inf", z[-1])):
        outer = slope[(z * end > 0) & (z.abs() > end.abs() / 4)]
        largest = float(outer.abs().max())
        if float(outer.max() - outer.min()) > 1e-7 * max(steepest, largest):
            grows = largest > 4 * steepest
            how = "grows without bound" if grows else "does not settle to a constant"
            raise NeedsInput(f"has a derivative that {how} as z goes to {side}")


def _find_turn(function: Function, z: Tensor, slope: Tensor, steepest: float) -> tuple[float, float] | None:
    """The fold's two ends: equal, or the ends of a flat part. None for a monotone function."""
    moving = (slope.abs() > NOISE * steepest).nonzero().view(-1)
    sign = slope[moving] > 0
    changes = (sign[1:] != sign[:-1]).nonzero().view(-1)
    if len(changes) == 0:
        return None
    if len(changes) > 1:
        places = ((z[moving[changes]] + z[moving[changes + 1]]) / 2).tolist()
        places = sorted(sorted(places, key=abs)[:3])
        listed = ", ".join(f"{place:.3g}" for place in places)
        often = f"{len(changes)} times" if len(changes) < 4 else f"at least {len(changes)} times"
        raise NeedsInput(f"turns {often} (z = {listed}{', ...' if len(changes) > 3 else ''})")
    at = int(changes[0])
    before, after = z[moving[at]], z[moving[at + 1]]
    falls_first = not bool(sign[at])

    start = bisect(function, lambda s: s < 0 if falls_first else s > 0, before, after)
    stop = bisect(function, lambda s: s <= 0 if falls_first else s >= 0, before, after)
    return start, max(start, stop)


class Samples(NamedTuple):
    """A function's values and slopes at some inputs."""

    z: Tensor
    y: Tensor
    slope: Tensor


def measurement_points(function: Function, features: Features, dtype: torch.dtype) -> tuple[Samples, Samples]:
    """Samples for measuring a fit for outputs of ``dtype``: quantiles of N(0, 1) times each of ``SCALES``, as numbers
    of that dtype, which is what PyTorch computes the derivative from; and float32 numbers of all sizes, with more near
    folds and kinks."""
    count = 1 << 15
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    near = torch.logspace(-9, -1, 161, dtype=torch.float64)
    places = [kink.position for kink in features.kinks] + ([] if features.fold is None else [features.fold.position])
    around = [place + side * near for place in places for side in (-1, 1)]
    sizes = torch.logspace(-44, -4, 160, dtype=torch.float64)
    between = (sample_points()[1:] + sample_points()[:-1]) / 2
    # Denser than the samples of the fit, so that an error between two of those shows.
    wide = torch.logspace(1, 6, 10_000, dtype=torch.float64)
    normal_z = torch.special.ndtri(quantiles)
    at = [torch.cat([scale * normal_z for scale in SCALES]), torch.cat([between, *around, sizes, -sizes, wide, -wide])]
    normal, anywhere = (z.to(stored).double() for z, stored in zip(at, (dtype, torch.float32), strict=True))
    anywhere = anywhere[(anywhere >= features.reach[0]) & (anywhere <= features.reach[1])]
    return Samples(normal, *value_and_slope(function, normal)), Samples(anywhere, *value_and_slope(function, anywhere))


# --- assembling -------------------------------------------------------------------------------------------------------


def _assemble(
    function: Function,
    z: Tensor,
    y: Tensor,
    slope: Tensor,
    steepest: float,
    turn: tuple[float, float] | None,
    kinks: list[Kink],
    corners: list[float],
) -> Features:
    marks = {kink.position for kink in kinks} | _edges_of_flats(function, z, slope)
    marks |= {corner for corner in corners if all(abs(corner - mark) > 1e-5 for mark in marks)}
    cuts, turn = _in_order(marks, turn)
    rises = float(slope[slope.abs() > NOISE * steepest][0]) > 0
    is_falling = rises if turn is not None else not rises
    sign = -1.0 if is_falling else 1.0
    at_cuts, _ = value_and_slope(function, torch.tensor(cuts, dtype=torch.float64))
    outputs = dict(zip(cuts, (sign * at_cuts).tolist(), strict=True))

    fold = None
    if turn is not None:
        at_turn = next((kink for kink in kinks if kink.position == turn[0] == turn[1]), None)
        turn_is_left = at_turn is not None and abs(at_turn.slope - at_turn.before) < abs(at_turn.slope - at_turn.after)
        far = _far_outputs(sign * y, slope, steepest)
        fold = _fold(turn, outputs[turn[0]], *far, is_falling, steepest, turn_is_left)

    stretches, levels = [], []
    bounds = [-math.inf, *cuts, math.inf]
    for a, b in itertools.pairwise(bounds):
        inside = (z > a) & (z < b)
        parts = [z[inside], *(c for e, s in ((a, 1.0), (b, -1.0)) if math.isfinite(e) for c in [_close_to(e, s, a, b)])]
        at = torch.cat(parts).sort().values
        if len(at) == 0:
            continue
        value, s = value_and_slope(function, at)
        value = sign * value
        marked = fold is not None and turn is not None and (b <= turn[0] if fold.marked == "left" else a >= turn[1])
        goes_left = turn is not None and b <= turn[0]
        if not goes_left and turn is not None and a < turn[1]:  # the fold's own flat part
            levels += [Level("bottom", outputs[turn[0]], 0.0, m, (a + b) / 2) for m in (False, True)]
            continue
        ends = [_end(e, outputs, turn) for e in (a, b)]
        if goes_left:
            at, value, s = at.flip(0), value.flip(0), s.flip(0)
            ends.reverse()
            a, b = b, a
        if bool((s == 0).all()):
            place: Literal["bottom", "top", "point"]
            place = "bottom" if ends[0][0] == "infinity" else "top" if ends[1][0] == "infinity" else "point"
            levels.append(Level(place, float(value[-1]), 0.0, marked, float(at[len(at) // 2])))
            continue
        first, last = 0, len(at)
        for end, at_end in enumerate((s[0], s[-1])):
            if ends[end][0] == "kink" and float(at_end.abs()) <= 1e-5 * steepest:
                ends[end] = "limit", ends[end][1]
        moving = (s.abs() > NOISE * steepest).nonzero().view(-1)
        if len(moving) == 0:
            continue
        if ends[1][0] == "infinity" and _has_arrived(value, s, int(moving[-1]), -1, steepest):
            last = int(moving[-1]) + 1
            ends[1] = "limit", float(value[-1])
            levels.append(Level("top", float(value[-1]), 0.0, marked, float(at[-1])))
        if ends[0][0] == "infinity" and _has_arrived(value, s, int(moving[0]), 0, steepest):
            first = int(moving[0])
            ends[0] = "limit", float(value[0])
            levels.append(Level("bottom", float(value[0]), 0.0, marked, float(at[0])))
        (lower, start), (upper, stop) = ends
        rising = value[first:last].cummax(0).values
        stretches.append(Stretch(rising, s[first:last], marked, lower, upper, start, stop))
    levels += _points(kinks, sign, fold)
    return Features(
        fold, is_falling, tuple(stretches), tuple(levels), tuple(kinks), steepest, (float(z[0]), float(z[-1]))
    )


def _in_order(marks: set[float], turn: tuple[float, float] | None) -> tuple[list[float], tuple[float, float] | None]:
    """The marks without those that lie next to another, and the turn's ends at two of them."""
    if turn is not None:
        turn = _snapped(turn[0], marks), _snapped(turn[1], marks)
        marks = marks | set(turn)
    cuts = sorted(marks)
    cuts = [cut for i, cut in enumerate(cuts) if i == 0 or cut - cuts[i - 1] > 1e-9 * max(1.0, abs(cut))]
    return cuts, None if turn is None else (_snapped(turn[0], set(cuts)), _snapped(turn[1], set(cuts)))


def _far_outputs(y: Tensor, slope: Tensor, steepest: float) -> tuple[float, float]:
    """What outputs tend to on the left and on the right; infinity where they tend to no limit."""
    moving = (slope.abs() > NOISE * steepest).nonzero().view(-1)
    left, right = (float(y[i]) if _has_arrived(y, slope, int(moving[i]), i, steepest) else math.inf for i in (0, -1))
    return left, right


def _has_arrived(y: Tensor, slope: Tensor, moving: int, end: int, steepest: float) -> bool:
    """Whether outputs tend to a limit: they hardly change where the slope has vanished. (Those of a root do.)"""
    change = float((y[end] - y[moving]).abs())
    return float(slope[end].abs()) <= NOISE * steepest and change <= 1e-3 * max(1.0, float(y[moving].abs()))


def _end(position: float, outputs: dict[float, float], turn: tuple[float, float] | None) -> tuple[str, float]:
    if not math.isfinite(position):
        return "infinity", math.copysign(math.inf, position)
    return ("fold" if turn is not None and position in turn else "kink"), outputs[position]


def _snapped(position: float, marks: set[float]) -> float:
    return next((mark for mark in marks if abs(mark - position) <= 1e-9 * max(1.0, abs(mark))), position)


def _close_to(end: float, side: float, a: float, b: float) -> Tensor:
    """Inputs close to the end of a stretch, where a fit in the root of the distance needs samples."""
    reach = min(0.5, (b - a) / 2)
    return end + side * torch.logspace(-5, 0, 120, dtype=torch.float64) * reach


def _edges_of_flats(function: Function, z: Tensor, slope: Tensor) -> set[float]:
    """Where intervals begin or end in which the derivative is exactly 0. Beyond 16 that is taken for underflow."""
    flat = slope == 0
    edges = set()
    for i in (flat[1:] != flat[:-1]).nonzero().view(-1).tolist():
        a, b = z[i], z[i + 1]
        run = flat[max(0, i - 8) : i + 1] if bool(flat[i]) else flat[i + 1 : i + 10]
        if float(a.abs()) > 16 or float(b - a) < 1e-4 or not bool(run.all()):
            continue
        edges.add(rounded(bisect(function, (lambda s: s == 0) if bool(flat[i]) else (lambda s: s != 0), a, b)))
    return edges


def _fold(
    turn: tuple[float, float],
    extremum: float,
    far_left: float,
    far_right: float,
    is_maximum: bool,
    steepest: float,
    turn_is_left: bool,
) -> Fold:
    """``turn_is_left``: whether the turn itself has the left branch's slope. (It lies on the branch without a mark.)"""
    if abs(extremum) < NOISE * steepest:
        extremum = 0.0
    # The branch with the smaller range of outputs is the marked one: all its outputs are ambiguous.
    marks_right = far_left > far_right or (far_left == far_right and turn_is_left)
    marked: Literal["left", "right"] = "right" if marks_right else "left"
    ceiling = min(far_left, far_right)
    ambiguous: Ambiguous = "negative" if ceiling <= 1e-9 * steepest else "positive" if extremum >= 0 else "both"
    true_sign = ambiguous
    if is_maximum and ambiguous != "both":
        true_sign = "positive" if ambiguous == "negative" else "negative"
    position = turn[0] if marked == "left" else turn[1]
    largest = abs(extremum) if ambiguous == "negative" else max(abs(far_left), abs(far_right), abs(extremum))
    return Fold(position, -extremum if is_maximum else extremum, is_maximum, true_sign, marked, largest < 1e4)


def _points(kinks: list[Kink], sign: float, fold: Fold | None) -> list[Level]:
    """Kinks with a slope of their own: autograd returns neither side's, and the output carries no branch bit or is 0.

    If one side is flat, all its inputs have the kink's output, and their slope counts.
    """
    levels = []
    for kink in kinks:
        apart = 1e-9 * max(1.0, abs(kink.before), abs(kink.after))
        neither = min(abs(kink.slope - kink.before), abs(kink.slope - kink.after)) > apart
        if neither and (fold is None or kink.output == 0):
            on_left = fold is not None and kink.position < fold.position
            marked = fold is not None and on_left == (fold.marked == "left") and kink.position != fold.position
            levels.append(Level("kink", sign * kink.output, kink.slope, marked, kink.position))
    return levels
