"""Edits in place of an output that a node has saved.

PyTorch's own layers save the input of most activations, so code may edit their output. Autograd refuses to run backward
from a saved tensor that was edited; that error says here what to do.

Autograd does not look at what saved-tensor hooks bring back: PyTorch's own operations then read what was written over
it. Where PyTorch saves an operation's input, a model's code may edit its output, under hooks too. So the nodes here
look for edits themselves:

* Under hooks an edit is an error, as it is without. Whether they held a copy by then does not show.
* A checkpoint's hooks bring back what a second run has made. Both runs write to each tensor as often; more writes are
  an edit, fewer are another function. (Other hooks may have given the second run a copy to write over: ``call.py``
  leaves that to PyTorch.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import checkpoint

from .._torch import saved_tensors_hooks_on_top
from ..activations import Activation
from ..utils.autograd_graph import raw_saved

#: How autograd's error begins, which people search for.
_EDITED = "one of the variables needed for gradient computation has been modified by an inplace operation"


class Expected(NamedTuple):
    """Of an output that hooks get: its version once ``forward`` has ended; and, where they are no checkpoint's, an
    empty tensor that counts the writes to it."""

    version: int
    counter: Tensor | None = None


def expected_from_hooks(y: Tensor, *, is_dirty: bool = False) -> Expected | None:
    """What to look for in backward, of ``y``, which a node's ``forward`` saves; None where no hooks get it.

    Args:
        is_dirty: whether the node marks it as such, for which autograd counts one more behind ``forward``.
    """
    hooks = saved_tensors_hooks_on_top(True)
    if hooks is None:
        return None
    version = y._version + is_dirty
    if _are_of_checkpoint(hooks):
        return Expected(version)
    counter = y.detach()
    counter.data = y.new_empty(0)  # it goes on counting, and holds no memory
    return Expected(version, counter)


def is_under_checkpoint() -> bool:
    """Whether a checkpoint's hooks get what is saved."""
    hooks = saved_tensors_hooks_on_top(True)
    return hooks is not None and _are_of_checkpoint(hooks)


def _are_of_checkpoint(hooks: Any) -> bool:
    return getattr(hooks[0], "__module__", None) == checkpoint.__name__


def held(saved: Tensor) -> tuple[Tensor, int]:
    """A pack hook that keeps the tensor, and its version, at which autograd does not look under hooks."""
    return saved, saved._version


def unedited(packed: tuple[Tensor, int]) -> Tensor:
    """The unpack hook for ``held``.

    Raises:
        RuntimeError: the tensor has been edited since.
    """
    saved, version = packed
    if saved._version != version:
        raise RuntimeError(
            f"{_EDITED}: a tensor of shape {tuple(saved.shape)} was saved at version {version} and is at version "
            f"{saved._version} now."
        )
    return saved


def saved_tensors(ctx: Any, function: str, activation: Activation | None = None) -> tuple[Any, ...]:
    """``ctx.saved_tensors`` of a node that saves its output as the first of them, or None in its place.

    Args:
        ctx: its ``expected`` is what ``expected_from_hooks`` has said of the output.
        function, activation: whose output it is, for the error.

    Raises:
        RuntimeError: what was saved has been edited, or freed; or a checkpoint has recomputed something else.
    """
    try:
        saved: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if _EDITED not in str(error) or _is_of_another(ctx, str(error)):
            raise
        raise _output_was_edited(function, activation, str(error)) from error
    y, expected = saved[0], ctx.expected
    if expected is None or y is None:
        return saved
    version = (y if expected.counter is None else expected.counter)._version
    if version == expected.version:
        return saved
    if version > expected.version:
        found = f"an output of shape {tuple(y.shape)}, brought back by hooks, is at version {version}"
        reason = f"{_EDITED}: {found}; expected version {expected.version} instead."
        raise _output_was_edited(function, activation, reason)
    raise RuntimeError(
        f"{function}: in the place of {_output_of(activation)} a checkpoint has recomputed something else, of shape "
        f"{tuple(y.shape)}. A function under a checkpoint must compute the same each time it runs."
    )


def _is_of_another(ctx: Any, reason: str) -> bool:
    """Whether autograd complains of a saved tensor that is no output of the node."""
    output, *others = raw_saved(ctx)
    if all(hasattr(saved, "unpack") for saved in others):
        return any(map(_was_edited, others))
    # torch 2.11 unpacks them together alone. It says what it complains of; hooks of this package do not.
    if "; expected version" not in reason:
        return False
    if not isinstance(output.data, Tensor):  # the node keeps its input instead; or hooks keep the output
        return True
    own = f"[{', '.join(map(str, output.data.shape))}]], which is output 0 of {ctx._forward_cls.__name__}"
    return own not in reason


def _was_edited(saved: Any) -> bool:
    """Whether a saved tensor that is no output of its node was edited."""
    try:
        saved.unpack()
    except RuntimeError as error:
        return _EDITED in str(error)
    return False


def _output_of(activation: Activation | None) -> str:
    return "its output" if activation is None else f"its {activation} output"


def _output_was_edited(function: str, activation: Activation | None, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{function}: {_output_of(activation)} was edited in place after the forward pass, and backward reads it. "
        'Edit a copy (y = y.clone()), or let the input be kept: by save="input" in your own calls and layers, in a '
        "fused model by fl.unfuse(module) (torch.autograd.set_detect_anomaly(True) shows which), or in all of it by "
        f"fl.fuse(model, exact=True). PyTorch says: {reason}"
    )
