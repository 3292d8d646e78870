"""Saved tensors of nodes: edits in place of an output are errors, and backward overwrites a buffer of its own.

PyTorch's own layers save the input of most activations, so code may edit their output. Autograd refuses to run backward
from a saved tensor that was edited; the error here says what to do. What saved-tensor hooks bring back autograd does
not look at. So nodes that save their output look for edits themselves:

* Under hooks an edit is an error, as it is without. Whether they held a copy by then does not show.
* A checkpoint's hooks bring back what a second run has made. Both runs write to each tensor as often; other numbers of
  writes are an edit, or another function. (Other hooks may have given the second run a copy to write over, which
  ``calls/plan.py`` leaves to PyTorch.)

Backward may overwrite a saved buffer (``take_over``) only where nobody can read it again by way of torch. Three
conditions are necessary. The graph is not retained for a second backward pass. Nobody but the node holds the buffer:
the user may still have it, another operation or a saved-tensor hook may have saved it. And torch allocated the memory
for itself alone: NumPy's arrays and shared memory have owners that torch does not count. torch counts the users of a
storage; how many of them are torch's own is calibrated once.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from .._torch import graph_is_kept, saved_tensors_hooks_on_top, storage_id, storage_use_count
from ..activations import Activation
from ..utils.caching import in_clean_state

# --- edits ------------------------------------------------------------------------------------------------------------


#: How the error of autograd begins, which people search for.
EDITED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def expected_from_hooks(y: Tensor, *, is_dirty: bool) -> tuple[int, Tensor | None]:
    """The state of ``y``, which hooks get, that backward must find: its version once ``forward`` has ended; and, where
    the hooks are not a checkpoint's, an empty tensor that counts the writes to it.

    Args:
        is_dirty: whether the node marks it as such, for which autograd counts one more after ``forward``.
    """
    version = y._version + is_dirty
    if is_under_checkpoint():
        return version, None
    counter = y.detach()
    counter.data = y.new_empty(0)  # it goes on counting, and holds no memory
    return version, counter


def is_under_checkpoint() -> bool:
    """Whether a checkpoint's hooks get what is saved."""
    hooks = saved_tensors_hooks_on_top(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


def saved_output(ctx: Any, function: str, activation: Activation) -> list[Tensor]:
    """The output of ``function``, which a node has saved, followed by the activation's operands.

    Args:
        ctx: its ``expected`` is what ``expected_from_hooks`` has said of the output.

    Raises:
        RuntimeError: the output was edited, or freed; or a checkpoint has recomputed something else.
    """
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        if EDITED not in str(error):
            raise
        raise _was_edited(function, activation, str(error)) from error
    if ctx.expected is not None:
        version, counter = ctx.expected
        found = (saved[0] if counter is None else counter)._version
        if found != version:
            reason = f"{EDITED}: what hooks brought back is at version {found}; expected version {version}"
            raise _was_edited(function, activation, reason)
    return saved


def _was_edited(function: str, activation: Activation, reason: str) -> RuntimeError:
    """The error for an output that backward reads, and that is not what ``forward`` has saved."""
    return RuntimeError(
        f"{function}: its {activation} output was edited in place after the forward pass, and backward reads it. "
        'Edit a copy (y = y.clone()), or let the input be kept: by save="input" in your own calls and layers, in a '
        "fused model by fl.unfuse(module) (torch.autograd.set_detect_anomaly(True) shows which), or in all of it by "
        "fl.fuse(model). A function under a checkpoint that computes something else when it runs again "
        f"looks the same. PyTorch says: {reason}"
    )


def unedited(packed: tuple[Tensor, int]) -> Tensor:
    """A tensor that a hook has kept, with its version then.

    Raises:
        RuntimeError: the tensor has been edited since.
    """
    saved, version = packed
    if saved._version != version:
        raise RuntimeError(
            f"{EDITED}: a tensor of shape {tuple(saved.shape)} was saved at version {version} and is at "
            f"version {saved._version} now."
        )
    return saved


# --- reuse ------------------------------------------------------------------------------------------------------------


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
    return int(storage_use_count(storage_id(storage))) + sys.getrefcount(storage)


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
