"""Dropout on a GPU, alone and behind an activation: one pass over memory each way.

What is stored behind an activation, and the gradient from it, are printed from the reference's functions
(``kernels/reference/dropout_bits.py``), as activations are; p is an argument, so that it may change from step to step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activations import Activation
from ...activations.tracing import trace
from ...utils.caching import BoundedCache
from .. import reference
from .codegen import compile_function, print_function
from .fallback import or_reference
from .launch import Launch, cdiv, on
from .tiles import OPTIONS, TILE

#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit
def pack_kernel(keep_ptr, bits_ptr, count, BYTES: tl.constexpr):
    """Eight of the mask in a byte."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    keep = tl.load(keep_ptr + place, mask=place < count, other=0).to(tl.int32)
    bits = tl.sum(keep << bit[None, :], 1)
    tl.store(bits_ptr + byte, bits.to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def drop_gradient_kernel(dy_ptr, bits_ptr, dx_ptr, count, factor, BYTES: tl.constexpr):
    """dx = dy factor where the bit is set, else dy 0."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    place = byte[:, None] * 8 + bit[None, :]
    inside = place < count
    bits = tl.load(bits_ptr + byte, mask=byte * 8 < count, other=0).to(tl.int32)
    keep = (bits[:, None] >> bit[None, :]) & 1
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dx = dy * tl.where(keep != 0, factor, 0.0)
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def drop_marked_kernel(y_ptr, keep_ptr, out_ptr, count, rest, SCALE: tl.constexpr, COUNT: tl.constexpr):
    """What is stored of outputs y, of which ``rest`` are kept; out_ptr may be y_ptr."""
    place = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = place < count
    y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    keep = tl.load(keep_ptr + place, mask=inside, other=0).to(tl.int32)
    kept = SCALE(y, rest, y_ptr, 0, 1)
    dropped = (y - y) * -1.0  # -0, or NaN; Triton 3.6 computes the negative of 0 as 0 - 0
    out = tl.where(keep != 0, kept, dropped)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def drop_marked_gradient_kernel(dy_ptr, y_ptr, dz_ptr, count, rest, GRADIENT: tl.constexpr, COUNT: tl.constexpr):
    """The gradient through both, from what was stored; dz_ptr may be y_ptr."""
    place = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    inside = place < count
    dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + place, mask=inside, other=0.0).to(tl.float32)
    dz = GRADIENT(dy, y, rest, y_ptr, 0, 1)
    tl.store(dz_ptr + place, dz.to(dz_ptr.dtype.element_ty), mask=inside)


def drop(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """``F.dropout(x, p)`` of dense x, in a new tensor, and a bit for each element that is kept."""
    # PyTorch's kernel draws the numbers, and multiplies in the same pass.
    y, keep = reference.dropped_by_torch(x, p)
    return y, packed(keep)


@or_reference(reference.packed)
def packed(keep: Tensor) -> Tensor:
    """The bits of a dense mask, as ``kernels/reference/dropout_bits.py`` lays them out."""
    bits = torch.empty(-(-keep.numel() // 8), dtype=torch.uint8, device=keep.device)
    if keep.numel():
        launch = _launch(pack_kernel, keep, (), {"BYTES": TILE // 8})
        with on(keep):
            launch(keep.view(torch.uint8), bits)
    return bits


@or_reference(reference.drop_gradient)
def drop_gradient(dy: Tensor, bits: Tensor, factor: float) -> Tensor:
    """The gradient of x, in a new tensor, for dense dy, laid out like x."""
    if not dy.numel():
        return reference.drop_gradient(dy, bits, factor)
    dx = torch.empty_like(dy)
    launch = _launch(drop_gradient_kernel, dy, (factor,), {"BYTES": TILE // 8})
    with on(dy):
        launch(dy, bits, dx)
    return dx


@or_reference(reference.drop_marked)
def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if y.numel():
        constants = {"SCALE": scale_function(activation, y.dtype), "COUNT": TILE}
        launch = _launch(drop_marked_kernel, y, (1 - p,), constants)
        with on(y):
            launch(y, keep.view(torch.uint8), out)
    torch.autograd.graph.increment_version(out)
    return out


@or_reference(reference.drop_marked_gradient)
def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if y.numel():
        constants = {"GRADIENT": gradient_function(activation, y.dtype), "COUNT": TILE}
        launch = _launch(drop_marked_gradient_kernel, y, (1 - p,), constants)
        with on(y):
            launch(dy, y, out)
    torch.autograd.graph.increment_version(out)
    return out


def _launch(kernel: Any, x: Tensor, numbers: tuple[float, ...], constants: dict[str, Any]) -> Launch:
    """A launch over all of x, whose dtype the others have; what it depends on is kept."""
    functions = (value if isinstance(value, int) else id(value) for value in constants.values())
    key = id(kernel), x.numel(), numbers, x.dtype, x.get_device(), *functions
    known = _launches.get(key)
    if known is None:
        launch = Launch(kernel, [cdiv(x.numel(), TILE)], [x.numel(), *numbers], constants | OPTIONS)
        known = _launches.put(key, launch)
    return known


@functools.lru_cache(1024)
def scale_function(activation: Activation, dtype: torch.dtype) -> Any:
    """``(y, rest, ...) -> y / rest`` with y's branch, as a device function."""
    scaled = trace(lambda y, rest: reference.scaled(activation, y, dtype, rest), ["y", "rest"])
    return compile_function(print_function("scale", scaled))


@functools.lru_cache(1024)
def gradient_function(activation: Activation, dtype: torch.dtype) -> Any:
    """``(dy, y, rest, ...) -> dz`` as a device function."""
    of_both = trace(
        lambda dy, y, rest: reference.gradient_of_marked(activation, dy, y, dtype, rest), ["dy", "y", "rest"]
    )
    return compile_function(print_function("gradient", of_both))
