"""A torch function as a list of pointwise operations.

``trace`` runs the function on fake tensors, decomposes it to core ATen, and tidies the result: constants are folded
into their users, copies and casts to the same type vanish, equal nodes become one, dead ones go. What remains is small
enough to read, and a backend prints it in its own language. ``aten_graph`` stops before the decomposition.

Anything that is not pointwise (reductions, random numbers, data-dependent branches) raises ``NotPointwise``, with the
operation that is to blame.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch import FAKE_TENSOR_LOGGER, TO_COPY, ensure_cuda_guard, make_fx
from ..utils.isolation import in_clean_state
from .decompositions import NotPointwise, to_core

__all__ = [
    "FILL_VALUES",
    "TORCH_CALLS",
    "NotPointwise",
    "Operation",
    "Pointwise",
    "aten_graph",
    "eliminate_common_subexpressions",
    "simplified",
    "trace",
]

aten = torch.ops.aten

Argument = str | float | int | bool
"""A name (of the input or an earlier operation) or a constant."""


@dataclass(frozen=True)
class Operation:
    """``name = op(*arguments)``; ``op`` is ATen's name without overload, or "bitcast", or "cast"."""

    name: str
    op: str
    arguments: tuple[Argument, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Pointwise:
    """A pointwise function in single assignments."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Argument, ...]


#: What torch calls the operation, by what it is called here. All else keeps its name.
_RENAMED = {"view_copy": "bitcast", TO_COPY.__name__: "cast"}
_CONSTANTS = ("full", "full_like", "scalar_tensor")
#: Options that are read; of those without an entry none is, and what is not read must not be ignored.
_OPTIONS = {"add": {"alpha"}, "sub": {"alpha"}}
_NOTHING = ("alias", "alias_copy", "clone", "detach", "detach_copy", "empty_permuted")


def trace(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[str] = ("z",),
    dtype: torch.dtype = torch.float32,
) -> Pointwise:
    """The operations of ``function``, whose inputs have these names and ``dtype``.

    Raises:
        NotPointwise: see above.
    """
    examples = [torch.zeros(_EXAMPLE_SHAPE, dtype=dtype, device="cpu") for _ in inputs]
    return _read(aten_graph(function, examples, to_core()), tuple(inputs))


def aten_graph(
    function: Callable[..., Any], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None = None
) -> GraphModule:
    """What ``function`` calls on tensors like ``examples``, without views and mutations (but for a ``copy_`` at the end
    for each example that is changed).

    Raises:
        NotPointwise: the function cannot be traced.
    """
    # Tracing happens on a short-lived thread; the caller's lasts.
    ensure_cuda_guard()
    with _one_at_a_time:
        return _aten_graph(function, examples, decompositions)


#: torch.fx notes what it is tracing in global variables.
_one_at_a_time = threading.Lock()


@in_clean_state
def _aten_graph(
    function: Callable[..., Any], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None
) -> GraphModule:
    log = logging.getLogger(FAKE_TENSOR_LOGGER)  # prints the traceback of what is caught here
    log.addFilter(_is_not_ours)
    try:
        return make_fx(
            torch.func.functionalize(lambda *tensors: function(*tensors), remove="mutations_and_views"),
            decomposition_table=decompositions,
            tracing_mode="fake",
        )(*examples)
    except Exception as error:  # whatever the function does that a trace cannot follow
        raise NotPointwise(_why_untraceable(error)) from error
    finally:
        log.removeFilter(_is_not_ours)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Whether another thread says it: one at a time traces here."""
    return record.thread != threading.get_ident()


#: Operations that take from a tensor its shape at most, and how to read off what they fill another with.
FILL_VALUES: dict[Any, Callable[[Node], Any]] = {
    aten.empty.memory_format: lambda node: 0,  # what nobody has written, where any number will do
    aten.empty_like.default: lambda node: 0,
    aten.fill.Scalar: lambda node: node.args[1],
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.new_ones.default: lambda node: 1,
    aten.new_zeros.default: lambda node: 0,
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.scalar_tensor.default: lambda node: node.args[0],
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
}
_IDENTITIES = {aten.alias.default, aten.alias_copy.default, aten.detach.default, aten.detach_copy.default}
#: With 1 for their second argument these do nothing.
_NEUTRAL = {aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar}

#: What torch itself calls these takes half as long to call.
TORCH_CALLS: dict[Any, Callable[..., Any]] = {
    getattr(aten, name): getattr(torch, name)
    for name in (
        *("add", "sub", "mul", "div", "neg", "abs", "reciprocal", "sqrt", "pow", "maximum", "minimum", "clamp"),
        *("exp", "expm1", "log", "log1p", "lgamma", "sigmoid", "tanh", "sin", "cos", "erf", "where"),
        *("gt", "ge", "lt", "le", "eq", "ne"),
    )
}


def eliminate_common_subexpressions(graph: Graph) -> None:
    """What is computed twice, and what does nothing; gradients stay what they are."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target in _NEUTRAL and node.args[1] == 1 else None
        if not isinstance(source, Node) or source.meta["val"].dtype is not node.meta["val"].dtype:
            # torch's own pass takes 0.0 and -0.0 for the same.
            source = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if source is not node:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def simplified(module: GraphModule) -> GraphModule:
    """A trace that is to be run without gradients, without what does nothing then, and with tensors of equal numbers as
    single ones. It computes the same for any shapes that broadcast."""
    for node in list(module.graph.nodes):
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
        elif node.target in FILL_VALUES and isinstance(fill := FILL_VALUES[node.target](node), (bool, int, float)):
            with module.graph.inserting_before(node):
                dtype = {"dtype": node.meta["val"].dtype}
                number = module.graph.call_function(aten.scalar_tensor.default, (fill,), dtype)
                number.meta = node.meta
                node.replace_all_uses_with(number)
    eliminate_common_subexpressions(module.graph)
    module.graph.eliminate_dead_code()
    return GraphModule(module, module.graph)


def _why_untraceable(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if "data-dependent" in text:
        return "what it does depends on the values of a tensor"
    if "convert all Tensors to FakeTensors" in text:
        return "it reads a tensor that could not be found; pass it through functools.partial or a module's parameters"
    if "alias annotations" in text and (called := re.search(r"aten::(\w+_)\(", text)):
        return f"torch cannot trace {called[1]}, which works in place; use inplace=False"
    return f"it cannot be traced: {text.splitlines()[0].partition('. ')[0]}"  # torch goes on for paragraphs


#: Neither a dimension of 1, which broadcasts, nor two equal ones: a shape that only pointwise operations keep.
_EXAMPLE_SHAPE = (3, 5)


def _read(module: GraphModule, inputs: tuple[str, ...]) -> Pointwise:
    values: dict[Node, Argument] = {}
    seen: dict[tuple[object, ...], str] = {}
    operations: list[Operation] = []
    outputs: tuple[Argument, ...] = ()
    names = iter(inputs)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(names)
        elif node.op == "output":
            (result,) = node.args
            results = result if isinstance(result, (tuple, list)) else (result,)
            if not all(isinstance(r, Node) for r in results):
                raise NotPointwise("it does not return a tensor")
            outputs = tuple(values[r] for r in results)
        elif node.op == "call_function":
            values[node] = _operation(node, values, seen, operations)
        else:
            raise NotPointwise(f"it reads a tensor from outside ({node.target})")
    return Pointwise(inputs, _live(operations, outputs), outputs)


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
    if node.target is TO_COPY.default:
        source = node.args[0]
        assert isinstance(source, Node)
        if source.meta["val"].dtype == meta.dtype:
            return arguments[0]
        arguments = arguments[:1]
    if op == "view_copy":
        arguments = arguments[:1]
    if (unknown := node.kwargs.keys() - _OPTIONS.get(op, set())) and node.target is not TO_COPY.default:
        raise NotPointwise(f"{op} with {', '.join(sorted(unknown))} has no decomposition here")
    alpha: Any = node.kwargs.get("alpha", arguments.pop() if op in ("add", "sub") and len(arguments) == 3 else 1)
    if alpha != 1:
        arguments[1] = _append("mul", (arguments[1], alpha), meta.dtype, seen, operations)
    if not all(isinstance(a, (str, bool, int, float)) for a in arguments):
        raise NotPointwise(f"{op} is not pointwise")
    if op == "mul" and 1 in arguments[1:]:
        return arguments[0]
    if op == "mul" and arguments[0] == 1:
        return arguments[1]
    if op == "pow" and arguments[1] == 1:
        return arguments[0]
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


def _live(operations: list[Operation], outputs: tuple[Argument, ...]) -> tuple[Operation, ...]:
    needed = set(outputs)
    live = []
    for operation in reversed(operations):
        if operation.name in needed:
            live.append(operation)
            needed.update(a for a in operation.arguments if isinstance(a, str))
    return tuple(reversed(live))
