"""What ``fit`` found: which plan it chose, what that was predicted to take, and took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..utils.formatting import budget_text, counted_lines, path_text, size_text
from ..utils.reports import DrawnReport
from .blocks import Mode
from .plans import Plan
from .training import Of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a table says whose times are of two kinds.
TIMES = "(predicted: what each block took by itself, added up. Times of the same plan vary from run to run.)"

#: What each mode does, for people.
WORDS: dict[Mode, str] = {
    "eager": "as PyTorch",
    "outputs": "keep outputs",
    "mlp": "keep outputs and recompute the MLP",
    "cheap": "recompute all but matmuls, convolutions and attention",
    "all": "recompute all",
}


@dataclass(frozen=True)
class Choice:
    """Blocks that are trained in the same way.

    Attributes:
        modules: their paths; "" for what lies outside of all blocks.
        mode: "eager", "outputs", "mlp", "cheap" or "all".
        time_ms: how much longer a step takes because of them, as predicted; negative where it takes less.
    """

    modules: tuple[str, ...]
    mode: Mode
    time_ms: float


@dataclass(frozen=True)
class Measurement:
    """Bytes that count for the budget, and milliseconds of a step; None where that was not measured."""

    bytes: int
    time_ms: float | None


@dataclass(frozen=True)
class FitReport(DrawnReport):
    """What ``fit`` returns. ``str()`` is a table, ``plot(path)`` a picture.

    Attributes:
        name: of the model's class.
        of: what counts: "saved" or "peak".
        budget_bytes: of the plan.
        choices: how the blocks are trained.
        eager: the model as it was, measured.
        predicted: the chosen plan.
        measured: the same, measured; None if it was only planned.
        checkpointed: every block recomputed, predicted.
        plans: those that no other is better than, from the smallest to the fastest.
        skipped: by reason, the blocks that can be trained as PyTorch does alone, or the ways that failed.
        notes: what to know of the report itself.
    """

    name: str
    of: Of
    budget_bytes: int
    choices: tuple[Choice, ...]
    eager: Measurement
    predicted: Measurement
    measured: Measurement | None
    checkpointed: Measurement
    plans: tuple[Plan, ...]
    skipped: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that can be met."""
        return self.plans[0].bytes

    @property
    def less(self) -> Plan | None:
        """The next plan that takes fewer bytes, and more time, as predicted. Of those that take less of both the best
        was measured too, and is slower."""
        time_ms = self.predicted.time_ms or 0.0
        less = (p for p in self.plans if p.bytes < self.predicted.bytes and p.time_ms >= time_ms)
        return max(less, key=lambda p: p.bytes, default=None)

    @property
    def faster(self) -> Plan | None:
        """The next plan beyond the budget that takes less time, as predicted. Those within it were measured too, where
        they could be the fastest."""
        time_ms = self.predicted.time_ms or 0.0
        faster = (p for p in self.plans if p.bytes > self.budget_bytes and p.time_ms < time_ms)
        return min(faster, key=lambda p: p.bytes, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        own = asdict(self) | {"smallest_bytes": self.smallest_bytes}
        own["choices"] = [choice | {"modules": list(choice["modules"])} for choice in own["choices"]]
        own["plans"] = [{"bytes": plan.bytes, "time_ms": plan.time_ms} for plan in self.plans]
        own["skipped"] = {reason: list(paths) for reason, paths in self.skipped.items()}
        return own

    def figure(self) -> Figure:
        """Time over bytes: the plans, the chosen one, eager PyTorch and a checkpoint of every block.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from . import plot

        return plot.draw(self)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        what = "saved for backward" if self.of == "saved" else "allocated at the peak"
        yield f"{self.name}: at most {budget_text(self.budget_bytes)} {what}"
        yield ""
        rows = [("blocks", "way to train", "adds to a step, predicted", "modules")]
        for choice in self.choices:
            number, where = str(len(choice.modules)), path_text(choice.modules)
            if choice.modules == ("",):
                number, where = "", "the rest of the model"
            rows.append((number, WORDS[choice.mode], f"{choice.time_ms:+.3g} ms", where))
        yield from counted_lines(rows)
        if self.skipped:
            yield ""
            for reason, paths in self.skipped.items():
                yield f"left to PyTorch: {path_text(paths)}: {reason}"
        yield ""
        lines = [("eager PyTorch", self.eager), ("this plan, predicted", self.predicted)]
        if self.measured is not None:
            lines.append(("this plan, measured", self.measured))
        smallest = Measurement(self.plans[0].bytes, self.plans[0].time_ms)
        if self.checkpointed.bytes not in (smallest.bytes, self.eager.bytes):  # as without blocks
            lines.append(("every block recomputed, predicted", self.checkpointed))
        # What would look like the plan itself, or stand there twice, is left out.
        if self.less is not None and size_text(self.less.bytes) not in (
            size_text(self.predicted.bytes),
            size_text(smallest.bytes),
        ):
            lines.append(("the next smaller plan, predicted", Measurement(self.less.bytes, self.less.time_ms)))
        if self.faster is not None:
            lines.append(("the next faster plan, predicted", Measurement(self.faster.bytes, self.faster.time_ms)))
        lines.append(("the smallest plan", smallest))
        width = max(len(name) for name, _ in lines)
        for name, found in lines:
            time = "" if found.time_ms is None else f"{found.time_ms:>10.4g} ms a step"
            yield f"{name:<{width}}  {size_text(found.bytes):>9}{time}"
        yield TIMES
        for note in self.notes:
            yield ""
            yield note
