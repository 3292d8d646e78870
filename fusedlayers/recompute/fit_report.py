"""``FitReport``: the plan that ``fit`` chose, as predicted and as measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.formatting import budget_text, counted_lines, path_text, size_text
from ..utils.reports import Report
from .training import COUNTED, Measurement, Of


@dataclass(frozen=True)
class FitReport(Report):
    """What ``fit`` returns. ``str()`` is a table.

    Attributes:
        name: of the model's class.
        of: what counts: "saved" or "peak".
        budget_bytes: what there may be.
        recomputed: paths of the blocks that are recomputed.
        saved_once: those of the others.
        eager: the model as it was; None where that does not fit the memory.
        predicted, measured: the chosen plan.
        smallest: the plan that recomputes all blocks.
        skipped: by reason, blocks that cannot be recomputed.
        notes: what to know of the report itself.
    """

    name: str
    of: Of
    budget_bytes: int
    recomputed: tuple[str, ...]
    saved_once: tuple[str, ...]
    eager: Measurement | None
    predicted: Measurement
    measured: Measurement
    smallest: Measurement
    skipped: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("blocks", "way to train", "modules")]
        for way, paths in (("recomputed", self.recomputed), ("saved once", self.saved_once)):
            rows += [(str(len(paths)), way, path_text(paths))] if paths else []
        rows += [(str(len(paths)), "saved once", f"{path_text(paths)}: {why}") for why, paths in self.skipped.items()]
        rows += [("", "saved once", "the rest of the model")]
        found = {
            "eager PyTorch": self.eager,
            "this plan, predicted": self.predicted,
            "this plan, measured": self.measured,
            "the smallest plan": self.smallest,
        }
        known = {name: each for name, each in found.items() if each is not None}
        width = max(map(len, known))
        title = f"{self.name}: at most {budget_text(self.budget_bytes)} {COUNTED[self.of]}"
        lines = [title, "", *counted_lines(rows), ""]
        for name, each in known.items():
            lines.append(f"{name:<{width}}  {size_text(each.bytes):>9}{each.time_ms:>10.4g} ms a step")
        lines.append("(predicted: by forward passes of blocks. Times of the same plan vary from run to run.)")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])
