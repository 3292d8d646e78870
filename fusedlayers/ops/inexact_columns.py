"""Which columns of a norm, or channels, have outputs that do not determine the normalised input xhat.

``y = xhat (offset + w) + b`` is rounded: xhat is lost where its factor is next to 0, or much smaller than b. Each call
looks at its weights; on a GPU, where a look makes the CPU wait, each version of them is looked at once.

xhat is itself small, and lost sooner, where the variances are far below eps. On CPUs a call looks at them as well.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import foreach
from ..backends import Backend
from ..backends.norms import in_a_row

#: How many times its factor's size a column's shift may be. xhat then errs by so many roundings of y, and one.
RATIO = 4.0
#: Where xhat is to be saved of more than this part of the columns, x is saved as it is, and not y. xhat is saved beside
#: y: where nobody else saves y, the call saves more than PyTorch, by so much at most.
MOST = 0.25


def inexact_columns(
    backend: Backend, w: Tensor | None, b: Tensor | None, offset: float, dtype: torch.dtype, count: int
) -> Tensor | None:
    """The columns of which outputs of ``dtype`` do not determine xhat, or None where there are none.

    Args:
        count: how many numbers share their statistics; the largest xhat is the root of it.
    """
    if w is None:
        return None
    if w.is_cpu:
        return _look(backend, w, b, offset, None, limits(dtype, count))
    return _remembered(backend, w, b, offset, limits(dtype, count))


def inexact_for_variances(
    backend: Backend,
    columns: Tensor | None,
    inverse_std: Tensor,
    eps: float,
    w: Tensor | None,
    b: Tensor | None,
    dtype: torch.dtype,
    count: int,
) -> Tensor | None:
    """``columns``, and those of which outputs do not determine xhat because the variances are far below eps.

    Args:
        inverse_std: (rows,), or (rows, groups) of groups of as many columns each.
    """
    if b is None or not inverse_std.is_cpu:  # without b small xhat are rounded as finely as large ones
        return columns
    # xhat has the variance 1 where eps is nothing beside that of x. Most calls end here.
    if 1 - eps * inverse_std.max().item() ** 2 >= 1 / RATIO**2:
        return columns
    rows = inverse_std.view(len(inverse_std), -1).to(torch.promote_types(dtype, torch.float32))
    spread = rows.square().mean(0).mul_(-eps).add_(1.0).clamp_(min=0.0).sqrt_()
    if spread.min().item() >= 1 / RATIO:
        return columns
    of_columns = spread.repeat_interleave(b.numel() // len(spread))
    return _look(backend, torch.ones_like(b) if w is None else w, b, 0.0, of_columns, limits(dtype, count))


@functools.lru_cache(256)
def limits(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """Between which sizes of the factor outputs are neither subnormal nor infinite. The count is rounded up to a power
    of two: sizes of images that change need no new look."""
    numbers, most = torch.finfo(dtype), 1 << (count - 1).bit_length()
    return numbers.smallest_normal, numbers.max / (most**0.5 + RATIO)


def _look(
    backend: Backend, w: Tensor, b: Tensor | None, offset: float, spread: Tensor | None, limits: tuple[float, float]
) -> Tensor | None:
    """``spread``: of xhat, for each column; None for 1."""
    wide = torch.promote_types(w.dtype, torch.float32)
    factor = in_a_row(w, wide)
    factor = factor + offset if offset else factor
    factor = factor if spread is None else factor * spread
    return backend.inexact_columns(factor, None if b is None else in_a_row(b, wide), RATIO, *limits)


class _Seen:
    """What a look at the weights of a norm on a GPU has found."""

    def __init__(self, b: Tensor | None, offset: float, limits: tuple[float, float]) -> None:
        self.offset, self.limits = offset, limits
        self.b = None if b is None else weakref.ref(b)
        self.versions: tuple[int, int] | None = None
        self.columns: Tensor | None = None

    def shift(self) -> Tensor | None:
        return None if self.b is None else self.b()


#: By weight: one norm each. A look makes the CPU wait for the GPU, so one look serves all norms whose weights changed.
_seen: MutableMapping[Tensor, _Seen] = WeakIdKeyDictionary()


def _remembered(
    backend: Backend, w: Tensor, b: Tensor | None, offset: float, limits: tuple[float, float]
) -> Tensor | None:
    """The same, looked at once for each version of the weights: writes past the version counter (``.data``) are not
    noticed."""
    seen = _seen.get(w)
    if seen is None or seen.offset != offset or seen.limits != limits or seen.shift() is not b:
        seen = _seen[w] = _Seen(b, offset, limits)
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
        offsets = [stale[i][2].offset for i in places]
        sizes = foreach("abs")(foreach("add")(weights, offsets) if any(offsets) else weights)
        shifts = [in_a_row(w if b is None else b, w.dtype) for w, b in ((stale[i][0], stale[i][1]) for i in places)]
        allowed = foreach("mul")(sizes, RATIO)
        excess = foreach("sub")(foreach("abs")(shifts), allowed)
        ends = [*foreach("max")(sizes), *foreach("max")(foreach("neg")(sizes)), *foreach("max")(excess)]
        largest, smallest, shifted = torch.stack(ends).float().view(3, -1).tolist()
        for i, high, low, over in zip(places, largest, smallest, shifted, strict=True):
            least, most = stale[i][2].limits
            no_shift = stale[i][1] is None
            found_of[i] = max(least + low, high - most, -1.0 if no_shift else over)
    for i, (w, b, seen) in enumerate(stale):
        # NaN is no number that passes.
        seen.columns = None if found_of[i] <= 0 else _look(backend, w, b, seen.offset, None, seen.limits)
        seen.versions = _versions(w, b)
