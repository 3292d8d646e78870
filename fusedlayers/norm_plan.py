"""Decides what layer, RMS and group norms do, as ``plan.py`` does for a layer: once for each situation.

What the values of the weights decide is no part of it: of columns whose output does not determine its input more is
saved (``ops/row_norm.py``, ``ops/group_norm.py``). Who asks for the plan is told that too.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from . import asking, backends, norm_validation, plan, sizes, validation
from ._torch import autocast_is_active, dispatch_mode_count, is_of_transform
from .backends.norms import GroupNorm, RowNorm
from .call import followed_by, is_capturing, needs_gradient
from .ops.inexact_columns import MOST, inexact_columns
from .plan import Plan
from .utils.bounded_cache import BoundedCache
from .utils.storages import has_data

Norm = RowNorm | GroupNorm

#: Plans by facts.
_plans: BoundedCache[Plan] = BoundedCache(1024)


def plan_norm(norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> Plan:
    """For ``norm(x, w, b)``.

    Raises:
        TypeError, ValueError: arguments that do not fit together. Nothing has been computed by then.
    """
    if not validation.are_usual((x,), (w, b)):
        _check(norm, x, w, b, save)
        found = _make_plan(norm, x, w, b, save)
    else:
        facts = _facts(norm, x, w, b, save)
        known = _plans.get(facts)
        if known is None:
            _check(norm, x, w, b, save)
            known = _plans.put(facts, _make_plan(norm, x, w, b, save))
        found = known
    if asking.questions:
        asking.answer(_for_weights(found, norm, x, w, b), lambda: _make_plan(norm, x, w, b, save, is_compiling=True))
    return found


def _for_weights(found: Plan, norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None) -> Plan:
    """What a call saves with these weights."""
    if found.path != "fused" or w is None or not has_data(w):
        return found
    if isinstance(norm, GroupNorm):
        offset, count = 0.0, x.numel() // (len(x) * norm.groups)
    else:
        offset, count = norm.offset, norm.columns
    columns = inexact_columns(found.backend, w, b, offset, x.dtype, count)
    if columns is None:
        return found
    where = f"for {len(columns)} of {w.numel()} weights, which are 0, extreme, or less than a quarter of the bias"
    if len(columns) > MOST * w.numel():
        return plan.plain(f"its output does not determine its input {where}")
    return found._replace(reason=f"saves the output, and its normalised input {where}")


def _check(norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> None:
    if isinstance(norm, GroupNorm):
        norm_validation.check_group_norm(norm, x, w, b, save)
    else:
        norm_validation.check_row_norm(norm, x, w, b, save)


def _facts(norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> Hashable:
    """What can be read off a call: equal facts, equal plans."""
    of_parameters = tuple(
        p is not None and (p.dtype, p.layout, p.is_cpu or p.device, p.requires_grad, p.is_neg(), p.shape)
        for p in (w, b)
    )
    return (
        norm,
        save,
        norm.sizes(x),
        (least_bytes := _least_bytes(norm, x)),
        x.numel() * x.itemsize < least_bytes,
        x.numel() == 0,
        (x.dtype, x.layout, x.is_cpu or x.device, x.requires_grad, x.is_neg() or is_of_transform(x)),
        of_parameters,
        torch.is_grad_enabled(),
        autocast_is_active() and validation.is_autocast(x.device.type),
        followed_by(),
        dispatch_mode_count(),
        x.is_cuda and is_capturing(x),
    )


def _make_plan(
    norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str, *, is_compiling: bool = False
) -> Plan:
    least_bytes = 0 if save == "output" else _least_bytes(norm, x)
    is_small = x.numel() * x.itemsize < least_bytes
    because = _plain_because(norm, x, w, b, save, is_compiling or torch.compiler.is_compiling())
    if because is None and save != "output":
        because = backends.choose(x).row_norm_slow_because(x.dtype, may_build=not is_small)
    if because is not None:
        return plan.plain(because)
    if is_small:
        return plan.too_small(least_bytes)
    if not needs_gradient(x, w, b):
        return Plan("composite", "nothing", "saves nothing: no gradient is needed")
    return Plan("fused", "output", "saves the output, which determines the input", backend=backends.choose(x))


def _plain_because(
    norm: Norm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str, is_compiling: bool
) -> str | None:
    """Why PyTorch computes the norm, whatever its size and whoever could compute it; or None."""
    if is_compiling:
        return "a compiled graph cannot look at the weights"
    if save == "input":
        return "its input is saved"
    because = validation.unusual_because(x, w, b) or followed_by()
    if because is not None:
        return because
    if isinstance(norm, GroupNorm) and not norm.reads(x):
        return "the input is neither contiguous nor channels-last"
    if is_capturing(x):
        return "a CUDA graph does not look at the weights again"
    if any(p is not None and p.dtype is not x.dtype and not _is_wider(p, x) for p in (w, b)):
        return "dtypes are mixed"
    if not x.is_cpu and x.itemsize == 2 and validation.is_autocast(x.device.type):
        return "autocast computes it in float32"
    if not x.numel():
        return "the input is empty"
    return None


def _least_bytes(norm: Norm, x: Tensor) -> int:
    """From how many bytes on outputs are saved under ``save="auto"``."""
    if isinstance(norm, GroupNorm):
        return sizes.least_bytes(x, sizes.GROUP_NORM_BYTES * sizes.layout_factor(x))
    return sizes.least_bytes(x, sizes.LAYER_NORM_BYTES if norm.is_centred else sizes.SMALL_BYTES)


def _is_wider(p: Tensor, x: Tensor) -> bool:
    """Whether torch's norms of 16-bit x take such a parameter."""
    return x.is_cpu and x.itemsize == 2 and p.dtype is torch.float32
