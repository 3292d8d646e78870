"""``analyse``: whether a function's output determines its derivative, and a fit of the derivative if it does.

``analyse`` finds the function's features (``features.py``), fits its derivative as a function of the output and, if the
function has a fold, of the branch (``branch_bit.py``), and measures the fit against float64. Functions like GELU take a
short fit (``folded.py``), all others one in segments (``piecewise.py``). It takes half a second to a second.

What it does not do: functions with more than one fold, because one bit distinguishes two branches, and functions that
no short program follows. ``analyse`` then returns the reason; it never raises.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from . import branch_bit
from .features import SCALES, Features, Fold, find_features, measurement_points
from .folded import FoldedDerivative, fit
from .kinks import Kink, NeedsInput, value_and_slope
from .piecewise import Flat, Segments, fit_segments
from .polynomial import PRECISIONS, Precision

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MonotoneDerivative:
    """``f'`` as a function of the output of a monotone function."""

    segments: Segments

    def __call__(self, y: Tensor) -> Tensor:
        return self.segments(None, y, None)

    def differentiable(self, y: Tensor) -> Tensor:
        """The same: no floor stops its gradient."""
        return self(y)


class Errors(NamedTuple):
    """Errors of a derivative: the rms over N(0, 1), or smaller normal numbers, in units of the rms derivative over
    N(0, 1); and the largest absolute error anywhere."""

    rms: float
    largest: float


#: The errors of GELU's derivative from the output with its branch bit.
GELU_ERRORS = {
    torch.float32: Errors(1.1e-6, 9.1e-5),
    torch.float16: Errors(8.3e-4, 6.6e-3),
    torch.bfloat16: Errors(4.2e-3, 2.4e-2),
}
#: No derivative may err more than GELU's times this. The largest error counts in units of the steepest slope.
ALLOWANCE = 2.0
#: The same where the function is computed in float32, because its formula may amplify rounding errors: GELU's tanh form
#: errs by four units where correct rounding errs by one, which doubles the error next to the minimum.
FLOAT32_ALLOWANCE = 3.0
COARSE = "has an output that tells its derivative too coarsely"


@dataclass(frozen=True)
class Measured:
    """The measured errors for outputs of one dtype.

    Attributes:
        from_exact_output: of the derivative from the exact f(z), rounded to the dtype with the branch bit.
        from_float32_output: the same with f computed in float32, as layers do.
        rounded: of the exact f' rounded to the dtype, which is the least that eager PyTorch errs.
    """

    from_exact_output: Errors
    from_float32_output: Errors
    rounded: Errors


@dataclass(frozen=True, eq=False)
class Analysis:
    """The result of ``analyse``.

    Attributes:
        kind: "monotone": the output determines the derivative; "folded": it does with a branch bit; "input": it does
            not.
        reason: why, in one sentence.
        fold: the fold, if the kind is "folded".
        measured: the errors, by the dtypes of outputs for which there is a fit.
        refusals: by dtype, why outputs of this dtype are too inaccurate although those of another are not.
        derivatives: the fits, by the dtype of the outputs and the dtype whose accuracy the fit has.
    """

    kind: Literal["monotone", "folded", "input"]
    reason: str
    fold: Fold | None = None
    measured: Mapping[torch.dtype, Measured] = field(default_factory=dict)
    refusals: Mapping[torch.dtype, str] = field(default_factory=dict)
    derivatives: Mapping[tuple[torch.dtype, torch.dtype], MonotoneDerivative | FoldedDerivative] = field(
        default_factory=dict, repr=False
    )

    def output_refusal(self, dtype: torch.dtype) -> str | None:
        """Why outputs of ``dtype`` do not determine the derivative, or None if they do."""
        if self.kind == "input":
            return self.reason
        return self.refusals.get(dtype)

    def derivative(
        self, dtype: torch.dtype = torch.float32, *, closest: bool = False
    ) -> MonotoneDerivative | FoldedDerivative:
        """The fit for outputs of ``dtype``: as accurate as these allow, or (``closest``) the most accurate one."""
        return self.derivatives.get((dtype, torch.float32 if closest else dtype)) or self.derivatives[dtype, dtype]


@in_clean_state
def analyse(function: Function) -> Analysis:
    """Whether the output of ``function``, a torch function of one tensor, determines its derivative; and the fit."""
    try:
        features = find_features(function)
        return _analysed(function, features)
    except NeedsInput as reason:
        return Analysis("input", f"the function {reason}")
    except Exception as error:  # a user's function may raise anything
        line = str(error).strip().split("\n")[0]
        return Analysis("input", f"the function cannot be analysed in float64: {type(error).__name__}: {line}")


def _analysed(function: Function, features: Features) -> Analysis:
    derivatives: dict[tuple[torch.dtype, torch.dtype], MonotoneDerivative | FoldedDerivative] = {}
    measured, refusals = {}, {}
    fits: dict[torch.dtype, Callable[[torch.dtype], MonotoneDerivative | FoldedDerivative]] = {}
    for dtype, precision in PRECISIONS.items():
        try:
            fits[dtype] = _fitted(function, features, precision)
            derivatives[dtype, dtype] = fits[dtype](dtype)
            if torch.float32 in fits:
                derivatives[dtype, torch.float32] = fits[torch.float32](dtype)
            measured[dtype] = measure(function, features, derivatives[dtype, dtype], dtype)
            _refuse_untold_kinks(function, features, derivatives[dtype, dtype], dtype)
            _refuse_what_is_inaccurate(measured[dtype], features.steepest, dtype)
        except NeedsInput as reason:
            refusals[dtype] = f"the function {reason}"
    if len(refusals) == len(PRECISIONS):
        return Analysis("input", refusals[torch.float32], None, measured)
    if features.fold is None:
        way = "falls" if features.is_falling else "rises"
        return Analysis("monotone", f"the function {way} all the way", None, measured, refusals, derivatives)
    reason_ = f"the function turns once, at z = {features.fold.position:.4g}"
    return Analysis("folded", reason_, features.fold, measured, refusals, derivatives)


def _fitted(
    function: Function, features: Features, precision: Precision
) -> Callable[[torch.dtype], MonotoneDerivative | FoldedDerivative]:
    """The fit with this precision, as a function of the dtype of the outputs."""
    fold = features.fold
    if fold is not None and _is_like_gelu(features):
        relative = replace(precision, tolerance=precision.tolerance * features.steepest)
        with contextlib.suppress(ValueError):  # segments may fit where the short form does not
            folded = fit.__wrapped__(function, relative)  # type: ignore[attr-defined]  # of in_clean_state
            return lambda _: FoldedDerivative(fold, folded.of_distance)
    segments = fit_segments(features, precision)

    def for_outputs(dtype: torch.dtype) -> MonotoneDerivative | FoldedDerivative:
        flats = tuple(_flats(function, features, dtype))
        whole = Segments(segments.segments, flats, segments.fold, segments.is_falling)
        return MonotoneDerivative(whole) if fold is None else FoldedDerivative(fold, whole)

    return for_outputs


def _is_like_gelu(features: Features) -> bool:
    fold = features.fold
    assert fold is not None
    if fold.ambiguous != "negative" or fold.is_maximum or fold.marked != "left" or len(features.stretches) != 2:
        return False
    falling, rising = sorted(features.stretches, key=lambda stretch: not stretch.marked)
    return falling.upper == "limit" and abs(falling.stop) < 1e-9 and rising.upper == "infinity" and not features.kinks


def _flats(function: Function, features: Features, dtype: torch.dtype) -> list[Flat]:
    """The levels in outputs of ``dtype``: rounded, with the branch bit, and one float32 unit wider on both sides,
    because a formula may miss a level other than 0 by that."""
    flats: list[Flat] = []
    for level in features.levels:
        true = -level.y if features.is_falling else level.y
        exact = torch.tensor([true], dtype=torch.float32)
        shown = [exact, *(torch.nextafter(exact, exact * f) for f in (0.0, 2.0) if true != 0)]
        evaluated = function(torch.tensor([level.position], dtype=torch.float32)).detach().float()
        if float((evaluated - exact).abs()) <= 1e-5 * max(1.0, abs(true)):
            shown.append(evaluated)
        values = torch.cat(shown)
        if features.fold is not None:
            values = _encoded(values, torch.full((len(values),), level.marked), dtype, features.fold)
        stored = values.to(dtype).double()
        stored = -stored if features.is_falling else stored
        low = -math.inf if level.place == "bottom" else float(stored.min())
        high = math.inf if level.place == "top" else float(stored.max())
        if level.place == "kink" and any(f.marked == level.marked and low <= f.high and f.low <= high for f in flats):
            continue
        flats.append(Flat(low, high, level.slope, level.marked))
    return flats


def _encoded(y: Tensor, marked: Tensor, dtype: torch.dtype, fold: Fold) -> Tensor:
    return branch_bit.encode(y, marked, dtype, fold.ambiguous, bounded=fold.bounded)


def measure(
    function: Function, features: Features, derivative: MonotoneDerivative | FoldedDerivative, dtype: torch.dtype
) -> Measured:
    """The errors of a derivative that is computed in float32 from stored outputs, as devices do."""
    normal, anywhere = measurement_points(function, features, dtype)
    z, y, slope = (torch.cat([a, b]) for a, b in zip(normal, anywhere, strict=True))
    trial = _Trial(features, dtype, z, slope, len(normal.z))
    exact = torch.where(y.isfinite(), y, 0.0)
    own = function(z.float()).detach().double()
    # Where float32 cannot evaluate the function, its derivative has no meaning.
    sane = y.isfinite() & ((own - exact).abs() <= 0.01 * (exact.abs() + 0.01))
    everywhere = torch.ones_like(sane)
    return Measured(
        trial.errors_from(y, derivative, y.isfinite()),
        trial.errors_from(own, derivative, sane),
        trial.errors(slope.to(dtype), y, everywhere),
    )


@dataclass(frozen=True, eq=False)
class _Trial:
    """Inputs, of which the first, ``normal``, are normal at each of ``SCALES``, and the derivatives there."""

    features: Features
    dtype: torch.dtype
    z: Tensor
    slope: Tensor
    normal: int

    def errors_from(self, outputs: Tensor, derivative: MonotoneDerivative | FoldedDerivative, valid: Tensor) -> Errors:
        """Those of the derivative from outputs that are stored in the dtype."""
        fold = self.features.fold
        stored = _stored(outputs, self.z, self.dtype, fold)
        if fold is not None:
            valid = valid & ~(fold.marks(self.z) & stored.isinf())  # infinity has no last bit
        return self.errors(_from_stored(derivative, stored, self.dtype), stored.double(), valid & ~stored.isnan())

    def errors(self, found: Tensor, stored: Tensor, valid: Tensor) -> Errors:
        """Those of the derivatives ``found`` for the outputs ``stored``."""
        valid = valid & self.slope.isfinite()
        error = torch.where(valid, (found.double() - self.slope).abs(), 0.0)
        by_scale = error[: self.normal].view(len(SCALES), -1).square().mean(1).sqrt()
        # In units of the rms slope over N(0, 1), which is the first scale: the slopes of small inputs may all be small.
        slope = torch.where(self.slope.isfinite(), self.slope, 0.0)
        size = slope[: self.normal // len(SCALES)].square().mean().sqrt()
        for kink in self.features.kinks:
            close = self._is_next_to(kink, stored) & valid
            for right in (kink.before, kink.slope, kink.after):
                error = torch.where(close, torch.minimum(error, (found.double() - right).abs()), error)
        return Errors(float(by_scale.max() / size), float(error.max()))

    def _is_next_to(self, kink: Kink, stored: Tensor) -> Tensor:
        """Where the slopes of both sides are right, and the one that autograd has at the kink: within a unit of the
        kink's output, for inputs within their own rounding of the kink. Inputs further away may have its output too,
        where a side is flat or rounds to it."""
        eps = torch.finfo(self.dtype).eps
        unit = 2.0 ** (math.frexp(kink.output)[1] - 1) * eps if kink.output else 0.0
        same = (stored - float(torch.tensor(kink.output, dtype=self.dtype))).abs() <= unit
        return same & ((self.z - kink.position).abs() <= 2 * eps * max(1.0, abs(kink.position)))


def _stored(outputs: Tensor, z: Tensor, dtype: torch.dtype, fold: Fold | None) -> Tensor:
    """What outputs of ``dtype`` hold, in float32."""
    stored = outputs.float()
    return (stored if fold is None else _encoded(stored, fold.marks(z), dtype, fold)).to(dtype).float()


def _from_stored(derivative: MonotoneDerivative | FoldedDerivative, stored: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(derivative, MonotoneDerivative):
        return derivative(stored)
    return derivative(stored, branch_bit.decode(stored, dtype, derivative.fold.ambiguous))


def _refuse_untold_kinks(
    function: Function, features: Features, derivative: MonotoneDerivative | FoldedDerivative, dtype: torch.dtype
) -> None:
    """At a kink itself the derivative must be autograd's. Many inputs may lie there: zeros of a padding or a dropout,
    values that were clamped, 16-bit numbers. A side that is flat has the kink's output too, often with another slope.
    """
    allowed = FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].largest * features.steepest
    for kink in features.kinks:
        at = torch.tensor([kink.position], dtype=torch.float64).to(dtype).float()  # in which layers compute
        y, slope = value_and_slope(function, at)
        stored = _stored(y, at.double(), dtype, features.fold)
        found = _from_stored(derivative, stored, dtype)
        if not float((found.double() - slope.double()).abs()) <= allowed:
            raise NeedsInput(f"has a derivative at its kink, z = {kink.position:.4g}, that its output does not tell")


def _refuse_what_is_inaccurate(measured: Measured, steepest: float, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    limit = GELU_ERRORS[dtype]
    for errors, allowance, whose in (
        (measured.from_exact_output, ALLOWANCE, f"a {name} output determines the derivative to within {{}}"),
        (
            measured.from_float32_output,
            FLOAT32_ALLOWANCE,
            f"computed in float32, a {name} output determines the derivative to {{}}",
        ),
    ):
        largest = errors.largest / steepest if steepest else errors.largest
        if not errors.rms <= allowance * limit.rms:
            raise NeedsInput(f"{COARSE}: {whose.format(f'{errors.rms:.1e} (rms), GELU to {limit.rms:.1e}')}")
        if not largest <= allowance * limit.largest:
            raise NeedsInput(f"{COARSE}: {whose.format(f'{largest:.1e}, GELU to {limit.largest:.1e}')}")
