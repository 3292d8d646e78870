"""Gates and their gradients on a GPU: one pass over memory each.

Cost: one read of each input and one write of each output. Limits: activations that read tensors (operands) take a
launch for the activation and one for each product, and memory for these.
"""

from __future__ import annotations

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
from .tiles import OPTIONS, index_of

#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit
def gate_kernel(z_ptr, up_ptr, y_ptr, count, FORWARD: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr):
    """y = f(z) up, tile by tile; y_ptr may be z_ptr."""
    place = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    inside = place < count
    z = tl.load(z_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = FORWARD(z, z_ptr, place, 1) * up
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_gradient_kernel(
    dy_ptr,
    z_ptr,
    up_ptr,
    count,
    FORWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):
    """dy up f'(z) over z, and dy f(z) over up, tile by tile."""
    place = tl.program_id(0).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    inside = place < count
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    of_up = dy * FORWARD(z, dy_ptr, place, 1)
    products = GRADIENT(dy * up, z, dy_ptr, place, 1)
    tl.store(z_ptr + place, products[0].to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(up_ptr + place, of_up.to(up_ptr.dtype.element_ty), mask=inside)


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``Backend.gate`` by one launch, where there are no operands."""
    y = torch.empty_like(z) if out is None else out
    if operands or not z.numel():
        return bias_act(z, None, activation, operands, dim=-1, encode=False, out=y).mul_(up)
    _run(gate_kernel, {"FORWARD": device_function(activation, "forward", given="input", dtype=z.dtype)}, z, up, y)
    increment_version(y)
    return y


def gate_gradient(
    dy: Tensor, z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """``Backend.gate_gradient`` by one launch, where there are no operands."""
    if operands or not z.numel():
        of_up = bias_act(z, None, activation, operands, dim=-1, encode=False, out=None).mul_(dy)
        request = GradientRequest("input", True, False, needs)
        _, _, *shares = gradient(dy.mul_(up), z, activation, operands, request, dim=-1)
        up.copy_(of_up)
        return shares
    functions = {
        "FORWARD": device_function(activation, "forward", given="input", dtype=z.dtype),
        "GRADIENT": device_function(activation, "gradient", given="input", dtype=z.dtype),
    }
    _run(gate_gradient_kernel, functions, dy, z, up)
    increment_version((z, up))
    return []


def _run(kernel: Any, functions: dict[str, Any], *tensors: Tensor) -> None:
    first = tensors[0]
    count = first.numel()
    key = id(kernel), *map(id, functions.values()), tiles.TILE, first.get_device(), count, *(t.dtype for t in tensors)
    launch = _launches.get(key)
    if launch is None:
        constants = {**functions, "COLUMNS": tiles.TILE, "INDEX": index_of(count), **OPTIONS}
        launch = _launches.put(key, Launch(kernel, [cdiv(count, tiles.TILE)], [count], constants))
    with on(first):
        launch(*tensors)
