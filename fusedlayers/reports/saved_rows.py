"""The tensors that a graph saves: a row for each storage, with the modules and operations that save it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import FORWARD_CLASS, storage_id, tree_leaves
from ..activations import Activation
from ..utils.autograd_graph import checkpoints_of, saved_by
from ..utils.formatting import path_text, pattern_of
from ..utils.module_tracker import ModuleTracker
from ..utils.storages import strided_parts

#: The dtypes of scalars in which autograd saves Python's numbers. These are not listed.
NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


@dataclass(frozen=True)
class Row:
    """A storage that is saved for the backward pass, and that the forward pass has made.

    Attributes:
        module: path of the innermost module that was running when it was first saved; for a checkpoint, of the
            innermost one that was running throughout. Empty for the model itself.
        operation: what saved it first: a node of autograd, such as GeluBackward0, or an operation of this library.
        shape, dtype: of the tensor that was saved first; others can be views of the same storage.
        bytes: of the whole storage, which a view keeps alive.
        shared_with: the other (module, operation) pairs that saved it.
    """

    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    shared_with: tuple[tuple[str, str], ...]


class Saver(NamedTuple):
    """The nodes that save a tensor: one, or those of a checkpoint."""

    nodes: Sequence[Any]
    operation: str
    tensor: Tensor


def savers_of(nodes: Sequence[Any], device: torch.device) -> Iterator[Saver]:
    """The savers of all tensors on a device, in the order of the nodes; of tensors that wrap others, for each of
    these."""
    saved = (([node], operation_of(node), saved_by(node)) for node in nodes)
    recomputed = ((own, "checkpoint", tensors) for own, tensors in checkpoints_of(nodes))
    for own, operation, tensors in chain(saved, recomputed):
        for tensor in tensors:
            for part in strided_parts(tensor):
                is_number = part.dim() == 0 and part.dtype in NUMBERS
                if part.device == device and part.untyped_storage().nbytes() and not is_number:
                    yield Saver(own, operation, part)


def rows_of(savers: Iterable[Saver], tracker: ModuleTracker, existing: Container[int]) -> Iterator[Row]:
    """A row for each storage whose address is not among the ``existing``."""
    by_storage: dict[int, list[Saver]] = {}
    for saver in savers:
        if (address := storage_id(saver.tensor.untyped_storage())) not in existing:
            by_storage.setdefault(address, []).append(saver)
    for own in by_storage.values():
        (module, operation), *others = dict.fromkeys((tracker.module_of(*s.nodes), s.operation) for s in own)
        first = own[0].tensor
        dtype, size = str(first.dtype).removeprefix("torch."), first.untyped_storage().nbytes()
        yield Row(module, operation, tuple(first.shape), dtype, size, tuple(others))


def operation_of(node: Any) -> str:
    """The name of a node, such as GeluBackward0; of this library's nodes the Function's name and the activation."""
    function = getattr(type(node), FORWARD_CLASS, None)
    if function is None or not function.__module__.startswith("fusedlayers."):
        return str(node.name())
    found = [leaf for leaf in tree_leaves(vars(node)) if isinstance(leaf, Activation)]
    return f"fusedlayers.{function.__name__}" + (f"({found[0]!r})" if found else "")


class Entry(NamedTuple):
    """A line of a table: the storages of one shape that one operation saves in the same modules of repeated blocks."""

    modules: str
    operation: str
    tensors: str
    bytes: int


def entries_of(rows: Iterable[Row], model: str) -> list[Entry]:
    """The entries, the most bytes first. The model itself is called ``model``."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        operation = row.operation + (f" +{len(row.shared_with)}" if row.shared_with else "")
        alike.setdefault((pattern_of(row.module), operation, _tensor_text(row)), []).append(row)
    entries = []
    for (_, operation, tensor), own in alike.items():
        modules = path_text(dict.fromkeys(row.module for row in own), model)
        tensors = f"{len(own)} of {tensor}" if len(own) > 1 else tensor
        entries.append(Entry(modules, operation, tensors, sum(row.bytes for row in own)))
    return sorted(entries, key=lambda entry: -entry.bytes)


def _tensor_text(row: Row) -> str:
    is_part = row.bytes > math.prod(row.shape) * getattr(torch, row.dtype).itemsize
    return f"{' x '.join(map(str, row.shape)) or 'scalar'} {row.dtype}{', a view' if is_part else ''}"
