"""An autograd graph: its nodes, what each saves, and its leaves."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from .._torch import RAW_SAVED, SELECTIVE_CHECKPOINT_MODES, SavedTensor, number_of, tree_leaves


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """All nodes of the tensors' graph, in the order in which they were created; those of leaves come last."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = {node for node, _ in pending.pop().next_functions if node is not None} - seen
        seen |= following
        pending += following
    return sorted(seen, key=number_of)


def leaves_of(nodes: Sequence[Any]) -> list[Tensor]:
    """The tensors that gradients are accumulated into."""
    return [node.variable for node in nodes if is_leaf(node)]


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a leaf."""
    return hasattr(node, "variable")  # as AccumulateGrad has


def saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node holds: saved tensors, what saved-tensor hooks packed them into, and attributes.

    Nothing is unpacked: that would read from disk, or recompute, what hooks have moved or dropped. Some nodes do not
    show what they save (``hides_what_it_saves``).
    """
    for saved in () if is_leaf(node) else raw_saved(node):
        yield from _held_by(saved)
    yield from attributes_of(node)


def hides_what_it_saves(node: Any) -> bool:
    """Whether a node is written in C++ outside of torch's own formulas, as TorchScript's are, or holds another node, as
    that of a write over a view in place does."""
    return type(node).__name__ in ("CppFunction", "CopySlices")


def checkpoints_of(nodes: Iterable[Any]) -> Iterator[tuple[list[Any], list[Tensor]]]:
    """The nodes of each checkpoint, those of checkpoints in it included, and the inputs that it will recompute from.

    The nodes of the checkpointed function are in the graph and save next to nothing. Their unpack hooks hold the
    inputs, as saved tensors (torch 2.13) or on a node outside the graph (2.11).
    """
    nodes_of_frames: dict[int, tuple[Any, list[Any]]] = {}
    for node in nodes:
        pending = [] if is_leaf(node) else [*raw_saved(node)]
        while pending:
            for frame in _frames_of(pending.pop()):
                own = nodes_of_frames.setdefault(id(frame), (frame, []))[1]
                if node not in own[-1:]:  # it saves several tensors
                    own.append(node)
                    pending += _inputs_of(frame)  # which a checkpoint around this one has got
    for frame, own in nodes_of_frames.values():
        inputs = [tensor for held in _inputs_of(frame) for tensor in _held_by(held)]
        yield own, inputs + list(_tensors(_saved_for_recompute(frame)))


def _frames_of(saved: Any) -> Iterator[Any]:
    """The checkpoints whose hooks have got a saved tensor, or what it is replayed from."""
    for hook in (saved.unpack_hook, *(getattr(part, "unpack", None) for part in _parts_of(saved))):
        for cell in getattr(hook, "__closure__", None) or ():
            if type(cell.cell_contents).__module__ == "torch.utils.checkpoint":
                yield cell.cell_contents


def _parts_of(saved: Any) -> list[Any]:
    """What a saved tensor is packed as; of a value of ``save_once`` all values that it is made of, too."""
    parts = [saved.data]
    for part in parts:
        parts += getattr(part, "operands", ())
    return parts


def _held_by(saved: Any) -> Iterator[Tensor]:
    return _tensors([(part, getattr(part, "packed", None)) for part in _parts_of(saved)])


def _inputs_of(frame: Any) -> list[Any]:
    """A checkpoint's inputs, packed as they are."""
    saver = getattr(frame, "input_saver", None)
    raw: list[Any] = [] if saver is None else [*raw_saved(saver.grad_fn)]
    return raw + [held for held in getattr(frame, "saved_args", ()) if isinstance(held, SavedTensor)]


def _saved_for_recompute(frame: Any) -> list[Any]:
    """The results that a selective checkpoint has saved."""
    found: list[Any] = []
    for cell in getattr(frame.recompute_fn, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, SELECTIVE_CHECKPOINT_MODES):
                results = dict(getattr(cell.cell_contents, "storage", {}))
                found += [getattr(held, "val", None) for held in tree_leaves(results)]
    return found


def attributes_of(node: Any) -> Iterator[Tensor]:
    """The tensors that a Function has set as attributes of its context; compiled code does so too."""
    yield from _tensors(getattr(node, "__dict__", {}))


def raw_saved(node: Any) -> Iterator[Any]:
    """A node's saved tensors, packed as they are; those of a Function in the order in which it saved them."""
    for name in dir(node):
        if name.startswith(RAW_SAVED):
            raw = getattr(node, name)
            yield from raw if isinstance(raw, tuple | list) else (raw,)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
