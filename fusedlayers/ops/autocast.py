"""Autocast's casts: torch makes one of a parameter for all who use it while autocast is on, and so it is kept once.

``parameter.to(dtype)`` is another each time. torch has no function for its own, but who uses one saves it: it is had
from the node of a product that computes nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .buffer_reuse import saved_under_hooks


def shared_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, the lower dtype of the autocast that is on; of a matrix that torch would keep the cast of,
    that cast."""
    is_kept = tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or not is_kept:
        return tensor.to(dtype)
    nothing = torch.empty(tensor.shape[1], 0, dtype=dtype, device=tensor.device, requires_grad=True)
    # What hooks would make of it, a checkpoint's for one, is not the cast.
    with saved_tensors_hooks(lambda t: t, lambda t: t) if saved_under_hooks() else nullcontext():
        cast = getattr(torch.mm(tensor, nothing).grad_fn, "_saved_self", None)
    return cast if cast is not None and cast.dtype is dtype else tensor.to(dtype)
