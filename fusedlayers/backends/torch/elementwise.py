"""Bias, activation and gradient in torch operations: the readable reference, and the backend for CPUs.

Which kernel serves an activation is decided once for each dtype (``forward_kernel``, ``gradient_kernel``):

* ATen's own kernel where the table of activations names one: a single vectorised pass;
* a program of the trace (``traced.py``) for users' functions and for activations that read other tensors;
* for 16-bit dtypes a table of all 65,536 values, computed once in float64, and one look-up: exact and branch-free;
* for float32 and float64 the activation's own function, and ``fold.py`` for the derivative from a fitted output.

The last two make temporaries, so they run chunk by chunk (``chunks.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.folded import FoldedDerivative
from ...utils.isolation import in_clean_state
from ...utils.layout import along, is_dense
from ..base import GradientRequest
from . import fold, traced
from .chunks import Chunkwise, for_each
from .lookup import lookup

#: Kernels cached for each direction. Those of 16-bit dtypes hold a table of 128 or 256 KiB, and an activation whose
#: parameter changes from step to step has one for each value.
KERNELS = 64


class ForwardKernel(NamedTuple):
    """How y is computed from z."""

    #: What overwrites z, which is dense: None where z is y, "trace" for a program of ``traced.py``.
    overwrite: Callable[[Tensor], object] | Chunkwise | Literal["trace"] | None
    #: The same into a new tensor in one pass, where torch has that.
    new: Callable[[Tensor], Tensor] | None = None


class NativeGradient(NamedTuple):
    """ATen's operator for ``dy * f'`` from the output, and its arguments from ``(dy, y, **parameters)``."""

    operator: Any
    arguments: Callable[..., tuple[Any, ...]]
    parameters: Mapping[str, float]


# --- the backend's functions ------------------------------------------------------------------------------------------


def bias_act(
    z: Tensor,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    residual: Tensor | None = None,
    dim: int,
    encode: bool,
    out: Tensor | None,
) -> Tensor:
    """``activation(z + b + residual, *operands)``, in ``out`` (which may be z) or in a new buffer of z's memory
    format; b, and operands of more than one element, run along ``dim``."""
    overwrite, new = forward_kernel(activation, z.dtype, encode, z.device)
    is_sum = b is not None or residual is not None
    if new is not None and out is None and not is_sum:
        return new(z)
    y = out if out is not None and (out.is_contiguous() or is_dense(out)) else torch.empty_like(z)
    source = y
    if b is not None:
        torch.add(z, b if dim == -1 else along(b, dim, z.dim()), out=y)
    if residual is not None:
        torch.add(z if b is None else y, residual, out=y)
    if not is_sum and y is not z:
        if overwrite == "trace" and z.stride() == y.stride():
            source = z  # a program need not overwrite what it reads
        else:
            y.copy_(z)
    if overwrite == "trace":
        if y.numel():
            traced.activate(source, y, activation, operands, dim)
    elif isinstance(overwrite, Chunkwise):
        for_each(overwrite, y)
    elif overwrite is not None:
        overwrite(y)
    return y if out is None or y is out else out.copy_(y)


def gradient(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    *,
    dim: int,
) -> tuple[Tensor | None, ...]:
    """``dz = dy * f'``, the gradient of the bias, and those of the operands: None where not requested."""
    kernel = gradient_kernel(activation, saved.dtype, request.saved, saved.device)
    overwrite = request.overwrite
    if not (saved.is_contiguous() or is_dense(saved)):  # an output written over a view with gaps, or a user's input
        saved, overwrite = torch.empty_like(saved).copy_(saved), True
    shares: Sequence[Tensor | None] = ()
    if isinstance(kernel, NativeGradient):
        values = kernel.arguments(dy, saved, **kernel.parameters)
        operator = kernel.operator
        dz = operator.grad_input(*values, grad_input=saved) if overwrite else operator.default(*values)
    else:
        dz = saved if overwrite else torch.empty_like(saved)
        if dy.stride() != saved.stride():
            dy = torch.empty_like(saved).copy_(dy)
        if isinstance(kernel, Chunkwise):
            for_each(kernel, dy, saved, dz)
        elif dz.numel():
            shares = traced.gradient(dy, saved, dz, activation, operands, request, dim)
        else:
            needs = zip(operands, request.needs_operands, strict=True)
            shares = [torch.zeros_like(p) if need else None for p, need in needs]
    db = None
    if request.needs_bias:
        db = dz.sum(_all_but(dim, dz.dim())) if dz.dim() > 1 else dz
    return dz, db, *shares


@functools.cache
def _all_but(dim: int, dims: int) -> tuple[int, ...]:
    return tuple(i for i in range(dims) if i != dim % dims)


# --- which kernel -----------------------------------------------------------------------------------------------------


@functools.lru_cache(KERNELS)
def forward_kernel(activation: Activation, dtype: torch.dtype, encode: bool, device: torch.device) -> ForwardKernel:
    """The kernel for z of a dtype; ``encode`` puts the branch of a folded activation into y."""
    encode = encode and activation.is_folded
    if activation.is_identity:
        return ForwardKernel(None)
    if not encode and _is_by_trace(activation, dtype):
        return ForwardKernel("trace")
    native, row = activation.native.activate_, activation.row
    if native is not None and not encode:
        is_torchs = row is not None and row.plain is None
        parameters = activation.parameters
        overwrite = functools.partial(native, **parameters) if parameters else native
        return ForwardKernel(overwrite, activation.plain if is_torchs else None)
    if dtype.itemsize == 2:
        table = _forward_table(activation, dtype, encode, device)
        return ForwardKernel(Chunkwise(functools.partial(_overwrite_by_table, table), (torch.int32,), looks_up=True))
    if encode:
        assert dtype is torch.float32
        return ForwardKernel(fold.forward_(activation))
    return ForwardKernel(Chunkwise(lambda part: part.copy_(activation.function(part)), allocates=True))


@functools.lru_cache(KERNELS)
def gradient_kernel(
    activation: Activation, dtype: torch.dtype, saved: str, device: torch.device
) -> NativeGradient | Chunkwise | Literal["trace"]:
    """The kernel for ``dy * f'`` from ``saved``, the "output" or the "input", of a dtype: of a chunk of dy, of the
    saved tensor and of dz."""
    native = activation.native
    if saved == "output" and native.gradient is not None:
        return NativeGradient(*native.gradient, activation.rounded_parameters(dtype))
    if saved == "input" and _is_by_trace(activation, dtype):
        return "trace"
    if dtype.itemsize == 2:
        table = _derivative_table(activation, dtype, saved, device)
        scratch = (torch.float32, torch.float32, torch.int32)
        return Chunkwise(functools.partial(_multiply_by_table, table), scratch, looks_up=True)
    of_input = native.gradient_given_input
    if saved == "input" and of_input is not None:
        parameters = activation.parameters
        return Chunkwise(lambda dy, z, dz: dz.copy_(of_input(dy, z, **parameters)), allocates=True)
    if saved == "input":
        derivative = Chunkwise(functools.partial(_differentiate, activation), allocates=True)
    elif activation.fitted_derivative() is not None:
        derivative = fold.derivative(activation)
    else:
        derivative = Chunkwise(lambda y: activation.derivative_given_output(y, y.dtype), allocates=True)
    slope = derivative.function
    return derivative._replace(function=lambda dy, saved, dz, *scratch: torch.mul(dy, slope(saved, *scratch), out=dz))


def _is_by_trace(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether a program of the trace runs: where there is no shorter way, as a 16-bit table is one."""
    return bool(activation.operand_dims) or (activation.is_traced and dtype.itemsize > 2)


def _differentiate(activation: Activation, z: Tensor) -> Tensor:
    if activation.row is not None and activation.row.derivative is not None:
        return activation.row.derivative(z, **activation.parameters)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        # torch's own function: its backward is one kernel, and for mish and gelu_tanh three times as accurate as the
        # derivatives of the row's operations.
        y = activation.plain(z)
        return torch.autograd.grad(y, z, torch.ones_like(y))[0]


# --- tables of all 16-bit values --------------------------------------------------------------------------------------


def _overwrite_by_table(table: Tensor, z: Tensor, index: Tensor, *more: Tensor) -> Tensor:
    # Signed 16-bit patterns run from -32768: the tables start there. (uint16 has no vectorised conversion.)
    return lookup(table, index.copy_(z.view(torch.int16)).add_(32768), *more, out=z)


def _multiply_by_table(
    table: Tensor,
    dy: Tensor,
    saved: Tensor,
    dz: Tensor,
    wide: Tensor,
    slope: Tensor,
    index: Tensor,
    *for_lookup: Tensor,
) -> Tensor:
    lookup(table, index.copy_(saved.view(torch.int16)).add_(32768), *for_lookup, out=slope)
    # torch multiplies two dtypes through temporaries of its own, which takes it five times as long.
    return dz.copy_(wide.copy_(dy).mul_(slope))


def _all_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).double()


@in_clean_state
def _forward_table(activation: Activation, dtype: torch.dtype, encode: bool, device: torch.device) -> Tensor:
    z = _all_values(dtype)
    y = activation.encoded(z, dtype) if encode else activation.function(z)
    return y.to(dtype).to(device)


@in_clean_state
def _derivative_table(activation: Activation, dtype: torch.dtype, saved: str, device: torch.device) -> Tensor:
    # float32, not dtype: the product dy * f' is then rounded once.
    values = _all_values(dtype)
    if saved == "output":
        # A table costs the same whatever it holds: it takes the closest fit there is.
        fitted = activation.fitted_derivative(dtype, closest=True)
        if isinstance(fitted, FoldedDerivative):
            slope = fitted(values, branch_bit.decode(values.float(), dtype, fitted.fold.ambiguous))
        else:
            slope = activation.derivative_given_output(values, dtype) if fitted is None else fitted(values)
    else:
        slope = _differentiate(activation, values)
    return slope.float().to(device)
