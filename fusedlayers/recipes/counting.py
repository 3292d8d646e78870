"""What ``save_once`` has packed in a graph: the bytes that are kept, and those that recipes spare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..utils.autograd_graph import is_leaf, nodes_of, raw_saved
from ..utils.storages import sizes_of, tensors_in
from .recipe import Recipe, Saved, Value, all_of


class Spared(NamedTuple):
    """A value that is replayed.

    Attributes:
        made_by: the node whose result it is; ``read_by``: those that have it for a saved tensor.
        modules: whose parameters the readers read, for each reader; empty where it reads none.
        nbytes: of the tensor that is not saved.
    """

    made_by: str
    read_by: tuple[str, ...]
    modules: tuple[str, ...]
    nbytes: int


class Count(NamedTuple):
    """What a graph keeps, and what it spares."""

    kept_bytes: int
    spared: tuple[Spared, ...]

    @property
    def spared_bytes(self) -> int:
        return sum(value.nbytes for value in self.spared)


def count(result: Any, exclude: Any = (), model: nn.Module | None = None) -> Count:
    """What is packed in the graph of ``result``: each storage once, without those of ``exclude``; with the names of the
    model's modules."""
    tensors: list[Tensor] = []
    readers: dict[int, tuple[Recipe, list[Any]]] = {}
    owners = {
        id(parameter): path
        for path, module in (() if model is None else model.named_modules())
        for parameter in module.parameters(recurse=False)
    }
    for node in nodes_of(tensors_in(result)):
        for packed in () if is_leaf(node) else _packed(node):
            held = (value.packed for value in all_of([packed]) if isinstance(value, Saved))
            tensors += [tensor for tensor in held if isinstance(tensor, Tensor)]
            source = _replayed(packed)
            if source is not None:
                readers.setdefault(id(source), (source, []))[1].append(node)
    left_out = sizes_of(tensors_in(exclude)).keys()
    kept = sum(size for key, size in sizes_of(tensors).items() if key not in left_out)
    spared = [
        Spared(
            recipe.made_by, tuple(n.name() for n in nodes), tuple(_module_of(n, owners) for n in nodes), recipe.nbytes
        )
        for recipe, nodes in readers.values()
    ]
    return Count(kept, tuple(spared))


def _module_of(node: Any, owners: Mapping[int, str]) -> str:
    """Whose parameter is behind the node, or behind the cast and the view of it."""
    pending = [(following, 2) for following, _ in node.next_functions]
    while pending:
        following, left = pending.pop(0)
        if following is None:
            continue
        owner = owners.get(id(getattr(following, "variable", None)))
        if owner is not None:
            return owner
        if left and following.name() in ("TBackward0", "ToCopyBackward0"):
            pending += [(behind, left - 1) for behind, _ in following.next_functions]
    return ""


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
