"""Batch norm, and the activation that follows it: one node for both, where the output of both determines the norm's
input.

A batch norm does not know that an activation follows. ``batch_norm`` is PyTorch's own, and notes on the node that it
made what that was given; ``after_batch_norm`` finds the note on its input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import validation
from ._torch import autocast_is_active
from .activations import Activation
from .backends.operations import BatchNorm
from .call import followed_by, plan_for
from .ops.batch_norm import act_after_norm, inverse_error_of
from .ops.buffer_reuse import hooks_move_tensors

_NOTE = "fusedlayers batch norm"


class _Made(NamedTuple):
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
    z = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if torch.compiler.is_compiling():  # a graph that is traced shows no nodes; batch norms are the compiler's
        return z
    node: Any = z.grad_fn
    if training and node is not None and validation.are_torchs_own((input,), (weight, bias)):
        # The statistics of this batch are the node's; the running ones have been updated.
        norm = BatchNorm(None, None, None, True, None, eps, dims=input.dim())
        node.metadata[_NOTE] = _Made(norm, input, weight, bias, z._version)
    return z


def after_batch_norm(z: Tensor, activation: Activation, inplace: bool) -> Tensor | None:
    """``activation(z)`` of a batch norm's result, written over it or not, that saves its own output alone; None where
    nobody knows of a batch norm, or its output would not determine its input."""
    if torch.compiler.is_compiling():
        return None
    node: Any = z.grad_fn
    if node is None or node.metadata.get(_NOTE) is None:
        return None
    made: _Made = node.metadata[_NOTE]
    if z._version != made.version or z._is_view() or z._backward_hooks or hooks_move_tensors() or autocast_is_active():
        return None
    if followed_by() is not None or not hasattr(node, "_saved_result2"):
        return None
    norm, x, w, b, _ = made
    plan, record, operands = plan_for(norm, x, w, b, None, activation, "auto", (norm.facts(), x.shape), x.numel())
    inverse_error = inverse_error_of(record, x) if plan.path == "tells_input" and not operands else None
    if inverse_error is None:
        return None
    statistics = node._saved_result1, node._saved_result2
    return act_after_norm(norm, x, w, b, z, statistics, record, inverse_error, inplace)
