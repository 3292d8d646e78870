"""Dropout behind an activation on a GPU: one pass over memory each way.

What is stored, and the gradient from it, are printed from the reference's functions
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
from .launch import Launch, cdiv, on
from .tiles import OPTIONS, TILE

#: By what they depend on.
_launches: BoundedCache[Launch] = BoundedCache(1024)


@triton.jit
def drop_marked_kernel(y_ptr, keep_ptr, out_ptr, count, rest, SCALE: tl.constexpr, COUNT: tl.constexpr):
    """out = the stored numbers for outputs y, of which ``rest`` are kept; out_ptr may be y_ptr."""
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


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""
    if y.numel():
        constants = {"SCALE": scale_function(activation, y.dtype), "COUNT": TILE}
        launch = _launch(drop_marked_kernel, y, 1 - p, constants)
        with on(y):
            launch(y, keep.view(torch.uint8), out)
    torch.autograd.graph.increment_version(out)
    return out


def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    if y.numel():
        constants = {"GRADIENT": gradient_function(activation, y.dtype), "COUNT": TILE}
        launch = _launch(drop_marked_gradient_kernel, y, 1 - p, constants)
        with on(y):
            launch(dy, y, out)
    torch.autograd.graph.increment_version(out)
    return out


def _launch(kernel: Any, x: Tensor, rest: float, constants: dict[str, Any]) -> Launch:
    """A launch over all of x, whose dtype the others have; what it depends on is kept."""
    functions = (value if isinstance(value, int) else id(value) for value in constants.values())
    key = id(kernel), x.numel(), rest, x.dtype, x.get_device(), *functions
    known = _launches.get(key)
    if known is None:
        launch = Launch(kernel, [cdiv(x.numel(), TILE)], [x.numel(), rest], constants | OPTIONS)
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
