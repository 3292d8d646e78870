"""A torch function as a list of pointwise operations.

``trace`` runs the function on fake tensors, decomposes it to core ATen, and tidies the result: constants are folded
into their users, copies and casts to the same type vanish, equal nodes become one, dead ones go. What remains is small
enough to read, and a backend prints it in its own language. ``aten_graph`` stops before the decomposition.

Anything that is not pointwise (reductions, random numbers, data-dependent branches) raises ``NotPointwise``, with the
operation that is to blame.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes
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
    """A pointwise function in single assignments."""

    inputs: tuple[str, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Argument, ...]


#: What torch calls the operation, by what it is called here. All else keeps its name.
_RENAMED = {"view_copy": "bitcast", "_to_copy": "cast"}
_CONSTANTS = ("full", "full_like", "scalar_tensor")
_NOTHING = ("alias", "alias_copy", "detach", "clone", "empty_permuted")


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
    return _read(aten_graph(function, examples, _decompositions()), tuple(inputs))


@in_clean_state
def aten_graph(
    function: Callable[..., Any], examples: Sequence[Tensor], decompositions: Mapping[Any, Any] | None = None
) -> GraphModule:
    """What ``function`` calls on tensors like ``examples``, without views and mutations (but for a ``copy_`` at the end
    for each example that is changed).

    Raises:
        NotPointwise: the function cannot be traced.
    """
    try:
        return make_fx(
            torch.func.functionalize(lambda *tensors: function(*tensors), remove="mutations_and_views"),
            decomposition_table=decompositions,
            tracing_mode="fake",
        )(*examples)
    except Exception as error:  # whatever the function does that a trace cannot follow
        raise NotPointwise(_why_untraceable(error)) from error


#: Operations that take from a tensor its shape at most, and how to read off what they fill another with.
FILLED: dict[Any, Callable[[Node], Any]] = {
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


def simplified(module: GraphModule) -> GraphModule:
    """A trace that is to be run without gradients, without what does nothing then, and with tensors of equal numbers as
    single ones. It computes the same for any shapes that broadcast."""
    for node in list(module.graph.nodes):
        if node.target in _IDENTITIES or (node.target is aten.pow.Tensor_Scalar and node.args[1] == 1):
            node.replace_all_uses_with(node.args[0])
        elif node.target in FILLED and isinstance(fill := FILLED[node.target](node), (bool, int, float)):
            with module.graph.inserting_before(node):
                dtype = {"dtype": node.meta["val"].dtype}
                number = module.graph.call_function(aten.scalar_tensor.default, (fill,), dtype)
                number.meta = node.meta
                node.replace_all_uses_with(number)
    seen: dict[str, Node] = {}
    for node in module.graph.nodes:  # those that compute the same (for torch's own pass 0.0 and -0.0 are the same)
        if node.op == "call_function":
            first = seen.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
    module.graph.eliminate_dead_code()
    return GraphModule(module, module.graph)


def _why_untraceable(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if "data-dependent" in text:
        return "what it does depends on the values of a tensor"
    if "convert all Tensors to FakeTensors" in text:
        return "it reads a tensor that could not be found; pass it through functools.partial or a module's parameters"
    return f"it cannot be traced: {text.splitlines()[0]}"


#: Neither a dimension of 1, which broadcasts, nor two equal ones: a shape that only pointwise operations keep.
_EXAMPLE_SHAPE = (3, 5)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    promotions = {
        overload: _in_one_type(overload, kind)
        for kind, operators in _PROMOTED.items()
        for operator in operators
        for overload in (getattr(operator, name) for name in operator.overloads())
    }
    return {**core_aten_decompositions(), **get_decompositions(_MORE_DECOMPOSITIONS), **promotions, **_OWN}


@functools.cache
def slow_kernels() -> dict[Any, Callable[..., Any]]:
    """Decompositions of operations whose CPU kernels are not vectorised: what they are made of runs faster."""
    return get_decompositions([aten._prelu_kernel, aten._prelu_kernel_backward])


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


# --- decompositions that torch has not --------------------------------------------------------------------------------

#: Operations of core ATen that convert their arguments themselves, by how they choose the type. Their arguments get it
#: here, so that printers need no rules for mixed types; float16 and bfloat16 are computed in float32, as in kernels.
_PROMOTED = {
    PROMOTION.DEFAULT: (
        aten.abs, aten.add, aten.ceil, aten.copysign, aten.floor, aten.fmax, aten.fmin, aten.fmod, aten.hypot,
        aten.maximum, aten.minimum, aten.mul, aten.pow, aten.remainder, aten.round, aten.sign, aten.sub, aten.trunc,
    ),
    PROMOTION.INT_TO_FLOAT: (
        aten.acos, aten.acosh, aten.asin, aten.asinh, aten.atan, aten.atan2, aten.atanh, aten.cos, aten.cosh,
        aten.digamma, aten.div, aten.erf, aten.erfc, aten.erfinv, aten.exp, aten.exp2, aten.expm1, aten.i0, aten.lgamma,
        aten.log, aten.log10, aten.log1p, aten.log2, aten.reciprocal, aten.rsqrt, aten.sigmoid, aten.sin, aten.sinh,
        aten.special_erfcx, aten.special_i0e, aten.special_i1, aten.special_i1e, aten.special_ndtri, aten.sqrt,
        aten.tan, aten.tanh,
    ),
}  # fmt: skip


def _in_one_type(overload: Any, kind: Any) -> Callable[..., Any]:
    def decomposition(*arguments: Any, **options: Any) -> Any:
        numbers = [a for a in arguments if isinstance(a, (Tensor, bool, int, float))]
        computed, result = elementwise_dtypes(*numbers, type_promotion_kind=kind)
        if all(a.dtype == computed for a in arguments if isinstance(a, Tensor)):
            return NotImplemented
        converted = [a.to(computed) if isinstance(a, Tensor) else a for a in arguments]
        return overload(*converted, **options).to(result)

    return decomposition


def _truth(value: Any) -> Any:
    return value if value.dtype == torch.bool else value != 0


def _divide(x: Any, y: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    quotient = torch.true_divide(x, y)
    if rounding_mode is None:
        return quotient
    _refuse_integers(x, y)
    return torch.trunc(quotient)


def _floor_divide(x: Any, y: Any) -> Any:
    # As torch's kernels do it, from the exact remainder: a quotient that is rounded up to a whole number is below it.
    _refuse_integers(x, y)
    quotient = torch.true_divide(x, y)
    remainder = torch.fmod(x, y) if isinstance(x, Tensor) else torch.fmod(torch.full_like(y, x), y)
    whole = (x - remainder) / y
    whole = torch.where((remainder != 0) & ((remainder < 0) != (y < 0)), whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    floor = torch.where(whole != 0, floor, torch.copysign(torch.zeros_like(quotient), quotient))
    if isinstance(y, Tensor):
        return torch.where(y == 0, quotient, floor)
    return floor if y else quotient


def _refuse_integers(*arguments: Any) -> None:
    if not any(isinstance(a, Tensor) and a.is_floating_point() for a in arguments):
        raise NotPointwise("a rounded division of integers has no decomposition here")


def _round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    if decimals < 0:
        return torch.round(x / 10.0**-decimals) * 10.0**-decimals
    return torch.round(x * 10.0**decimals) / 10.0**decimals


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))  # 1 + erf(x) would cancel


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    return NotImplemented if training else torch.where(x > 0, x, x * ((lower + upper) / 2))


def _rrelu_and_noise(x: Tensor, noise: Tensor, *arguments: Any, **options: Any) -> Any:
    result = _rrelu(x, noise, *arguments, **options)
    return result if result is NotImplemented else (result, noise)


def _rrelu_backward(
    grad: Tensor, x: Tensor, noise: Tensor, lower: float, upper: float, training: bool, self_is_result: bool
) -> Any:
    return NotImplemented if training else torch.where(x > 0, grad, grad * ((lower + upper) / 2))


def _logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    outside = math.nan if eps is None else 0.0
    return torch.where((x >= low) & (x <= high), grad / (x * (1 - x)), outside)


def _zeros(size: Any, **options: Any) -> Tensor:
    # For memory that nobody has written, where any number will do, and for autograd's gradients that are zero.
    return torch.full(size, 0, dtype=options.get("dtype"))


_OWN: dict[Any, Callable[..., Any]] = {
    aten._efficientzerotensor.default: _zeros,
    aten.angle.default: lambda x: torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0)),
    aten.div.Scalar_mode: _divide,
    aten.div.Tensor_mode: _divide,
    aten.empty.memory_format: _zeros,
    aten.floor_divide.Scalar: _floor_divide,
    aten.floor_divide.default: _floor_divide,
    aten.gelu.default: _gelu,
    aten.hardshrink_backward.default: lambda grad, x, lambd: torch.where((x >= -lambd) & (x <= lambd), 0.0, grad),
    aten.ldexp.Tensor: lambda x, exponent: x * torch.pow(2.0, exponent),
    aten.logical_and.default: lambda x, y: _truth(x) & _truth(y),
    aten.logical_not.default: lambda x: ~_truth(x),
    aten.logical_or.default: lambda x, y: _truth(x) | _truth(y),
    aten.logical_xor.default: lambda x, y: _truth(x) ^ _truth(y),
    aten.logit_backward.default: _logit_backward,
    aten.polygamma.default: lambda n, x: torch.digamma(x) if n == 0 else NotImplemented,
    aten.round.decimals: _round_decimals,
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_backward.default: _rrelu_backward,
    aten.rrelu_with_noise_functional.default: _rrelu_and_noise,
}
