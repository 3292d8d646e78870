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
from .features import Features, Fold, find_features, measurement_points
from .folded import FoldedDerivative, fit
from .kinks import NeedsInput
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
    """Errors of a derivative: the relative rms over N(0, 1), and the largest absolute error anywhere."""

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
        if dtype not in PRECISIONS:
            return "a fitted derivative is accurate to float32, not to float64"
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
    count = len(normal.z)
    z, y, slope = (torch.cat([a, b]) for a, b in zip(normal, anywhere, strict=True))
    exact = torch.where(y.isfinite(), y, 0.0)
    own = function(z.float()).detach().double()
    # Where float32 cannot evaluate the function, its derivative has no meaning.
    sane = y.isfinite() & ((own - exact).abs() <= 0.01 * (exact.abs() + 0.01))

    def errors(found: Tensor, valid: Tensor, stored: Tensor) -> Errors:
        error = (found.double() - slope).abs()
        of_normal = error[:count]  # of N(0, 1)
        for kink in features.kinks:
            # Within a unit of a kink's output the slopes of both sides are right, and the one that autograd has at the
            # kink. A unit of 0 is what a marked output underflows to.
            info = torch.finfo(dtype)
            unit = 2.0 ** (math.frexp(kink.output)[1] - 1) * info.eps
            if kink.output == 0:
                unit = 0.0 if features.fold is None else branch_bit.smallest_marked(dtype)
            close = (stored - float(torch.tensor(kink.output, dtype=dtype))).abs() <= unit
            # Only for inputs within their own rounding of the kink: inputs further away may have the kink's output too,
            # where a side is flat or rounds to it. Inputs of N(0, 1) are numbers of the dtype: only the kink is exempt.
            apart = (z - kink.position).abs() / max(1.0, abs(kink.position))
            is_kink = (close & (apart <= 2 * torch.finfo(torch.float32).eps))[:count]
            close &= apart <= 2 * info.eps
            for side in (kink.before, kink.slope, kink.after):
                of_side = (found.double() - side).abs()
                of_normal = torch.where(is_kink, torch.minimum(of_normal, of_side[:count]), of_normal)
                error = torch.where(close, torch.minimum(error, of_side), error)
        is_sane = valid & slope.isfinite()
        error, of_normal = torch.where(is_sane, error, 0.0), torch.where(is_sane[:count], of_normal, 0.0)
        square = torch.where(slope.isfinite(), slope, 0.0)[:count].square().mean()
        return Errors(float((of_normal.square().mean() / square).sqrt()), float(error.max()))

    def errors_from(outputs: Tensor, valid: Tensor) -> Errors:
        stored = outputs.float()
        if features.fold is None:
            stored = stored.to(dtype).float()
            assert isinstance(derivative, MonotoneDerivative)
            found = derivative(stored)
        else:
            marked = features.fold.marks(z)
            stored = _encoded(stored, marked, dtype, features.fold).to(dtype).float()
            assert isinstance(derivative, FoldedDerivative)
            found = derivative(stored, branch_bit.decode(stored, dtype, features.fold.ambiguous))
            valid = valid & ~(marked & stored.isinf())  # infinity has no last bit
        return errors(found, valid & ~stored.isnan(), stored.double())

    everywhere = torch.ones_like(sane)
    return Measured(errors_from(y, y.isfinite()), errors_from(own, sane), errors(slope.to(dtype), everywhere, y))


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
            raise NeedsInput(f"is out of reach: {whose.format(f'{errors.rms:.1e} (rms), GELU to {limit.rms:.1e}')}")
        if not largest <= allowance * limit.largest:
            raise NeedsInput(f"is out of reach: {whose.format(f'{largest:.1e}, GELU to {limit.largest:.1e}')}")
