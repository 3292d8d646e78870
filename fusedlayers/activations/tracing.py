"""Traces a torch function to a list of pointwise operations.

``aten_graph`` runs the function on fake tensors, and ``simplified`` removes copies, repetitions and dead operations.
``trace`` does both, in core ATen, and folds constants into their users: a backend prints the remaining operations in
its own language. An activation and its vjp take 0.1 s and give 20 to 100 operations.

Torch decomposes most operations into those of core ATen. The decompositions here are of those that torch keeps whole,
that compute in mixed dtypes, or that torch decomposes with less accuracy than the kernel has.

What it does not do: anything that is not pointwise (reductions, random numbers, data-dependent branches) raises
``NotPointwise``, which names the operation.
"""

import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch import (
    EFFICIENT_ZEROS,
    FAKE_TENSOR_LOGGER,
    PRELU_BACKWARD,
    TO_COPY,
    core_decompositions,
    decompositions_of,
    elementwise_dtypes,
    ensure_cuda_guard,
    make_fx,
)
from ..utils.caching import in_clean_state
from .builtin import gelu_gate, gelu_tanh_gate
from .free_variables import OWN_BACKWARD

aten = torch.ops.aten

Argument = str | float | int | bool
"""The name of an input or of an earlier operation, or a constant."""


class NotPointwise(ValueError):
    """A function that does not map each element by itself."""


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


def trace(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[str] = ("z",)) -> Trace:
    """The operations of ``function`` for float32 inputs with these names.

    Raises:
        NotPointwise: the function cannot be traced, or is not pointwise.
    """
    examples = [torch.zeros(_EXAMPLE_SHAPE, dtype=torch.float32, device="cpu") for _ in inputs]
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


# --- simplifying ------------------------------------------------------------------------------------------------------

#: Operations that fill a new tensor with one number (uninitialised memory: any will do), or with their argument of this
#: place.
_ZEROS = {aten.empty.memory_format, aten.empty_like.default, aten.empty_permuted.default, aten.new_zeros.default,
          aten.zeros.default, aten.zeros_like.default}  # fmt: skip
_ONES = {aten.new_ones.default, aten.ones.default, aten.ones_like.default}
_FILLING_WITH = {aten.fill.Scalar: 1, aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2,
                 aten.scalar_tensor.default: 0}  # fmt: skip
_DETACHING = {aten.detach.default, aten.detach_copy.default}
#: Copies, and what broadcasting does by itself: an expansion holds the size of the example.
_COPYING = {aten.alias.default, aten.alias_copy.default, aten.clone.default, aten.expand.default,
            aten.expand_copy.default}  # fmt: skip
#: Operations that return the values of their argument.
COPIES = {TO_COPY.default, *_COPYING, *_DETACHING}
#: These do nothing if the result has the argument's shape.
_RESHAPING = {aten.view.default, aten.view_copy.default}
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


def simplified(module: GraphModule, *, for_autograd: bool = False) -> GraphModule:
    """A trace without copies, expansions, repetitions and dead operations, and with a 0-d tensor for each tensor of
    equal numbers. It computes the same for all shapes that broadcast. Its gradients are the same only
    ``for_autograd``: else what was detached no longer is."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _does_nothing(node, for_autograd):
            node.replace_all_uses_with(node.args[0])
        elif isinstance(fill := _fill_value(node), (bool, int, float)):
            with module.graph.inserting_before(node):
                dtype = {"dtype": node.meta["val"].dtype}
                number = module.graph.call_function(aten.scalar_tensor.default, (fill,), dtype)
                number.meta = node.meta
                node.replace_all_uses_with(number)
    _eliminate_common_subexpressions(module.graph)
    module.graph.eliminate_dead_code()
    return GraphModule(module, module.graph)


def _does_nothing(node: Node, for_autograd: bool) -> bool:
    source: Any = node.args[0] if node.args else None
    if node.target is TO_COPY.default:
        return bool(node.meta["val"].dtype is source.meta["val"].dtype)
    if node.target in _RESHAPING:
        return bool(node.meta["val"].shape == source.meta["val"].shape)
    return node.target in (_COPYING if for_autograd else _COPYING | _DETACHING)


def _fill_value(node: Node) -> Any:
    if node.target in _ZEROS or node.target in _ONES:
        return int(node.target in _ONES)
    return node.args[_FILLING_WITH[node.target]] if node.target in _FILLING_WITH else None


def _eliminate_common_subexpressions(graph: Graph) -> None:
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


# --- reading ----------------------------------------------------------------------------------------------------------

#: A shape that only pointwise operations keep: no dimension of 1, which broadcasts, and no two equal ones.
_EXAMPLE_SHAPE = (3, 5)
#: Operations with another name here than in ATen.
_RENAMED = {"view_copy": "bitcast", TO_COPY.__name__: "cast"}
#: What people write for them, in messages.
_SAID = {"local_scalar_dense": "item()", "alias": "a slice"}
#: The keyword arguments that are handled. An operation with any other one is refused.
_OPTIONS = {"add": {"alpha"}, "sub": {"alpha"}}


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
    """The name that people use for an operation of ATen's."""
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


# --- decompositions ---------------------------------------------------------------------------------------------------

Decompositions = dict[Any, Callable[..., Any]]

#: Core ATen keeps these whole. Torch's decompositions of them save the printers from knowing them.
_MORE_DECOMPOSITIONS = (
    aten.celu, aten.clamp, aten.elu, aten.elu_backward, aten.hardtanh, aten.hardtanh_backward, aten.leaky_relu,
    aten.relu, aten.softshrink, aten.threshold, aten.threshold_backward,
)  # fmt: skip


@functools.cache
def to_core() -> Decompositions:
    """Decompositions down to the operations that printers know."""
    promotions = {
        overload: _in_one_type(overload, kind)
        for kind, operators in _PROMOTED.items()
        for operator in operators
        for overload in (getattr(operator, name) for name in operator.overloads())
    }
    return {**core_decompositions(), **decompositions_of(_MORE_DECOMPOSITIONS), **promotions, **_OWN}


@functools.cache
def to_single_results() -> Decompositions:
    """Decompositions of operations that return more than one result, or that fill the elements that a mask selects."""
    return {**decompositions_of([aten.log_sigmoid_forward]), **_FILLING}


@functools.cache
def slow_kernels() -> Decompositions:
    """Decompositions of operations whose CPU kernels are not vectorised: their parts run faster."""
    return decompositions_of([PRELU_BACKWARD])


#: Operations of core ATen that convert their arguments themselves, by torch's rule of type promotion. Here explicit
#: casts do, so that printers need no rules for mixed dtypes. float16 and bfloat16 are computed in float32, as kernels
#: do.
_PROMOTED = {
    "DEFAULT": (
        aten.abs, aten.add, aten.ceil, aten.copysign, aten.floor, aten.fmax, aten.fmin, aten.fmod,
        aten.maximum, aten.minimum, aten.mul, aten.pow, aten.remainder, aten.round, aten.sign, aten.sub, aten.trunc,
    ),
    "INT_TO_FLOAT": (
        aten.asinh, aten.atan, aten.atanh, aten.cos, aten.cosh,
        aten.div, aten.erf, aten.erfc, aten.exp, aten.exp2, aten.expm1,
        aten.log, aten.log10, aten.log1p, aten.log2, aten.reciprocal, aten.rsqrt, aten.sigmoid, aten.sin, aten.sinh,
        aten.sqrt, aten.tanh,
    ),
}  # fmt: skip


def _in_one_type(overload: Any, kind: Any) -> Callable[..., Any]:
    def decomposition(*arguments: Any, **options: Any) -> Any:
        numbers = [a for a in arguments if isinstance(a, (Tensor, bool, int, float))]
        computed, result = elementwise_dtypes(*numbers, promotion=kind)
        if all(a.dtype == computed for a in arguments if isinstance(a, Tensor)):
            return NotImplemented
        converted = [a.to(computed) if isinstance(a, Tensor) else a for a in arguments]
        return overload(*converted, **options).to(result)

    return decomposition


def _truth(value: Any) -> Any:
    return value if value.dtype == torch.bool else value != 0


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        gate = gelu_tanh_gate(x)
        slope = gate * (1 - gate) * (2 * math.sqrt(2 / math.pi)) * (1 + 3 * 0.044715 * x * x)
    else:
        gate, slope = gelu_gate(x), torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (gate + x * slope)


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    (mask, *others) = indices
    if others or accumulate or mask is None or mask.dtype != torch.bool or mask.shape != x.shape or values.dim():
        return NotImplemented
    return torch.where(mask, values, x)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    return source.to(x.dtype, copy=True) if source.shape == x.shape else NotImplemented


_FILLING: Decompositions = {
    aten.copy.default: _copy,
    aten.index_put.default: _index_put,
    aten.masked_fill.Tensor: lambda x, mask, value: torch.where(mask, value.to(x.dtype), x),
}


def _zeros(size: Any, **options: Any) -> Tensor:
    # For uninitialised memory, where any number will do, and for autograd's zero gradients.
    return torch.full(size, 0, dtype=options.get("dtype"))


_OWN: Decompositions = {
    EFFICIENT_ZEROS.default: _zeros,
    aten.empty.memory_format: _zeros,
    aten.gelu.default: lambda x, approximate="none": x * (gelu_tanh_gate if approximate == "tanh" else gelu_gate)(x),
    aten.gelu_backward.default: _gelu_backward,
    aten.hardshrink_backward.default: lambda grad, x, lambd: torch.where((x >= -lambd) & (x <= lambd), 0.0, grad),
    aten.logical_and.default: lambda x, y: _truth(x) & _truth(y),
    aten.logical_not.default: lambda x: ~_truth(x),
    aten.logical_or.default: lambda x, y: _truth(x) | _truth(y),
    aten.logical_xor.default: lambda x, y: _truth(x) ^ _truth(y),
}
