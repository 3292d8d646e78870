"""Autocast's casts. While autocast is on, torch casts a parameter once for all who use it, and saves that one cast.

``parameter.to(dtype)`` makes another each time. torch has no function that returns its own cast, but operations save
it: it is read from the node of a product that computes nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .._torch import saved_tensors_hooks_on_top


def shared_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, for the dtype that autocast casts to; of a matrix whose cast torch caches, that cast."""
    is_trained = tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()
    is_shared = is_trained and torch.is_autocast_cache_enabled()
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or not is_shared:
        return tensor.to(dtype)
    nothing = torch.empty(tensor.shape[1], 0, dtype=dtype, device=tensor.device, requires_grad=True)
    # Saved-tensor hooks, a checkpoint's for one, would replace the cast.
    with saved_tensors_hooks(lambda t: t, lambda t: t) if saved_tensors_hooks_on_top(True) else nullcontext():
        cast = getattr(torch.mm(tensor, nothing).grad_fn, "_saved_self", None)
    return cast if cast is not None and cast.dtype is dtype else tensor.to(dtype)
