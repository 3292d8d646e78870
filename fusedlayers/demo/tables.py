"""Show a comparison: the losses while it runs, then a table and a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..utils.plotting import EAGER, FONT, HERE, INK, legend, new_figure, style
from ..utils.progress import OnStage
from .training import Outcome, Settings, seconds_spent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

MIB = 2**20
COLORS = {"eager": EAGER, "fused": HERE}
LEGEND = """\
fused: the same model after fl.fuse(model)
saved: kept by the forward pass for the backward pass, parameters left out
peak: most allocated at once in both passes
time: medians, of steps that take turns and of their ratios; they say little where other processes compute"""
Outcomes = dict[str, Outcome]
Quantity = Callable[[Outcome], float]


def describe(settings: Settings) -> str:
    """Say in a line what is trained, where and how."""
    threads = torch.get_num_threads()
    cpu = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    device = torch.cuda.get_device_name(settings.device) if settings.device.type == "cuda" else cpu
    return (
        f"{settings.activation}, {str(settings.dtype).removeprefix('torch.')}, {device}; "
        f"{settings.layers} layers of width {settings.width}, {settings.batch} x {settings.context} bytes a step"
    )


def losses_to(on_stage: OnStage, settings: Settings) -> Callable[[Outcomes], None]:
    """An `on_step` for `compare`, which says the losses for every hundredth of the way: drawing takes time too."""
    shown = 0

    def on_step(outcomes: Outcomes) -> None:
        nonlocal shown
        done = len(outcomes["fused"].losses)
        spent = int(100 * seconds_spent(outcomes) / settings.seconds)
        hundredths = min(100, max(100 * done // settings.steps, spent))
        if hundredths > shown:
            shown = hundredths
            fused, eager = (outcomes[name].losses[-1] for name in ("fused", "eager"))
            on_stage(f"step {done}: loss {fused:.3f} (eager {eager:.3f})", hundredths / 100)

    return on_step


def table(outcomes: Outcomes) -> "Table":
    """Lay out the figures: a row for each variant, and the ratio of the two."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for column in ("saved MiB", "peak MiB", "ms / step", "first loss", "last loss"):
        table.add_column(column, justify="right")
    for name, outcome in outcomes.items():
        sizes = [f"{outcome.saved_bytes / MIB:.2f}", f"{outcome.peak_bytes / MIB:.2f}"]
        losses = [f"{loss:.4f}" for loss in (outcome.losses[0], outcome.losses[-1])]
        table.add_row(name, *sizes, f"{outcome.step_ms:.1f}", *losses)
    eager, fused = outcomes["eager"], outcomes["fused"]
    ratios = [fused.saved_bytes / eager.saved_bytes, fused.peak_bytes / eager.peak_bytes, fused.step_ratio(eager)]
    table.add_section()
    table.add_row("fused / eager", *[f"{ratio:.2f}" for ratio in ratios], style="bold")
    return table


def plot(outcomes: Outcomes, title: str, path: Path) -> None:
    """Draw loss curves, memory and time to a PNG file; matplotlib's global state stays as it is."""
    figure = new_figure("demo", 4, title)
    losses, memory, duration = figure.subplots(1, 3, width_ratios=[5, 4, 2])

    for (name, outcome), width in zip(outcomes.items(), (5, 1.2), strict=True):
        steps = range(1, len(outcome.losses) + 1)  # the curves coincide, so the first is drawn wide, below the other
        losses.plot(steps, outcome.losses, color=COLORS[name], linewidth=width, label=name)
    differences = [abs(a - b) for a, b in zip(*(outcome.losses for outcome in outcomes.values()), strict=True)]
    difference = f"Loss (they differ by at most {max(differences):.1g})"
    style(losses, title=difference, xlabel="training step", ylabel="nats per byte")
    legend(losses)
    quantities = {"saved for backward": lambda o: o.saved_bytes / MIB, "peak": lambda o: o.peak_bytes / MIB}
    draw_bars(memory, outcomes, quantities, "Memory, MiB")
    draw_bars(duration, outcomes, {"median step": lambda o: o.step_ms}, "Time, ms")
    figure.savefig(path)


def draw_bars(axes: "Axes", outcomes: Outcomes, quantities: dict[str, Quantity], title: str) -> None:
    """Draw a bar of each variant for each quantity, labelled with its value and its change from eager."""
    eager = [quantity(outcomes["eager"]) for quantity in quantities.values()]
    for offset, (name, outcome) in zip((-0.2, 0.2), outcomes.items(), strict=True):
        values = [quantity(outcome) for quantity in quantities.values()]
        labels = [f"{value:.1f}" for value in values]
        if name != "eager":
            labels = [f"{new:.1f}\n({new / old - 1:+.0%})" for new, old in zip(values, eager, strict=True)]
        bars = axes.bar([group + offset for group in range(len(values))], values, width=0.38, color=COLORS[name])
        axes.bar_label(bars, labels, padding=2, fontsize=FONT, color=INK)
    style(axes, title=title)
    axes.set_xticks(range(len(quantities)), list(quantities))
    axes.grid(False)
    axes.set_yticks([])  # each bar states its value
    axes.margins(y=0.12)
