"""Edits in place of an output that a node has saved, in what a checkpoint computes again.

Autograd refuses to run backward from a saved tensor that was edited, but not where saved-tensor hooks have put it
there, as a checkpoint's do: PyTorch's own operations then read what was written over it. Where a model's code edits the
output of an operation of PyTorch that saves its input, that is right in PyTorch; so here the nodes look themselves.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils import checkpoint

from .._torch import saved_tensors_hooks_on_top


def version_for_backward(y: Tensor, *, is_dirty: bool = False) -> int | None:
    """The version at which a checkpoint will bring back ``y``, which a node's ``forward`` saves; None where no
    checkpoint's hooks get it.

    Args:
        is_dirty: whether the node marks it as such, for which autograd counts one more behind ``forward``.
    """
    hooks = saved_tensors_hooks_on_top(True)
    is_checkpoints = hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__
    return y._version + is_dirty if is_checkpoints else None


def check_unedited(y: Tensor | None, version: int | None) -> None:
    """Raises:
    RuntimeError: ``y``, that backward has unpacked, was edited since it was saved.
    """
    if y is not None and version is not None and y._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: an "
            f"output of shape {tuple(y.shape)}, saved within a checkpoint, is at version {y._version}; expected "
            f"version {version} instead."
        )
