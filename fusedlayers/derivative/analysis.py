"""``analyse``: whether a function's output determines its derivative, and a fit of the derivative if it does.

``analyse`` finds the function's features (``features.py``), fits its derivative as a function of the output
(``monotone.py``) or, if the function has one minimum, of the output and the branch (``folded.py``), and measures the
fit against the function itself in float64. It takes half a second to a second.

What it does not do: functions with another fold than one negative minimum, with kinks beside it or at numbers that are
not round, and functions that no short program follows. ``analyse`` then returns the reason, and the function saves its
input.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..utils.caching import in_clean_state
from . import branch_bit
from .features import Features, Fold, Function, NeedsInput, find_features, sample_points, value_and_slope
from .folded import FoldedDerivative, fit_derivative
from .monotone import Level, MonotoneDerivative, Stretch, fit_segments, stretches
from .polynomial import PRECISIONS

Derivative = FoldedDerivative | MonotoneDerivative


class Errors(NamedTuple):
    """Errors of a derivative: the rms over N(0, 1), or smaller normal numbers, in units of the rms derivative over
    N(0, 1); and the largest error anywhere, in units of the steepest slope."""

    rms: float
    largest: float


#: The errors of GELU's derivative from the output with its branch bit.
GELU_ERRORS = {
    torch.float32: Errors(1.1e-6, 9.1e-5),
    torch.float16: Errors(8.3e-4, 6.6e-3),
    torch.bfloat16: Errors(4.2e-3, 2.4e-2),
}
#: No derivative may err more than GELU's times this, from outputs that are computed in float32 as layers do. A formula
#: may amplify rounding errors: GELU's tanh form errs by four units where correct rounding errs by one, which doubles
#: the error next to the minimum.
FLOAT32_ALLOWANCE = 3.0
#: Standard deviations of the normal inputs that fits are measured on: of small ones many lie next to a kink at 0.
SCALES = (1.0, 0.1, 0.01)


@dataclass(frozen=True, eq=False)
class Analysis:
    """The result of ``analyse``.

    Attributes:
        kind: "monotone": the output determines the derivative; "folded": it does with a branch bit; "input": it does
            not.
        reason: why, in one sentence.
        fold: the fold, if the kind is "folded".
        refusals: by dtype, why outputs of this dtype are too inaccurate although those of another are not.
        derivatives: the fits, by the dtype of the outputs and the dtype whose accuracy the fit has.
    """

    kind: Literal["monotone", "folded", "input"]
    reason: str
    fold: Fold | None = None
    refusals: Mapping[torch.dtype, str] = field(default_factory=dict)
    derivatives: Mapping[tuple[torch.dtype, torch.dtype], Derivative] = field(default_factory=dict, repr=False)

    def output_refusal(self, dtype: torch.dtype) -> str | None:
        """Why outputs of ``dtype`` do not determine the derivative, or None if they do."""
        if self.kind == "input":
            return self.reason
        return self.refusals.get(dtype)

    def derivative(self, dtype: torch.dtype = torch.float32, *, closest: bool = False) -> Derivative:
        """The fit for outputs of ``dtype``: as accurate as these allow, or (``closest``) the most accurate one."""
        return self.derivatives.get((dtype, torch.float32 if closest else dtype)) or self.derivatives[dtype, dtype]


@in_clean_state
def analyse(function: Function) -> Analysis:
    """Whether the output of ``function``, a pointwise torch function of one tensor, which computes in float64 too,
    determines its derivative; and the fit."""
    try:
        return _analysed(function, find_features(function))
    except NeedsInput as reason:
        return Analysis("input", f"the function {reason}")


def _analysed(function: Function, features: Features) -> Analysis:
    fits: dict[torch.dtype, Callable[[torch.dtype], Derivative]] = {}
    derivatives: dict[tuple[torch.dtype, torch.dtype], Derivative] = {}
    refusals = {}
    for dtype in PRECISIONS:
        try:
            fits[dtype] = _fitted(function, features, dtype)
            for precision in {dtype, torch.float32} & fits.keys():
                derivatives[dtype, precision] = fits[precision](dtype)
            _refuse_untold_kinks(function, features, derivatives[dtype, dtype], dtype)
            _refuse_what_is_inaccurate(function, features, derivatives[dtype, dtype], dtype)
        except NeedsInput as reason:
            refusals[dtype] = f"the function {reason}"
    if len(refusals) == len(PRECISIONS):
        return Analysis("input", refusals[torch.float32])
    if features.fold is None:
        way = "falls" if features.is_falling else "rises"
        return Analysis("monotone", f"the function {way} all the way", None, refusals, derivatives)
    turn = f"the function turns once, at z = {features.fold.position:.4g}"
    return Analysis("folded", turn, features.fold, refusals, derivatives)


def _fitted(function: Function, features: Features, dtype: torch.dtype) -> Callable[[torch.dtype], Derivative]:
    """The fit with this dtype's precision, as a function of the dtype of the outputs."""
    precision = PRECISIONS[dtype]
    if features.fold is not None:
        folded = fit_derivative(function, features, precision.tolerance * features.steepest)
        return lambda _: folded
    parts = stretches(function, features)
    segments = fit_segments(parts, features.steepest, precision)
    return lambda stored: MonotoneDerivative(segments, tuple(_levels(features, parts, stored)), features.is_falling)


def _levels(features: Features, parts: list[Stretch], dtype: torch.dtype) -> list[Level]:
    """The outputs of ``dtype`` that have a slope of their own: those of flat parts, and those of kinks, which have the
    slope that autograd returns there. A flat part at a kink has the kink's output too, and counts."""
    found = []
    for place, part in enumerate(parts):
        if part.is_flat:
            low, high = _stored_level(float(part.y[0]), dtype)
            is_bottom, is_top = place == 0, place == len(parts) - 1
            found.append(Level(-math.inf if is_bottom else low, math.inf if is_top else high, 0.0))
    for kink in features.kinks:
        low, high = _stored_level(-kink.output if features.is_falling else kink.output, dtype)
        if not any(low <= level.high and level.low <= high for level in found):
            found.append(Level(low, high, kink.slope))
    return found


def _stored_level(y: float, dtype: torch.dtype) -> tuple[float, float]:
    """The range of what is stored for the output y: a formula may miss it by a float32 unit if it is not 0."""
    exact = torch.tensor(y, dtype=torch.float32)
    beside = (torch.nextafter(exact, exact * factor) for factor in (0.0, 2.0) if y != 0)
    stored = torch.stack([exact, *beside]).to(dtype)
    return float(stored.min()), float(stored.max())


# --- measuring --------------------------------------------------------------------------------------------------------


def _told(derivative: Derivative, y: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """The derivative, computed in float32 as devices do, from what outputs of ``dtype`` hold of y, the outputs of z."""
    marked = None
    if isinstance(derivative, FoldedDerivative):
        y = branch_bit.encode(y.float(), derivative.fold.marks(z), dtype)
        marked = branch_bit.decode(y, dtype)
    return derivative(y.to(dtype).float(), marked).double()


def measurement_points(features: Features, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs for measuring a fit for outputs of ``dtype``: quantiles of N(0, 1) times each of ``SCALES``, as numbers of
    that dtype, which is what PyTorch computes the derivative from; and float32 numbers of all sizes, with more near the
    fold and kinks."""
    quantiles = (torch.arange(1 << 15, dtype=torch.float64) + 0.5) / (1 << 15)
    near = torch.logspace(-9, -1, 161, dtype=torch.float64)
    places = [kink.position for kink in features.kinks] + ([] if features.fold is None else [features.fold.position])
    sizes = torch.logspace(-44, -4, 160, dtype=torch.float64)
    between = (sample_points()[1:] + sample_points()[:-1]) / 2
    # Denser than the samples of the fit, so that an error between two of those shows.
    wide = torch.logspace(1, 6, 10_000, dtype=torch.float64)
    around = [place + side * near for place in places for side in (-1, 1)]
    normal = torch.cat([scale * torch.special.ndtri(quantiles) for scale in SCALES]).to(dtype).double()
    anywhere = torch.cat([between, *around, sizes, -sizes, wide, -wide]).float().double()
    return normal, anywhere[(anywhere >= features.z[0]) & (anywhere <= features.z[-1])]


def _refuse_what_is_inaccurate(
    function: Function, features: Features, derivative: Derivative, dtype: torch.dtype
) -> None:
    """Measure a derivative from outputs that are computed in float32, as layers do."""
    normal, anywhere = measurement_points(features, dtype)
    z = torch.cat([normal, anywhere])
    y, slope = value_and_slope(function, z)
    own = function(z.float()).detach()
    # Where float32 cannot evaluate the function, its derivative has no meaning.
    valid = y.isfinite() & slope.isfinite() & ((own.double() - y).abs() <= 0.01 * (y.abs() + 0.01))
    for kink in features.kinks:  # within an input's own rounding of a kink, or float32's of 1, either side is right
        reach = torch.finfo(dtype).eps * abs(kink.position) + torch.finfo(torch.float32).eps
        valid &= (z - kink.position).abs() > 2 * reach
    error = torch.where(valid, (_told(derivative, own, z, dtype) - slope).abs(), 0.0)
    by_scale = error[: len(normal)].view(len(SCALES), -1).square().mean(1).sqrt()
    # In units of the rms slope over N(0, 1), which is the first scale: the slopes of small inputs may all be small.
    size = slope[: len(normal) // len(SCALES)].square().mean().sqrt()
    found = Errors(float(by_scale.max() / size), float(error.max()) / features.steepest)
    for kind, off, of_gelu in zip((" (rms)", ""), found, GELU_ERRORS[dtype], strict=True):
        if not off <= FLOAT32_ALLOWANCE * of_gelu:
            name = str(dtype).removeprefix("torch.")
            raise NeedsInput(
                f"has an output that tells its derivative too coarsely: a {name} output determines the derivative to "
                f"{off:.1e}{kind}, GELU to {of_gelu:.1e}"
            )


def _refuse_untold_kinks(function: Function, features: Features, derivative: Derivative, dtype: torch.dtype) -> None:
    """Refuse kinks that outputs do not tell: at a kink the derivative must be autograd's. Many inputs may lie there:
    zeros of a padding or a dropout, values that were clamped, 16-bit numbers. A side that is flat has the kink's output
    too, often with another slope."""
    allowed = FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].largest * features.steepest
    for kink in features.kinks:
        at = torch.tensor([kink.position], dtype=torch.float64).to(dtype).float()  # in which layers compute
        y, slope = value_and_slope(function, at)
        if not float((_told(derivative, y, at, dtype) - slope.double()).abs()) <= allowed:
            raise NeedsInput(f"has a derivative at its kink, z = {kink.position:.4g}, that its output does not tell")
