"""Traces a torch function to a list of pointwise operations.

``aten_graph`` runs the function on fake tensors, and ``simplified`` removes copies, repetitions and dead operations.
``trace`` does both, in core ATen, and folds constants into their users: a backend prints the remaining operations in
its own language. An activation and its vjp take 0.1 s and give 20 to 100 operations.

What it does not do: anything that is not pointwise (reductions, random numbers, data-dependent branches) raises
``NotPointwise``, which names the operation.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch import FAKE_TENSOR_LOGGER, TO_COPY, ensure_cuda_guard, make_fx
from ..utils.caching import in_clean_state
from .decompositions import NotPointwise, to_core
from .free_variables import OWN_BACKWARD

__all__ = [
    "EXPANDING",
    "FILL_VALUES",
    "TORCH_CALLS",
    "NotPointwise",
    "Trace",
    "TracedOperation",
    "aten_graph",
    "eliminate_common_subexpressions",
    "muted",
    "simplified",
    "trace",
]

aten = torch.ops.aten

Argument = str | float | int | bool
"""The name of an input or of an earlier operation, or a constant."""


@dataclass(frozen=True)
class TracedOperation:
    """``name = op(*arguments)``; ``op`` is ATen's name without overload, or "bitcast", or "cast"."""

    name: str
    op: str
    arguments: tuple[Argument, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Trace:
    """A pointwise function in static single assignment form."""

    inputs: tuple[str, ...]
    operations: tuple[TracedOperation, ...]
    outputs: tuple[Argument, ...]


#: Operations with another name here than in ATen.
_RENAMED = {"view_copy": "bitcast", TO_COPY.__name__: "cast"}
#: What people write for them, in messages.
_SAID = {"local_scalar_dense": "item()", "alias": "a slice"}
#: The keyword arguments that are handled. An operation with any other one is refused.
_OPTIONS = {"add": {"alpha"}, "sub": {"alpha"}}


def trace(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[str] = ("z",),
    dtype: torch.dtype = torch.float32,
) -> Trace:
    """The operations of ``function`` for inputs with these names and this dtype.

    Raises:
        NotPointwise: the function cannot be traced, or is not pointwise.
    """
    examples = [torch.zeros(_EXAMPLE_SHAPE, dtype=dtype, device="cpu") for _ in inputs]
    return _read(simplified(aten_graph(function, examples, to_core())), tuple(inputs))


def aten_graph(
    function: Callable[..., Any], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None = None
) -> GraphModule:
    """The graph of ``function`` on tensors like ``examples``, without views and mutations. (A mutation of an example
    remains as a ``copy_`` at the end.)

    Raises:
        NotPointwise: the function cannot be traced.
    """
    # Without a GPU torch 2.11 makes a stand-in for the CUDA device guard when it first traces, and frees it with the
    # thread that traced (pytorch#178950). That thread may be short-lived; the caller's lasts.
    ensure_cuda_guard()
    with _trace_lock:
        return _aten_graph(function, examples, decompositions)


#: torch.fx stores what it is tracing in global variables.
_trace_lock = threading.Lock()


@in_clean_state
def _aten_graph(
    function: Callable[..., Any], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None
) -> GraphModule:
    functional = torch.func.functionalize(lambda *tensors: function(*tensors), remove="mutations_and_views")
    try:
        with muted(logging.getLogger(FAKE_TENSOR_LOGGER)):  # it prints tracebacks of caught exceptions
            graph: GraphModule = make_fx(functional, decomposition_table=decompositions, tracing_mode="fake")(*examples)
            return graph
    except Exception as error:  # a trace may fail in any way
        raise NotPointwise(_untraceable_reason(error)) from error


@contextmanager
def muted(log: logging.Logger) -> Iterator[None]:
    """Drop what this thread logs."""
    thread = threading.get_ident()

    def is_other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_other_thread)
    try:
        yield
    finally:
        log.removeFilter(is_other_thread)


#: Operations that fill a new tensor with one value, and how to read that value from the node.
FILL_VALUES: dict[Any, Callable[[Node], Any]] = {
    aten.empty.memory_format: lambda node: 0,  # uninitialised memory: any number will do
    aten.empty_like.default: lambda node: 0,
    aten.empty_permuted.default: lambda node: 0,
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
#: What broadcasting does by itself. The size that they hold is that of the example.
EXPANDING = {aten.expand.default, aten.expand_copy.default}
_DETACHING = {aten.alias.default, aten.alias_copy.default, aten.detach.default, aten.detach_copy.default}
_COPYING = {aten.clone.default, *EXPANDING, *_DETACHING}
#: These do nothing if their second argument is 1.
_NEUTRAL = {aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar}

#: The same operations as functions of ``torch``, which take half as long to call.
TORCH_CALLS: dict[Any, Callable[..., Any]] = {
    getattr(aten, name): getattr(torch, name)
    for name in (
        *("add", "sub", "mul", "div", "neg", "abs", "reciprocal", "sqrt", "pow", "maximum", "minimum", "clamp"),
        *("exp", "expm1", "log", "log1p", "lgamma", "sigmoid", "tanh", "sin", "cos", "erf", "where"),
        *("gt", "ge", "lt", "le", "eq", "ne"),
    )
}


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Remove repeated computations and multiplications by 1. Gradients stay the same."""
    seen: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target in _NEUTRAL and node.args[1] == 1 else None
        if not isinstance(source, Node) or source.meta["val"].dtype is not node.meta["val"].dtype:
            # By text, because torch's own pass takes 0.0 and -0.0 for equal.
            source = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if source is not node:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def simplified(module: GraphModule) -> GraphModule:
    """A trace simplified for running without gradients: without detaches, copies and expansions, and with a 0-d tensor
    for each tensor of equal numbers. It computes the same for all shapes that broadcast."""
    for node in list(module.graph.nodes):
        is_same_cast = node.target is TO_COPY.default and node.meta["val"].dtype is node.args[0].meta["val"].dtype
        if node.target in _COPYING or is_same_cast:
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


def _untraceable_reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if "autograd.Function" in text or "custom_function_call" in text:
        return OWN_BACKWARD
    if "data-dependent" in text:
        return "what it does depends on the values of a tensor"
    if "convert all Tensors to FakeTensors" in text:
        return "it reads a tensor that could not be found; pass it through functools.partial or a module's parameters"
    if "broadcast" in text or "must match the size" in text:
        return "it does not work for inputs of every shape"
    if "alias annotations" in text and (called := re.search(r"aten::(\w+_)\(", text)):
        return f"torch cannot trace {called[1]}, which works in place; use inplace=False"
    return f"it cannot be traced: {text.splitlines()[0].partition('. ')[0]}"  # torch's message has paragraphs


#: A shape that only pointwise operations keep: no dimension of 1, which broadcasts, and no two equal ones.
_EXAMPLE_SHAPE = (3, 5)


def _read(module: GraphModule, inputs: tuple[str, ...]) -> Trace:
    values: dict[Node, Argument] = {}
    operations: list[TracedOperation] = []
    names = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(names)
        elif node.op == "call_function":
            values[node] = _operation(node, values, operations)
        elif node.op == "get_attr":
            raise NotPointwise(f"it reads a tensor from outside ({node.target})")
    (result,) = node.args  # of the last node, the output
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not all(isinstance(r, Node) for r in results):
        raise NotPointwise("it does not return a tensor")
    return Trace(inputs, tuple(operations), tuple(values[r] for r in results))


def name_of(op: str) -> str:
    """What people call an operation of ATen's."""
    name = op.removesuffix("_copy").strip("_")
    return _SAID.get(name, name)


def _operation(node: Node, values: dict[Node, Argument], operations: list[TracedOperation]) -> Argument:
    """Append the operation of ``node``, unless it is a constant. Returns its name or the constant."""
    op = str(node.target).split(".")[1]
    meta = node.meta.get("val")
    arguments: list[Any] = [values[a] if isinstance(a, Node) else a for a in node.args]
    if op == "scalar_tensor":  # by name: it is one of ATen's and one of torch's primitives
        return arguments[0]  # type: ignore[no-any-return]
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random or not isinstance(meta, Tensor) or tuple(meta.shape) not in (_EXAMPLE_SHAPE, ()):
        raise NotPointwise(f"{name_of(op)} is not pointwise")
    if node.target is TO_COPY.default or op == "view_copy":
        arguments = arguments[:1]
    elif unhandled := node.kwargs.keys() - _OPTIONS.get(op, set()):
        raise NotPointwise(f"{op} with {', '.join(sorted(unhandled))} has no decomposition here")
    if not all(isinstance(a, (str, bool, int, float)) for a in arguments):
        raise NotPointwise(f"{name_of(op)} is not pointwise")

    def append(op: str, *arguments: Argument) -> str:
        operations.append(TracedOperation(f"t{len(operations)}", op, arguments, meta.dtype))
        return operations[-1].name

    alpha: Any = node.kwargs.get("alpha", arguments.pop() if op in ("add", "sub") and len(arguments) == 3 else 1)
    if alpha != 1:
        arguments[1] = append("mul", arguments[1], alpha)
    for this, other in ((0, 1), (1, 0)):  # a constant of 1 may be either factor
        if op == "mul" and arguments[other] == 1:
            return arguments[this]  # type: ignore[no-any-return]
    return append(_RENAMED.get(op, op), *arguments)
