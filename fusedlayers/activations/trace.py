"""An activation's torch function as a list of pointwise operations.

``trace`` runs the function on fake tensors, decomposes it to core ATen, and tidies the result: constants are folded
into their users, copies and casts to the same type vanish, equal nodes become one, dead ones go. What remains is small
enough to read, and a backend prints it in its own language.

Anything that is not pointwise in one tensor and constants (reductions, random numbers, data-dependent branches, several
outputs) raises ``NotPointwise``, with the operation that is to blame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..clean import in_clean_state

aten = torch.ops.aten

#: Core ATen keeps these whole; printers have fewer operations to know if they are taken apart too.
_MORE_DECOMPOSITIONS = (
    aten.celu,
    aten.clamp,
    aten.elu,
    aten.elu_backward,
    aten.hardtanh,
    aten.hardtanh_backward,
    aten.leaky_relu,
    aten.relu,
    aten.softshrink,
    aten.threshold,
    aten.threshold_backward,
)

Argument = str | float | int | bool
"""A name (of the input or an earlier operation) or a constant."""


class NotPointwise(ValueError):
    """A function that does not map each element by itself."""


@dataclass(frozen=True)
class Operation:
    """``name = op(*arguments)``; ``op`` is ATen's name without overload, or "bitcast", or "cast"."""

    name: str
    op: str
    arguments: tuple[Argument, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function of one input, in single assignments."""

    input: str
    operations: tuple[Operation, ...]
    output: Argument


#: What torch calls the operation, by what it is called here. All else keeps its name.
_RENAMED = {"view_copy": "bitcast", "_to_copy": "cast"}
_CONSTANTS = ("full", "full_like", "scalar_tensor")
_NOTHING = ("alias", "alias_copy", "detach", "clone", "empty_permuted")


@in_clean_state
def trace(function: Callable[[Tensor], Tensor], name: str = "z", dtype: torch.dtype = torch.float32) -> Pointwise:
    """The operations of ``function``, whose input is called ``name`` and has ``dtype``.

    Raises:
        NotPointwise: see above.
    """
    example = torch.zeros(_EXAMPLE_SHAPE, dtype=dtype)
    try:
        module = make_fx(
            torch.func.functionalize(lambda z: function(z), remove="mutations_and_views"),
            decomposition_table=_decompositions(),
            tracing_mode="fake",
        )(example)
    except Exception as error:  # whatever the function does that a trace cannot follow
        raise NotPointwise(f"the function cannot be traced: {error}") from error
    return _read(module, name)


#: Neither a dimension of 1, which broadcasts, nor two equal ones: a shape that only pointwise operations keep.
_EXAMPLE_SHAPE = (3, 5)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {**core_aten_decompositions(), **get_decompositions(_MORE_DECOMPOSITIONS)}


def _read(module: GraphModule, input_name: str) -> Pointwise:
    values: dict[Node, Argument] = {}
    seen: dict[tuple[object, ...], str] = {}
    operations: list[Operation] = []
    output: Argument | None = None

    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = input_name
        elif node.op == "output":
            (result,) = node.args
            if not isinstance(result, Node):
                raise NotPointwise("the function must return one tensor")
            output = values[result]
        elif node.op == "call_function":
            values[node] = _operation(node, values, seen, operations)
        else:
            raise NotPointwise(f"the function reads a tensor from outside ({node.target})")
    assert output is not None
    return Pointwise(input_name, _live(operations, output), output)


def _operation(
    node: Node, values: dict[Node, Argument], seen: dict[tuple[object, ...], str], operations: list[Operation]
) -> Argument:
    """Append what ``node`` computes, unless it is a constant or was computed before; return how to refer to it."""
    op = str(node.target).split(".")[1]
    meta = node.meta.get("val")
    arguments: list[Any] = [values[a] if isinstance(a, Node) else a for a in node.args]
    if op in _CONSTANTS:
        fill = arguments[0 if op == "scalar_tensor" else 1]
        assert isinstance(fill, (bool, int, float))
        return fill
    if op in _NOTHING:
        return arguments[0] if arguments and isinstance(node.args[0], Node) else 0.0
    if not isinstance(meta, Tensor) or tuple(meta.shape) not in (_EXAMPLE_SHAPE, ()):
        raise NotPointwise(f"{op} is not pointwise")
    if op == "_to_copy":
        source = node.args[0]
        assert isinstance(source, Node)
        if source.meta["val"].dtype == meta.dtype:
            return arguments[0]
        arguments = arguments[:1]
    if op == "view_copy":
        arguments = arguments[:1]
    alpha: Any = node.kwargs.get("alpha", arguments.pop() if op in ("add", "sub") and len(arguments) == 3 else 1)
    if alpha != 1:
        arguments[1] = _append("mul", (arguments[1], alpha), meta.dtype, seen, operations)
    if not all(isinstance(a, (str, bool, int, float)) for a in arguments):
        raise NotPointwise(f"{op} is not pointwise")
    if op == "mul" and 1 in arguments[1:]:
        return arguments[0]
    if op == "mul" and arguments[0] == 1:
        return arguments[1]
    return _append(_RENAMED.get(op, op), tuple(arguments), meta.dtype, seen, operations)


def _append(
    op: str,
    arguments: tuple[Argument, ...],
    dtype: torch.dtype,
    seen: dict[tuple[object, ...], str],
    operations: list[Operation],
) -> str:
    # The types keep 0, 0.0 and False apart, which are equal.
    key = (op, dtype, *((type(a), a, str(a)) for a in arguments))
    if key not in seen:
        seen[key] = f"t{len(seen)}"
        operations.append(Operation(seen[key], op, arguments, dtype))
    return seen[key]


def _live(operations: list[Operation], output: Argument) -> tuple[Operation, ...]:
    needed = {output}
    live = []
    for operation in reversed(operations):
        if operation.name in needed:
            live.append(operation)
            needed.update(a for a in operation.arguments if isinstance(a, str))
    return tuple(reversed(live))
