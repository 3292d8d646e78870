"""Derivatives, fitted on float32 outputs, as tables of cubics for ``loops.c``.

An interval is all float32 numbers w with the same sign, exponent and leading bits, which takes no root and no division
to find. w is a distance, with its sign set on one side: intervals lie closest where a derivative bends most, next to
the place from which distances are counted. A table has a cubic for each of 8,192 intervals, 128 KiB in all; outputs of
ordinary size need a tenth of them. It is made when an activation first runs a backward pass in float32.

Limits: tables add up to ``ADDED`` to the error of the fit. Where none is accurate enough (two kinks, a bend far from
all ends) ``derivative_table`` returns None, and ``kernels/reference`` evaluates the polynomials.
"""

import functools
import math

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.features import round_numbers
from ...derivative.folded import TAIL_FRACTION, FoldedDerivative, Polynomials
from ...derivative.monotone import FAR, MonotoneDerivative
from ...derivative.polynomial import PRECISIONS, TINY, to_float32
from ...utils.caching import in_clean_state
from . import loops
from .loops import PLACES, cubics

#: What a table may add to the error of the fit, rms over N(0, 1) and at most, in units of the steepest slope.
ADDED_RMS = PRECISIONS[torch.float32].tolerance
ADDED = 1e-5
#: So many of the inputs that tables are tried on are of N(0, 1).
NORMAL = 1 << 14
#: The last bits of w, which are the place in the interval.
REST = 19


class FoldTable:
    """The derivative of a folded activation (``derivative/folded.py``), from encoded float32 outputs (by
    ``look_up_fold`` of ``loops.c``).

    w is the distance ``y - y_min``, with its sign set on the falling branch; in the tail of that branch y times a power
    of two that keeps it apart from all distances.
    """

    def __init__(self, fitted: FoldedDerivative) -> None:
        polynomials = fitted.of_distance
        assert isinstance(polynomials, Polynomials)
        nearest, tail = fitted.margin, polynomials.minimum * TAIL_FRACTION
        # The factor of the tail: all of it is then below half the smallest distance. It is 2^-24 or 2^-25, because the
        # distance is a unit in the last place of the minimum.
        down = 2.0 ** (math.frexp(nearest)[1] - 2 - math.frexp(tail)[1])
        #: Numbers of ``loops.c``'s structure.
        self.numbers = (*fitted.origin_parts, nearest, tail, down)
        low, high = _intervals()
        w = low + (high - low) * PLACES
        size, falling = w.abs(), w.signbit()
        in_tail = falling & (size < nearest / 2)
        distance = torch.where(in_tail, 1.0, size.clamp_min(nearest))
        y = torch.where(in_tail, -size / down, fitted.fold.extremum + distance)
        distance = torch.where(in_tail, y - fitted.fold.extremum, distance)
        values = polynomials(distance, y, falling)
        # The last finite interval stands for infinity too. Numbers that are none stay that, whatever is found.
        settled = values[int((low.squeeze(1) == math.inf).nonzero()) - 1]
        self.cubics = cubics(torch.where(w.isfinite() & ~values.isnan(), values, settled)).contiguous()


class MonotoneTable:
    """The derivative of a monotone function from float32 outputs (``look_up`` in ``loops.c``).

    Outputs from ``middle`` on are the upper side, whose w has its sign set. w is the distance from the limit of a side,
    or, where it has none, from ``middle``. So a derivative may jump at ``middle``, which has a number of its own, and
    vanish at both limits.
    """

    def __init__(self, fitted: MonotoneDerivative, middle: float) -> None:
        middle, rises = to_float32(middle), -1.0 if fitted.is_falling else 1.0
        # A side's origin, the sign of its distances, and the largest of these: ``middle``, where the derivative may
        # jump, is excepted.
        sides = [
            (middle, sign, FAR) if abs(end) >= FAR else (end, -sign, abs(middle - end) * (1 - 2.0**-40))
            for end, sign in zip(fitted.ends, (-1.0, 1.0), strict=True)
        ]
        at_middle = float(fitted(rises * torch.tensor([middle], dtype=torch.float64)))
        parts = ((to_float32(origin), origin - to_float32(origin), sign) for origin, sign, _ in sides)
        #: Numbers of ``loops.c``'s structure.
        self.numbers = (rises, middle, at_middle, *(number for part in parts for number in part))
        low, high = (t.abs() for t in _intervals())
        is_upper = torch.arange(len(low)).unsqueeze(1) < len(low) // 2  # negative w
        origin, sign, most = torch.tensor(sides, dtype=torch.float64)[is_upper.long()].unbind(-1)
        # Cubics run through values of their own side. At a limit itself, which may be flat, is one number.
        part = ((most - low) / (high - low)).nan_to_num(0.0).clamp(0.0, 1.0)
        part = torch.where((low == 0) & (origin != middle), 0.0, part)
        distance = torch.minimum(low + (high - low).nan_to_num(0.0) * part * PLACES, most)
        self.cubics = cubics(fitted(rises * (origin + sign * distance)), part * PLACES).contiguous()


def _intervals() -> tuple[Tensor, Tensor]:
    """The ends of all intervals of w, in the order of its bits as integers; infinity and NaN have some too."""
    start = torch.arange(-(2**31), 2**31, 2**REST, dtype=torch.int64).to(torch.int32)
    low, last = (bits.view(torch.float32).double().unsqueeze(1) for bits in (start, start + (2**REST - 1)))
    return low, low + (last - low) * (2**REST / (2**REST - 1))


@functools.lru_cache(64)
@in_clean_state
def derivative_table(activation: Activation) -> MonotoneTable | FoldTable | None:
    """The table for an activation whose derivative is fitted, or None if none is good enough."""
    fitted = activation.fitted_derivative()
    y = activation.encoded(_inputs(), torch.float32)
    y = y[y.isfinite()]
    if isinstance(fitted, FoldedDerivative):
        if not isinstance(fitted.of_distance, Polynomials):
            return None
        table = FoldTable(fitted)
        expected = fitted(y.double(), branch_bit.decode(y, torch.float32))
        return table if _is_exact(loops.Kernel(torch.float32, slope=table), y, expected) else None
    if fitted is None:
        return None
    y = y[(y == 0) | (y.abs() >= TINY)]
    middles = [segment.start for segment in fitted.segments[1:]] or [sum(fitted.ends) / 2]
    for middle in sorted(middles, key=abs):
        found = MonotoneTable(fitted, middle)
        if _is_exact(loops.Kernel(torch.float32, table=found), y, fitted(y.double())):
            return found
    return None


def _is_exact(kernel: loops.Kernel, y: Tensor, expected: Tensor) -> bool:
    """Whether the derivatives at outputs, of which the first, ``NORMAL``, are of inputs of N(0, 1), are as expected."""
    found = loops.gradient(kernel, torch.ones_like(y), y, torch.empty_like(y), None, None)
    error = (found.double() - expected).abs() / expected.abs().max()
    return float(error.max()) <= ADDED and float(error[:NORMAL].square().mean().sqrt()) <= ADDED_RMS


def _inputs() -> Tensor:
    """The inputs that tables are tried on, of which the first, ``NORMAL``, are of N(0, 1)."""
    normal = torch.special.ndtri((torch.arange(NORMAL, dtype=torch.float64) + 0.5) / NORMAL)
    sizes = torch.logspace(-44, 38, 4001, dtype=torch.float64)
    wide = torch.linspace(-32, 32, 65_537, dtype=torch.float64) + 1e-4
    return torch.cat([normal, wide, round_numbers(), sizes, -sizes]).float()
