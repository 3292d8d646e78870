"""What ``fuse`` has done, and what it could not do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..utils.formatting import counted_lines, path_text, size_text
from ..utils.reports import Report

#: What a table says whose rows are not parts of the whole.
ROWS = (
    "(frees: how much more would be saved if this operation alone were left out. Operations can share it, so that rows "
    "need not add up.)"
)


@dataclass(frozen=True)
class Replaced:
    """Places in the model that are fused, alike in all repeated blocks.

    Attributes:
        modules: the paths of the modules in whose code they are.
        pattern: "activation", "dropout", "layer_norm", "rms_norm", "group_norm", "batch_norm", "product" (a matrix
            product of a product, as behind a gate), or "mlp" for what is recomputed as a whole.
        activation: the name of an activation, else None.
        saves: what is kept of it for the backward pass, in a few words.
        saved_bytes: how many bytes fewer a forward pass on the example inputs keeps because of these places, while all
            others are fused; None without example inputs.
        time_ms: how much longer a step of forward and backward takes because of these places; negative where it takes
            less. None unless it was a dry run on example inputs.
        calls: how many calls of the operation the example makes; without example inputs, one for each module.
    """

    modules: tuple[str, ...]
    pattern: str
    activation: str | None
    saves: str
    saved_bytes: int | None = None
    time_ms: float | None = None
    calls: int = 1


@dataclass(frozen=True)
class Skipped:
    """Places that look as if they could be fused, and why they are not."""

    modules: tuple[str, ...]
    pattern: str
    activation: str | None
    reason: str


@dataclass(frozen=True)
class FuseReport(Report):
    """What ``fuse`` returns; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        replaced: what is fused.
        skipped: what is not, and why.
        too_small: what is fused, but PyTorch computes at the size of the example.
        saved_bytes: what a forward pass on the example inputs kept for the backward pass before, and what one keeps
            now; None without example inputs, or where the outputs need no gradient.
        notes: what to know of the report itself.
        dry_run: whether nothing was changed.
        step_ms: how long a step of forward and backward takes before, and with these places; of a dry run.
        idle: what is fused, but of which nothing is saved on the example: it runs under a checkpoint, or without
            gradients.
    """

    name: str
    replaced: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    too_small: tuple[Skipped, ...] = ()
    saved_bytes: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    dry_run: bool = False
    step_ms: tuple[float, float] | None = None
    idle: tuple[Skipped, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        before, after = self.saved_bytes or (None, None)
        before_ms, after_ms = self.step_ms or (None, None)
        return {
            "name": self.name,
            "replaced": [asdict(place) | {"modules": list(place.modules)} for place in self.replaced],
            "skipped": [asdict(place) | {"modules": list(place.modules)} for place in self.skipped],
            "too_small": [asdict(place) | {"modules": list(place.modules)} for place in self.too_small],
            "idle": [asdict(place) | {"modules": list(place.modules)} for place in self.idle],
            "saved_bytes": {"before": before, "after": after},
            "notes": list(self.notes),
            "dry_run": self.dry_run,
            "step_ms": {"before": before_ms, "after": after_ms},
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = sum(place.calls for place in self.replaced)
        would = "would be fused" if self.dry_run else "fused"
        here = " on these inputs" if self.too_small or self.idle else ""
        yield f"{self.name}: {count} operation{'' if count == 1 else 's'} {would}{here}"
        for note in self.notes:
            yield ""
            yield note
        if self.replaced:
            yield ""
            header = ("calls", "operation", "module", "frees", "adds to a step", "for the backward pass it")
            rows = [(str(p.calls), p.activation or p.pattern, *_columns(p)) for p in self.replaced]
            # What was not measured has no column.
            columns = [(title, *texts) for title, *texts in zip(header, *rows, strict=True) if any(texts)]
            yield from counted_lines([*zip(*columns, strict=True)])
        for title, places in (
            ("not fused:", self.skipped),
            ("fused for larger inputs:", self.too_small),
            ("fused, where nothing is saved here:", self.idle),
        ):
            if places:
                yield ""
                yield title
                yield from _reasons(places)
        if self.saved_bytes is not None:
            before, after = self.saved_bytes
            yield ""
            change = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
            now = "then" if self.dry_run else "now"
            saved = f"{size_text(before)} before, {size_text(after)} {now}{change}"
            details = "; details: memory_report" if after != before else ""
            yield f"saved for backward beside inputs and parameters: {saved}{details}"
            known = [place.saved_bytes for place in self.replaced if place.saved_bytes is not None]
            if len(known) > 1 and not 0.98 * (before - after) <= sum(known) <= 1.02 * (before - after):
                yield ROWS
        if self.step_ms is not None:
            before_ms, then_ms = (f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}" for ms in self.step_ms)
            yield f"forward and backward: {before_ms} ms before, {then_ms} ms then"


def _reasons(places: Sequence[Skipped]) -> Iterator[str]:
    """A line for all places with the same reason."""
    lines: dict[tuple[str, str], list[str]] = {}
    for place in places:
        lines.setdefault((place.activation or place.pattern, place.reason), []).append(path_text(place.modules))
    for (name, reason), paths in lines.items():
        yield f"  {name}: {reason} ({_first_of(paths)})"


def _first_of(paths: list[str]) -> str:
    text = ", ".join(paths[:2]) + (f" and {len(paths) - 2} more" if len(paths) > 2 else "")
    return f"module {text}" if text.isdecimal() else text  # of an nn.Sequential, where it would be read as a count


def _columns(place: Replaced) -> Iterator[str]:
    yield path_text(place.modules)
    yield "" if place.saved_bytes is None else size_text(place.saved_bytes)
    ms = place.time_ms
    yield "" if ms is None else f"{ms:+.0f} ms" if abs(ms) >= 10 else f"{ms:+.2g} ms"
    yield place.saves
