"""Batch norm, and the activation that follows it: one node for both, where the output of both determines the norm's
input.

A batch norm does not know that an activation follows. ``batch_norm`` notes on the node that it made what that was
given; ``after_batch_norm`` finds the note on its input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from . import backends, validation
from ._torch import autocast_is_active
from .activations import Activation
from .backends import InputPasses
from .backends.operations import BatchNorm
from .call import followed_by, needs_gradient, plan_for
from .ops.batch_norm import Made, act_after_norm, inverse_error_of
from .ops.batch_norm_input import IDENTITY, norm_of_input
from .ops.buffer_reuse import hooks_move_tensors
from .utils.layout import has_torchs_layout

_NOTE = "fusedlayers batch norm"


class _Given(NamedTuple):
    """What a batch norm was given."""

    norm: BatchNorm
    x: Tensor
    w: Tensor | None
    b: Tensor | None
    version: int


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm``, whose node and result an activation behind it may replace by one that saves its own output."""
    parameters = weight, bias, running_mean, running_var
    is_followed = training and validation.are_usual((input,), parameters)
    if not is_followed:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    norm = BatchNorm(running_mean, running_var, None, True, momentum, eps, dims=input.dim())
    passes = _passes(norm, input, weight, bias)
    if passes is not None:
        z = norm_of_input(norm, input, weight, bias, passes)
    else:
        z = F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    node: Any = z.grad_fn
    if node is not None:
        # The statistics of this batch are the node's; the running ones have been updated.
        node.metadata[_NOTE] = _Given(norm.without_tensors(), input, weight, bias, z._version)
    return z


def _passes(norm: BatchNorm, x: Tensor, w: Tensor | None, b: Tensor | None) -> InputPasses | None:
    """A backend's passes for ``norm(x, w, b)``, or None: where torch's kernel is quicker, or may refuse the call or
    compute it in another way."""
    passes = backends.choose(x).input_passes(IDENTITY, x.dtype)
    if passes is None or x.dim() < 2 or x.numel() == x.shape[1] or not has_torchs_layout(x):
        return None
    running = norm.running_mean, norm.running_var
    is_usual = not x.is_inference() and (running[0] is None) == (running[1] is None) and not needs_gradient(*running)
    channels, dtype, device = x.shape[1:2], x.dtype, x.device
    for t in (w, b, *running):  # every call asks, and a generator would be a call for each tensor
        if t is not None:
            is_like_x = t.dtype is dtype and t.device == device and t.shape == channels and t.is_contiguous()
            is_usual = is_usual and is_like_x and not t.is_inference()
    is_usual = is_usual and type(norm.momentum) is float and type(norm.eps) is float and norm.eps > 0
    is_usual = is_usual and validation.unusual_because(x, w, b, *running) is None
    is_free = not autocast_is_active() and followed_by() is None
    return passes if is_usual and is_free and needs_gradient(x, w, b) else None


def after_batch_norm(z: Tensor, activation: Activation, inplace: bool) -> Tensor | None:
    """``activation(z)`` of a batch norm's result, written over it or not, that saves its own output alone; None where
    nobody knows of a batch norm, or its output would not determine its input."""
    node: Any = z.grad_fn
    if node is None or node.metadata.get(_NOTE) is None:
        return None
    given: _Given = node.metadata[_NOTE]
    is_asked_for = z._backward_hooks or z.retains_grad
    if z._version != given.version or z._is_view() or is_asked_for or hooks_move_tensors() or autocast_is_active():
        return None
    in_passes = hasattr(node, "statistics")
    if followed_by() is not None or not (in_passes or hasattr(node, "_saved_result2")):
        return None
    norm, x, w, b, _ = given
    found, record, operands = plan_for(norm, x, w, b, None, activation, "auto", (norm.facts(), x.shape), x.numel())
    inverse_error = inverse_error_of(record, x) if found.path == "tells_input" and not operands else None
    if inverse_error is None:
        return None
    mean, inverse_std = node.statistics if in_passes else (node._saved_result1, node._saved_result2)
    return act_after_norm(norm, x, w, b, z, Made(mean, inverse_std, in_passes, inplace), record, inverse_error)
