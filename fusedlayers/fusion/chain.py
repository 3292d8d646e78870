"""Operations of a graph, one after the other, as one function of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..activations import DTYPES, Activation, resolve
from ..utils.bounded_cache import BoundedCache
from .stand_in import computed_by

#: Python's statements that write over their first operand.
_STATEMENTS = frozenset(
    {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem"}
)
#: Functions outside the table of which PyTorch keeps the outputs too.
_OF_THEIR_RESULT = frozenset({"exp", "exp_", "expm1", "exp2", "sqrt", "sqrt_", "rsqrt", "reciprocal", "tan"})


class Slot(NamedTuple):
    """In the arguments of a step: the chain's input, which is number 0, or the result of a step."""

    number: int


Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Chain:
    """The function of z that nodes compute, the last of them its result."""

    def __init__(self, z: Node, nodes: Sequence[Node]) -> None:
        slots = {z: Slot(0)} | {node: Slot(number) for number, node in enumerate(nodes, 1)}
        self.steps: list[Step] = [_step(node, slots) for node in nodes]
        self.__name__ = ", ".join(map(name_of, nodes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.steps == other.steps

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __call__(self, z: Tensor) -> Tensor:
        values: dict[Slot, Any] = {Slot(0): z}
        for number, (function, args, kwargs) in enumerate(self.steps, 1):
            # Whether it writes over its argument is for others to decide.
            options = {name: value for name, value in kwargs.items() if name != "inplace"}
            values[Slot(number)] = function(*_replaced(args, values), **_replaced(options, values))
        result: Tensor = values[Slot(len(self.steps))]
        return result


_activations: BoundedCache[Activation | bool] = BoundedCache()


def activation_of_chain(chain: Chain, dtype: torch.dtype) -> Activation | None:
    """What a chain computes, if that is an activation of which PyTorch keeps the input."""
    if chain.__name__ in _OF_THEIR_RESULT:
        return None
    found = _activations.get(chain)
    if found is None:
        activation = resolve(chain)
        dtype = dtype if dtype in DTYPES else torch.float32
        found = _activations.put(chain, computed_by(activation, dtype) or False)
    return found or None  # type: ignore[return-value]  # True is never put


def writes(node: Node) -> bool:
    """Whether a call may write over its first argument, which PyTorch says by its name or an option."""
    name = name_of(node)
    is_named_so = name.endswith("_") and not name.endswith("__")
    is_asked_to = bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return node.op.startswith("call_") and (is_named_so or is_asked_to or name.strip("_") in _STATEMENTS)


def name_of(node: Node) -> str:
    """The name of what a node calls."""
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", type(target).__name__))


def _step(node: Node, slots: Mapping[Node, Slot]) -> Step:
    target: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
    # A graph's lists and dicts are immutable ones of its own.
    args: Any = map_arg(tuple(node.args), lambda other: slots.get(other, other))
    kwargs: Any = map_arg(dict(node.kwargs), lambda other: slots.get(other, other))
    return target, args, dict(kwargs)


def _replaced(tree: Any, values: Mapping[Any, Any]) -> Any:
    """Arguments with what stands for tensors replaced."""
    if isinstance(tree, Slot):
        return values[tree]
    if isinstance(tree, tuple | list):
        return type(tree)(_replaced(part, values) for part in tree)
    return {key: _replaced(part, values) for key, part in tree.items()} if isinstance(tree, dict) else tree
