"""The features of a function: whether it is monotone or has one minimum, its kinks, and its steepest slope.

The function and autograd's derivative are sampled at some ten thousand float64 numbers from -3e38 to 3e38, most densely
around 0. Kinks (jumps of the derivative) are looked for at round numbers, where formulas have them.

What it does not do: a kink anywhere else is refused where a flat part ends, and not found otherwise, nor is a jump of
the second derivative elsewhere than at 0. No polynomial then follows the derivative (``monotone.py``, ``folded.py``),
and the function saves its input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

#: Slopes below this part of the steepest count as 0.
NOISE = 1e-12
#: A fold must lie within this distance from 0, where samples are dense, and above this output, far from overflow.
FARTHEST_TURN, LOWEST_TURN = 8.0, -1e30
#: A function must be finite up to here. Further out PyTorch's own derivative may overflow.
FINITE_WITHIN = 30.0
#: A function with more kinks is refused, as a staircase.
MAXIMUM_KINKS = 16


class NeedsInput(ValueError):
    """Why a function's output does not determine its derivative: a predicate ("turns 2 times")."""


@dataclass(frozen=True)
class Fold:
    """The fold of a function: its only minimum, ``f(position) = extremum``, which is negative.

    Inputs left of it are on the marked branch, whose outputs are all negative, or 0.
    """

    position: float
    extremum: float

    def marks(self, z: Tensor) -> Tensor:
        """Whether inputs lie on the marked branch."""
        return z < self.position


@dataclass(frozen=True)
class Kink:
    """A jump of the derivative from ``before`` to ``after``. ``slope`` is what autograd returns at the kink itself."""

    position: float
    output: float
    before: float
    after: float
    slope: float


@dataclass(frozen=True, eq=False)
class Features:
    """The features of a function that is monotone or has one minimum.

    Attributes:
        z: the sampled inputs in their order, as far from 0 as the function is finite.
        fold: the minimum, or None.
        is_falling: whether the function falls all the way.
        kinks: the jumps of the derivative, in the order of their positions.
        steepest: the largest absolute slope.
    """

    z: Tensor
    fold: Fold | None
    is_falling: bool
    kinks: tuple[Kink, ...]
    steepest: float


def value_and_slope(function: Function, z: Tensor) -> tuple[Tensor, Tensor]:
    """The function's values and autograd's derivatives at z; 0 where autograd finds no dependence."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        y = function(z)
        slope = None
        if y.requires_grad:
            (slope,) = torch.autograd.grad(y, z, torch.ones_like(y), allow_unused=True)
        return y.detach(), torch.zeros_like(z) if slope is None else slope.detach()


def find_features(function: Function) -> Features:
    """The features of ``function``.

    Raises:
        NeedsInput: its output does not determine its derivative.
    """
    z, y, slope = _sample(function)
    steepest = float(slope[z.abs() > 5e-4].abs().max())
    if steepest == 0:
        raise NeedsInput("has the derivative 0 everywhere")
    _refuse_unsettled_slopes(z, slope)
    width, near = z.diff(), (z[1:].abs() < FINITE_WITHIN) & (z.diff() > 1e-4)
    off = (y.diff() - width * (slope[1:] + slope[:-1]) / 2).abs() > 1e-2 * steepest * width
    if float(off[near].double().mean()) > 0.05:
        raise NeedsInput("has a backward pass that does not return its derivative")
    kinks = _find_kinks(function, steepest)
    _refuse_other_ends_of_flat_parts(function, z, slope, steepest, kinks)
    steep = torch.cat([slope, *(torch.tensor([kink.before, kink.after], dtype=slope.dtype) for kink in kinks)]).abs()
    if float(steep.max()) > 100 * steepest:
        raise NeedsInput("has a vertical tangent")
    is_falling, turn = _find_turn(z, y, steepest)
    fold = None if turn is None else _fold(function, z, y, turn, steepest)
    if fold is not None and kinks:
        raise NeedsInput(f"has a minimum, and a kink at z = {kinks[0].position:.4g}")
    return Features(z, fold, is_falling, kinks, steepest)


# --- sampling ---------------------------------------------------------------------------------------------------------


def sample_points() -> Tensor:
    """Some ten thousand numbers from -3e38 to 3e38, in float64 and in order."""
    # The shift keeps samples off the round numbers where kinks are.
    fine = (torch.arange(-4096, 4096, dtype=torch.float64) + 0.3819) / 512
    coarse = torch.arange(8 * 64, 32 * 64, dtype=torch.float64).add(0.3819) / 64
    far = 32 * torch.logspace(0, 37, 1750, dtype=torch.float64)
    tiny = torch.logspace(-12, -3, 91, dtype=torch.float64)
    return torch.cat([fine, coarse, -coarse, far, -far, tiny, -tiny]).sort().values


def round_numbers() -> Tensor:
    """Multiples of an eighth and of a tenth, at which formulas have their kinks."""
    eighths, tenths = (torch.arange(-16 * n, 16 * n + 1, dtype=torch.float64) / n for n in (8, 10))
    both: Tensor = torch.cat([eighths, tenths]).unique()
    return both


def _sample(function: Function) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, outputs and slopes, as far from 0 as they are finite."""
    z = sample_points()
    y, slope = value_and_slope(function, z)
    bad = (~(y.isfinite() & slope.isfinite())).nonzero().view(-1)
    near = z[bad][z[bad].abs() < FINITE_WITHIN]
    if len(near):
        raise NeedsInput(f"is not finite at z = {float(near[0]):.3g}")
    first = int(bad[z[bad] < 0].max()) + 1 if bool((z[bad] < 0).any()) else 0
    last = int(bad[z[bad] > 0].min()) if bool((z[bad] > 0).any()) else len(z)
    return z[first:last], y[first:last], slope[first:last]


def _refuse_unsettled_slopes(z: Tensor, slope: Tensor) -> None:
    steepest = float(slope[z.abs() < FINITE_WITHIN].abs().max())
    for side, end in (("-inf", z[0]), ("+inf", z[-1])):
        outer = slope[(z * end > 0) & (z.abs() > end.abs() / 4)]
        largest = float(outer.abs().max())
        if float(outer.max() - outer.min()) > 1e-7 * max(steepest, largest):
            how = "grows without bound" if largest > 4 * steepest else "does not settle to a constant"
            raise NeedsInput(f"has a derivative that {how} as z goes to {side}")


# --- kinks ------------------------------------------------------------------------------------------------------------


def _find_kinks(function: Function, steepest: float) -> tuple[Kink, ...]:
    """The round numbers where the derivatives to both sides differ, or autograd's from both."""
    z = round_numbers()
    step = 1e-9 * z.abs().clamp_min(1.0)
    (_, before), (y, slope), (_, after) = (value_and_slope(function, z + side * step) for side in (-1, 0, 1))
    is_smooth = torch.maximum((slope - before).abs(), (slope - after).abs()) <= 1e-6 * steepest
    found = torch.stack([z, y, before, after, slope], 1)[~is_smooth]
    if not bool(found.isfinite().all()):
        raise NeedsInput("is not finite at a kink")
    if len(found) > MAXIMUM_KINKS:
        raise NeedsInput(f"has at least {len(found)} kinks")
    return tuple(Kink(*numbers) for numbers in found.tolist())


def _refuse_other_ends_of_flat_parts(
    function: Function, z: Tensor, slope: Tensor, steepest: float, kinks: tuple[Kink, ...]
) -> None:
    """Refuse a jump of the slope to 0 that is at no round number. Many inputs may lie there, clamped before by the same
    limit, and the output would not tell them from the flat part's."""
    is_flat = slope.abs() <= NOISE * steepest
    edges = (is_flat[1:] != is_flat[:-1]).nonzero().view(-1)
    left, right, flat_left = z[edges], z[edges + 1], is_flat[edges]
    for _ in range(80):
        middle = (left + right) / 2
        goes_left = (value_and_slope(function, middle)[1].abs() <= NOISE * steepest) == flat_left
        left, right = torch.where(goes_left, middle, left), torch.where(goes_left, right, middle)
    beside = value_and_slope(function, torch.where(flat_left, right, left))[1].abs()
    for place in left[beside > 1e-6 * steepest].tolist():
        if not any(abs(place - kink.position) <= 1e-8 * max(1.0, abs(place)) for kink in kinks):
            raise NeedsInput(f"has a kink at z = {place:.4g}, which is no multiple of 1/8 or 1/10")


# --- the minimum ------------------------------------------------------------------------------------------------------


def _find_turn(z: Tensor, y: Tensor, steepest: float) -> tuple[bool, int | None]:
    """Whether the function falls all the way; or the sample next to its only minimum."""
    change = y.diff()
    moves = (change.abs() > 1e-9 * y[1:].abs().clamp_min(steepest)).nonzero().view(-1)
    rises = change[moves] > 0
    turns = moves[1:][rises[1:] != rises[:-1]]
    if len(turns) > 1:
        listed = ", ".join(f"{place:.3g}" for place in sorted(sorted(z[turns].tolist(), key=abs)[:3]))
        raise NeedsInput(f"turns {len(turns)} times (z = {listed}{', ...' if len(turns) > 3 else ''})")
    if len(turns) == 0:
        return not bool(rises[0]), None
    if bool(rises[0]):
        raise NeedsInput(f"has a maximum, at z = {float(z[turns[0]]):.3g}")
    return False, int(y.argmin())


def _fold(function: Function, z: Tensor, y: Tensor, lowest: int, steepest: float) -> Fold:
    low, high = z[lowest - 1], z[lowest + 1]
    for _ in range(80):
        middle = (low + high) / 2
        falls = bool(value_and_slope(function, middle.view(1))[1] < 0)
        low, high = (middle, high) if falls else (low, middle)
    fold = Fold(float(high), float(function(high.view(1)).detach()))
    where = f"its minimum at z = {round(fold.position, 6):.4g}"
    if abs(fold.position) > FARTHEST_TURN or fold.extremum < LOWEST_TURN:
        raise NeedsInput(f"has {where}, too far from 0 to be followed closely")
    if fold.extremum >= -1e-9 * steepest or float(y[:lowest].max()) > 1e-9 * steepest:
        raise NeedsInput(f"has outputs that are not negative on both sides of {where}")
    return fold
