"""A user's function, made into an activation.

The function is pointwise in its first argument, and reads tensors, modules and plain numbers that its closure, its
globals, its defaults, a partial or attributes show. ``trace_activation`` finds these (``free_variables.py``), traces
the function, splits the trace into a part that depends on z and one that does not (``partition.py``), and compares the
result with the original (``_verify``). The trace serves every function with the same code, numbers and tensor shapes: a
look-up takes 25 us, a trace a tenth of a second, the analysis of its derivative up to a second.

A function that fails any step is left to plain PyTorch, and the log says why, once.

What it does not do well: numbers (not tensors) that change at every call need a trace each, and after 32 of them the
function is left to PyTorch. A function that reads tensors keeps its input, because training may change the tensors,
unless it states its derivative (``_stated``). A branch that none of the compared numbers takes goes unnoticed.
"""

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..derivative.analysis import Analysis, analyse
from ..derivative.features import round_numbers, value_and_slope
from ..derivative.input_of import within_reach
from ..utils.caching import BoundedCache, in_clean_state
from ..utils.formatting import first_line, with_place
from ..utils.storages import sizes_of
from .free_variables import STATED, FreeVariables, find_variables
from .partition import Split, example_shape
from .partition import split as split_trace
from .record import Activation, Definition, WithOperands
from .table import by_name
from .tracing import NotPointwise

_log = logging.getLogger("fusedlayers")


#: How many traces may differ only in what a function reads: numbers, and other functions. Each costs up to a second, so
#: a function of which these change at every step is left to PyTorch.
_MAX_TRACES = 32
#: A layer keeps z, and what follows it y.
_BUFFERS_OF_A_LAYER = 2
#: Activations, each with the split of its trace if it reads tensors; or why the function is left to PyTorch. Functions
#: themselves, which may hold a user's tensors, are not held here.
_traces: BoundedCache[tuple[Activation, Split | None] | str] = BoundedCache()
_trace_counts: BoundedCache[int] = BoundedCache()
_analyses: BoundedCache[Analysis] = BoundedCache()
_logged: BoundedCache[bool] = BoundedCache()


def trace_activation(
    activation: Activation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """The activation and operands of a callable that is not in the table, for z of this shape, dtype and device.

    The activation has a ``fallback_reason`` if the callable is left to PyTorch.
    """
    variables = find_variables(activation.function)
    if variables.refusal is not None:
        return _left_to_pytorch(activation, variables.refusal)
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    example = example_shape(shape, variables.tensors)
    key = variables.key, activation.name, example, dtype, autocast
    traced = _traces.get(key)
    if traced is None:
        try:
            kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in variables.tensors)
            kind = variables.code, kinds, example, dtype, autocast
            if _trace_counts.put(kind, (_trace_counts.get(kind) or 0) + 1) > _MAX_TRACES:
                raise NotPointwise(
                    "the numbers (or functions) that it reads change from call to call; let it read tensors instead"
                )
            traced = _trace(activation, variables, example, dtype, autocast)
        except NotPointwise as refusal:
            traced = str(refusal)
        _traces.put(key, traced)
    if isinstance(traced, str):
        return _left_to_pytorch(activation, traced)
    found, split = traced
    if split is None:
        return WithOperands(found)
    wide, tensors = torch.promote_types(dtype, torch.float32), variables.tensors
    if split.direct is not None:
        operands = tuple(tensors[i] for i in split.direct)
    else:
        operands = split.prologue(*(t.to(wide) if t.is_floating_point() else t for t in tensors))
    if device is not None:
        operands = tuple(p if p.dim() else p.to(device) for p in operands)  # torch combines 0-d tensors with any device
        if any(p.device != device for p in operands):
            return _left_to_pytorch(activation, "its tensors are on another device")
    return WithOperands(found, operands, next((d for d in split.dims if d is not None), None))


def _left_to_pytorch(activation: Activation, why: str) -> WithOperands:
    """The activation with its reason as a sentence, which is logged if it is new."""
    reason = f"{with_place(activation.name, activation.function)} is left to PyTorch because {why}"
    if _logged.get(reason) is None:
        _logged.put(reason, True)
        _log.warning("fusedlayers: %s", reason)
    return WithOperands(replace(activation, fallback_reason=reason, needs_tracing=False))


def _trace(
    activation: Activation, variables: FreeVariables, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[Activation, Split | None]:
    """The record of a function's trace, found and checked.

    Raises:
        NotPointwise: it is left to PyTorch.
    """
    split = split_trace(variables, example, dtype)
    saved, with_output = _verify(variables, split, example, dtype, autocast)
    equal = None if split.dims else _recognise(split.body)
    if equal is not None:
        return equal, None
    if not saved:  # f is linear in z: PyTorch saves neither z nor y, a layer would save one of them
        raise NotPointwise("backward needs nothing of it, and PyTorch keeps nothing")
    stated = _stated(activation, variables, split, example, dtype)
    definition = None
    if stated is None and not split.dims:
        # Made once for all shapes and dtypes, because it takes up to a second.
        analysis = _analyses.get(variables.key) or _analyses.put(variables.key, analyse(split.body))
        definition = Definition(activation.name, split.body, derivative_given_output=analysis)
    found = Activation(activation.name, split.body, definition=definition, operand_dims=split.dims, is_traced=True)
    found, split = stated or (found, split)
    keeps_less = found.output_refusal(dtype) is not None and with_output < _BUFFERS_OF_A_LAYER
    return replace(found, torch_keeps_less=keeps_less), split if split.dims else None


# --- a stated derivative ----------------------------------------------------------------------------------------------


def _stated(
    activation: Activation, variables: FreeVariables, function: Split, example: tuple[int, ...], dtype: torch.dtype
) -> tuple[Activation, Split] | None:
    """The record of a function with ``STATED`` attributes, or of a module with such methods, and its split: its own
    operands, through which gradients go, are followed by those of its formulas. None for others. A formula that is not
    pointwise, is missing, or is wrong raises ValueError."""
    name, parts = activation.name, [function]
    for stated in itertools.takewhile(lambda stated: hasattr(activation.function, stated), STATED):
        rebind = lambda tensors, stated=stated: getattr(variables.rebind(tensors), stated)
        try:
            parts.append(split_trace(variables._replace(rebind=rebind), example, dtype))
        except NotPointwise as error:
            raise ValueError(f"activation {name!r}: {stated} cannot be used because {error}") from error
    dims = tuple(dim for part in parts for dim in part.dims)
    if not parts[1:]:
        return None
    if dims and not parts[2:]:
        raise ValueError(f"activation {name!r} reads tensors, whose gradients need {STATED[1]} as well; state it too")
    first = len(function.dims)
    last = first + len(parts[1].dims)

    def prologue(*tensors: Tensor) -> tuple[Tensor, ...]:
        fixed = [tensor.detach() for tensor in tensors]
        return (*function.prologue(*tensors), *(p for part in parts[1:] for p in part.prologue(*fixed)))

    def told(y: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        z = within_reach(parts[2].body(y, *operands[last:]), y) if dims else y
        return parts[1].body(y, *operands[first:last]), z

    body = lambda z, *operands: function.body(z, *operands[:first])
    found = Activation(name, body, operand_dims=dims, is_traced=True, told=told)
    _check_stated(found, first, variables, prologue)
    if not dims:  # as a row of the table
        found = replace(found, definition=Definition(name, body, derivative_given_output=parts[1].body), told=None)
    return found, Split(body, prologue, dims, None)


@in_clean_state
def _check_stated(activation: Activation, count: int, variables: FreeVariables, prologue: Callable[..., Any]) -> None:
    """Compare gradients from outputs with those from inputs, in float64: with the tensors as they are, and, as training
    may change them, with others. ``count``: of the operands that need gradients."""
    needs = tuple(i < count for i in range(len(activation.operand_dims)))
    inputs = torch.linspace(-8, 8, _SWEEP, dtype=torch.float64)  # of an even number: no kink is hit
    for change in (0.0, 0.25):
        tensors = own_tensors(variables, inputs.dtype)
        own = [(t + change * (abs(t) + 1)).detach() if t.requires_grad else t for t in tensors]
        operands = [p.flatten()[:8, None] for p in prologue(*own)]  # of eight channels
        at, *operands = torch.broadcast_tensors(inputs, *operands)
        values, dy = activation.function(at, *operands), torch.ones_like(at)
        of_output, of_input = (activation.gradient_function(needs, given) for given in ("output", "input"))
        pairs = zip(of_output(dy, values, *operands), of_input(dy, at, *operands), strict=True)
        for i, (found, exact) in enumerate(pairs):
            off = torch.where(exact.isfinite(), (found - exact).abs().nan_to_num(nan=math.inf), 0.0)
            if bool(off.max() > _TOLERANCE * torch.where(exact.isfinite(), exact, 0.0).abs().max()):
                z, y, a, b = (float(t.flatten()[off.argmax()]) for t in (at, values, found, exact))
                raise ValueError(
                    f"activation {activation.name!r}: {STATED[i > 0]} is wrong"
                    f"{', once training has changed a tensor' if change else ''}: at z = {z:.6g}, where the output is "
                    f"{y:.6g}, {'a gradient of a tensor' if i else 'the derivative'} is {a:.6g} by it, and {b:.6g} by "
                    f"autograd, the largest difference of {_SWEEP} inputs from -8 to 8"
                )


# --- equal to the function --------------------------------------------------------------------------------------------

#: Special values, and about how many values are compared in all.
_EDGES = (0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4)
_SWEEP = 4096
#: The accepted difference. Both sides run the same operations, some of them perhaps in float32.
_TOLERANCE = 64 * torch.finfo(torch.float32).eps


@in_clean_state
def _verify(
    variables: FreeVariables, split: Split, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[float, float]:
    """Compare the function with its trace before that is used: values and gradients at about 4096 numbers of another
    shape, in float64, in which sums whose terms cancel have digits enough. That takes some milliseconds. Returns how
    often z's bytes PyTorch saves for backward, and how often with the output, which the next layer saves.

    Raises:
        NotPointwise: they differ; or the function raises, changes what it reads, or returns another dtype than its
            argument's. (Under autocast it may return any dtype.)
    """
    shape = _other_shape(example, split.dims)
    kept = _kept_bytes(variables, shape, dtype, autocast)
    count = math.prod(shape)
    moderate = torch.linspace(-8, 8, max(1, count), dtype=torch.float64).reshape(shape)
    extreme = torch.tensor(_EDGES).double().repeat(count // len(_EDGES) + 1)[:count].reshape(shape)
    tensors = [t.detach() for t in own_tensors(variables, torch.float64)]
    trained = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    # No gradients of the tensors at extreme values: a sum over these says nothing.
    for leaves in ([moderate.requires_grad_(), *trained], [extreme.requires_grad_(), *tensors]):
        theirs = _values_and_gradients(lambda z, *t: variables.rebind(t)(z), leaves)
        try:
            ours = _values_and_gradients(lambda z, *t: split.body(z, *split.prologue(*t)), leaves)
        except NotPointwise as error:  # as operations raise on constants of another dtype than the argument's
            raise NotPointwise(f"it computes in one dtype alone: {first_line(error)}") from error
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            finite = a[a.isfinite()].abs()
            atol = _TOLERANCE * (float(finite.max()) if finite.numel() else 0.0)
            if a.shape != b.shape or not torch.allclose(a, b, rtol=_TOLERANCE, atol=atol, equal_nan=True):
                raise NotPointwise(_DIFFERS["gradient" if i else "value"])
    return kept


_DIFFERS = {
    "value": "its operations do not give its value, which depends on something else (a shape, changing state)",
    "gradient": "its operations do not give its gradient: autograd does not see some (no_grad, .data), or PyTorch's "
    "formula for the gradient of one gives other values than that of its parts",
}


def _kept_bytes(
    variables: FreeVariables, shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> tuple[float, float]:
    own = own_tensors(variables, None)
    function = variables.rebind(own)
    before = find_variables(function).key
    z = torch.linspace(-4, 4, math.prod(shape)).reshape(shape).to(dtype)
    kept: list[Tensor] = []  # held: an address stands for a storage only while that is alive

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(z.clone().requires_grad_() * 1)
    except Exception as error:  # whatever a user's function may raise
        raise _raised(error) from error
    if find_variables(function).key != before:
        raise NotPointwise("it changes what it reads from call to call")
    if y.dtype is not dtype and not autocast:
        raise NotPointwise(f"it returns {y.dtype} for {dtype}; its tensors may have another dtype than the layer")
    given = sizes_of(own)
    saved, with_output = (
        sum(size for storage, size in sizes_of(found).items() if storage not in given) / max(1, z.nbytes)
        for found in (kept, [*kept, y.detach()])
    )
    return saved, with_output


def _values_and_gradients(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The value and the gradients, in float64, of a function that may overwrite its first argument."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        y = function(leaves[0] * 1, *leaves[1:]).double()
        weight = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=y.dtype).reshape(y.shape)
        grads = torch.autograd.grad(y, wanted, weight, allow_unused=True) if y.requires_grad else [None] * len(wanted)
    except Exception as error:  # whatever a user's function may raise
        raise _raised(error) from error
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True))]


def own_tensors(variables: FreeVariables, dtype: torch.dtype | None) -> list[Tensor]:
    """The function's tensors as leaves on the CPU, floating ones in this dtype; arbitrary values for the meta
    device's."""
    found = []
    for tensor in variables.tensors:
        values = torch.full(tensor.shape, 0.5).to(tensor.dtype) if tensor.is_meta else tensor.detach()
        values = values.to("cpu", dtype if tensor.is_floating_point() else None)
        found.append(values.detach().requires_grad_(tensor.requires_grad))
    return found


def _raised(error: Exception) -> NotPointwise:
    return NotPointwise(f"it raised {type(error).__name__} when it was tried: {first_line(error)}")


def _other_shape(example: tuple[int, ...], dims: Sequence[int | None]) -> tuple[int, ...]:
    """A shape with about ``_SWEEP`` elements that differs from the example in all dimensions but that of operands."""
    along = {len(example) + dim for dim in dims if dim is not None}
    free = [i for i in range(len(example)) if i not in along]
    shape = [size if i in along else 2 for i, size in enumerate(example)]
    if free:
        shape[free[0]] = max(2, _SWEEP * 2 // max(1, math.prod(shape)))
    return tuple(shape)


# --- equal to a row ---------------------------------------------------------------------------------------------------

#: The accepted difference of values and slopes from a row's, times |z| where that is above 1. Constants are often
#: written with ten digits.
_EQUAL = 2e-9
#: The numbers compared are dense up to here. They reach as far as float32, because a function may be clamped.
NEAR = 40.0


@in_clean_state
def _recognise(body: Callable[..., Tensor]) -> Activation | None:
    """The activation of the table, with its default parameters, that the trace ``body`` is equal to, such as another
    library's ``gelu``; or None. It replaces the function, with its kernels, derivatives and name.

    Values and slopes in float64 must agree with the row's to more digits than float32 holds (``z * sigmoid(z)`` for
    silu), also at round numbers, where rows have their kinks. Values alone do not suffice: a straight-through estimator
    (``z.detach() * sigmoid(z)``) has the values of another function.
    """
    z, known = _of_rows()
    y, slope = value_and_slope(body, z)
    if y.dtype is not z.dtype:
        return None
    found = torch.stack([y, slope])
    # Far from zero some formulas overflow where the row does not, as ``z / (1 + exp(-z))`` does.
    overflowed = found.isnan() & (z.abs() > NEAR)
    for activation, expected in known:
        is_near = (found - expected).abs() <= _EQUAL * z.abs().clamp(min=1)
        if bool((is_near | (found == expected) | (found.isnan() & expected.isnan()) | overflowed).all()):
            return activation
    return None


@functools.cache
def _of_rows() -> tuple[Tensor, list[tuple[Activation, Tensor]]]:
    """The numbers compared, and the values and slopes there of the table's own activations."""
    far = torch.logspace(math.log10(NEAR), 30, 120, dtype=torch.float64)
    small = torch.logspace(-30, 0, 150, dtype=torch.float64)
    near = torch.linspace(-NEAR, NEAR, 4001, dtype=torch.float64), small, -small, torch.tensor([math.nan]).double()
    z = torch.cat([*near, round_numbers(), far, -far])
    known = [found for found in by_name.values() if found.definition is not None and not found.is_identity]
    return z, [(activation, torch.stack(value_and_slope(activation.plain, z))) for activation in known]
