"""Group norm in one node that saves its output, and not its input; as ``row_norm.py``, whose idea it shares.

Each group of channels of a sample has statistics of its own, each channel a weight: ``y = xhat w + b``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..backends import Backend
from ..backends import torch as reference
from ..backends.norms import GroupNorm, Kept
from ..utils.layout import laid_out_as
from ..utils.profile_ranges import profile_range
from .buffer_reuse import is_ours_alone, saved_under_hooks
from .edits import expected_from_hooks, saved_tensors
from .inexact_columns import MOST, inexact_columns, inexact_for_variances
from .place import AtPlace, place_of
from .pointwise import apart, gradients_through, needs_composite


@profile_range(lambda norm, *_: norm.function)
def group_norm(norm: GroupNorm, backend: Backend, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """``norm(x, w, b)``, of which y determines xhat, at least that of most channels."""
    channels = inexact_columns(backend, w, b, 0.0, x.dtype, x.numel() // (len(x) * norm.groups))
    if channels is not None and len(channels) > MOST * x.shape[1]:
        return norm(x, w, b)
    y: Tensor = _GroupNorm.apply(x, w, b, place_of(x) if x.requires_grad else None, norm, backend, channels)
    return y


def keeps_output(y: Tensor) -> bool:
    """Whether y is a result of ``group_norm`` that is kept for its backward pass."""
    node: Any = y.grad_fn
    return getattr(node, "_forward_cls", None) is _GroupNorm and node.keeps_output


class _GroupNorm(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        place: Tensor | None,
        norm: GroupNorm,
        backend: Backend,
        channels: Tensor | None,
    ) -> Tensor:
        x = x if x.is_cpu else x.contiguous()  # as F.group_norm does
        y, mean, inverse_std = torch.native_group_norm(x, w, b, *norm.extents(x), norm.groups, norm.eps)
        count = x.numel() // (len(x) * norm.groups)
        channels = inexact_for_variances(backend, channels, inverse_std, norm.eps, w, b, x.dtype, count)
        ctx.place, ctx.settings = place, (norm, backend, saved_under_hooks())
        ctx.keeps_output = channels is None or len(channels) <= MOST * x.shape[1]
        if not ctx.keeps_output:
            ctx.save_for_backward(None, None, w, b, None, x)
            ctx.expected = None
            return y
        kept = None
        if channels is not None:
            own_mean, own_std = (norm.of_channels(t, x).index_select(1, channels) for t in (mean, inverse_std))
            kept = ((x.index_select(1, channels) - own_mean) * own_std).to(x.dtype)
        ctx.save_for_backward(y, inverse_std, w, b, channels, kept)
        ctx.expected = expected_from_hooks(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        norm, backend, hooked = ctx.settings
        y, inverse_std, w, b, channels, kept_tensor = saved_tensors(ctx, norm.function)
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        again = torch.is_grad_enabled()  # else not: torch's second derivatives of group norm know no batches
        kept = None if channels is None else Kept(channels, kept_tensor)
        if y is None or again or needs_composite(dy):
            with torch.no_grad():
                x = kept_tensor if y is None else reference.centred(norm, y.detach(), w, b, inverse_std, kept, None)
            x = x if ctx.place is None else AtPlace.apply(ctx.place, x)
            with torch.enable_grad():
                sources = apart(x, w, b)
                found = gradients_through(norm(*sources), dy, sources, (needs_x, needs_w, needs_b), create_graph=again)
            return *found, None, None, None, None
        y = y if norm.reads(y) else y.contiguous()  # hooks may have laid it out in another way
        overwrite = not hooked and is_ours_alone(y)
        dx, dw, db = backend.group_norm_gradient(
            norm, laid_out_as(dy, y), y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )
        dx = dx.detach() if dx is y else dx  # which is a result, and knows its node
        dw = dw.to(w.dtype) if needs_w else None
        db = db.to(b.dtype) if needs_b else None
        return dx, dw, db, None, None, None, None
