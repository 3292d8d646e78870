"""The picture of an ``Explanation``: the function, its derivative over the output, that one's errors, and bytes."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..derivative import branch_bit
from ..derivative.features import Fold
from ..utils.plotting import EAGER, FONT, HERE, INK, ORANGE, WINE, legend, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .explanation import Explanation

HEIGHT, CHARACTERS = 6.6, 118
#: How far from 0 and from a fold errors are shown, the function is shown, and all of it is to be seen.
FAR, SHOWN, WHOLE = 6.0, 4.0, 2.0
ERRORS, TICKS = (1e-11, 1e3), tuple(10.0**n for n in range(-10, 1, 2))
#: Space within legends.
TIGHT: dict[str, Any] = {"borderpad": 0.1, "columnspacing": 1.0, "handlelength": 1.8}
#: Errors are shown as the largest of each part of the inputs.
PARTS = 128
#: The branch whose outputs have the bit set, and the other one, or all of a function without branches.
MARKED, UNMARKED = ORANGE, WINE


@dataclass(frozen=True)
class Curves:
    """What is drawn over inputs z, in float64.

    Attributes:
        z, y, slope: inputs, outputs and derivatives.
        errors: of the derivative, by dtype: here, PyTorch's, and of rounding the exact derivative.
        given: what the derivative is evaluated from, "output" or "input".
        fold: where the saved output carries a branch bit.
    """

    z: Tensor
    y: Tensor
    slope: Tensor
    errors: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    given: str
    fold: Fold | None

    def within(self, distance: float) -> Tensor:
        """The places of inputs no further than this from 0, from the fold, or between the two."""
        low, high = inputs_within(distance, self.fold)
        return (low <= self.z) & (self.z <= high)


def inputs_within(distance: float, fold: Fold | None) -> tuple[float, float]:
    """The inputs that are drawn: around 0 and the minimum."""
    position = 0.0 if fold is None else fold.position
    return min(0.0, position) - distance, max(0.0, position) + distance


@dataclass(frozen=True)
class Pair:
    """An output on both branches of a fold: its input, derivative, and bits in bfloat16, on the marked branch first."""

    fold: Fold
    y: float
    z: tuple[float, float]
    slope: tuple[float, float]
    bits: tuple[str, str]


def draw(found: Explanation, curves: Curves) -> Figure:
    """What an activation is, what its output tells, how exact that is, and the bytes."""
    figure = new_figure("explain", HEIGHT, _title(found))
    dtypes = [dtype for dtype in curves.errors if dtype in found.accuracy]
    panels = figure.subplot_mosaic([[[["function", "output"]]], [[[*dtypes, "bytes"]]]], height_ratios=[1.25, 1])
    pair = None if curves.fold is None else pair_of(curves, curves.fold)
    _draw_function(panels["function"], curves, pair)
    _draw_output(panels["output"], curves, pair)
    for dtype in dtypes:
        _draw_errors(panels[dtype], curves, dtype, found)
    _draw_bytes(panels["bytes"], found.saved_bytes)
    return figure


def _title(found: Explanation) -> str:
    """What is saved, and why that is enough."""
    kept = {dtype: saves.partition(":")[0] for dtype, saves in found.saves.items()}
    most, *others = dict.fromkeys(kept.values())
    lines = [f"{found.name} {most}"]
    for other in others:
        lines[0] += f", in {' and '.join(dtype for dtype in kept if kept[dtype] == other)} {other}"
    return "\n".join(line for text in (*lines, found.reason) for line in textwrap.wrap(text, CHARACTERS))


def pair_of(curves: Curves, fold: Fold) -> Pair:
    """An output that both branches take, well away from the extremum."""
    near, marked = curves.within(SHOWN), fold.marks(curves.z)
    distance = (curves.y - fold.extremum).abs()
    reach = min(float(distance[near & branch].max()) for branch in (marked, ~marked))
    about = fold.extremum + min(0.4 * reach, 1.0)
    encode = functools.partial(branch_bit.encode, dtype=torch.bfloat16)
    even = encode(torch.tensor([about]), torch.tensor([False]))  # so that the two differ in the last bit alone
    bits = encode(even.repeat(2), torch.tensor([True, False]))
    y = float(bits[1])
    places = [int(torch.where(branch, (curves.y - y).abs(), torch.inf).argmin()) for branch in (marked, ~marked)]
    z, slope = ([float(values[place]) for place in places] for values in (curves.z, curves.slope))
    texts = [f"{number & 0xFFFF:016b}" for number in bits.to(torch.bfloat16).view(torch.int16).tolist()]
    one, other = (f"{text[0]} {text[1:9]} {text[9:15]}[{text[15]}]" for text in texts)
    return Pair(fold, y, (z[0], z[1]), (slope[0], slope[1]), (one, other))


def _branches(curves: Curves) -> list[tuple[Tensor, str]]:
    """Each branch's places in the curves, and its colour."""
    if curves.fold is None:
        return [(torch.ones_like(curves.z, dtype=torch.bool), UNMARKED)]
    marked = curves.fold.marks(curves.z)
    return [(marked, MARKED), (~marked, UNMARKED)]


def _masked(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, torch.nan)


def _draw_function(axes: Axes, curves: Curves, pair: Pair | None) -> None:
    for where, color in _branches(curves):
        axes.plot(curves.z, _masked(curves.y, where), color=color, lw=1.8)
        axes.plot(curves.z, _masked(curves.slope, where), "--", color=color, lw=1.2)
    marks = [("-", "f"), ("--", "f'")]
    if pair is not None:
        marks.append(("v", "minimum"))
        axes.plot(pair.z, [pair.y] * 2, color=INK, lw=0.8)
        _draw_points(axes, [(z, pair.y) for z in pair.z])
        axes.plot(pair.fold.position, pair.fold.extremum, "v", color=INK, ms=5)
    whole = curves.within(WHOLE)
    axes.set(xlim=inputs_within(SHOWN, curves.fold), ylim=_limits(torch.cat([curves.y[whole], curves.slope[whole]])))
    style(axes, title="Function and derivative", xlabel="input z")
    handles = [axes.plot([], [], mark, color=INK, ms=5, label=label)[0] for mark, label in marks]
    legend(axes, handles=handles, loc="lower right", bbox_to_anchor=(1.02, 1), ncols=3, **TIGHT)


def _draw_output(axes: Axes, curves: Curves, pair: Pair | None) -> None:
    for where, color in _branches(curves):
        axes.plot(_masked(curves.y, where), curves.slope, "--", color=color, lw=1.5)
    low, high = _limits(curves.y[curves.within(WHOLE)])
    title = "Derivative over the output" + (": one value for each" if curves.given == "output" else " (not saved)")
    if pair is not None:
        title = "Derivative over the output: the last bit is the branch"
        low, high = pair.fold.extremum * 1.3, -pair.fold.extremum * 2.5  # around those that both branches take
        axes.axvline(pair.fold.extremum, color=INK, lw=0.8, ls=":")
        _draw_points(axes, [(pair.y, slope) for slope in pair.slope])
        handles = [
            axes.plot([], [], "o--", ms=5, color=color, label=f"z = {z:.3g}\n{bits}")[0]
            for color, z, bits in zip((MARKED, UNMARKED), pair.z, pair.bits, strict=True)
        ]
        legend(axes, f"y = {pair.y:.3g} in bfloat16", handles=handles, prop={"family": "monospace", "size": FONT})
    inside = (low <= curves.y) & (curves.y <= high)
    axes.set(xlim=(low, high), ylim=_limits(curves.slope[inside]))
    style(axes, title=title, xlabel="output y = f(z)", ylabel="f'")


def _draw_points(axes: Axes, points: list[tuple[float, float]]) -> None:
    """Of the pair, in the colours of their branches."""
    for point, color in zip(points, (MARKED, UNMARKED), strict=True):
        axes.plot(*point, "o", color=color, ms=5)


def _limits(values: Tensor) -> tuple[float, float]:
    """Of an axis that shows these values."""
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _draw_errors(axes: Axes, curves: Curves, dtype: str, found: Explanation) -> None:
    z = _parts(curves.z).mean(1)
    here, eager, rounding = (_parts(error).amax(1) for error in curves.errors[dtype])
    rms = found.accuracy[dtype]
    axes.set(yscale="log", ylim=ERRORS, xlim=(float(z[0]), float(z[-1])))  # first: zeros have no logarithm
    for error, name, of_normal, color, line in (
        (eager, "PyTorch", rms.eager_rms, EAGER, "-"),
        (here, "here", rms.rms, HERE, "-"),
        (rounding, "rounding", rms.floor_rms, INK, ":"),
    ):
        text = f"{name}: {of_normal:.1e}" if of_normal else f"{name}: exact"
        axes.plot(z, error, line, color=color, lw=1.4, label=text)
    style(axes, title=f"Error of f' in {dtype}", xlabel="input z", ylabel="largest |f' - float64's| nearby")
    axes.set_yticks(TICKS)
    legend(axes, "relative rms, z ~ N(0, 1)", loc="upper left", labelspacing=0.2, **TIGHT)


def _parts(values: Tensor) -> Tensor:
    count = min(PARTS, len(values))
    return values[: len(values) // count * count].view(count, -1)


def _draw_bytes(axes: Axes, saved_bytes: Mapping[str, tuple[float, float]]) -> None:
    for offset, sizes, color, name in zip(
        (-0.19, 0.19), zip(*saved_bytes.values(), strict=True), (EAGER, HERE), ("PyTorch", "here"), strict=True
    ):
        bars = axes.barh([row + offset for row in range(len(sizes))], sizes, 0.36, color=color, label=name)
        axes.bar_label(bars, [f"{size:.3g}" for size in sizes], padding=3, fontsize=FONT, color=INK)
    style(axes, title="Bytes kept per element", xlabel="between two layers")
    axes.set_yticks(range(len(saved_bytes)), [*saved_bytes])
    axes.grid(False)
    axes.set_xticks([])  # each bar states its value
    axes.margins(x=0.1)
    axes.spines["bottom"].set_visible(False)
    axes.invert_yaxis()
    legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
