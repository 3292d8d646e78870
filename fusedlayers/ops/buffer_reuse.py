"""Whether backward may overwrite a buffer that its node has saved: only where nobody can read it again by way of torch.

Three conditions are necessary. The graph is not retained for a second backward pass. Nobody but the node holds the
buffer: the user may still have it, another operation or a saved-tensor hook may have saved it. And torch allocated the
memory for itself alone: NumPy's arrays and shared memory have owners that torch does not count. torch counts the users
of a storage; how many of them are torch's own is calibrated once.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from .._torch import graph_is_kept, storage_use_count
from ..utils.caching import in_clean_state


def take_over(ctx: Any, saved: list[Tensor]) -> list[bool]:
    """Free a node's saved tensors in its last backward pass, and say which of them may be overwritten.

    Args:
        saved: the only references of the caller. Each becomes an alias: whoever holds the tensor itself, be it in
            Python, is then a user of its storage.
    """
    alone = _users_of_new()
    is_last = alone is not None and not graph_is_kept()
    if is_last:
        ctx.maybe_clear_saved_tensors()
    found = []
    for i in range(len(saved)):
        saved[i] = saved[i].detach()
        # What torch has from elsewhere it cannot resize.
        found.append(is_last and _users(saved[i]) == alone and saved[i].untyped_storage().resizable())
    return found


def _users(tensor: Tensor) -> int:
    # However many hold the storage's Python object, torch counts them as one.
    storage = tensor.untyped_storage()
    return int(storage_use_count(storage._cdata)) + sys.getrefcount(storage)


@functools.cache
@in_clean_state
def _users_of_new() -> int | None:
    """How many users torch itself makes of a new tensor, or None where this torch does not tell."""
    try:
        graph_is_kept()
        alone, held = _users(torch.zeros(2)), torch.zeros(2)
        aliases = held, held.detach()
        return alone if _users(aliases[0]) > alone else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
