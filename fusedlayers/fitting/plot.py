"""The picture of a ``FitReport``: the time of a step over bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.formatting import size_text, unit_for
from ..utils.plotting import EAGER, FONT, HERE, INK, ORANGE, PALE, legend, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import FitReport, Measurement

HEIGHT = 5
CHOSEN = ORANGE


def draw(report: FitReport) -> Figure:
    """The time of a step over the bytes that it takes, for the best plans and for what was measured."""
    title = f"{report.name}: {size_text(report.eager.bytes)} as it is, {size_text(report.budget_bytes)} allowed"
    figure = new_figure("fit", HEIGHT, title)
    axes = figure.subplots()
    unit, scale = unit_for(max(report.eager.bytes, report.checkpointed.bytes))
    sizes, times = [plan.bytes / scale for plan in report.plans], [plan.time_ms for plan in report.plans]
    axes.step(sizes, times, where="post", color=HERE, lw=1.5)
    axes.plot(sizes, times, "o", color=HERE, ms=4, label="best plans, predicted")

    def mark(name: str, found: Measurement, marker: str, color: str) -> None:
        if found.time_ms is not None:
            axes.plot(found.bytes / scale, found.time_ms, marker, color=color, ms=9, label=name)

    mark("eager PyTorch", report.eager, "s", EAGER)
    mark("every block recomputed, predicted", report.checkpointed, "^", EAGER)
    if report.measured is None:
        mark("chosen, predicted", report.predicted, "*", CHOSEN)
    else:
        mark("chosen, measured", report.measured, "*", CHOSEN)
    budget = report.budget_bytes / scale
    axes.set_xlim(0, 1.04 * max(axes.get_xlim()[1], budget))
    axes.axvspan(budget, axes.get_xlim()[1], color=PALE, zorder=0)
    axes.annotate(
        "above the budget", (budget, 0), (4, 4), ("data", "axes fraction"), "offset points", fontsize=FONT, color=INK
    )
    what = "saved for backward" if report.of == "saved" else "allocated at the peak"
    style(axes, xlabel=f"{what}, {unit}", ylabel="a step of forward and backward, ms")
    legend(axes)
    return figure
