"""Two reports side by side: before and after a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..utils.formatting import unit_for
from .table import LINES, groups_of

if TYPE_CHECKING:
    from .memory_use import MemoryReport


@dataclass(frozen=True)
class Comparison:
    """What ``MemoryReport.compare`` returns; ``str()`` is a table."""

    before: MemoryReport
    after: MemoryReport

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Saved bytes before and after, by module; repeated blocks are one. What changed most comes first.

        Where one report has a module and the other, in its place, modules inside it, these are summed up.
        """
        before, after = _sums(self.before), _sums(self.after)
        for own, others in ((before, after), (after, before)):
            for path in sorted(own.keys() - others.keys(), reverse=True):
                for inner in [inner for inner in others.keys() - own.keys() if inner.startswith(f"{path}.")]:
                    others[path] += others.pop(inner)
        pairs = {path: (before[path], after[path]) for path in {**before, **after}}
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
        shown = groups if len(groups) <= LINES + 1 else groups[:LINES]
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


def _sums(report: MemoryReport) -> Counter[str]:
    sums: Counter[str] = Counter()
    for group in groups_of(report):
        sums[group.path] += group.bytes
    return sums
