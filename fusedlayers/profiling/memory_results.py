"""What ``memory_report`` returns: a report of one model, and the comparison of two, with their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..utils.formatting import described, merged_path, path_text, pattern_of, size_text, unit_for
from ..utils.reports import DrawnReport, NothingToDrawError, Report
from . import memory_plot
from .row_groups import Entry, bytes_by_module, entries_of
from .saved_rows import KINDS, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: How many lines a table has at most, before the rest is summed up.
LINES = 16


@dataclass(frozen=True)
class MemoryReport(DrawnReport):
    """What ``memory_report`` found. ``str()`` is a table, ``plot(path)`` a picture, ``compare(after)`` another table.

    Attributes:
        name: of the model's class, or of the function.
        device: where it was measured.
        rows: every saved storage once, the largest first.
        peak_bytes: the most that the device's allocator has handed out at once in a forward and a backward pass.
        estimated_peak_bytes: the most that was alive at once in another such pass, followed tensor by tensor.
        parts: what the estimate consists of; the bytes of each part.
        moment: when that was.
        unlisted: paths of the modules whose nodes do not show what they save, so that the rows lack it: TorchScript's,
            other C++ extensions', and those of writes over views in place.
        unlisted_bytes: how much that is in all, which ``saved_bytes`` lacks too; None where that is not known.
    """

    name: str
    device: str
    rows: tuple[Row, ...]
    peak_bytes: int
    estimated_peak_bytes: int
    parts: Mapping[str, int]
    moment: str
    unlisted: tuple[str, ...] = ()
    unlisted_bytes: int | None = 0

    @property
    def saved_bytes(self) -> int:
        """The sum of the saved activations; what existed before the call does not count."""
        return self.bytes_of("activation")

    @property
    def rest_bytes(self) -> int:
        """The measured peak minus the estimate; negative where the estimate is too high."""
        return self.peak_bytes - self.estimated_peak_bytes

    def bytes_of(self, kind: str) -> int:
        return sum(row.bytes for row in self.rows if row.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = [
            vars(row) | {"shape": list(row.shape), "shared_with": [list(pair) for pair in row.shared_with]}
            for row in self.rows
        ]
        sums = {"saved_bytes": self.saved_bytes, "rest_bytes": self.rest_bytes}
        return own | sums | {"parts": dict(self.parts), "rows": rows, "unlisted": list(self.unlisted)}

    def figure(self) -> Figure:
        """What is saved: modules beside the modules that they consist of, and the operations that save.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing is saved.
        """
        if not self.saved_bytes:
            raise NothingToDrawError(
                f"memory_report: {self.name} saves nothing for backward, so that there is nothing to draw"
            )
        title = (
            f"{self.name}: {size_text(self.saved_bytes)} saved for backward; "
            f"peak of forward and backward: {size_text(self.peak_bytes)} ({self.device})"
        )
        return memory_plot.draw(self.rows, self.name, title)

    def compare(self, after: MemoryReport) -> Comparison:
        """This report and a later one, side by side.

        Raises:
            TypeError: ``after`` is no ``MemoryReport``.
        """
        if not isinstance(after, MemoryReport):
            raise TypeError(f"compare: expected another report of memory_report, got {described(after)}")
        return Comparison(self, after)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Comparison(Report):
    """What ``MemoryReport.compare`` returns; ``str()`` is a table."""

    before: MemoryReport
    after: MemoryReport

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Saved bytes before and after, by module; repeated blocks are one. What changed most comes first.

        Where one report has a module and the other, in its place, modules inside it, these are summed up.
        """
        before, after = bytes_by_module(self.before.rows), bytes_by_module(self.after.rows)
        for own, others in ((before, after), (after, before)):
            for path in sorted(own.keys() - others.keys(), reverse=True):
                for inner in [inner for inner in others.keys() - own.keys() if inner.startswith(f"{path}.")]:
                    others[path] += others.pop(inner)
        classes = [{row.module: row.module_class for row in report.rows} for report in (self.before, self.after)]
        alike: dict[object, list[str]] = {}
        for path in {**before, **after}:
            size = before[path], after[path]
            is_numbered = path.rpartition(".")[2].isdecimal()  # as in a Sequential, where any two may differ
            kinds = tuple(of_report.get(path) for of_report in classes)
            key = pattern_of(path), kinds, size if is_numbered else tuple(map(bool, size))
            alike.setdefault(key, []).append(path)
        pairs: dict[str, tuple[int, int]] = {}
        for paths in alike.values():
            name = merged_path(paths) or self.after.name  # a module may have the name of the model's class
            old, new = pairs.get(name, (0, 0))
            pairs[name] = old + sum(before[p] for p in paths), new + sum(after[p] for p in paths)
        return dict(sorted(pairs.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), -item[1][0])))

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        return {
            "saved for backward": (self.before.saved_bytes, self.after.saved_bytes),
            "peak, estimated": (self.before.estimated_peak_bytes, self.after.estimated_peak_bytes),
            "peak, measured": (self.before.peak_bytes, self.after.peak_bytes),
        }

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values, for JSON."""

        def named(pairs: dict[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
            return {name: {"before": a, "after": b} for name, (a, b) in pairs.items()}

        return {"groups": named(self.groups), "totals": named(self.totals)}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        unit, scale = unit_for(max(self.before.peak_bytes, self.after.peak_bytes))

        def line(name: str, before: int, after: int) -> str:
            change = f"{100 * (after - before) / before:>+8.1f} %" if before else f"{'new':>10}" if after else ""
            return f"{before / scale:>10.2f}{after / scale:>10.2f}{change:>11}  {name}".rstrip()

        groups = list(self.groups.items())
        total = max(self.before.saved_bytes, self.after.saved_bytes)
        shown = [group for group in groups[:LINES] if 1000 * max(group[1]) >= total]
        shown = groups if len(shown) + 1 >= len(groups) else shown
        others = [pair for _, pair in groups[len(shown) :]]
        names = dict.fromkeys((self.before.name, self.after.name))
        yield f"{' and '.join(names)}, in {unit}"
        yield ""
        yield f"{'before':>10}{'after':>10}{'change':>11}  saved by"
        for path, pair in shown:
            yield line(path, *pair)
        if others:
            yield line(f"{len(others)} more", *(sum(sizes) for sizes in zip(*others, strict=True)))
        yield ""
        for name, pair in self.totals.items():
            yield line(name, *pair)


def _lines(report: MemoryReport) -> Iterator[str]:
    unit, scale = unit_for(max(report.peak_bytes, report.saved_bytes))

    def line(size: int, whole: int, text: str) -> str:
        share = 100 * size / max(whole, 1)
        return f"{_rounded(size / scale, 2):>9}{_rounded(share, 1):>8}  {text}".rstrip()

    yield f"{report.name} on {report.device}"
    yield ""
    saved = report.saved_bytes
    entries = entries_of(report.rows, report.name)
    shown = _shown(entries, saved)
    paths, operations = (
        max((len(getattr(entry, name)) for entry in shown), default=0) for name in ("path", "operation")
    )
    yield f"{unit:>9}{'%':>8}  {'module':<{paths}}  {'saved by':<{operations}}  tensors"
    for entry in shown:
        text = f"{entry.path:<{paths}}  {entry.operation:<{operations}}  {entry.tensors}"
        yield line(entry.bytes, saved, text)
    if others := entries[len(shown) :]:
        yield line(sum(entry.bytes for entry in others), saved, f"{len(others)} more")
    yield line(saved, saved, "saved for backward")
    if any("+" in entry.operation for entry in shown):
        yield f"{'':<19}+n: n more operations save the same memory"
    before = [f"{size_text(report.bytes_of(kind))} of {kind}s" for kind in KINDS[1:] if report.bytes_of(kind)]
    if before:
        yield f"{'':<19}saved too, and not counted, because it was there before: {', '.join(before)}"

    if report.unlisted:
        more = "bytes that do not show" if report.unlisted_bytes is None else f"{size_text(report.unlisted_bytes)} more"
        savers = f"TorchScript, C++ extensions or writes over views in place: {path_text(report.unlisted)}"
        yield f"{'':<19}not listed: {more}, saved by {savers}"

    yield ""
    peak = report.peak_bytes
    yield f"{unit:>9}{'%':>8}  at the peak: {report.moment}"
    for part, size in report.parts.items():
        if float(_rounded(size / scale, 2)):
            yield line(size, peak, part)
    yield line(report.estimated_peak_bytes, peak, "estimated")
    yield line(report.rest_bytes, peak, f"rest: {_rest(report)}")
    yield line(peak, peak, "measured")


def _rounded(number: float, digits: int) -> str:
    return f"{round(number, digits) + 0.0:.{digits}f}"  # no minus before a zero


def _shown(entries: list[Entry], saved: int) -> list[Entry]:
    """All but the small ones; a single small one takes no more room than its summary would."""
    shown = [entry for entry in entries[:LINES] if 1000 * entry.bytes >= saved]
    return entries if len(shown) + 1 >= len(entries) else shown


def _rest(report: MemoryReport) -> str:
    if any(row.operation.startswith("CompiledFunction") for row in report.rows):
        return "compiled code's temporaries"
    return "what no operator returned"
