"""Matmuls and convolutions, through oneDNN where that is faster than torch's default.

torch multiplies float32 matrices with MKL, which on AMD processors is slower than the oneDNN that torch also carries;
16-bit matrices go to oneDNN anyway. oneDNN can apply some activations while it writes the result. Its operators are
internal to torch, so they are probed for, and ``F.linear`` remains the fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...activations import Activation
from ..base import GradientRequest
from ..operations import Convolution, Matmul, Operation, Weight
from .elementwise import bias_act

#: Multiply-adds from which oneDNN's longer call pays (a 4x4 layer takes it 10 us, F.linear 2).
WORTH_IT = 1 << 20


def has_faster_linear(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these."""
    return _is_large(x, w) and _onednn_wins(x.dtype, False)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x w^T + b`` in a new buffer."""
    if has_faster_linear(x, w):
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")
    return F.linear(x, w, b)


def operation_act(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    activation: Activation,
    operands: Sequence[Tensor] = (),
    *,
    encode: bool = False,
) -> Tensor:
    """``activation(operation(x, w, b), *operands)`` in one new buffer; ``encode`` puts the branch in it."""
    post_op = None if encode or operands else activation.native.post_op
    if post_op is not None and isinstance(operation, Matmul) and _is_large(x, w) and _onednn_wins(x.dtype, True):
        return torch.ops.mkldnn._linear_pointwise(x, w, b, *post_op(**activation.parameters))
    if post_op is not None and isinstance(operation, Convolution) and _convolves(operation, x, w):
        p, s, d, g = operation.padding, operation.stride, operation.dilation, operation.groups
        return torch.ops.mkldnn._convolution_pointwise(x, w, b, p, s, d, g, *post_op(**activation.parameters))
    z = linear(x, w, b) if isinstance(operation, Matmul) else operation(x, w, b)
    return bias_act(z, None, activation, operands, dim=operation.dim, encode=encode, out=z)


def has_epilogue(x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, *, encode: bool) -> bool:
    """Whether ``operation_act`` computes a matmul's without a pass of its own for the activation. Those that oneDNN has
    carry no branch, or make a number of NaN."""
    return False


def linear_gradient(
    dy: Tensor,
    w: Tensor,
    parts: Sequence[Tensor],
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    *,
    hidden: bool,
) -> None:
    """None: ``linear``, and ``gradient`` or ``gate_gradient`` after it, are as fast."""


def _convolves(convolution: Convolution, x: Tensor, w: Tensor) -> bool:
    """Whether oneDNN's convolution takes these, and is the one that torch would call."""
    return (
        x.is_cpu
        and x.dim() == w.dim() == 4
        and not isinstance(convolution.padding, str)
        and x.numel() * w.shape[0] >= WORTH_IT
        and torch._C._get_mkldnn_enabled()
        and not _are_flops_counted()
        and _has_convolution()
        and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and _has_bfloat16()))
    )


def _is_large(x: Tensor, w: Tensor) -> bool:
    """Whether oneDNN, if the user leaves it switched on, is worth its longer call."""
    is_large = x.numel() * w.shape[0] >= WORTH_IT
    return is_large and x.is_cpu and torch._C._get_mkldnn_enabled() and not _are_flops_counted()


def _are_flops_counted() -> bool:
    """Whether torch's ``FlopCounterMode`` is on, which counts oneDNN's operators as nothing. It looks for formulas when
    it is made, and importing it to register some takes 0.7 s."""
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in modes)


@functools.cache
def _onednn_wins(dtype: torch.dtype, with_post_op: bool) -> bool:
    if dtype is torch.float32:
        return _has_onednn() and _is_amd()
    return dtype is torch.bfloat16 and with_post_op and _has_onednn() and _has_bfloat16()


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def _has_convolution() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


@functools.cache
def _has_bfloat16() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return probe is not None and bool(probe())


@functools.cache
def _is_amd() -> bool:
    return str(torch.cpu.get_capabilities().get("cpu_name", "")).startswith("AMD")


def describe_matmuls(w: Tensor, activation: Activation) -> list[str]:
    """How layers and blocks multiply by ``w``, where that is measured, for people: here it is not."""
    return []
