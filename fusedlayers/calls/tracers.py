"""Who traces a call, and must see PyTorch's own operations; and the trace of a user's activation for a call."""

from collections.abc import Sequence

import torch

from .. import _torch
from .._torch import (
    FAKE_MODE,
    PROXY_MODE,
    SELECTIVE_CHECKPOINT_MODES,
    dispatch_mode_at,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    infrastructure_mode,
    torchscript_state,
)
from ..activations import Activation, WithOperands
from ..activations.custom import trace_activation


def with_operands(
    activation: Activation, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """A user's function made into an activation for z of this shape and dtype, with the tensors that it reads."""
    is_users = activation.needs_tracing
    return trace_activation(activation, tuple(shape), dtype, device) if is_users else WithOperands(activation)


def followed_by() -> str | None:
    """The active tracer or transform that must see PyTorch's own operations, or None."""
    if functorch_is_active():
        return _torch.UNSEEN or "a transform of torch.func follows the computation"
    if forward_ad_level() >= 0:
        return "forward-mode differentiation follows the computation"
    if torchscript_state() is not None:
        return "TorchScript traces the computation"
    if not dispatch_mode_count():
        return None
    if infrastructure_mode(PROXY_MODE) is not None:
        return "make_fx traces the computation"
    if infrastructure_mode(FAKE_MODE) is not None:
        return "fake tensors stand for the results"
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    selective = (isinstance(m, SELECTIVE_CHECKPOINT_MODES) or getattr(m, "keeps_results", False) for m in modes)
    # It saves the results of some operations, a matmul's say, which must not be overwritten.
    return "a selective checkpoint saves results of single operations" if any(selective) else None
