"""What ``memory_report`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..utils.formatting import counted_lines, path_text, size_text, unit_for
from ..utils.plotting import FONT, GREY, HERE, INK, new_figure, style
from ..utils.reports import DrawnReport, NothingToDrawError
from .saved_rows import Row, entries_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How many lines a table has at most, before the rest is summed up; and a picture bars.
LINES, BARS = 16, 12


@dataclass(frozen=True)
class MemoryReport(DrawnReport):
    """What ``memory_report`` found. ``str()`` is a table, ``plot(path)`` a picture.

    Attributes:
        name: of the model's class, or of the function.
        device: where it was measured.
        rows: every saved storage once, the largest first. What existed before the call, such as inputs, parameters and
            buffers, is not among them.
        peak_bytes: the most that the device's allocator has handed out at once in a forward and a backward pass.
        parts: what the peak consists of: the saved activations that were still held, gradients that were there, and
            the rest; the bytes of each.
        moment: when that was.
        unlisted: paths of the modules whose nodes do not show what they save, so that the rows lack it: TorchScript's,
            other C++ extensions', and those of writes over views in place.
    """

    name: str
    device: str
    rows: tuple[Row, ...]
    peak_bytes: int
    parts: Mapping[str, int]
    moment: str
    unlisted: tuple[str, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """The sum of the rows."""
        return sum(row.bytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return super().to_dict() | {"saved_bytes": self.saved_bytes}

    def figure(self) -> Figure:
        """A bar for each of the largest lines of the table, and below them one for each part of the peak.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing is saved.
        """
        if not self.saved_bytes:
            raise NothingToDrawError(
                f"memory_report: {self.name} saves nothing for backward, so that there is nothing to draw"
            )
        bars = [(f"{e.modules}: {e.operation}", e.bytes, HERE) for e in entries_of(self.rows, self.name)[:BARS]]
        bars += [(text.partition(":")[0], size, GREY) for text, size in self.parts.items() if size]
        title = (
            f"{self.name} on {self.device}: {size_text(self.saved_bytes)} saved for backward, by module and operation"
            f"\nPeak of forward and backward: {size_text(self.peak_bytes)}, of which (grey)"
        )
        figure = new_figure("memory_report", 1 + 0.25 * len(bars), title)
        axes = figure.subplots()
        names, sizes, colors = zip(*bars, strict=True)
        drawn = axes.barh(range(len(bars)), sizes, color=colors)
        axes.bar_label(drawn, [size_text(size) for size in sizes], padding=3, fontsize=FONT, color=INK)
        style(axes)
        axes.set_yticks(range(len(bars)), [name if len(name) <= 60 else f"…{name[-59:]}" for name in names])
        axes.grid(False)
        axes.set_xticks([])  # each bar states its value
        axes.margins(x=0.1)
        axes.invert_yaxis()
        return figure

    def __str__(self) -> str:
        unit, scale = unit_for(max(self.peak_bytes, self.saved_bytes))

        def line(size: int, whole: int, *texts: str) -> tuple[str, ...]:
            return f"{size / scale:.2f}", f"{100 * size / max(whole, 1):.1f}", *texts

        entries, saved = entries_of(self.rows, self.name), self.saved_bytes
        rows: list[tuple[str, ...]] = [(f"{unit:>9}", f"{'%':>6}", "module", "saved by", "tensors")]
        rows += [line(entry.bytes, saved, entry.modules, entry.operation, entry.tensors) for entry in entries[:LINES]]
        if others := entries[LINES:]:
            rows.append(line(sum(entry.bytes for entry in others), saved, f"{len(others)} more", "", ""))
        rows.append(line(saved, saved, "saved for backward", "", ""))
        notes = []
        if any("+" in entry.operation for entry in entries[:LINES]):
            notes.append("+n: n more operations save the same memory")
        if self.unlisted:
            savers = f"TorchScript, C++ extensions or writes over views in place: {path_text(self.unlisted)}"
            notes.append(f"not listed (fusedlayers.memory.saved_bytes counts it): what is saved by {savers}")
        at_peak: list[tuple[str, ...]] = [(f"{unit:>9}", f"{'%':>6}", f"at the peak: {self.moment}")]
        at_peak += [line(size, self.peak_bytes, part) for part, size in self.parts.items() if size]
        at_peak.append(line(self.peak_bytes, self.peak_bytes, "measured"))
        return "\n".join(
            [
                f"{self.name} on {self.device}",
                "",
                *counted_lines(rows, numbers=2),
                *(f"{'':<19}{note}" for note in notes),
                "",
                *counted_lines(at_peak, numbers=2),
            ]
        )
