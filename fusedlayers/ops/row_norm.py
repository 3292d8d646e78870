"""Layer norm and RMS norm in one node that saves its output, which the next layer saves anyway, and not its input.

``y = xhat gain + b``, so ``xhat = (y - b) / gain``; xhat and one number for each row are all that backward needs (as
Apex's ``memory_efficient=True``; there small factors are clamped). y is rounded, and determines xhat only where the
gain is neither too small nor much smaller than b. Of the other columns xhat is saved beside y (``inexact_columns.py``).

The norm of x does not change when its mean does. Second derivatives are therefore those of the norm of
``xhat / inverse_std``, which is x less its mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..backends import Backend
from ..backends.norms import Kept, RowNorm
from ..utils.profile_ranges import profile_range
from .buffer_reuse import is_ours_alone, saved_under_hooks
from .edits import expected_from_hooks, saved_tensors
from .inexact_columns import MOST, inexact_columns, inexact_for_variances
from .place import AtPlace, place_of
from .pointwise import apart, gradients_through, needs_composite


@profile_range(lambda norm, *_: norm.function)
def row_norm(norm: RowNorm, backend: Backend, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """``norm(x, w, b)``, of which y determines xhat, at least that of most columns."""
    columns = inexact_columns(backend, w, b, norm.offset, x.dtype, norm.columns)
    if columns is not None and len(columns) > MOST * norm.columns:
        return norm(x, w, b)
    place = place_of(x) if x.requires_grad else None
    y: Tensor = _RowNorm.apply(x, w, b, place, norm, backend, columns)
    return y


class _RowNorm(Node):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        place: Tensor | None,
        norm: RowNorm,
        backend: Backend,
        columns: Tensor | None,
    ) -> Tensor:
        x = x.contiguous()
        y, inverse_std, mean = backend.row_norm(norm, x, w, b)
        eps = norm.epsilon(x.dtype)
        columns = inexact_for_variances(backend, columns, inverse_std, eps, w, b, x.dtype, norm.columns)
        ctx.place = place
        ctx.settings = norm, backend, saved_under_hooks()
        if columns is not None and len(columns) > MOST * norm.columns:
            ctx.save_for_backward(None, None, w, b, None, x)
            ctx.expected = None
            return y
        kept = None if columns is None else _xhat_of(x.view(-1, norm.columns), inverse_std, mean, columns)
        ctx.save_for_backward(y, inverse_std, w, b, columns, kept)
        ctx.expected = expected_from_hooks(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        norm, backend, hooked = ctx.settings
        y, inverse_std, w, b, columns, kept_tensor = saved_tensors(ctx, norm.function)
        needs_x, needs_w, needs_b, *_ = needs = ctx.needs_input_grad[:3]
        if y is None:
            return *_differentiable(ctx.place, dy, kept_tensor, w, b, norm, needs), None, None, None, None
        y = y if y.is_contiguous() else y.contiguous()  # hooks may have laid it out in another way
        kept = None if columns is None else Kept(columns, kept_tensor)
        if needs_composite(dy):
            with torch.no_grad():
                xhat = norm.xhat(y.detach().view(-1, norm.columns), w, b, kept)
                x = (xhat / inverse_std.unsqueeze(1)).to(y.dtype).view(y.shape)
            return *_differentiable(ctx.place, dy, x, w, b, norm, needs), None, None, None, None
        overwrite = not hooked and is_ours_alone(y)
        dx, of_w, of_b = backend.row_norm_gradient(
            norm, dy.contiguous(), y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )
        dx = dx.detach() if dx is y else dx  # which is a result, and knows its node
        dw = of_w.view(norm.shape).to(w.dtype) if needs_w and of_w is not None else None
        db = of_b.view(norm.shape).to(b.dtype) if needs_b and of_b is not None else None
        return dx, dw, db, None, None, None, None


def _xhat_of(rows: Tensor, inverse_std: Tensor, mean: Tensor | None, columns: Tensor) -> Tensor:
    """xhat of these columns."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    found = rows[:, columns].to(wide)
    if mean is not None:
        found -= mean.unsqueeze(1).to(wide)
    return (found * inverse_std.unsqueeze(1).to(wide)).to(rows.dtype)


def _differentiable(
    place: Tensor | None,
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    norm: RowNorm,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients of x, w and b by PyTorch's operations, which autograd can differentiate again."""
    again = torch.is_grad_enabled()
    x = x if place is None else AtPlace.apply(place, x)
    with torch.enable_grad():
        sources = apart(x, w, b)
        return gradients_through(norm(*sources), dy, sources, needs, create_graph=again)
