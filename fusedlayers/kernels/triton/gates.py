"""Gates and their gradients on a GPU: one pass over memory each.

Idea: the factors and gradients may be rows with gaps, the halves of one tensor, say, that a single layer has made. So
each is a matrix with a stride between its rows, and one between its elements, and none is copied.

Cost: one read of each input and one write of each output. Limits: activations that read tensors (operands), and what is
not such rows, take a launch for the activation and one for each product, and memory for these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from ...activations import Activation
from ...utils.caching import BoundedCache
from ..interface import GradientRequest
from . import tiles
from .codegen import device_function
from .elementwise import bias_act, gradient
from .launch import Launch, cdiv, on
from .tiles import OPTIONS, Matrix, index_of, tile_of

#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(
    z_ptr,
    up_ptr,
    y_ptr,
    rows,
    columns,
    z_stride,
    up_stride,
    y_stride,
    FORWARD: tl.constexpr,
    STEPS: tl.constexpr,  # between the elements of each tensor
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """y = f(z) up, tile by tile; y_ptr may be z_ptr."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    z = tl.load(z_ptr + row * z_stride + column * STEPS[0], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column * STEPS[1], mask=inside, other=0.0).to(tl.float32)
    y = FORWARD(z, z_ptr, column, columns) * up
    tl.store(y_ptr + row * y_stride + column * STEPS[2], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_gradient_kernel(
    dy_ptr,
    z_ptr,
    up_ptr,
    of_z_ptr,
    of_up_ptr,
    rows,
    columns,
    dy_stride,
    z_stride,
    up_stride,
    of_z_stride,
    of_up_stride,
    FORWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dy up f'(z) and dy f(z), tile by tile; of_z_ptr may be z_ptr, and of_up_ptr up_ptr."""
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    dy = tl.load(dy_ptr + row * dy_stride + column * STEPS[0], mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + column * STEPS[1], mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column * STEPS[2], mask=inside, other=0.0).to(tl.float32)
    of_up = dy * FORWARD(z, dy_ptr, column, columns)
    products = GRADIENT(dy * up, z, dy_ptr, column, columns)
    of_z_place = of_z_ptr + row * of_z_stride + column * STEPS[3]
    tl.store(of_z_place, products[0].to(of_z_ptr.dtype.element_ty), mask=inside)
    of_up_place = of_up_ptr + row * of_up_stride + column * STEPS[4]
    tl.store(of_up_place, of_up.to(of_up_ptr.dtype.element_ty), mask=inside)


def _are_rows(*tensors: Tensor) -> bool:
    """Whether all are rows of equal length, evenly spaced, of elements that are so too."""
    for t in tensors:
        if not t.dim() or t.numel() == 0:
            return False
        sizes = [(size, stride) for size, stride in zip(t.shape[:-1], t.stride(), strict=False) if size != 1]
        for (_, outer), (size, stride) in itertools.pairwise(sizes):
            if outer != size * stride:
                return False
    return True


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``Backend.gate`` by one launch, where there are no operands."""
    y = torch.empty_like(z) if out is None else out
    if operands or not _are_rows(z, up, y):
        return bias_act(z, None, activation, operands, dim=-1, encode=False, out=y).mul_(up)
    _run(gate_kernel, {"FORWARD": device_function(activation, "forward", given="input", dtype=z.dtype)}, z, up, y)
    increment_version(y)
    return y


def gate_gradient(
    dy: Tensor,
    z: Tensor,
    up: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
    out: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:
    """``Backend.gate_gradient`` by one launch, where there are no operands."""
    of_z, of_up = out or (z, up)
    if operands or not _are_rows(dy, z, up, of_z, of_up):
        products = bias_act(z, None, activation, operands, dim=-1, encode=False, out=None).mul_(dy), dy * up
        request = GradientRequest("input", False, False, needs)
        dz, _, *shares = gradient(products[1], z, activation, operands, request, dim=-1)
        assert dz is not None
        of_z.copy_(dz), of_up.copy_(products[0])
        return shares
    functions = {
        "FORWARD": device_function(activation, "forward", given="input", dtype=z.dtype),
        "GRADIENT": device_function(activation, "gradient", given="input", dtype=z.dtype),
    }
    _run(gate_gradient_kernel, functions, dy, z, up, of_z, of_up)
    increment_version((of_z, of_up))
    return []


def _run(kernel: Any, functions: dict[str, Any], *tensors: Tensor) -> None:
    first = tensors[0]
    key = (
        *(id(kernel), *map(id, functions.values()), tiles.TILE, first.get_device(), first.shape),
        *((t.dtype, t.stride()) for t in tensors),
    )
    launch = _launches.get(key)
    if launch is None:
        columns = first.shape[-1]
        rows = first.numel() // columns
        height, width = tile_of(Matrix(rows, columns, columns, "column"))
        constants = {
            **functions,
            "STEPS": tuple(t.stride(-1) for t in tensors),
            "ROWS": height,
            "COLUMNS": width,
            "INDEX": index_of(max(map(_extent, tensors))),
            **OPTIONS,
        }
        strides = [_between_rows(t) for t in tensors]
        grid = [cdiv(rows, height) * cdiv(columns, width)]
        launch = _launches.put(key, Launch(kernel, grid, [rows, columns, *strides], constants))
    with on(first):
        launch(*tensors)


def _between_rows(t: Tensor) -> int:
    """How many elements lie between the beginnings of two rows."""
    return next((t.stride(i) for i in range(t.dim() - 2, -1, -1) if t.shape[i] != 1), 0)


def _extent(t: Tensor) -> int:
    """How many elements lie from the first to the last, with the gaps between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
