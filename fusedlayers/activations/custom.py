"""A user's function, made into an activation.

The function is pointwise in its first argument, and reads tensors, modules and plain numbers that its closure, its
globals, its defaults, a partial or attributes show. ``trace_activation`` finds these (``free_variables.py``), traces
the function, splits the trace into a part that depends on z and one that does not (``partition.py``), and compares the
result with the original (``verification.py``). The trace serves every function with the same code, numbers and tensor
shapes: a look-up takes 25 us, a trace a tenth of a second, the analysis of its derivative up to a second.

A function that fails any step is left to plain PyTorch, and the log says why, once.

What it does not do well: numbers (not tensors) that change at every call need a trace each, and after 32 of them the
function is left to PyTorch. A function that reads tensors keeps its input, because training may change the tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch

from ..derivative.analysis import Analysis, analyse
from ..utils.caching import BoundedCache
from ..utils.formatting import with_place
from .free_variables import FreeVariables, find_variables
from .partition import Split, example_shape
from .partition import split as split_trace
from .record import Activation, Row, WithOperands
from .tracing import NotPointwise, muted
from .verification import recognise, verify

_log = logging.getLogger("fusedlayers")


class _Traced(NamedTuple):
    """An activation, with the split of its trace if it reads tensors; or the reason why the function, which may hold a
    user's tensors and is not held here, is left to PyTorch."""

    activation: Activation | None = None
    split: Split | None = None
    refusal: str = ""


#: How many traces may differ only in what a function reads: numbers, and other functions. Each costs up to a second, so
#: a function of which these change at every step is left to PyTorch.
_MAX_TRACES = 32
#: A layer keeps z, and what follows it y.
_BUFFERS_OF_A_LAYER = 2
_traces: BoundedCache[_Traced] = BoundedCache()
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
            _count((variables.code, kinds, example, dtype, autocast))
            traced = _trace(activation, variables, example, dtype, autocast)
        except NotPointwise as refusal:
            traced = _Traced(refusal=str(refusal))
        _traces.put(key, traced)
    found, split, refused = traced
    if found is None:
        return _left_to_pytorch(activation, refused)
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


def without_logging() -> AbstractContextManager[None]:
    """Log nothing in this thread: the caller only asks whether functions could be fused."""
    return muted(_log)


def _count(key: Hashable) -> None:
    count = _trace_counts.put(key, (_trace_counts.get(key) or 0) + 1)
    if count > _MAX_TRACES:
        raise NotPointwise(
            "the numbers (or functions) that it reads change from call to call; let it read tensors instead"
        )


def _left_to_pytorch(activation: Activation, why: str) -> WithOperands:
    """The activation with its reason as a sentence, which is logged if it is new."""
    reason = f"{with_place(activation.name, activation.function)} is left to PyTorch because {why}"
    if _logged.get(reason) is None:
        _logged.put(reason, True)
        _log.warning("fusedlayers: %s", reason)
    return WithOperands(replace(activation, fallback_reason=reason, needs_tracing=False))


def _trace(
    activation: Activation, variables: FreeVariables, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> _Traced:
    """What a function computes, found and checked.

    Raises:
        NotPointwise: it is left to PyTorch.
    """
    split = split_trace(variables, example, dtype)
    saved, with_output = verify(variables, split, example, dtype, autocast)
    equal = None if split.dims else recognise(split.body)
    if equal is not None:
        return _Traced(equal)
    if not saved:  # f is linear in z: PyTorch saves neither z nor y, a layer would save one of them
        raise NotPointwise("backward needs nothing of it, and PyTorch keeps nothing")
    row = None
    if not split.dims:
        # Made once for all shapes and dtypes, because it takes up to a second.
        analysis = _analyses.get(variables.key) or _analyses.put(variables.key, analyse(split.body))
        row = Row(activation.name, split.body, derivative_given_output=analysis)
    found = Activation(activation.name, split.body, row=row, operand_dims=split.dims, is_traced=True)
    keeps_less = found.output_refusal(dtype) is not None and with_output < _BUFFERS_OF_A_LAYER
    return _Traced(replace(found, torch_keeps_less=keeps_less), split if split.dims else None)
