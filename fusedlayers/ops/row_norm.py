"""Layer norm and RMS norm in one node that saves its output, which the next layer saves anyway, and not its input.

``y = xhat gain + b``, so ``xhat = (y - b) / gain``; xhat and one number for each row are all that backward needs (as
Apex's ``memory_efficient=True``; there small factors are clamped). y is rounded, and determines xhat only where the
gain is neither too small nor much smaller than b. Of the other columns xhat is saved beside y. Which these are is seen
from the weights of each call.

The norm of x does not change when its mean does. Second derivatives are therefore those of the norm of
``xhat / inverse_std``, which is x less its mean.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import foreach
from ..backends import Backend
from ..backends.norms import Kept, RowNorm, in_a_row
from ..utils.profile_ranges import profile_range
from .buffer_reuse import is_ours_alone, saved_under_hooks
from .edits import saved_tensors, version_for_backward
from .place import AtPlace, place_of
from .pointwise import apart, gradients_through, is_batched

#: How many times its factor's size a column's shift may be. xhat then errs by so many roundings of y, and one.
RATIO = 4.0
#: Where xhat is to be saved of more than this part of the columns, x is saved as it is. xhat is saved beside y: where
#: nobody else saves y, the call saves more than PyTorch, by so much at most.
MOST = 0.25


@profile_range(lambda norm, *_: norm.function)
def row_norm(norm: RowNorm, backend: Backend, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
    """``norm(x, w, b)``, of which y determines xhat, at least that of most columns."""
    columns = inexact_columns(norm, backend, w, b, x.dtype)
    if columns is not None and len(columns) > MOST * norm.columns:
        return norm(x, w, b)
    place = place_of(x) if x.requires_grad else None
    y: Tensor = _RowNorm.apply(x, w, b, place, norm, backend, columns)
    return y


class _RowNorm(Function):
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
        y, inverse_std = backend.row_norm(norm, x, w, b)
        kept = None if columns is None else _xhat_of(norm, x, inverse_std, columns)
        ctx.save_for_backward(y, inverse_std, w, b, columns, kept)
        ctx.place = place
        ctx.settings = norm, backend, saved_under_hooks()
        ctx.expected = version_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        norm, backend, hooked = ctx.settings
        y, inverse_std, w, b, columns, kept_xhat = saved_tensors(ctx, norm.function)
        y = y if y.is_contiguous() else y.contiguous()  # hooks may have laid it out in another way
        kept = None if columns is None else Kept(columns, kept_xhat)
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched(dy):
            found = _differentiable(ctx.place, dy, y, inverse_std, w, b, kept, norm, (needs_x, needs_w, needs_b))
            return *found, None, None, None, None
        overwrite = not hooked and is_ours_alone(y)
        dx, of_w, of_b = backend.row_norm_gradient(
            norm, dy.contiguous(), y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )
        dx = dx.detach() if dx is y else dx  # which is a result, and knows its node
        dw = of_w.view(norm.shape).to(w.dtype) if needs_w and of_w is not None else None
        db = of_b.view(norm.shape).to(b.dtype) if needs_b and of_b is not None else None
        return dx, dw, db, None, None, None, None


def _xhat_of(norm: RowNorm, x: Tensor, inverse_std: Tensor, columns: Tensor) -> Tensor:
    """xhat of these columns, from x."""
    rows = x.view(-1, norm.columns)
    wide = torch.promote_types(x.dtype, torch.float32)
    found = rows[:, columns].to(wide)
    if norm.is_centred:
        found -= rows.mean(1, keepdim=True, dtype=wide)
    return (found * inverse_std.unsqueeze(1).to(wide)).to(x.dtype)


def _differentiable(
    place: Tensor | None,
    dy: Tensor,
    y: Tensor,
    inverse_std: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    kept: Kept | None,
    norm: RowNorm,
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """The gradients of x, w and b, in operations that autograd can differentiate again."""
    with torch.no_grad():
        xhat = norm.xhat(y.detach().view(-1, norm.columns), w, b, kept)
        x = (xhat / inverse_std.unsqueeze(1)).to(y.dtype).view(y.shape)
    x = x if place is None else AtPlace.apply(place, x)
    with torch.enable_grad():
        sources = apart(x, w, b)
        return gradients_through(norm(*sources), dy, sources, needs)


# --- which columns outputs tell ---------------------------------------------------------------------------------------


def inexact_columns(
    norm: RowNorm, backend: Backend, w: Tensor | None, b: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The columns of which outputs of ``dtype`` do not determine xhat, or None where there are none."""
    if w is None:
        return None
    if w.is_cpu:
        return _look(norm, backend, w, b, dtype)
    return _remembered(norm, backend, w, b, dtype)


def _look(norm: RowNorm, backend: Backend, w: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    wide = torch.promote_types(w.dtype, torch.float32)
    gain = norm.gain(w, wide)
    assert gain is not None
    shift = None if b is None else in_a_row(b, wide)
    return backend.inexact_columns(gain, shift, RATIO, *limits(dtype, norm.columns))


@functools.lru_cache(256)
def limits(dtype: torch.dtype, columns: int) -> tuple[float, float]:
    """Between which sizes of the factor outputs are neither subnormal nor infinite; the largest xhat is the root of the
    number of columns."""
    numbers = torch.finfo(dtype)
    return numbers.smallest_normal, numbers.max / (columns**0.5 + RATIO)


class _Seen:
    """What a look at the weights of a norm on a GPU has found."""

    def __init__(self, norm: RowNorm, b: Tensor | None, dtype: torch.dtype) -> None:
        self.norm, self.dtype = norm, dtype
        self.b = None if b is None else weakref.ref(b)
        self.versions: tuple[int, int] | None = None
        self.columns: Tensor | None = None

    def shift(self) -> Tensor | None:
        return None if self.b is None else self.b()


#: By weight: one norm each. A look makes the CPU wait for the GPU, so one look serves all norms whose weights changed.
_seen: MutableMapping[Tensor, _Seen] = WeakIdKeyDictionary()


def _remembered(norm: RowNorm, backend: Backend, w: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same, looked at once for each version of the weights: writes past the version counter (``.data``) are not
    noticed."""
    seen = _seen.get(w)
    if seen is None or seen.norm != norm or seen.dtype is not dtype or seen.shift() is not b:
        seen = _seen[w] = _Seen(norm, b, dtype)
    if seen.versions != _versions(w, b):
        _look_at_all(backend, w.device)
    return seen.columns


def _versions(w: Tensor, b: Tensor | None) -> tuple[int, int]:
    return w._version, 0 if b is None else b._version


def _look_at_all(backend: Backend, device: torch.device) -> None:
    """Look at all norms of a device whose weights have changed; the CPU waits for the GPU once, if all is well."""
    stale = [(w, seen.shift(), seen) for w, seen in _seen.items() if w.device == device]
    stale = [(w, b, seen) for w, b, seen in stale if seen.versions != _versions(w, b)]
    found_of: dict[int, float] = {}
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, (w, _, _) in enumerate(stale):
        by_dtype.setdefault(w.dtype, []).append(i)
    for places in by_dtype.values():  # few launches for all of them
        weights = [in_a_row(stale[i][0], stale[i][0].dtype) for i in places]
        offsets = [stale[i][2].norm.offset for i in places]
        sizes = foreach("abs")(foreach("add")(weights, offsets) if any(offsets) else weights)
        shifts = [in_a_row(w if b is None else b, w.dtype) for w, b in ((stale[i][0], stale[i][1]) for i in places)]
        allowed = foreach("mul")(sizes, RATIO)
        excess = foreach("sub")(foreach("abs")(shifts), allowed)
        ends = [*foreach("max")(sizes), *foreach("max")(foreach("neg")(sizes)), *foreach("max")(excess)]
        largest, smallest, shifted = torch.stack(ends).float().view(3, -1).tolist()
        for i, high, low, over in zip(places, largest, smallest, shifted, strict=True):
            least, most = limits(stale[i][2].dtype, stale[i][2].norm.columns)
            no_shift = stale[i][1] is None
            found_of[i] = max(least + low, high - most, -1.0 if no_shift else over)
    for i, (w, b, seen) in enumerate(stale):
        # NaN is no number that passes.
        seen.columns = None if found_of[i] <= 0 else _look(seen.norm, backend, w, b, seen.dtype)
        seen.versions = _versions(w, b)
