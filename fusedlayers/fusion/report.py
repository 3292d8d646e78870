"""What ``fuse`` has done, and what it could not do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..utils.formatting import merged_path, pattern_of, size_text


@dataclass(frozen=True)
class Replaced:
    """A place in the model that is fused.

    Attributes:
        modules: the paths of what is fused: a layer and its activation; the module that is an MLP; an activation.
        pattern: "dense", "conv" or "norm", with the activation after it; "mlp", "gated mlp"; "activation" alone.
        activation: its name.
        saves: what is kept of it for the backward pass, in a few words.
    """

    modules: tuple[str, ...]
    pattern: str
    activation: str
    saves: str


@dataclass(frozen=True)
class Skipped:
    """A place that looks as if it could be fused, and why it is not."""

    module: str
    reason: str


@dataclass(frozen=True)
class FuseReport:
    """What ``fuse`` returns; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        replaced: what is fused.
        skipped: what is not, and why.
        saved_bytes: what a forward pass on the example inputs kept for the backward pass before, and what one keeps
            now; None without example inputs, or where the outputs need no gradient.
    """

    name: str
    replaced: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    saved_bytes: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        before, after = self.saved_bytes or (None, None)
        return {
            "name": self.name,
            "replaced": [asdict(place) | {"modules": list(place.modules)} for place in self.replaced],
            "skipped": [asdict(place) for place in self.skipped],
            "saved_bytes": {"before": before, "after": after},
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.replaced)
        yield f"{self.name}: {count} place{'' if count == 1 else 's'} fused"
        groups: dict[object, list[Replaced]] = {}
        for place in self.replaced:
            key = place.pattern, place.activation, place.saves, *map(pattern_of, place.modules)
            groups.setdefault(key, []).append(place)
        lines = [(str(len(places)), *_columns(places)) for places in groups.values()]
        if lines:
            yield ""
            header = "", "pattern", "modules", "for the backward pass it"
            widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
            for line in (header, *lines):
                number, *texts = line
                padded = (f"{text:<{width}}" for text, width in zip(texts, widths[1:], strict=True))
                yield "  ".join((f"{number:>{widths[0]}}", *padded)).rstrip()
        skipped: dict[tuple[str, object], list[str]] = {}
        for skip in self.skipped:
            skipped.setdefault((skip.reason, pattern_of(skip.module)), []).append(skip.module)
        if skipped:
            yield ""
            yield "not fused:"
            for (reason, _), modules in skipped.items():
                yield f"  {merged_path(modules) or self.name}: {reason}"
        if self.saved_bytes is not None:
            before, after = self.saved_bytes
            yield ""
            change = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
            yield f"saved for backward: {size_text(before)} before, {size_text(after)} now{change}"


def _columns(places: list[Replaced]) -> tuple[str, str, str]:
    first = places[0]
    pattern = first.activation if first.pattern == "activation" else f"{first.pattern} + {first.activation}"
    if "mlp" in first.pattern:
        pattern = f"{first.pattern}, {first.activation}"
    paths = [merged_path(paths) for paths in zip(*(place.modules for place in places), strict=True)]
    return pattern, " + ".join(paths) or "the model", first.saves
