"""Bias, activation and gradient in torch operations: the readable reference, and what runs on CPUs.

Large tensors are walked in chunks (``chunks.py``). Three ways to evaluate, by dtype:

* ATen's own kernel where the table names one: a single vectorised pass;
* 16-bit dtypes otherwise: a table over all 65,536 values, made once in float64, and one gather. Exact and branch-free;
* float32 and float64 otherwise: the activation's own function, and ``fold.py`` for the derivative of folded
activations.

Activations that read other tensors too are for ``traced.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative import branch_bit
from ...derivative.folded import FoldedDerivative
from ...utils.isolation import in_clean_state
from ...utils.layout import along, is_dense, sum_along
from ..base import GradientRequest
from . import fold, traced
from .chunks import Chunkwise, for_each
from .lookup import lookup
from .lookup import scratch as lookup_scratch

#: Tables kept, of 128 or 256 KiB each: an activation whose parameter changes from step to step has one for each value.
TABLES = 64


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
    is_sum = b is not None or residual is not None
    if out is None and not is_sum and _is_one_kernel(activation, encode):
        return activation.plain(z)
    y = out if out is not None and is_dense(out) else torch.empty_like(z)
    by_trace = _is_by_trace(activation, y) and not (encode and activation.is_folded)
    is_readable = by_trace and not is_sum and z.stride() == y.stride()  # z itself, to write y
    if b is not None:
        torch.add(z, along(b, dim, z.dim()), out=y)
    if residual is not None:
        torch.add(z if b is None else y, residual, out=y)
    if not is_sum and y is not z and not is_readable:
        y.copy_(z)
    if by_trace:
        traced.activate(z if is_readable else y, y, activation, operands, dim)
    else:
        activate_(y, activation, encode=encode)
    return y if out is None or y is out else out.copy_(y)


def _is_one_kernel(activation: Activation, encode: bool) -> bool:
    """Whether torch's function is the kernel that ``activate_`` would run, without the copy before it."""
    row = activation.row
    return (
        row is not None
        and row.native.activate_ is not None
        and row.plain is None
        and not (encode and activation.is_folded)
    )


def _is_by_trace(activation: Activation, tensor: Tensor) -> bool:
    """Whether a program of the trace is run: where there is no shorter way, as a 16-bit table is one."""
    reads_more = bool(activation.operand_dims)
    return (reads_more or (activation.is_traced and tensor.dtype.itemsize > 2)) and tensor.numel() > 0


def activate_(z: Tensor, activation: Activation, *, encode: bool) -> None:
    """Overwrite the pre-activation with the activation's output."""
    if activation.is_identity or z.numel() == 0:
        return
    encode = encode and activation.is_folded
    native = activation.native.activate_
    if native is not None and not encode:
        native(z, **activation.parameters)
        return
    for_each(_overwrite(activation, z, encode=encode), z)


def _overwrite(activation: Activation, z: Tensor, *, encode: bool) -> Chunkwise:
    if z.dtype.itemsize == 2:
        table = _forward_table(activation, z.dtype, encode, z.device)
        return Chunkwise(
            lambda part, index, *more: lookup(table, _index(part, index), *more, out=part),
            (torch.int32, *lookup_scratch()),
        )
    if encode:
        assert z.dtype is torch.float32
        return fold.forward_(activation)
    return Chunkwise(lambda part: part.copy_(activation.function(part)), allocates=True)


def gradient(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    *,
    dim: int,
) -> tuple[Tensor | None, ...]:
    """``dz = dy * f'``, the gradient of the bias, and those of the operands: None where not wanted."""
    given, overwrite = request.saved, request.overwrite
    if not is_dense(saved):  # an output that was written over a view with gaps, or a user's input
        saved, overwrite = torch.empty_like(saved).copy_(saved), True
    native = activation.native.gradient
    needs = zip(operands, request.needs_operands, strict=True)
    shares: Sequence[Tensor | None] = [torch.zeros_like(p) if need else None for p, need in needs]
    if given == "output" and native is not None:
        operator, arguments = native
        values = arguments(dy, saved, **activation.rounded_parameters(saved.dtype))
        dz = operator.grad_input(*values, grad_input=saved) if overwrite else operator.default(*values)
    else:
        dz = saved if overwrite else torch.empty_like(saved)
        if dy.stride() != saved.stride():
            dy = torch.empty_like(saved).copy_(dy)
        if given == "input" and _is_by_trace(activation, dz):
            shares = traced.gradient(dy, saved, dz, activation, operands, request, dim)
        elif dz.numel():
            for_each(_product(saved, activation, given), dy, saved, dz)
    return dz, sum_along(dz, dim) if request.needs_bias else None, *shares


def _product(saved: Tensor, activation: Activation, given: str) -> Chunkwise:
    """``dz = dy * f'`` as a function of chunks of dy, the saved tensor and dz."""
    native = activation.native.gradient_given_input
    if given == "input" and native is not None and saved.dtype.itemsize > 2:
        return Chunkwise(lambda dy, z, dz: dz.copy_(native(dy, z, **activation.parameters)), allocates=True)
    slope = _slope(saved, activation, given)
    if saved.dtype.itemsize > 2:
        return slope._replace(function=lambda dy, saved, dz, *more: torch.mul(dy, slope.function(saved, *more), out=dz))
    # torch multiplies two dtypes through temporaries of its own, which takes it five times as long.
    return slope._replace(
        function=lambda dy, saved, dz, wide, *more: dz.copy_(wide.copy_(dy).mul_(slope.function(saved, *more))),
        scratch=(torch.float32, *slope.scratch),
    )


def _slope(saved: Tensor, activation: Activation, given: str) -> Chunkwise:
    """The derivative as a function of a chunk of the saved tensor."""
    if saved.dtype.itemsize == 2:
        table = _derivative_table(activation, saved.dtype, given, saved.device)
        return Chunkwise(
            lambda part, index, out, *more: lookup(table, _index(part, index), *more, out=out),
            (torch.int32, torch.float32, *lookup_scratch()),
        )
    if given == "input":
        return Chunkwise(functools.partial(_differentiate, activation), allocates=True)
    if activation.fitted_derivative() is not None:
        return fold.derivative(activation)
    return Chunkwise(lambda part: activation.derivative_given_output(part, part.dtype), allocates=True)


def _differentiate(activation: Activation, z: Tensor) -> Tensor:
    if activation.row is not None and activation.row.derivative is not None:
        return activation.row.derivative(z, **activation.parameters)
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        # torch's own function: its backward is one kernel, and for mish and gelu_tanh three times as accurate as the
        # derivatives of the row's operations.
        y = activation.plain(z)
        return torch.autograd.grad(y, z, torch.ones_like(y))[0]


def _index(part: Tensor, out: Tensor) -> Tensor:
    # Signed 16-bit patterns run from -32768: the tables start there. (uint16 has no vectorised conversion.)
    return out.copy_(part.view(torch.int16)).add_(32768)


def _all_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).double()


@functools.lru_cache(TABLES)
@in_clean_state
def _forward_table(activation: Activation, dtype: torch.dtype, encode: bool, device: torch.device) -> Tensor:
    z = _all_values(dtype)
    y = activation.encoded(z, dtype) if encode else activation.function(z)
    return y.to(dtype).to(device)


@functools.lru_cache(TABLES)
@in_clean_state
def _derivative_table(activation: Activation, dtype: torch.dtype, given: str, device: torch.device) -> Tensor:
    # float32, not dtype: the product dy * f' is then rounded once.
    values = _all_values(dtype)
    if given == "output":
        # A table costs the same whatever it holds: it takes the closest fit there is.
        fitted = activation.fitted_derivative(dtype, closest=True)
        if isinstance(fitted, FoldedDerivative):
            slope = fitted(values, branch_bit.decode(values.float(), dtype, fitted.fold.ambiguous))
        else:
            slope = activation.derivative_given_output(values, dtype) if fitted is None else fitted(values)
    else:
        slope = _differentiate(activation, values)
    return slope.float().to(device)
