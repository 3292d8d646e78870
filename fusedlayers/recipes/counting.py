"""What ``save_once`` has packed in a graph: the bytes that are kept, and those that recipes spare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..utils.autograd_graph import is_leaf, nodes_of, raw_saved
from ..utils.storages import sizes_of, tensors_in
from .recipe import Recipe, Saved, Value, all_of
from .region import result_of


class Spared(NamedTuple):
    """A value that is not saved.

    Attributes:
        made_by: the node whose result it is; ``read_by``: those that would have saved it.
        modules: in which the readers run.
        nbytes: of the tensor that is not saved.
        by_output: whether its node saves its output in the place of it; else it is replayed.
    """

    made_by: str
    read_by: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int
    by_output: bool = False


class Kept(NamedTuple):
    """A value that is saved.

    Attributes:
        made_by: the node whose result it is, where that is known; ``read_by``: those that save it, or replay from it.
        modules: in which the readers run.
        nbytes: of its storage.
    """

    made_by: str | None
    read_by: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int


class Count(NamedTuple):
    """What a graph keeps, and what it spares."""

    kept: tuple[Kept, ...]
    spared: tuple[Spared, ...]

    @property
    def kept_bytes(self) -> int:
        return sum(value.nbytes for value in self.kept)

    @property
    def spared_bytes(self) -> int:
        return sum(value.nbytes for value in self.spared)


def count(result: Any, exclude: Any = (), module_of: Callable[[Any], str] = lambda node: "") -> Count:
    """What is packed in the graph of ``result``: each storage once, without those of ``exclude``; ``module_of`` names
    the module in which a node was made."""

    def named(readers: Sequence[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(node.name() for node in readers), tuple(map(module_of, readers))

    packed = _Packed(nodes_of(tensors_in(result)))
    spared = [Spared(recipe.made_by, *named(readers), recipe.nbytes) for recipe, readers in packed.recipes.values()]
    kept = []
    left_out = sizes_of(tensors_in(exclude)).keys()
    for key, (size, made_by, readers) in packed.storages.items():
        owner = packed.outputs.get(key)
        others = [reader for reader in readers if reader is not owner]
        if owner is not None and others:
            spared.append(Spared(owner.name(), *named(others), size, by_output=True))
        if key not in left_out:
            kept.append(Kept(made_by, *named(readers), size))
    return Count(tuple(kept), tuple(spared))


class _Packed:
    """What some nodes have packed.

    Attributes:
        recipes: with the nodes that have one for a saved tensor, or for a view of one.
        storages: their bytes, the name of the node that made one, where that is known, and the nodes that need it.
        outputs: the nodes that save their output in one, in the place of their input.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.recipes: dict[int, tuple[Recipe, list[Any]]] = {}
        self.storages: dict[int, tuple[int, str | None, list[Any]]] = {}
        self.outputs: dict[int, Any] = {}
        makers = {id(made): _maker(node) for node in nodes if (made := result_of(node)) is not None}
        for node in nodes:
            for packed in () if is_leaf(node) else _packed(node):
                for value in all_of([packed]):
                    if isinstance(value, Saved) and isinstance(value.packed, Tensor):
                        self._add(node, value.packed, makers.get(id(value)), value is packed and _saves_output(node))
                recipe = _replayed(packed)
                if recipe is not None:
                    self.recipes.setdefault(id(recipe), (recipe, []))[1].append(node)

    def _add(self, node: Any, tensor: Tensor, made_by: str | None, is_output: bool) -> None:
        for key, size in sizes_of([tensor]).items():
            _, known, readers = self.storages.get(key, (size, None, []))
            self.storages[key] = size, known or made_by, readers if node in readers else [*readers, node]
            if is_output:
                self.outputs.setdefault(key, node)


def _maker(node: Any) -> str:
    """The name of the node that has made a result, and not of a view of it."""
    while node.name() in ("ViewBackward0", "UnsafeViewBackward0", "TBackward0") and node.next_functions[0][0]:
        node = node.next_functions[0][0]
    return str(node.name())


def _saves_output(node: Any) -> bool:
    """Whether it is an activation of this package that does (``ops/pointwise.py``)."""
    return getattr(getattr(node, "plan", None), "saved", None) == "output"


def _packed(node: Any) -> Iterator[Value]:
    for raw in raw_saved(node):
        if isinstance(raw.data, Value):
            yield raw.data


def _replayed(value: Value) -> Recipe | None:
    """The recipe that a saved tensor is, or is a view of."""
    while not isinstance(value, Recipe):
        operands = value.operands()
        if not operands:
            return None
        value = operands[0]
    return value
