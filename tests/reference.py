"""The layers as eager PyTorch writes them: what the library replaces, and what tests and benchmarks compare with."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def bias_act(z: Tensor, b: Tensor | None, function: Function, dim: int = -1) -> Tensor:
    """``function(z + b)``, with ``b`` of shape ``(z.shape[dim],)``."""
    if b is not None:
        shape = [1] * z.dim()
        shape[dim] = -1
        z = z + b.view(shape)
    return function(z)


def dense_bias_act(x: Tensor, w: Tensor, b: Tensor | None, function: Function) -> Tensor:
    """``function(x w^T + b)``: ``(..., in), (out, in), (out,) -> (..., out)``."""
    return function(F.linear(x, w, b))


def mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, function: Function) -> Tensor:
    """A dense layer with activation and one without: ``(..., in) -> (..., hidden) -> (..., out)``."""
    return F.linear(dense_bias_act(x, w1, b1, function), w2, b2)


# --- measuring in numbers of a dtype ----------------------------------------------------------------------------------


def all_values(dtype: torch.dtype) -> Tensor:
    """Every one of the 65,536 numbers of a 16-bit dtype: both zeros, infinities, subnormals and all NaNs."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def steps(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers lie between ``a`` and ``b``, of one dtype; the two zeros are one number."""
    return (_ordinal(a) - _ordinal(b)).abs()


def _ordinal(tensor: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    bits = tensor.view(integer).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` at ``value``, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp_min(info.tiny))[1]
    return torch.exp2(exponent.double() - 1) * info.eps


def derivative(function: Function, z: Tensor) -> Tensor:
    """``function'`` at float64 ``z``, by autograd."""
    z = z.double().detach().requires_grad_()
    return torch.autograd.grad(function(z).sum(), z)[0]


def second_derivative(function: Function, z: Tensor) -> Tensor:
    """``function''`` at float64 ``z``, by autograd."""
    z = z.double().detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    return torch.autograd.grad(slope.sum(), z)[0] if slope.requires_grad else torch.zeros_like(z)


def assert_as_good_as_torch(ours: Tensor, torchs: Tensor, exact: Tensor) -> None:
    """Neither the largest nor the mean error is more than twice torch's own in the same dtype."""
    assert ours.dtype is torchs.dtype and ours.shape == exact.shape
    tiny = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    error, torchs_error = ((y.double() - exact).abs() for y in (ours, torchs))
    assert float(error.max()) <= 2 * float(torchs_error.max()) + tiny
    assert float(error.norm()) <= 2 * float(torchs_error.norm()) + tiny * math.sqrt(exact.numel())


def label(value: object) -> str:
    """A test's id for ``value``: the same in every process, where ``str`` of a function holds its address."""
    return str(getattr(value, "__name__", value))
