"""RMS norm on a GPU, and its gradients from the saved input: one pass over memory each.

Idea: a program takes whole rows, one after the other, and holds each in registers, so that statistics and gradients
need no second read. It adds up its rows' shares of the weight's gradient; a second kernel adds the programs' sums.

Cost: one read of x, in backward of dy too, and one write; and a row of sums for each program of the backward pass.
Limit: rows of at most ``WIDEST`` numbers; wider ones are the reference's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...utils.caching import BoundedCache
from .. import reference
from ..interface import RmsNormOptions
from .launch import Launch, cdiv, next_power_of_2, on
from .sums import add_up

#: The longest row that registers hold: 8 numbers of each operand for every one of 1,024 threads.
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
def rms_norm_gradient_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    inverse_std_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    columns,
    steps,
    offset,
    HAS_W: tl.constexpr,
    NEEDS_X: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx = inverse_std (g - xhat mean(g xhat)) with g = dy (offset + w); the sum of dy xhat over the program's rows."""
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    gain = tl.full((COLUMNS,), 1.0, tl.float32)
    if HAS_W:
        gain = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((COLUMNS,), tl.float32)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) * steps + step
        present = inside & (row < rows)
        inverse_std = tl.load(inverse_std_ptr + row, mask=row < rows, other=0.0)
        dy = tl.load(dy_ptr + row * columns + column, mask=present, other=0.0).to(tl.float32)
        xhat = tl.load(x_ptr + row * columns + column, mask=present, other=0.0).to(tl.float32) * inverse_std
        dw += dy * xhat
        if NEEDS_X:
            g = dy * gain
            dx = (g - xhat * (tl.sum(g * xhat, 0) / columns)) * inverse_std
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=present)
    if HAS_W:
        tl.store(partial_ptr + tl.program_id(0) * columns + column, dw, mask=inside)


def rms_norm(options: RmsNormOptions, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of contiguous x, and by how much each row was multiplied."""
    columns = x.shape[-1]
    if columns > WIDEST:
        return reference.rms_norm(options, x, w)
    rows = x.numel() // columns
    y, inverse_std = torch.empty_like(x), x.new_empty(rows, 1, dtype=torch.float32)
    key = id(rms_norm_kernel), options, rows, columns, x.dtype, None if w is None else w.dtype, x.get_device()
    launch = _launches.get(key)
    if launch is None:
        constants = {"HAS_W": w is not None, "ROUNDS_FIRST": options.rounds_first, **_constants(columns)}
        numbers = columns, options.eps, options.offset
        launch = _launches.put(key, Launch(rms_norm_kernel, [rows], numbers, constants))
    with on(x):
        launch(x, y if w is None else w.contiguous(), y, inverse_std)
    return y, inverse_std


def rms_norm_gradient(
    options: RmsNormOptions, dy: Tensor, x: Tensor, w: Tensor | None, inverse_std: Tensor, *, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of contiguous x, and of w."""
    columns = x.shape[-1]
    if columns > WIDEST:
        return reference.rms_norm_gradient(options, dy, x, w, inverse_std, needs_x=needs_x)
    rows = len(inverse_std)
    dx = torch.empty_like(x) if needs_x else None
    steps = cdiv(rows, PROGRAMS)
    programs = cdiv(rows, steps)
    partial = x.new_empty(1, programs, 0 if w is None else columns, dtype=torch.float32)
    of_w = None if w is None else w.dtype
    key = id(rms_norm_gradient_kernel), options.offset, rows, columns, programs, needs_x, x.dtype, of_w, x.get_device()
    launch = _launches.get(key)
    if launch is None:
        constants = {"HAS_W": w is not None, "NEEDS_X": needs_x, **_constants(columns)}
        numbers = rows, columns, steps, options.offset
        launch = _launches.put(key, Launch(rms_norm_gradient_kernel, [programs], numbers, constants))
    with on(x):
        launch(dy, x, x if w is None else w.contiguous(), inverse_std, x if dx is None else dx, partial)
        dw = None if w is None else add_up(partial, columns, 1, w.dtype)[0]
    return dx, dw


def _constants(columns: int) -> dict[str, Any]:
    """The width of a row in registers, and how many warps share it: 8 numbers for each thread."""
    width, warp = next_power_of_2(columns), 64 if torch.version.hip else 32
    return {"COLUMNS": width, "num_warps": max(1, width // (8 * warp)), "enable_fp_fusion": True}
