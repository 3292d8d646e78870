"""Any fitted derivative on float32 outputs, from a table that is linear between its nodes.

Idea: the nodes are uniform in a variable ("coordinate", then "scale") that is cheap to compute and in which the
derivative bends little. The coordinate s is the output or, with a fold, the root of the distance to the extremum,
negative on the marked branch. The scale is s itself; or the root of its distance to one end of the range; or an
arcsine, which is a root at both ends; or s over its size plus a constant, for derivatives that settle slowly. The
first scale whose table is accurate enough on sampled outputs is taken.

Cost: about a dozen passes over a chunk, where a fit of five polynomials takes a hundred. A table holds 8,192 pairs
(64 KiB), and is made when an activation first runs a backward pass in float32.

Kinks: the derivative may jump. The table then has a node there, and each interval holds its own value and step, so
that none mixes the two sides. The side of a jump comes from the sign of an exact difference. Where two jumps are closer
than float32 resolves in the variable, flat pieces are filled in by comparison.

Limits: tables add up to ``ADDED`` to the error of the fit. Where no scale is accurate enough ``interpolated`` returns
None, and the polynomials run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.analysis import MonotoneDerivative
from ...derivative.features import Fold
from ...derivative.folded import FoldedDerivative
from ...derivative.piecewise import TINY, Flat, Segments
from ...derivative.polynomial import PRECISIONS
from ...utils.isolation import in_clean_state
from .lookup import lookup

INTERVALS = 8192
#: What a table may add to the error of the fit, rms over N(0, 1) and at most, in units of the steepest slope.
ADDED_RMS = PRECISIONS[torch.float32].tolerance
ADDED = 1e-5


Kind = Literal["straight", "root from below", "root from above", "arcsine", "ratio"]


@dataclass(frozen=True)
class Scale:
    """The variable ``(g(s) - zero) scale``, with g as ``kind`` says: s, the root of the distance to one end, the
    arcsine, or s / (|s| + half).

    The interval of s is the integer below that. A negative scale makes ``zero`` belong to the interval below it in s.
    """

    kind: Kind
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
        if self.kind == "arcsine":
            return ((s - self.middle) / self.radius).clamp(-1, 1).asin()
        return (s - self.low).sqrt() if self.kind == "root from below" else (self.high - s).sqrt()

    @property
    def middle(self) -> float:
        return _float32((self.low + self.high) / 2)

    @property
    def radius(self) -> float:
        return _float32((self.high - self.low) / 2)

    def unbend(self, c: Tensor) -> Tensor:
        if self.kind == "straight":
            return c
        if self.kind == "ratio":
            return self.half * c / (1 - c.abs()).clamp_min(1e-9)
        if self.kind == "arcsine":
            return self.middle + self.radius * c.clamp(-math.pi / 2, math.pi / 2).sin()
        return self.low + c * c if self.kind == "root from below" else self.high - c * c

    def bend_(self, s: Tensor, free: Tensor) -> Tensor:
        """g over s."""
        if self.kind == "ratio":
            return s.div_(torch.abs(s, out=free).add_(self.half))
        if self.kind == "arcsine":
            return s.sub_(self.middle).mul_(1 / self.radius).clamp_(-1, 1).asin_()
        if self.kind == "root from below":
            return s.sub_(self.low).sqrt_()
        return s.neg_().add_(self.high).sqrt_() if self.kind == "root from above" else s


class Interpolated:
    """The derivative from (encoded) float32 outputs."""

    SCRATCH = (torch.float32, torch.float32, torch.int32, torch.complex64)

    def __init__(self, fitted: FoldedDerivative | MonotoneDerivative, scale: Scale, flats: tuple[Flat, ...]) -> None:
        self.fold: Fold | None = None
        if isinstance(fitted, FoldedDerivative):
            self.fold = fitted.fold
            self.high, self.low = fitted.origin_parts
            self.nearest = fitted.margin
            self.farthest = max(scale.low * scale.low, scale.high * scale.high)
        self.scale = scale
        # As float32, so that what is tried is what is computed.
        ends = scale.bend(torch.tensor([scale.low, scale.high], dtype=torch.float64))
        ends = ((ends - scale.zero) * scale.scale).floor()
        self.first = int(ends.min())
        self.count = int(ends.max()) - self.first + 1
        #: Flat pieces that are filled in by comparison, because float32 does not separate them from their neighbours.
        self.flats = flats
        self.nodes = self._evaluate(fitted)

    def _evaluate(self, fitted: FoldedDerivative | MonotoneDerivative) -> Tensor:
        # Within an interval, not at its ends: the derivative may jump there.
        inside = 2e-3
        start = torch.arange(self.first, self.first + self.count, dtype=torch.float64)
        ends = []
        for c in (start + inside, start + 1 - inside):
            ends.append(_at(fitted, self.scale.unbend(c / self.scale.scale + self.scale.zero)))
        step = (ends[1] - ends[0]) / (1 - 2 * inside)
        value = ends[0] - inside * step
        return torch.complex(value.float(), step.float())  # a pair is one look-up

    def __call__(self, y: Tensor, s: Tensor, c: Tensor, index: Tensor, pairs: Tensor, *for_lookup: Tensor) -> Tensor:
        scale = self.scale
        if self.fold is None:
            torch.clamp(y, scale.low, scale.high, out=s)
        else:
            self._signed_root(y, self.fold, out=s, free=c).clamp_(scale.low, scale.high)
        scale.bend_(s, c)
        if scale.zero:
            s.sub_(scale.zero)
        s.mul_(scale.scale)
        torch.floor(s, out=c)
        # NaN has no index; its fraction is NaN, and so is the result.
        index.copy_(c).sub_(self.first).clamp_(0, self.count - 1)
        value, step = torch.view_as_real(lookup(self.nodes, index, *for_lookup, out=pairs)).unbind(-1)
        slope = torch.addcmul(value, s.sub_(c), step, out=c)
        for flat in self.flats:
            slope.masked_fill_(flat.holds(y), flat.slope)
        return slope

    def _signed_root(self, y: Tensor, fold: Fold, *, out: Tensor, free: Tensor) -> Tensor:
        y_bits, v_bits, free_bits = y.view(torch.int32), out.view(torch.int32), free.view(torch.int32)
        torch.sub(y, self.high, out=out).sub_(self.low)
        if fold.is_maximum:
            out.neg_()
        out.clamp_(self.nearest, self.farthest).sqrt_()
        # The last bit, moved to the sign's place where the output is ambiguous: or-ing it into the root negates it.
        torch.bitwise_left_shift(y_bits, 31, out=free_bits)
        if fold.ambiguous == "negative":
            free_bits.bitwise_and_(y_bits)
        elif fold.ambiguous == "positive":
            free_bits.bitwise_or_(y_bits).bitwise_xor_(y_bits)  # and not
        v_bits.bitwise_or_(free_bits)
        return out


@functools.lru_cache(64)
@in_clean_state
def interpolated(activation: Activation) -> Interpolated | None:
    """The table for an activation whose derivative is fitted in segments, or None if none is good enough."""
    fitted = activation.fitted_derivative()
    if fitted is None:
        return None
    segments = fitted.of_distance if isinstance(fitted, FoldedDerivative) else fitted.segments
    if not isinstance(segments, Segments):
        return None
    y, normal = _outputs(activation, segments)
    expected = _expected(fitted, y)
    steepest = float(expected.abs().max())
    s = _coordinate(fitted, y)
    jumps = _jumps(fitted, segments, steepest)
    hard = [jump for jump in jumps if not jump.is_corner]
    tried = list(_scales(s, expected, jumps, steepest))
    if len(hard) < len(jumps):
        tried += _scales(s, expected, hard, steepest)
    for scale in tried:
        for flats in ((), _as_stored(segments)):
            table = Interpolated(fitted, scale, flats)
            buffers = [torch.empty(len(y), dtype=dtype) for dtype in table.SCRATCH]
            error = (table(y, *buffers).double() - expected).abs() / steepest
            good = float(error.max()) <= ADDED and float(error[:normal].square().mean().sqrt()) <= ADDED_RMS
            if good:
                # A comparison is as slow as three passes: where all pieces are constant, comparing alone is faster.
                constant = all(isinstance(segment.polynomial, float) for segment in segments.segments)
                return None if flats and constant else table
            if not segments.flats or isinstance(fitted, FoldedDerivative):
                break  # a comparison of outputs cannot tell the branches apart
    return None


def _outputs(activation: Activation, segments: Segments) -> tuple[Tensor, int]:
    """Outputs to try a table on, and how many of them, the first, are those of N(0, 1). Outputs so close to a kink that
    either side is right are left out."""
    count = 1 << 14
    normal = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    sizes = torch.logspace(-44, 38, 4001, dtype=torch.float64)
    z = torch.cat([normal, torch.linspace(-32, 32, 65_537, dtype=torch.float64) + 1e-4, sizes, -sizes]).float()
    y = activation.encoded(z, torch.float32)
    starts = [segment.start for segment in segments.segments if abs(segment.start) < 3e38]
    ends = [end for flat in segments.flats for end in (flat.low, flat.high) if math.isfinite(end)]
    sign = -1.0 if segments.is_falling else 1.0
    if activation.fold is None:
        edges = sign * torch.tensor(starts + ends, dtype=torch.float32)
        y = torch.cat([y, edges])
        for direction in (-math.inf, math.inf):
            step = edges
            for _ in range(3):
                step = torch.nextafter(step, torch.full_like(step, direction))
                y = torch.cat([y, step])
    # Next to a kink that is not at 0 either side is right, unless a side is flat.
    undecided = torch.zeros_like(y, dtype=torch.bool)
    for start in starts:
        if start != 0:
            unit = 2.0 ** (math.frexp(start)[1] - 1) * torch.finfo(torch.float32).eps
            undecided |= (sign * y.double() - start).abs() <= unit * (1 if activation.fold is None else 2)
    for flat in segments.flats:
        undecided &= ~flat.holds(sign * y)
    keep = y.isfinite() & ~undecided
    return y[keep], int(keep[:count].sum())


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


def _as_stored(segments: Segments) -> tuple[Flat, ...]:
    """The flat pieces in outputs; segments hold those of the rising function, whose negative a falling one is."""
    if not segments.is_falling:
        return segments.flats
    return tuple(Flat(-flat.high, -flat.low, flat.slope, flat.marked) for flat in segments.flats)


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
    places |= {(end, flat.marked) for flat in segments.flats for end in (flat.low, flat.high)}
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


def _scales(s: Tensor, expected: Tensor, jumps: list[Jump], steepest: float) -> Iterator[Scale]:
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
        yield from _placed("straight", low, high, jumps)
        if len(jumps) <= 1:
            yield from _placed("root from below", low, high, jumps)
            yield from _placed("root from above", low, high, jumps)
            yield from _placed("arcsine", low, high, jumps)
    for half in (1.0, 4.0, 0.25):
        yield from _placed("ratio", low, high, jumps, half)


def _placed(
    kind: Kind,
    low: float,
    high: float,
    jumps: list[Jump],
    half: float = 1.0,
) -> Iterator[Scale]:
    """The scale of this kind that has the jumps on integers; none where there is no such scale."""
    bare = Scale(kind, low, high, 0.0, 1.0, half)
    bend: Callable[[float], float] = lambda x: float(bare.bend(torch.tensor(x, dtype=torch.float64)))  # noqa: E731
    ends = sorted((bend(low), bend(high)))
    if not ends[1] > ends[0]:  # float64 does not separate them
        return
    scale = (INTERVALS - 4) / (ends[1] - ends[0])
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
