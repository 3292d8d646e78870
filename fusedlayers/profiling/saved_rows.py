"""What a graph saves: a row for each storage, with the modules and operations that saved it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_leaves
from ..activations import Activation
from ..recipes.recipe import Saved, Value, all_of
from ..utils.autograd_graph import checkpoints_of, is_leaf, raw_saved, saved_by
from ..utils.storages import strided_parts, tensors_in
from .module_tracker import ModuleTracker

#: What a saved storage can be. Only activations count: the others existed before the call.
KINDS = ("activation", "input", "parameter", "buffer", "constant")


@dataclass(frozen=True)
class Row:
    """A storage that is saved for the backward pass.

    Attributes:
        module: path of the innermost module that was running when it was first saved; for a checkpoint, of the
            innermost one that was running throughout. Empty for the model itself.
        module_class: the name of that module's class.
        operation: what saved it first: a node of autograd, such as GeluBackward0, or an operation of this library.
        shape, dtype: of the tensor that was saved first; others can be views of the same storage.
        bytes: of the whole storage, which a view keeps alive.
        kind: "activation"; or, of what existed before the call and does not count, "input", "parameter", "buffer",
            or "constant" (a tensor from elsewhere).
        shared_with: the other (module, operation) pairs that saved it.
    """

    module: str
    module_class: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: str
    shared_with: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Saver:
    """A node that saves a tensor, or part of one."""

    module: str
    operation: str
    tensor: Tensor


def savers_of(nodes: Sequence[Any], device: torch.device, tracker: ModuleTracker) -> dict[int, list[Saver]]:
    """The nodes that save each storage of a device, in their order; by the storage's address."""
    savers: dict[int, list[Saver]] = {}
    saved = (([node], operation_of(node), chain(saved_by(node), _saved_once(node))) for node in nodes)
    recomputed = ((own, "checkpoint", tensors) for own, tensors in checkpoints_of(nodes))
    for own, operation, tensors in chain(saved, recomputed):
        module = tracker.module_of(*own)
        for tensor in tensors:
            for part in strided_parts(tensor):
                if part.device == device and part.untyped_storage().nbytes():
                    savers.setdefault(part.untyped_storage()._cdata, []).append(Saver(module, operation, part))
    return savers


def _saved_once(node: Any) -> Iterator[Tensor]:
    """What ``save_once`` has packed a node's saved tensors into: they as they are, and what they are replayed from."""
    packed = [] if is_leaf(node) else [raw.data for raw in raw_saved(node)]
    for value in all_of([data for data in packed if isinstance(data, Value)]):
        if isinstance(value, Saved):
            yield from tensors_in(value.packed)


def row_of(savers: Sequence[Saver], kind: str, tracker: ModuleTracker) -> Row:
    """The row of the storage that these nodes save."""
    first, pairs = savers[0], dict.fromkeys((saver.module, saver.operation) for saver in savers)
    return Row(
        first.module,
        tracker.class_names[first.module],
        first.operation,
        tuple(first.tensor.shape),
        str(first.tensor.dtype).removeprefix("torch."),
        first.tensor.untyped_storage().nbytes(),
        kind,
        tuple(pairs)[1:],
    )


def preexisting_kinds(tracker: ModuleTracker, inputs: Iterable[Tensor], leaves: Iterable[Tensor]) -> dict[int, str]:
    """The kinds of the storages that existed before the call, by their addresses."""
    buffers = (buffer for module in tracker.modules for buffer in module.buffers(recurse=False))
    parameters = (parameter for module in tracker.modules for parameter in module.parameters(recurse=False))
    kinds = (("parameter", leaves), ("buffer", buffers), ("input", inputs), ("parameter", parameters))
    return {
        part.untyped_storage()._cdata: kind
        for kind, tensors in kinds
        for tensor in tensors
        for part in strided_parts(tensor)
    }


def operation_of(node: Any) -> str:
    """The name of a node, such as GeluBackward0; of this library's nodes the Function's name and the activation."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not function.__module__.startswith("fusedlayers."):
        return str(node.name())
    found = [leaf for leaf in tree_leaves(vars(node)) if isinstance(leaf, Activation)]
    return f"fusedlayers.{function.__name__}" + (f"({found[0]!r})" if found else "")
