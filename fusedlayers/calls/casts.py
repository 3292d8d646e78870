"""Autocast: what it casts to, and the casts that kernels and nodes need of it. Backward passes look at it where they
compute layers again (``ops/pointwise.py``, ``ops/mlp_node.py``), and a user's function where it is traced."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch import SAVED, autocast_is_active, saved_tensors_hooks_on_top
from ..kernels.operations import Matmul, Mlp

if TYPE_CHECKING:
    from .decide import Call, Decision


def is_autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch refuses to say for meta


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts a matmul's arguments to, or None where it is off; float64 stays."""
    if not autocast_is_active() or not is_autocast(x.device.type):
        return None
    return x.dtype if x.dtype is torch.float64 else torch.get_autocast_dtype(x.device.type)


def with_casts(decision: Decision, call: Call) -> Call:
    """The call with those of its tensors cast that reach a kernel or a node. What torch can cast torch casts: a weight
    that is used many times is then cast, and saved, once."""
    dtype, operation, tensors = decision.cast, call.operation, list(call.tensors)
    assert dtype is not None
    is_matmul, x, w, b = type(operation) is Matmul, 0, 1, 2
    cast: Iterable[int] = [b] * decision.bias_in_kernel
    if decision.path == "by_layer":
        cast = (x,)
    elif type(operation) is Mlp:
        cast = (x, *range(w, len(tensors), 2))  # biases come as they are: casts would be held for double backward alone
    elif decision.path == "no_grad":
        cast = (x, w, b) if is_matmul else cast
    elif decision.saved == "recompute":
        cast = (x, *cast)
    elif decision.saved == "output" and is_matmul:
        cast = (x, w, *cast)
    for i in cast:
        tensors[i] = None if tensors[i] is None else shared_cast(tensors[i], dtype)
    return call._replace(tensors=tuple(tensors))


def shared_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, for the dtype that autocast casts to; of a matrix whose cast torch caches, that cast.

    While autocast is on, torch casts a parameter once for all who use it, and saves that one cast. ``parameter.to``
    makes another each time, and torch has no function that returns its own; but operations save it: it is read from the
    node of a product that computes nothing.
    """
    is_trained = tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()
    is_shared = is_trained and torch.is_autocast_cache_enabled()
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or not is_shared:
        return tensor.to(dtype)
    nothing = torch.empty(tensor.shape[1], 0, dtype=dtype, device=tensor.device, requires_grad=True)
    # Saved-tensor hooks, a checkpoint's for one, would replace the cast.
    with saved_tensors_hooks(lambda t: t, lambda t: t) if saved_tensors_hooks_on_top(True) else nullcontext():
        cast = getattr(torch.mm(tensor, nothing).grad_fn, SAVED + "self", None)
    return cast if cast is not None and cast.dtype is dtype else tensor.to(dtype)
