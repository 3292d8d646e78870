"""The picture of a ``FitReport``: the time of a step over bytes."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ..utils.formatting import size_text, unit_for
from ..utils.plotting import new_figure

if TYPE_CHECKING:
    from .report import FitReport, Measurement

LINE, CHOSEN, OTHERS, INK = "#46729f", "#c25450", "#8a6752", "#22303c"
WIDTH, HEIGHT = 8, 5


def draw(report: FitReport, path: str | PathLike[str]) -> None:
    figure = new_figure("fit", (WIDTH, HEIGHT))
    axes = figure.subplots()
    unit, scale = unit_for(max(report.eager.bytes, report.checkpointed.bytes))
    sizes = [plan.bytes / scale for plan in report.plans]
    axes.step(sizes, [plan.time_ms for plan in report.plans], where="post", color=LINE, lw=1.5)
    axes.plot(sizes, [plan.time_ms for plan in report.plans], "o", color=LINE, ms=4, label="best plans, predicted")

    def mark(name: str, found: Measurement, marker: str, color: str) -> None:
        if found.time_ms is not None:
            axes.plot(found.bytes / scale, found.time_ms, marker, color=color, ms=9, label=name)

    mark("eager PyTorch", report.eager, "s", OTHERS)
    mark("every block recomputed, predicted", report.checkpointed, "^", OTHERS)
    if report.measured is None:
        mark("chosen, predicted", report.predicted, "*", CHOSEN)
    else:
        mark("chosen, measured", report.measured, "*", CHOSEN)
    axes.axvline(report.budget_bytes / scale, color=CHOSEN, ls=":", lw=1)
    what = "saved for backward" if report.of == "saved" else "allocated at the peak"
    axes.set(xlabel=f"{what}, {unit}", ylabel="a step of forward and backward, ms")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    title = f"{report.name}: {size_text(report.eager.bytes)} as it is, {size_text(report.budget_bytes)} allowed"
    axes.set_title(title, loc="left", color=INK)
    figure.savefig(path, dpi=120)
