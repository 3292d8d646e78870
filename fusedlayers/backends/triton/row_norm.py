"""Layer norm and RMS norm on a GPU, and their gradients from the output: one pass over memory each.

Idea: a program takes whole rows, one after the other. It holds a row in registers, so that statistics, normalised
values and gradients need no second read, and adds up its rows' shares of the weights' gradients there; a second kernel
adds the programs' sums. Layer norm's forward pass is torch's own kernel.

Cost: one read of y and dy and one write of dx, beside a row of sums for each program. Limit: rows of at most ``WIDEST``
numbers; wider ones are the reference's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...utils.bounded_cache import BoundedCache
from .. import torch as reference
from ..norms import Kept, RowNorm, RowNormResult
from .fallback import or_reference
from .launch import Launch, cdiv, next_power_of_2, on
from .sums import add_up

#: The longest row that registers hold: 8 numbers of each operand for every one of 1,024 threads, of which the compiler
#: spills 152 bytes on sm_90, and none on sm_80 and gfx942. With 16 it spills up to 912.
WIDEST = 1 << 13
#: Programs of a backward launch, about, each with a row of sums: several for each multiprocessor.
PROGRAMS = 512


#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    inverse_std_ptr,
    columns,
    eps,
    offset,
    HAS_W: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = xhat (offset + w) with xhat = x / sqrt(mean(x^2) + eps), a row for each program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inverse_std = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
    y = x * inverse_std
    if ROUNDS_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if HAS_W:
        y *= tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(inverse_std_ptr + row, inverse_std)


@triton.jit(do_not_specialize=["rows", "steps"])
def row_norm_gradient_kernel(
    dy_ptr,
    y_ptr,
    w_ptr,
    b_ptr,
    inverse_std_ptr,
    place_ptr,  # of each column the place of its xhat among those that were saved, or -1
    kept_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    columns,
    kept,
    steps,
    offset,
    IS_CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    NEEDS_X: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx = inverse_std (g - mean(g) - xhat mean(g xhat)) with g = dy (offset + w) and xhat = (y - b) / (offset + w);
    the sums of dy xhat and of dy over the program's rows. dx_ptr may be y_ptr."""
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    gain = tl.full((COLUMNS,), 1.0, tl.float32)
    if HAS_W:
        gain = tl.where(inside, tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset, 1.0)
    shift = tl.zeros((COLUMNS,), tl.float32)
    if HAS_B:
        shift = tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)
    place = tl.full((COLUMNS,), -1, tl.int32)
    if HAS_KEPT:
        place = tl.load(place_ptr + column, mask=inside, other=-1)
    of_w = tl.zeros((COLUMNS,), tl.float32)
    of_b = tl.zeros((COLUMNS,), tl.float32)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) * steps + step
        present = inside & (row < rows)
        dy = tl.load(dy_ptr + row * columns + column, mask=present, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * columns + column, mask=present, other=0.0).to(tl.float32)
        xhat = tl.where(present, (y - shift) / gain, 0.0)
        if HAS_KEPT:
            own = tl.load(kept_ptr + row * kept + place, mask=present & (place >= 0), other=0.0).to(tl.float32)
            xhat = tl.where(place >= 0, own, xhat)
        if HAS_W:
            of_w += dy * xhat
        if HAS_B:
            of_b += dy
        if NEEDS_X:
            inverse_std = tl.load(inverse_std_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
            g = dy * gain
            slope = tl.sum(g * xhat, 0) / columns
            if IS_CENTRED:
                dx = (g - tl.sum(g, 0) / columns - xhat * slope) * inverse_std
            else:
                dx = (g - xhat * slope) * inverse_std
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=present)
    partial = partial_ptr + tl.program_id(0) * columns
    if HAS_W:
        tl.store(partial + column, of_w, mask=inside)
        partial += tl.num_programs(0) * columns
    if HAS_B:
        tl.store(partial + column, of_b, mask=inside)


@or_reference(reference.row_norm)
def row_norm(norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None) -> RowNormResult:
    """The norm of contiguous x, and its statistics."""
    if norm.is_centred or not _serves(norm, x):
        return reference.row_norm(norm, x, w, b)
    y, inverse_std = torch.empty_like(x), x.new_empty(x.numel() // norm.columns, dtype=torch.float32)
    rows = len(inverse_std)
    key = id(rms_norm_kernel), norm, rows, x.dtype, None if w is None else w.dtype, x.get_device()
    launch = _launches.get(key)
    if launch is None:
        constants = {"HAS_W": w is not None, "ROUNDS_FIRST": norm.rounds_first, **options(norm.columns)}
        numbers = norm.columns, norm.epsilon(x.dtype), norm.offset
        launch = _launches.put(key, Launch(rms_norm_kernel, [rows], numbers, constants))
    with on(x):
        launch(x, y if w is None else w.contiguous(), y, inverse_std)
    return RowNormResult(y, inverse_std)


@or_reference(reference.row_norm_gradient)
def row_norm_gradient(
    norm: RowNorm,
    dy: Tensor,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
    *,
    needs_x: bool,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, in y if ``overwrite``, and of the rows that w and b are, in a floating dtype."""
    if not _serves(norm, y):
        return reference.row_norm_gradient(
            norm, dy, y, w, b, inverse_std, kept, needs_x=needs_x, overwrite=overwrite
        )  # fmt: skip
    rows, columns = y.numel() // norm.columns, norm.columns
    dx = (y if overwrite else torch.empty_like(y)) if needs_x else None
    place = None if kept is None else kept.places(columns)
    steps = cdiv(rows, PROGRAMS)
    programs = cdiv(rows, steps)
    partial = y.new_empty((w is not None) + (b is not None), programs, columns, dtype=torch.float32)
    count = 0 if kept is None else len(kept.columns)
    key = (
        *(id(row_norm_gradient_kernel), norm, rows, programs, count, needs_x, y.get_device(), y.dtype, dy.dtype),
        *(inverse_std.dtype, *(None if p is None else p.dtype for p in (w, b))),
    )
    launch = _launches.get(key)
    if launch is None:
        constants = {
            "IS_CENTRED": norm.is_centred,
            "HAS_W": w is not None,
            "HAS_B": b is not None,
            "HAS_KEPT": kept is not None,
            "NEEDS_X": needs_x,
            **options(columns),
        }
        numbers = rows, columns, count, steps, norm.offset
        launch = _launches.put(key, Launch(row_norm_gradient_kernel, [programs], numbers, constants))
    with on(y):
        launch(
            dy, y, y if w is None else w.contiguous(), y if b is None else b.contiguous(), inverse_std,
            y if place is None else place, y if kept is None else kept.xhat, y if dx is None else dx, partial,
        )  # fmt: skip
        dtypes = [p.dtype for p in (w, b) if p is not None]
        sums = iter(add_up(partial, columns, 1, dtypes[0]) if dtypes else ())
    if dx is not None:
        torch.autograd.graph.increment_version(dx)
    of_w, of_b = (None if p is None else next(sums) for p in (w, b))
    return dx, of_w, of_b


def row_norm_slow_because(dtype: torch.dtype, *, may_build: bool = True) -> str | None:
    """Why ``row_norm_gradient`` takes several times PyTorch's time, or None where it does not."""
    return None


def _serves(norm: RowNorm, x: Tensor) -> bool:
    return norm.columns <= WIDEST


def options(columns: int) -> dict[str, Any]:
    """The width of a row in registers, and how many warps share it: 8 numbers for each thread."""
    width, warp = next_power_of_2(columns), 64 if torch.version.hip else 32
    return {"COLUMNS": width, "num_warps": max(1, width // (8 * warp)), "enable_fp_fusion": True}
