"""A report as text, the modules of repeated blocks in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..utils.formatting import merged_path, pattern_of, size_text, unit_for
from .memory_use import MemoryReport
from .saved_rows import KINDS, Row

#: How many lines a table has at most, before the rest is summed up.
LINES = 16


@dataclass(frozen=True)
class Group:
    """Rows of similar modules: those of ``encoder.layer.0.output`` and ``encoder.layer.1.output``, say."""

    path: str
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)


def groups_of(report: MemoryReport) -> list[Group]:
    """The saved activations, by modules whose paths differ in numbers alone; the largest group first.

    Modules of different classes are apart, and those that are numbered themselves, as in a Sequential, where they save
    tensors of different shapes or by different operations.
    """
    by_module: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.kind == "activation":
            by_module.setdefault(row.module, []).append(row)
    similar: dict[object, list[str]] = {}
    for module, rows in by_module.items():
        is_numbered = module.rpartition(".")[2].isdecimal()
        saves = tuple(sorted((row.operation, row.shape) for row in rows)) if is_numbered else ()
        similar.setdefault((pattern_of(module), rows[0].module_class, saves), []).append(module)
    groups = [
        Group(merged_path(modules) or report.name, tuple(row for module in modules for row in by_module[module]))
        for modules in similar.values()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def lines(report: MemoryReport) -> Iterator[str]:
    unit, scale = unit_for(max(report.peak_bytes, report.saved_bytes))

    def line(size: int, whole: int, text: str) -> str:
        share = 100 * size / max(whole, 1)
        return f"{_rounded(size / scale, 2):>9}{_rounded(share, 1):>8}  {text}".rstrip()

    yield f"{report.name} on {report.device}"
    yield ""
    saved = report.saved_bytes
    entries = entries_of(report)
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
        yield f"{'':<19}not counted, because it was there before: {', '.join(before)}"

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


@dataclass(frozen=True)
class Entry:
    """A line of the table: what similar modules save by one operation, in one shape."""

    path: str
    operation: str
    tensors: str
    bytes: int


def entries_of(report: MemoryReport) -> list[Entry]:
    """The lines of all groups, the largest first."""
    entries = [entry for group in groups_of(report) for entry in entries_in(group, report.name)]
    return sorted(entries, key=lambda entry: -entry.bytes)


def entries_in(group: Group, name: str) -> Iterator[Entry]:
    """The lines of a group; ``name`` stands for the model itself."""
    similar: dict[tuple[str, str], list[Row]] = {}
    for row in group.rows:
        operation = row.operation + (f" +{len(row.shared_with)}" if row.shared_with else "")
        similar.setdefault((operation, f"{_shape(row.shape)} {row.dtype}"), []).append(row)
    for (operation, tensor), rows in similar.items():
        path = merged_path(dict.fromkeys(row.module for row in rows)) or name
        count = f"{len(rows)} of " if len(rows) > 1 else ""
        yield Entry(path, operation, count + tensor, sum(row.bytes for row in rows))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _rest(report: MemoryReport) -> str:
    if any(row.operation.startswith("CompiledFunction") for row in report.rows):
        return "compiled code's temporaries"
    return "what no operator returned"
