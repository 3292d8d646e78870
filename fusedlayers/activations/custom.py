"""A user's function, made into an activation.

``trace_activation`` finds the function's free variables (``free_variables.py``), traces it, splits the trace into what
depends on z and what does not (``partition.py``), and compares the result with the original (``verification.py``). The
trace serves every function with the same code, numbers and tensor shapes: a look-up takes 25 us, a trace a tenth of a
second, the analysis of its derivative up to a second.

A function that fails any step is left to plain PyTorch, and the log says why, once.

What it does not do well: numbers (not tensors) that change at every call need a trace each. After 16 of them the
function keeps its input, and after 64 it is left to PyTorch. A function that reads tensors keeps its input, because
training may change the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..derivative.analysis import Analysis, analyse
from ..utils.bounded_cache import BoundedCache
from ..utils.formatting import with_place
from .free_variables import FreeVariables, find_variables
from .partition import Split, example_shapes
from .partition import split as split_trace
from .recognition import recognise
from .record import Activation, Row, WithOperands
from .registration import find_counterexample, find_inaccurate_dtypes
from .tracing import NotPointwise, aten_graph, muted, simplified
from .verification import check_trace, kept_by_torch, reads_sizes

_log = logging.getLogger("fusedlayers")


class _TraceKey(NamedTuple):
    """What a function is traced for. ``is_exact``: ``example`` is the real shape, and stands for no other one."""

    example: tuple[int, ...]
    is_exact: bool
    dtype: torch.dtype
    autocast: bool


class _Traced(NamedTuple):
    """The result for one key: an activation, with the split of its trace if it reads tensors; or the reason why the
    function is left to PyTorch; or that each shape needs its own trace."""

    activation: Activation | None = None
    split: Split | None = None
    refusal: str | None = None
    reads_sizes: bool = False


#: How many traces may differ only in what a function reads: numbers, and other functions. Each costs a tenth of a
#: second, so a function of which these change at every step is left to PyTorch.
_MAX_VARIANTS = 64
#: How many of these are analysed, which takes half a second each.
_MAX_ANALYSED = 16
_NOT_ANALYSED = Analysis("input", f"its numbers have changed {_MAX_ANALYSED} times, and it is not analysed again")
#: Operations of whose arguments backward needs at most one truth value per element.
_COMPARISONS = {
    getattr(getattr(torch.ops.aten, name), kind)
    for name in ("gt", "ge", "lt", "le", "eq", "ne")
    for kind in ("Scalar", "Tensor")
}
_MASK = "PyTorch keeps no more than a layer would: backward needs no more of z than comparisons"
#: A layer keeps z, and what follows it y.
_BUFFERS_OF_A_LAYER = 2
_traces: BoundedCache[_Traced] = BoundedCache()
_analyses: BoundedCache[Analysis] = BoundedCache()
_trace_counts: BoundedCache[int] = BoundedCache()
_analysis_counts: BoundedCache[int] = BoundedCache()
_logged: BoundedCache[bool] = BoundedCache()


def trace_activation(
    activation: Activation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """The activation and operands of a callable that is not in the table, for z of this shape, dtype and device.

    The activation has a ``fallback_reason`` if the callable is left to PyTorch.
    """
    variables = find_variables(activation.function)
    if variables.refusal is not None:
        return WithOperands(_unfused(activation, _log_reason(activation, variables.refusal)))
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    *others, last = example_shapes(shape, variables.tensors)
    traced = _Traced()
    for example in (*others, last):
        traced = _cached_trace(activation, variables, _TraceKey(example, False, dtype, autocast), says=example is last)
        if traced.refusal is None:
            break
    if traced.reads_sizes:  # it may compute something else for other sizes
        traced = _cached_trace(activation, variables, _TraceKey(shape, True, dtype, autocast))
    if traced.activation is None:
        return WithOperands(_unfused(activation, traced.refusal or ""))
    if traced.split is None or not traced.split.dims:
        return WithOperands(traced.activation)
    operands = _operands(traced.split, variables.tensors, dtype)
    if device is not None:
        operands = tuple(p if p.dim() else p.to(device) for p in operands)  # torch combines 0-d tensors with any device
        if any(p.device != device for p in operands):
            return WithOperands(_unfused(activation, _log_reason(activation, "its tensors are on another device")))
    return WithOperands(traced.activation, operands, next((d for d in traced.split.dims if d is not None), None))


def without_logging() -> AbstractContextManager[None]:
    """Log nothing in this thread: the caller only asks whether functions could be fused."""
    return muted(_log)


def _operands(split: Split, tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    if split.direct is not None:
        return tuple(tensors[i] for i in split.direct)
    wide = torch.promote_types(dtype, torch.float32)
    operands: tuple[Tensor, ...] = split.prologue(*(t.to(wide) if t.is_floating_point() else t for t in tensors))
    return operands


def _unfused(activation: Activation, reason: str) -> Activation:
    return replace(activation, fallback_reason=reason, needs_tracing=False)


def _log_reason(activation: Activation, why: str) -> str:
    """The reason as a sentence, logged if it is new."""
    reason = f"{with_place(activation.name, activation.function)} is left to PyTorch because {why}"
    if _logged.get(reason) is None:
        _logged.put(reason, True)
        _log.warning("fusedlayers: %s", reason)
    return reason


def _cached_trace(
    activation: Activation, variables: FreeVariables, trace_key: _TraceKey, *, says: bool = True
) -> _Traced:
    """``says``: whether a refusal is logged."""
    key = variables.key, activation.row, _stated_derivatives_key(activation.row), trace_key
    traced = _traces.get(key)
    if traced is None:
        try:
            traced = _trace(activation, variables, trace_key)
        except NotPointwise as refusal:
            traced = _Traced(refusal=_log_reason(activation, str(refusal)) if says else str(refusal))
        _traces.put(key, traced)
    return traced


def _trace(activation: Activation, variables: FreeVariables, trace_key: _TraceKey) -> _Traced:
    kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in variables.tensors)
    if _counted(_trace_counts, (variables.code, kinds, trace_key)) > _MAX_VARIANTS:
        raise NotPointwise(
            "the numbers (or functions) that it reads change from call to call; let it read tensors instead"
        )
    example, is_exact, dtype, autocast = trace_key
    split = split_trace(variables, example, dtype)
    if reads_sizes(variables, example, dtype, autocast) and not is_exact:
        return _Traced(reads_sizes=True)
    check_trace(variables, split, example, dtype)
    found = _activation(activation, variables, trace_key, split)
    if split.writes_argument:
        found = replace(found, writes_argument=True)
    return _Traced(found, split if split.dims else None)


def _activation(activation: Activation, variables: FreeVariables, trace_key: _TraceKey, split: Split) -> Activation:
    """What a function computes, of which the trace has been checked."""
    _, is_exact, dtype, _ = trace_key
    equal = recognise(split.body, dtype) if activation.row is None and not split.dims else None
    if equal is not None:
        return equal
    # Registration checked stated derivatives for the default parameters only, and with what they read then.
    wrong = None if activation.row is None else find_counterexample(activation.row, activation.parameters)
    if wrong is not None:
        raise NotPointwise(wrong)
    reads = _what_backward_reads(split, dtype)
    if not reads:  # f is linear in z: PyTorch saves neither z nor y, a layer would save one of them
        raise NotPointwise("backward needs nothing of it, and PyTorch keeps nothing")
    if split.dims:
        keeps_less = _torch_keeps_less(reads, variables, trace_key, None)
        return Activation(
            activation.name, split.body, operand_dims=split.dims, is_traced=True, torch_keeps_less=keeps_less
        )
    row = activation.row or Row(activation.name, split.body)
    if row.derivative_given_output is None:
        # Functions of one class may have different programs: only those that differ in their numbers alone are counted.
        program = tuple((str(node.target), *map(str, node.all_input_nodes)) for node in split.body.graph.nodes)
        is_new = _counted(_analysis_counts, (variables.code, program, trace_key)) <= _MAX_ANALYSED
        key = variables.key, split.body.code if is_exact else None
        row = replace(row, derivative_given_output=_analysis(key, split.body) if is_new else _NOT_ANALYSED)
    keeps_less = False
    if (refused := replace(activation, row=row).output_refusal(dtype)) is not None:
        keeps_less = _torch_keeps_less(reads, variables, trace_key, refused)
    if activation.row is not None:
        row = replace(row, dtype_refusals=find_inaccurate_dtypes(activation.row, activation.parameters))
        return replace(activation, row=row, needs_tracing=False, torch_keeps_less=keeps_less)
    return Activation(activation.name, split.body, row=row, is_traced=True, torch_keeps_less=keeps_less)


def _counted(cache: BoundedCache[int], key: Hashable) -> int:
    """How often the key has been met, this time included."""
    return cache.put(key, (cache.get(key) or 0) + 1)


def _torch_keeps_less(reads: set[Any], variables: FreeVariables, trace_key: _TraceKey, refused: str | None) -> bool:
    """Whether PyTorch keeps less than a layer would, of a function whose output does not determine its derivative.

    Args:
        refused: why it does not, if it has no operands, which say it by themselves.

    Raises:
        NotPointwise: it keeps truth values in the place of z.
    """
    if reads <= _COMPARISONS:
        raise NotPointwise(_MASK if refused is None else f"{refused}; and {_MASK}")
    return kept_by_torch(variables, trace_key.example, trace_key.dtype) < _BUFFERS_OF_A_LAYER


def _analysis(key: Hashable, function: Callable[[Tensor], Tensor]) -> Analysis:
    """The analysis, made once for all shapes and dtypes because it takes up to a second."""
    return _analyses.get(key) or _analyses.put(key, analyse(function))


def _what_backward_reads(split: Split, dtype: torch.dtype) -> set[Any]:
    """The operations of the backward pass that read z."""
    gradients = Activation("", split.body, operand_dims=split.dims).gradient_function((True,) * len(split.dims))
    examples = [torch.zeros(4, 6, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2 + len(split.dims))]
    _, z, *_ = (node for node in simplified(aten_graph(gradients, examples)).graph.nodes if node.op == "placeholder")
    return {node.target for node in z.users}


def _stated_derivatives_key(row: Row | None) -> Hashable:
    """The part of the key for the derivatives that a user stated."""
    if row is None:
        return None
    return tuple(
        find_variables(stated).key for stated in (row.derivative, row.derivative_given_output) if callable(stated)
    )
