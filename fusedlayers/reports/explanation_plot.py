"""The picture of an ``Explanation``: the function, its derivative over the output, and that one's errors."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import torch

from ..utils.plotting import EAGER, HERE, INK, ORANGE, WINE, legend, new_figure, style
from .explanation_measurement import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .explanation import Explanation

HEIGHT, CHARACTERS = 6.6, 118
#: Errors are shown as the largest of each part of the inputs.
PARTS = 64


def draw(found: Explanation) -> Figure:
    """What an activation is, what its output tells of the derivative, and how exact that is."""
    kept = {dtype: saves.partition(":")[0] for dtype, saves in found.saves.items()}
    most, *others = dict.fromkeys(kept.values())
    title = f"{found.name} {most}"
    for other in others:
        title += f", in {' and '.join(dtype for dtype in kept if kept[dtype] == other)} {other}"
    lines = [line for text in (title, found.reason) for line in textwrap.wrap(text, CHARACTERS)]
    figure = new_figure("explain", HEIGHT, "\n".join(lines))
    (function, output), errors = figure.subplots(2, 2)
    _draw_function(function, output, found, found.samples["float32"])
    for axes, dtype in zip(errors, ("float32", "bfloat16"), strict=True):
        if dtype in found.samples:
            _draw_errors(axes, dtype, found)
        else:
            axes.set_axis_off()
    return figure


def _draw_function(axes: Axes, over_output: Axes, found: Explanation, samples: Samples) -> None:
    """The function and its derivative, over the input; and the derivative over the output. Branches have colours."""
    z, y, slope, *_ = samples
    is_saved = found.saves["float32"].startswith("saves the output")
    title = f"f' over the output{': one value for each' if is_saved else ' (not saved)'}"
    branches = [(torch.ones_like(z, dtype=torch.bool), WINE, "")]
    if found.fold is not None:
        title, marked = "f' over the output: the last bit is the branch", found.fold.marks(z)
        branches = [(marked, ORANGE, ", last bit 1"), (~marked, WINE, ", last bit 0")]
        over_output.axvline(found.fold.extremum, color=INK, lw=0.8, ls=":")
    for where, color, branch in branches:
        axes.plot(z[where], y[where], color=color, label=f"f{branch}")
        axes.plot(z[where], slope[where], "--", color=color, label=f"f'{branch}")
        over_output.plot(y[where], slope[where], "--", color=color)
    style(axes, title="Function f and derivative f'", xlabel="input z")
    legend(axes)
    style(over_output, title=title, xlabel="output y = f(z)", ylabel="f'")


def _draw_errors(axes: Axes, dtype: str, found: Explanation) -> None:
    samples, rms = found.samples[dtype], found.accuracy[dtype]
    z = [float(part.mean()) for part in samples.z.chunk(PARTS)]
    axes.set(yscale="log", ylim=(1e-11, 1e3), xlim=(z[0], z[-1]))  # first: zeros have no logarithm
    for error, name, of_normal, color in (
        (samples.eager_error, "PyTorch", rms.eager_rms, EAGER),
        (samples.error, "here", rms.rms, HERE),
    ):
        text = f"{name}: {of_normal:.1e}" if of_normal else f"{name}: exact"
        axes.plot(z, [float(part.max()) for part in error.chunk(PARTS)], color=color, label=text)
    style(axes, title=f"Error of f' in {dtype}", xlabel="input z", ylabel="largest |f' - float64's| nearby")
    legend(axes, "relative rms, z ~ N(0, 1)", loc="upper left")
