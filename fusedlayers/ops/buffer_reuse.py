"""Whether a saved buffer may be overwritten during backward: only where nobody can read it again by way of torch.

Four conditions are necessary. The graph is not retained for a second backward pass. Nobody but the graph holds the
buffer: the user may still have the output, and another operation may have saved it. No saved-tensor hook got the buffer
when it was saved. And torch allocated the memory for itself alone: NumPy's arrays and shared memory have owners that
torch does not count. The caller checks the third condition, because hooks are known in the forward pass alone. torch
counts the users of a storage; how many of them are torch's own is calibrated once, in a tiny backward pass.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from .._torch import graph_is_kept, saved_tensors_hooks_on_top, storage_use_count
from ..utils.isolation import in_clean_state


def saved_under_hooks() -> bool:
    """Whether tensors that are saved now pass through saved-tensor hooks; for the forward pass."""
    return saved_tensors_hooks_on_top(True) is not None


def is_ours_alone(saved: Tensor) -> bool:
    """Whether nobody else can read ``saved``, an output that this backward pass has unpacked.

    The caller holds it as the calibration below does: in one local variable, passed once.
    """
    expected = _users_when_alone()
    if expected is None or _graph_is_kept() or _users(saved) != expected:
        return False
    # What torch has from elsewhere it cannot resize.
    return saved.untyped_storage().resizable()


def graph_is_given_up() -> bool:
    """Whether this is the last backward pass, in which a node may overwrite buffers that nobody else has ever held."""
    return _users_when_alone() is not None and not _graph_is_kept()


def is_held_once(tensor: Tensor) -> bool:
    """Whether nobody else can read a buffer whose saved tensor the node and the caller have freed. ``tensor`` is a new
    tensor on its storage."""
    return _users(tensor) == _users_of_new() and tensor.untyped_storage().resizable()


@functools.cache
@in_clean_state
def _users_of_new() -> int:
    return _users(torch.zeros(2))


def _graph_is_kept() -> bool:
    return bool(graph_is_kept())


def _users(tensor: Tensor) -> int:
    # However many hold the storage's Python object, torch counts them as one.
    storage = tensor.untyped_storage()
    return int(storage_use_count(storage._cdata)) + sys.getrefcount(storage)


class _Probe(torch.autograd.Function):
    """Saves its output, and notes in backward how many users that has and whether the graph is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[tuple[int, bool]]) -> Tensor:
        y = x + 1
        ctx.save_for_backward(x, y)
        ctx.notes = notes
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _x, saved = ctx.saved_tensors
        ctx.notes.append((_users(saved), _graph_is_kept()))
        return grads[0], None


@functools.cache
@in_clean_state
def _users_when_alone() -> int | None:
    """How many users torch itself makes of a saved output, or None where this torch does not tell."""
    notes: list[tuple[int, bool]] = []
    try:
        x = torch.zeros(2, requires_grad=True)
        held = _Probe.apply(x, notes)
        held.sum().backward()
        _Probe.apply(x, notes).sum().backward()
        _Probe.apply(x, notes).sum().backward()
        _Probe.apply(x, notes).sum().backward(retain_graph=True)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    (shared, _), (alone, kept), (again, _), (_, retained) = notes
    return alone if shared > alone == again and retained and not kept else None
