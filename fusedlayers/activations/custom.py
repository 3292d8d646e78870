"""A user's own function, made into an activation.

``specialise`` takes the function apart (``capture.py``), traces it once, splits the trace in two (``splitting.py``) and
compares the result with the original (``comparing.py``). What comes out serves all functions of the same code.
What does not pass stays with plain PyTorch, with a reason that people can read.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capture import Captured, capture
from .comparing import compare, try_call
from .inverse import Analysis, analyse
from .register import mistake
from .spec import Activation, Row, Specialised
from .splitting import Split, example_shape
from .splitting import split as split_trace
from .trace import NotPointwise, aten_graph, simplified

_log = logging.getLogger("fusedlayers")


class _Entry(NamedTuple):
    """What is known of a function: how it is split, or why it is left to PyTorch."""

    activation: Activation | None
    split: Split | None
    refusal: str = ""


#: Traces kept, and how many that differ in nothing but the numbers that a function reads: each costs a tenth of a
#: second, so a function whose numbers change at every step is given up.
_ENTRIES = 512
_VARIANTS = 64
#: Functions whose variants are counted.
_FAMILIES = 4096
#: Of these, how many are analysed, which takes half a second: a number that changes at every step is kept out of it.
_ANALYSED = 8
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_analyses: OrderedDict[Hashable, Analysis] = OrderedDict()
#: Functions that ask for sizes: one may do another thing for large tensors, and is traced for each shape.
_sized: OrderedDict[Hashable, None] = OrderedDict()
_variants: Counter[Hashable] = Counter()
_said: set[str] = set()
_lock = threading.Lock()


def specialise(
    activation: Activation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> Specialised:
    """The activation for ``z`` of this shape, dtype and device, for a callable that is not in the table."""
    captured = capture(activation.function)
    if captured.refusal is not None:
        return Specialised(_unfused(activation, captured.refusal))
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    with _lock:
        is_sized = captured.key in _sized
    example = shape if is_sized else example_shape(shape, captured.tensors)
    key = captured.key, activation.row, _stated_key(activation.row), example, dtype, autocast
    with _lock:
        entry = _entries.get(key)
    if entry is None:
        entry = _make(activation, captured, example, dtype, autocast)
        if entry is None:
            _keep(_sized, captured.key, None)
            return specialise(activation, shape, dtype, device)
        _keep(_entries, key, entry)
    if entry.activation is None:
        return Specialised(replace(activation, unfused_because=entry.refusal, is_untraced=False))
    split = entry.split
    if split is None or not split.dims:
        return Specialised(entry.activation)
    if split.direct is not None:
        operands = tuple(captured.tensors[i] for i in split.direct)
    else:
        wide = torch.promote_types(dtype, torch.float32)
        operands = split.prologue(*(t.to(wide) if t.is_floating_point() else t for t in captured.tensors))
    if device is not None:
        operands = tuple(p if p.dim() else p.to(device) for p in operands)  # as torch combines 0-d tensors with others
        if any(p.device != device for p in operands):
            return Specialised(_unfused(activation, "its tensors are on another device"))
    return Specialised(entry.activation, operands, next((d for d in split.dims if d is not None), None))


def _unfused(activation: Activation, why: str) -> Activation:
    """The activation, left to PyTorch; the first time it is said."""
    reason = f"{activation.name} is left to PyTorch because {why}"
    if reason not in _said:
        _said.add(reason)
        _log.warning("%s", reason)
    return replace(activation, unfused_because=reason, is_untraced=False)


def _keep(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    with _lock:
        cache[key] = value
        if len(cache) > _ENTRIES:
            cache.popitem(last=False)


def _make(
    activation: Activation, captured: Captured, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> _Entry | None:
    """None for a function that asks for sizes, if it was not known to."""
    kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in captured.tensors)
    family = _family(captured.key), kinds, example, dtype, autocast
    with _lock:
        if len(_variants) > _FAMILIES:
            _variants.clear()
        _variants[family] += 1
        is_restless = _variants[family] > _VARIANTS
        is_changing = _variants[family] > _ANALYSED
    try:
        if is_restless:
            raise NotPointwise("numbers that it reads change from call to call; let it read tensors instead")
        split = split_trace(captured, example, dtype)
        is_sized = try_call(captured, example, dtype, autocast)
        if is_sized and captured.key not in _sized:
            return None
        compare(captured, split, example, dtype)
        _check_derivatives(activation)
        _check_what_backward_reads(split, dtype)
    except NotPointwise as refusal:
        return _Entry(None, None, _unfused(activation, str(refusal)).unfused_because or "")
    if split.dims:
        return _Entry(Activation(activation.name, split.body, operand_dims=split.dims, is_traced=True), split)
    row = activation.row or Row(activation.name, split.body)
    if row.given_output is None and not is_changing:
        row = replace(row, given_output=_analysis((captured.key, split.body.code if is_sized else None), split.body))
    if activation.row is not None:
        return _Entry(replace(activation, row=row, is_untraced=False), None)
    return _Entry(Activation(activation.name, split.body, row=row, is_traced=True), None)


def _analysis(key: Hashable, function: Callable[[Tensor], Tensor]) -> Analysis:
    """Once for all shapes and dtypes: it takes up to a second."""
    with _lock:
        found = _analyses.get(key)
    if found is None:
        found = analyse(function)
        _keep(_analyses, key, found)
    return found


def _family(key: Any) -> Hashable:
    """What functions that differ in the numbers that they read have in common."""
    while isinstance(key, tuple) and key[0] in ("partial", "method"):
        key = key[1][0][1]  # the key of the function
    return key[0] if isinstance(key, tuple) else key


def _check_what_backward_reads(split: Split, dtype: torch.dtype) -> None:
    """Refuse what is straight in z: PyTorch keeps nothing of it, and a layer would keep its input or its output."""
    gradients = Activation("", split.body, operand_dims=split.dims).gradients((True,) * len(split.dims))
    examples = [torch.zeros(4, 6, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2 + len(split.dims))]
    _, z, *_ = (node for node in simplified(aten_graph(gradients, examples)).graph.nodes if node.op == "placeholder")
    if not z.users:
        raise NotPointwise("backward needs nothing of it, and PyTorch keeps nothing")


def _stated_key(row: Row | None) -> Hashable:
    """What the derivatives that a user stated read."""
    if row is None:
        return None
    return tuple(capture(stated).key for stated in (row.derivative, row.given_output) if callable(stated))


def _check_derivatives(activation: Activation) -> None:
    """A stated derivative was compared when it was registered, for the parameters' defaults and what it read then."""
    if activation.row is not None:
        wrong = mistake(activation.row, activation.parameters)
        if wrong is not None:
            raise NotPointwise(wrong)
