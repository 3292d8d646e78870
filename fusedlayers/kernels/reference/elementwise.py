"""Bias, activation, gates and their gradients in torch operations: the readable reference.

ATen's own kernels serve what the table of activations names them for, each in one vectorised pass. Users' functions,
and activations that read other tensors, run as a program of their trace (``traced.py``). Everything else is the
activation's function, or its derivative, in float32 or wider, chunk by chunk (``chunks.py``).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...utils.layout import along, is_dense, laid_out_as, sum_along
from ..interface import GradientRequest
from . import traced
from .chunks import for_each


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
    encode = encode and activation.is_folded
    is_sum = b is not None or residual is not None
    native = None if encode else activation.native.activate_
    is_traced = native is None and not encode and _is_by_trace(activation)
    definition = activation.definition
    if native is not None and out is None and not is_sum and definition is not None and not definition.plain:
        return activation.plain(z)  # into a new tensor in one pass
    y = out if out is not None and (out.is_contiguous() or is_dense(out)) else torch.empty_like(z)
    if is_sum:
        z = sum_of(z, b, residual, dim, out=y)
    elif y is not z and not (is_traced and z.stride() == y.stride()):  # a program need not overwrite what it reads
        z = y.copy_(z)
    if is_traced:
        if y.numel():
            traced.activate(z, y, activation, operands, dim)
    elif native is not None:
        native(y, **activation.parameters)
    elif encode:
        for_each(lambda part: part.copy_(activation.encoded(upcast(part), part.dtype)), y)
    elif not activation.is_identity:
        for_each(lambda part: part.copy_(activation.function(upcast(part))), y)
    return y if out is None or y is out else out.copy_(y)


def sum_of(z: Tensor, b: Tensor | None, residual: Tensor | None, dim: int, *, out: Tensor) -> Tensor:
    """``z + b + residual`` in ``out``, of which one of b and residual may be None."""
    if b is not None:
        z = torch.add(z, b if dim == -1 else along(b, dim, z.dim()), out=out)
    return z if residual is None else torch.add(z, residual, out=out)


def gradient(
    dy: Tensor, saved: Tensor, activation: Activation, operands: Sequence[Tensor], request: GradientRequest, *, dim: int
) -> tuple[Tensor | None, ...]:
    """``dz = dy * f'``, the gradient of the bias, and those of the operands: None where not requested."""
    native, overwrite, given_output = activation.native, request.overwrite, request.saved == "output"
    if not (saved.is_contiguous() or is_dense(saved)):  # an output written over a view with gaps, or a user's input
        saved, overwrite = torch.empty_like(saved).copy_(saved), True
    shares: Sequence[Tensor | None] = ()
    if given_output and native.gradient is not None:
        operator, arguments = native.gradient
        values = arguments(dy, saved, **activation.rounded_parameters(saved.dtype))
        dz = operator.grad_input(*values, grad_input=saved) if overwrite else operator.default(*values)
    else:
        dz = saved if overwrite else torch.empty_like(saved)
        dy = laid_out_as(dy, saved)
        if (given_output and not operands) or not _is_by_trace(activation):
            product = of_output if given_output else _of_input
            for_each(lambda dy, saved, dz: dz.copy_(product(activation, dy, saved)), dy, saved, dz)
        elif dz.numel():
            shares = traced.gradient(dy, saved, dz, activation, operands, request, dim)
        else:
            needs = zip(operands, request.needs_operands, strict=True)
            shares = [torch.zeros_like(p) if need else None for p, need in needs]
    return dz, sum_along(dz, dim) if request.needs_bias else None, *shares


# --- derivatives ------------------------------------------------------------------------------------------------------


def of_output(activation: Activation, dy: Tensor, y: Tensor) -> Tensor:
    """``dy f'``, in float32 or wider."""
    return upcast(dy) * activation.derivative_given_output(upcast(y), y.dtype)


def _of_input(activation: Activation, dy: Tensor, z: Tensor) -> Tensor:
    native = activation.native.gradient_given_input
    if native is not None:
        return native(dy, z, **activation.parameters)
    return upcast(dy) * derivative(activation, upcast(z))


def derivative(activation: Activation, z: Tensor) -> Tensor:
    """The derivative at z, float32 or wider."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        # torch's own function: its backward is one kernel, and for mish and gelu_tanh three times as accurate as the
        # derivatives of the row's operations.
        y = activation.plain(z)
        return torch.autograd.grad(y, z, torch.ones_like(y))[0]


def _is_by_trace(activation: Activation) -> bool:
    return bool(activation.operand_dims) or activation.is_traced


# --- gates ------------------------------------------------------------------------------------------------------------


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``activation(z, *operands) * up``, in ``out`` (which may be z) or in a new buffer."""
    out = torch.empty_like(z) if out is None else out

    def multiply(z: Tensor, up: Tensor, out: Tensor) -> None:
        torch.mul(_activated(z, activation, operands), up, out=out)

    _by_chunks(multiply, operands, z, up, out)
    return out


def gate_gradient(
    dy: Tensor, z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], needs: tuple[bool, ...]
) -> list[Tensor | None]:
    """Write the gradients of z and up over these, and over dy; return those of the operands."""
    request = GradientRequest("input", True, False, needs)
    shares: list[Tensor | None] = []

    def differentiate(dy: Tensor, z: Tensor, up: Tensor) -> None:
        of_up = _activated(z, activation, operands).mul_(dy)
        shares[:] = gradient(dy.mul_(up), z, activation, operands, request, dim=-1)[2:]
        up.copy_(of_up)

    _by_chunks(differentiate, operands, dy, z, up)
    return shares


def _by_chunks(function: Callable[..., None], operands: Sequence[Tensor], *tensors: Tensor) -> None:
    """Call a function with chunks of tensors; with all at once if there are operands, for a chunk has no channels."""
    function(*tensors) if operands else for_each(function, *tensors)


def _activated(z: Tensor, activation: Activation, operands: Sequence[Tensor] = ()) -> Tensor:
    """``activation(z, *operands)`` in a new tensor. ATen's kernels are used where it has them for both function and
    derivative: the package's own functions take several operations."""
    if activation.native.gradient_given_input is not None:
        return activation.plain(z)
    return bias_act(z, None, activation, operands, dim=-1, encode=False, out=None)
