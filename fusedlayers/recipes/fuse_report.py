"""The report of ``fuse``: bytes, peaks and times before and after, and the values that are not saved.

``count`` reads these off a graph, and what stays: nodes hold what ``save_once`` has packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..utils.autograd_graph import is_leaf, nodes_of, raw_saved
from ..utils.formatting import counted_lines, path_text, pattern_of, size_text
from ..utils.report import Report
from ..utils.storages import sizes_of, tensors_in
from .recipe import Recipe, Stored, Value, all_of
from .region import Region, result_of
from .replays import REPLAYS, RESULTS

#: Of what stays, the largest rows are listed, until so much of all bytes is.
LISTED = 0.9


@dataclass(frozen=True)
class Values:
    """Values that are not saved, or that stay: one, or those that are alike in repeated blocks.

    Attributes:
        made_by: the node whose result it is, by autograd's name of it; "" where that is not known.
        read_by: the nodes that would have saved it, or save it.
        modules: the paths of the modules in which these run.
        nbytes: of all values.
        how: "replayed", or "output saved" where its node saves its output in the place of its input; the reason why a
            value stays.
        values: how many.
    """

    made_by: str
    read_by: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int
    how: str = "replayed"
    values: int = 1


@dataclass(frozen=True)
class FuseReport(Report):
    """The report of ``fuse``; ``str()`` is a table.

    Attributes:
        name: of the model's class.
        spared: what is not saved, the most bytes first. A value that is spared may be one that PyTorch does not save
            either: another value is replayed from it.
        kept: what stays, the most bytes first, until ``LISTED`` of all its bytes are listed.
        saved_bytes: what a forward pass saves for backward, before and now, beside inputs and parameters.
        peak_bytes: the most that a forward and a backward pass have allocated at once, before and now.
        step_ms: how long they take; with ``time=True``.
        notes: what to know of the report itself.
    """

    name: str
    spared: tuple[Values, ...] = ()
    kept: tuple[Values, ...] = ()
    saved_bytes: tuple[int, int] | None = None
    peak_bytes: tuple[int, int] | None = None
    step_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        advice = "" if self.saved_bytes else "; with inputs this report has bytes: fuse(model, inputs)"
        yield f"{self.name}: fused, every value is saved once, with the same gradients to the last bit{advice}"
        yield from (line for note in self.notes for line in ("", note))
        for title, pair in (("saved for backward", self.saved_bytes), ("peak of a step", self.peak_bytes)):
            if pair is not None:
                before, now = pair
                change = f" ({100 * (now - before) / before:+.1f} %)" if before else ""
                yield ""
                yield f"{title}, beside inputs and parameters: {size_text(before)} before, {size_text(now)} now{change}"
        if self.step_ms is not None:
            before_ms, now_ms = self.step_ms
            yield ""
            yield f"forward and backward: {before_ms:.3g} ms before, {now_ms:.3g} ms now ({now_ms / before_ms:.2f}x)"
        not_saved = "not saved, where PyTorch saves them, recomputes them, or saves another value in their place"
        for found, what, title in ((self.spared, not_saved, "how"), (self.kept, "still saved", "why")):
            rows = [
                (str(r.values), r.made_by, ", ".join(r.read_by), path_text(r.modules), size_text(r.nbytes), r.how)
                for r in found
            ]
            if rows:
                yield from ("", f"{what}:")
                yield from counted_lines([("values", "made by", "read by", "in module", "bytes", title), *rows])


def grouped(values: Iterable[Values]) -> tuple[Values, ...]:
    """The values in groups of those that are alike but for the numbers in their modules' paths."""
    groups: dict[Any, list[Values]] = {}
    for value in values:
        patterns = tuple(map(pattern_of, dict.fromkeys(value.modules)))
        groups.setdefault((value.made_by, tuple(dict.fromkeys(value.read_by)), patterns, value.how), []).append(value)
    rows = []
    for (made_by, read_by, _, how), members in groups.items():
        modules = tuple(dict.fromkeys(path for member in members for path in member.modules))
        rows.append(Values(made_by, read_by, modules, sum(m.nbytes for m in members), how, len(members)))
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def largest(rows: Sequence[Values]) -> tuple[Values, ...]:
    """The first rows, until they have so much of all bytes."""
    left = (1 - LISTED) * sum(row.nbytes for row in rows)
    listed = list(rows)
    while listed and listed[-1].nbytes <= left:
        left -= listed.pop().nbytes
    return tuple(listed)


# --- what a graph holds -----------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """The values that a graph keeps, each storage once, and those that it spares."""

    kept: tuple[Values, ...]
    spared: tuple[Values, ...]

    @property
    def kept_bytes(self) -> int:
        return sum(value.nbytes for value in self.kept)


def count(result: Any, exclude: Any = (), module_of: Callable[[Any], str] = lambda node: "") -> Packed:
    """The values that the graph of ``result`` keeps, without the storages of ``exclude``, and those that it spares;
    ``module_of`` names the module in which a node was made."""
    recipes: dict[Recipe, list[Any]] = {}  # with the nodes that have saved one, or a view of one
    sizes: dict[int, int] = {}
    small: set[int] = set()
    readers: dict[int, list[Any]] = {}  # by storage, the nodes that need it
    owners: dict[int, Any] = {}  # the nodes that save their output in it, in the place of their input
    made: dict[int, str] = {}  # by storage, the node whose result is in it
    nodes = nodes_of(tensors_in(result))
    makers = {id(value): node.name() for node in nodes if (value := result_of(node)) is not None}
    for node in nodes:
        for packed in [] if is_leaf(node) else [raw.data for raw in raw_saved(node) if isinstance(raw.data, Value)]:
            for value in all_of([packed]):
                is_kept = isinstance(value, Stored) and isinstance(value.packed, Tensor)
                found = sizes_of([value.packed]) if is_kept else {}  # type: ignore[attr-defined]  # as the line above says
                sizes |= found
                for key in found:
                    if not Region.is_worth_a_replay(value.packed):  # type: ignore[attr-defined]
                        small.add(key)
                    made[key] = made.get(key) or makers.get(id(value), "")
                    if node not in readers.setdefault(key, []):
                        readers[key].append(node)
                    if value is packed and getattr(getattr(node, "plan", None), "saved", None) == "output":  # by hand
                        owners.setdefault(key, node)
            recipe = _recipe_of(packed)
            if recipe is not None:
                recipes.setdefault(recipe, []).append(node)

    def spared(made_by: str, nbytes: int, nodes: Sequence[Any], how: str) -> Values:
        return Values(made_by, tuple(node.name() for node in nodes), tuple(map(module_of, nodes)), nbytes, how)

    values = [spared(recipe.made_by, recipe.nbytes, nodes, "replayed") for recipe, nodes in recipes.items()]
    for key, owner in owners.items():
        others = [node for node in readers[key] if node is not owner]
        if others:
            values.append(spared(owner.name(), sizes[key], others, "output saved"))
    left_out = sizes_of(tensors_in(exclude)).keys()
    stay = sizes.keys() - left_out
    kept = [
        spared(made[key], sizes[key], readers[key], _because(made[key], key in small, owners.get(key))) for key in stay
    ]
    return Packed(tuple(kept), tuple(values))


def _because(made_by: str, is_small: bool, owner: Any) -> str:
    """Why a value stays."""
    if is_small:
        return "it is small, or no plain tensor"
    if owner is not None:
        return "backward reads this output"
    if not made_by:
        return "input or mask"
    return (
        "its operands are not saved" if made_by in REPLAYS or made_by in RESULTS else "no operation by element made it"
    )


def _recipe_of(value: Value) -> Recipe | None:
    """The recipe that a saved tensor is, or is a view of."""
    while not isinstance(value, Recipe):
        if not value.operands:
            return None
        value = value.operands[0]
    return value
