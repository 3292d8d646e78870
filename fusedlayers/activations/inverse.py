"""The derivative of an activation as a function of its output, found from the activation itself.

``analyse`` decides whether there is one: it looks at the function (``shape.py``), fits its derivative as a function of
the output and, where the function turns, of the branch (``branch.py``), and measures what comes out against float64.
Everything is in float64, in a fraction of a second; no coefficient is written down anywhere.

Most derivatives are fitted in segments (``segments.py``). Activations like GELU, which fall to one negative minimum and
then rise, with the falling branch beginning at 0, have a form of their own that is shorter (``fit``):

* around the minimum and on the rising branch, ``v = +-sqrt(y - y_min)``. The derivative is analytic in v *through* the
  minimum, so one polynomial serves both sides of it;
* on the falling branch's tail, where y returns to 0, ``u = sqrt(log(y_min / y))`` and ``f' = y * P(u)``, so that the
  derivative vanishes with y.

What it does not do: functions with more than one fold (a bit tells two branches apart), and what no short program
follows. ``analyse`` says so, and never raises.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..clean import in_clean_state
from . import branch
from .kinks import NeedsInput
from .polynomial import MAXIMUM_DEGREE, PRECISIONS, Piece, Precision, interpolate
from .segments import TINY, Flat, Segments, fit_segments, to_float32
from .shape import Fold, Shape, look, sweep

__all__ = [
    "PRECISIONS",
    "Analysis",
    "Errors",
    "Fold",
    "FoldedDerivative",
    "MonotoneDerivative",
    "Piece",
    "Polynomials",
    "Precision",
    "analyse",
    "find_fold",
    "fit",
    "interpolate",
]

Function = Callable[[Tensor], Tensor]

#: Inputs searched for the fold. Beyond it every activation of this kind is flat or straight to within float32.
REACH = 40.0
#: The tail polynomial takes over where the output has returned to this fraction of the minimum: far enough from the
#: minimum for log(y_min / y) to be free of cancellation, far enough from 0 for sqrt(y - y_min) to resolve y.
TAIL_FRACTION = 0.4


@dataclass(frozen=True)
class MonotoneDerivative:
    """``f'`` from the output alone: ``derivative(y)`` for floating y."""

    segments: Segments

    def __call__(self, y: Tensor) -> Tensor:
        return self.segments(None, y, None)

    def differentiable(self, y: Tensor) -> Tensor:
        """The same: nothing in it stops a gradient."""
        return self(y)


@dataclass(frozen=True)
class FoldedDerivative:
    """``f'`` from the output and the branch: ``derivative(y, marked)``, for floating y and boolean ``marked``.

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


@dataclass(frozen=True)
class Polynomials:
    """A fitted ``of_distance``: ``pieces`` in ``v = +-sqrt(distance)`` without gaps, the first across the minimum, and
    ``tail`` in ``u = sqrt(log(y_min / y))``."""

    minimum: float
    pieces: tuple[Piece, ...]
    tail: Piece

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
        return torch.where(in_tail, y_tail * self.tail(u), value)


@in_clean_state
def fit(function: Function, precision: Precision = PRECISIONS[torch.float32]) -> FoldedDerivative:
    """Find the fold of ``function`` and fit its derivative on both branches.

    Raises:
        ValueError: the function has no minimum below zero, more than one fold, or no fit that meets the tolerance.
    """
    tolerance = precision.tolerance
    fold = find_fold(function)
    root = math.sqrt(-fold.extremum)

    def z_of_v(v: Tensor) -> Tensor:
        return _solve(function, fold.extremum + v * v, fold, left=v < 0)

    def z_of_u(u: Tensor) -> Tensor:
        return _solve(function, fold.extremum * torch.exp(-u * u), fold, left=torch.ones_like(u, dtype=torch.bool))

    def derivative_of_v(v: Tensor) -> Tensor:
        return derivative(function, z_of_v(v))

    def ratio_of_u(u: Tensor) -> Tensor:
        return derivative(function, z_of_u(u)) / (fold.extremum * torch.exp(-u * u))

    start = -root * math.sqrt(1.0 - TAIL_FRACTION)
    stop = _settled(function, fold, tolerance)
    pieces: list[Piece] = []
    while start < stop:
        piece = _longest_piece(derivative_of_v, start, stop, precision)
        pieces.append(piece)
        start = piece.stop

    # Past this u the derivative is below a thousandth of the tolerance, whatever the clamped polynomial says.
    tail_stop = math.sqrt(math.log(1e3 * REACH * -fold.extremum / tolerance))
    tail_start = math.sqrt(-math.log(TAIL_FRACTION))
    for degree in range(precision.degree, MAXIMUM_DEGREE + 1):
        tail = interpolate(ratio_of_u, tail_start, tail_stop, degree)
        u = torch.linspace(tail_start, tail_stop, 2001, dtype=torch.float64)
        weight = -fold.extremum * torch.exp(-u * u)
        if float((weight * (tail(u) - ratio_of_u(u)).abs()).max()) <= tolerance:
            return FoldedDerivative(fold, Polynomials(fold.extremum, tuple(pieces), tail))
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


def _settled(function: Function, fold: Fold, tolerance: float) -> float:
    """The v past which the derivative is constant to within half the tolerance."""
    z = torch.linspace(fold.position, REACH, 40_001, dtype=torch.float64)
    slope = derivative(function, z)
    unsettled = (slope - slope[-1]).abs() > tolerance / 2
    last = int(unsettled.nonzero().max()) + 1 if bool(unsettled.any()) else 1
    if last >= len(z) - 1:
        raise ValueError("fit: the derivative does not settle to a constant on the rising branch")
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


# --- any function -----------------------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Errors of a derivative: relative rms over N(0, 1), and the largest anywhere, absolute."""

    rms: float
    largest: float


#: What GELU's derivative loses by being told by the output and a branch bit in it; no derivative may lose more.
GELU_ERRORS = {
    torch.float32: Errors(1.1e-6, 9.1e-5),
    torch.float16: Errors(8.3e-4, 6.6e-3),
    torch.bfloat16: Errors(4.2e-3, 2.4e-2),
}
#: ... than this much more, and times the steepest slope where that is above 1.
ALLOWANCE = 1.5
#: The same where the function is computed in float32, whose rounding errors its formula may have amplified: GELU's
#: tanh form errs by four units where correct rounding errs by one, which is twice the error next to the minimum.
ALLOWANCE_EVALUATED = 3.0


@dataclass(frozen=True)
class Measured:
    """What was measured for outputs of one dtype.

    Attributes:
        told: errors of the derivative told by f(z) rounded to the dtype, with the branch in it.
        evaluated: the same, with f computed in float32 first, as layers do.
        rounded: errors of f' itself when it is rounded to the dtype, which is what eager PyTorch has.
    """

    told: Errors
    evaluated: Errors
    rounded: Errors


@dataclass(frozen=True, eq=False)
class Analysis:
    """What is known about a function.

    Attributes:
        kind: "monotone", the output tells the derivative; "folded", with a branch bit it does; "input", it does not.
        reason: why, in one sentence.
        fold: where the function turns, if it is folded.
        measured: by dtype of the output, where the derivative could be fitted.
        refusals: by dtype, why the output of this dtype does not do although that of another does.
    """

    kind: Literal["monotone", "folded", "input"]
    reason: str
    fold: Fold | None = None
    measured: Mapping[torch.dtype, Measured] = field(default_factory=dict)
    refusals: Mapping[torch.dtype, str] = field(default_factory=dict)
    derivatives: Mapping[tuple[torch.dtype, torch.dtype], MonotoneDerivative | FoldedDerivative] = field(
        default_factory=dict, repr=False
    )

    def refused_because(self, dtype: torch.dtype) -> str | None:
        """Why outputs of ``dtype`` do not tell the derivative, or None if they do."""
        if self.kind == "input":
            return self.reason
        if dtype not in PRECISIONS:
            return "a fitted derivative is accurate to float32, not to float64"
        return self.refusals.get(dtype)

    def derivative(
        self, dtype: torch.dtype = torch.float32, *, closest: bool = False
    ) -> MonotoneDerivative | FoldedDerivative:
        """The derivative from outputs of ``dtype``, as closely as they tell it, or as closely as can be."""
        found = self.derivatives.get((dtype, torch.float32 if closest else dtype)) or self.derivatives[dtype, dtype]
        return found


@in_clean_state
def analyse(function: Function) -> Analysis:
    """Decide what a layer has to keep of ``function``, an ordinary torch function of one tensor; fit its derivative."""
    try:
        shape = look(function)
        return _analysed(function, shape)
    except NeedsInput as reason:
        return Analysis("input", f"the function {reason}")
    except Exception as error:  # a function may do anything at all with what it is given
        line = str(error).strip().split("\n")[0]
        return Analysis("input", f"the function cannot be analysed in float64: {type(error).__name__}: {line}")


def _analysed(function: Function, shape: Shape) -> Analysis:
    derivatives: dict[tuple[torch.dtype, torch.dtype], MonotoneDerivative | FoldedDerivative] = {}
    measured, refusals = {}, {}
    fits: dict[torch.dtype, Callable[[torch.dtype], MonotoneDerivative | FoldedDerivative]] = {}
    for dtype, precision in PRECISIONS.items():
        try:
            fits[dtype] = _fitted(function, shape, precision)
            derivatives[dtype, dtype] = fits[dtype](dtype)
            if torch.float32 in fits:
                derivatives[dtype, torch.float32] = fits[torch.float32](dtype)
            measured[dtype] = measure(function, shape, derivatives[dtype, dtype], dtype)
            _refuse_what_is_inaccurate(measured[dtype], shape.steepest, dtype)
        except NeedsInput as reason:
            refusals[dtype] = f"the function {reason}"
    if len(refusals) == len(PRECISIONS):
        return Analysis("input", refusals[torch.float32], None, measured)
    if shape.fold is None:
        way = "falls" if shape.is_falling else "rises"
        return Analysis("monotone", f"the function {way} all the way", None, measured, refusals, derivatives)
    reason_ = f"the function turns once, at z = {shape.fold.position:.4g}"
    return Analysis("folded", reason_, shape.fold, measured, refusals, derivatives)


def _fitted(
    function: Function, shape: Shape, precision: Precision
) -> Callable[[torch.dtype], MonotoneDerivative | FoldedDerivative]:
    """The derivative to this precision, for outputs of a dtype yet to be named."""
    fold = shape.fold
    if fold is not None and _is_like_gelu(shape):
        with contextlib.suppress(ValueError):  # where the short form does not fit, segments may
            folded = fit.__wrapped__(function, precision)  # type: ignore[attr-defined]
            return lambda _: FoldedDerivative(fold, folded.of_distance)
    segments = fit_segments(shape, precision)

    def for_outputs(dtype: torch.dtype) -> MonotoneDerivative | FoldedDerivative:
        flats = tuple(_flats(function, shape, dtype))
        whole = Segments(segments.segments, flats, segments.fold, segments.is_falling)
        return MonotoneDerivative(whole) if fold is None else FoldedDerivative(fold, whole)

    return for_outputs


def _is_like_gelu(shape: Shape) -> bool:
    fold = shape.fold
    assert fold is not None
    if fold.ambiguous != "negative" or fold.is_maximum or fold.marked != "left" or len(shape.stretches) != 2:
        return False
    falling, rising = sorted(shape.stretches, key=lambda stretch: not stretch.marked)
    return falling.upper == "limit" and abs(falling.stop) < 1e-9 and rising.upper == "infinity" and not shape.kinks


def _flats(function: Function, shape: Shape, dtype: torch.dtype) -> list[Flat]:
    """The levels as outputs of ``dtype`` show them: rounded, marked, and a float32 unit off in both directions, because
    that is how well a formula keeps a level that is not 0."""
    flats: list[Flat] = []
    for level in shape.levels:
        true = -level.y if shape.is_falling else level.y
        exact = torch.tensor([true], dtype=torch.float32)
        shown = [exact, *(torch.nextafter(exact, exact * f) for f in (0.0, 2.0) if true != 0)]
        evaluated = function(torch.tensor([level.position], dtype=torch.float32)).detach().float()
        if float((evaluated - exact).abs()) <= 1e-5 * max(1.0, abs(true)):
            shown.append(evaluated)
        values = torch.cat(shown)
        if shape.fold is not None:
            values = _encoded(values, torch.full((len(values),), level.marked), dtype, shape.fold)
        stored = values.to(dtype).double()
        stored = -stored if shape.is_falling else stored
        low = -math.inf if level.place == "bottom" else float(stored.min())
        high = math.inf if level.place == "top" else float(stored.max())
        if level.place == "kink" and any(f.marked == level.marked and low <= f.high and f.low <= high for f in flats):
            continue
        flats.append(Flat(low, high, level.slope, level.marked))
    return flats


def _encoded(y: Tensor, marked: Tensor, dtype: torch.dtype, fold: Fold) -> Tensor:
    return branch.encode(y, marked, dtype, fold.ambiguous, bounded=fold.bounded)


def measure(
    function: Function, shape: Shape, derivative: MonotoneDerivative | FoldedDerivative, dtype: torch.dtype
) -> Measured:
    """The errors of a derivative: in float32, from stored outputs, as devices compute it."""
    normal, anywhere = sweep(function, shape)
    count = len(normal.z)
    z, y, slope = (torch.cat([a, b]) for a, b in zip(normal, anywhere, strict=True))
    exact = torch.where(y.isfinite(), y, 0.0)
    own = function(z.float()).detach().double()
    # Where float32 is at a loss about the function itself its derivative has no meaning.
    sane = y.isfinite() & ((own - exact).abs() <= 0.01 * (exact.abs() + 0.01))

    def errors(told: Tensor, known: Tensor, stored: Tensor) -> Errors:
        error = (told.double() - slope).abs()
        for kink in shape.kinks:
            # Within a unit of a kink's output the slopes of both its sides are right, and what autograd has between
            # them. A unit of 0 is what underflows.
            info = torch.finfo(dtype)
            unit = 2.0 ** (math.frexp(kink.output)[1] - 1) * info.eps
            if kink.output == 0:
                unit = 0.0 if shape.fold is None else info.smallest_normal * info.eps
            close = (stored - float(torch.tensor(kink.output, dtype=dtype))).abs() <= unit
            # Inputs are rounded, too. That is all that excuses: many further ones may have the kink's output, where a
            # side is flat, or rounds to it.
            close &= (z - kink.position).abs() <= 2 * info.eps * max(1.0, abs(kink.position))
            for side in (kink.before, kink.slope, kink.after):
                error = torch.where(close, torch.minimum(error, (told.double() - side).abs()), error)
        error = torch.where(known & slope.isfinite(), error, 0.0)
        square = torch.where(slope.isfinite(), slope, 0.0)[:count].square().mean()
        return Errors(float((error[:count].square().mean() / square).sqrt()), float(error.max()))

    def told_by(outputs: Tensor, known: Tensor) -> Errors:
        stored = outputs.float()
        if shape.fold is None:
            stored = stored.to(dtype).float()
            assert isinstance(derivative, MonotoneDerivative)
            told = derivative(stored)
        else:
            marked = shape.fold.marks(z)
            stored = _encoded(stored, marked, dtype, shape.fold).to(dtype).float()
            assert isinstance(derivative, FoldedDerivative)
            told = derivative(stored, branch.decode(stored, dtype, shape.fold.ambiguous))
            known = known & ~(marked & stored.isinf())  # which has no last bit
        return errors(told, known & ~stored.isnan(), stored.double())

    everywhere = torch.ones_like(sane)
    return Measured(told_by(y, y.isfinite()), told_by(own, sane), errors(slope.to(dtype), everywhere, y))


def _refuse_what_is_inaccurate(measured: Measured, steepest: float, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    scale = max(1.0, steepest)
    limit = GELU_ERRORS[dtype]
    for errors, allowance, whose in (
        (measured.told, ALLOWANCE, f"a {name} output tells the derivative to within {{}}"),
        (measured.evaluated, ALLOWANCE_EVALUATED, f"computed in float32, a {name} output tells the derivative to {{}}"),
    ):
        rms, largest = (allowance * bound * scale for bound in limit)
        if not errors.rms <= rms:
            raise NeedsInput(f"is out of reach: {whose.format(f'{errors.rms:.1e} (rms), GELU to {limit.rms:.1e}')}")
        if not errors.largest <= largest:
            raise NeedsInput(f"is out of reach: {whose.format(f'{errors.largest:.1e}, GELU to {limit.largest:.1e}')}")
