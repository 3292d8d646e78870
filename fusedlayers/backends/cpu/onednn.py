"""Matmuls and convolutions, through oneDNN where that is faster than torch's default.

torch multiplies float32 matrices with MKL, which uses AVX2 on AMD processors. The oneDNN that torch also carries uses
AVX-512 where the processor has it, and is faster there; where it has not, oneDNN takes 1.03 to 1.9 times MKL's time
(transformers' layers, 2 threads). 16-bit matrices go to oneDNN anyway. oneDNN can apply some activations while it
writes the result. Its operators are internal to torch, so they are probed for; ``F.linear`` remains the fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch import (
    dispatch_mode_at,
    dispatch_mode_count,
    onednn_convolution,
    onednn_has_bfloat16,
    onednn_is_enabled,
    onednn_linear,
)
from ...activations import Activation
from ..operations import Convolution, Matmul, Operation, Weight
from .elementwise import bias_act

#: Multiply-adds from which oneDNN's float32 matmuls make up for their longer calls, and for an autograd node in Python.
#: Forward and backward took 1.5 times PyTorch's time at 2^20, 1.10 to 1.19 at 2^23, 0.95 to 1.01 at 2^25 and 0.93 to
#: 0.95 at 2^27 (AMD EPYC, 1 and 2 threads).
LARGE_MATMUL = 1 << 26
#: The same where oneDNN applies the activation too, which avoids a pass, and for convolutions.
LARGE_WITH_ACTIVATION = 1 << 20


def has_faster_linear(x: Tensor, w: Tensor) -> bool:
    """Whether ``linear`` is faster than ``F.linear`` for these: oneDNN, if the user leaves it switched on."""
    is_large = x.numel() * w.shape[0] >= LARGE_MATMUL
    is_faster = is_large and x.is_cpu and onednn_is_enabled() and _onednn_wins(x.dtype, False)
    return is_faster and not (dispatch_mode_count() and _are_flops_counted())


def faster_linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``linear`` where ``has_faster_linear`` holds."""
    y: Tensor = onednn_linear(x, w, b, "none", [], "")
    return y


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer."""
    y = faster_linear(x, w, b) if has_faster_linear(x, w) else F.linear(x, w, b)
    return y if out is None else out.copy_(y)


def add_linear(total: Tensor, x: Tensor, w: Tensor) -> None:
    """``total + x w^T`` over ``total``."""
    total.add_(linear(x, w, None))


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
    post_op = None if encode or operands else _post_op(activation)
    if isinstance(operation, Matmul):
        if x.numel() * w.shape[0] < LARGE_WITH_ACTIVATION:
            z = F.linear(x, w, b)
        elif post_op and x.is_cpu and onednn_is_enabled() and _onednn_wins(x.dtype, True) and not _are_flops_counted():
            multiplied: Tensor = onednn_linear(x, w, b, *post_op)
            return multiplied
        else:
            z = linear(x, w, b)
    elif post_op is not None and isinstance(operation, Convolution) and _convolves(operation, x, w):
        p, s, d, g = operation.padding, operation.stride, operation.dilation, operation.groups
        convolved: Tensor = onednn_convolution(x, w, b, p, s, d, g, *post_op)
        return convolved
    else:
        z = operation(x, w, b)
    return bias_act(z, None, activation, operands, dim=operation.dim, encode=encode, out=z)


def describe_matmuls(dtype: torch.dtype) -> str:
    """For people: whose matmuls layers call on this processor."""
    if not onednn_is_enabled():
        return "PyTorch's: oneDNN is switched off"
    if not _onednn_wins(dtype, True):
        return "PyTorch's"
    with_activation = f"with an activation that it knows from {LARGE_WITH_ACTIVATION:,} multiply-adds on"
    alone = f", without from {LARGE_MATMUL:,}" if _onednn_wins(dtype, False) else ""
    return f"oneDNN's {with_activation}{alone}; else PyTorch's"


@functools.lru_cache(64)
def _post_op(activation: Activation) -> tuple[str, list[float], str] | None:
    """What oneDNN calls the activation, or None."""
    post_op = activation.native.post_op
    return None if post_op is None else post_op(**activation.parameters)


def _convolves(convolution: Convolution, x: Tensor, w: Tensor) -> bool:
    """Whether oneDNN's convolution takes these, and is the one that torch would call."""
    return (
        x.is_cpu
        and x.dim() == w.dim() == 4
        and not isinstance(convolution.padding, str)
        and x.numel() * w.shape[0] >= LARGE_WITH_ACTIVATION
        and onednn_is_enabled()
        and not _are_flops_counted()
        and _has_convolution()
        and (x.dtype is torch.float32 or (x.dtype is torch.bfloat16 and _has_bfloat16()))
    )


def _are_flops_counted() -> bool:
    """Whether torch's ``FlopCounterMode`` is on, which counts oneDNN's operators as nothing. It looks for formulas when
    it is made, and importing it to register some takes 0.7 s."""
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in modes)


@functools.cache
def _onednn_wins(dtype: torch.dtype, with_post_op: bool) -> bool:
    if dtype is torch.float32:
        return _has_onednn() and _is_amd_with_avx512()
    return dtype is torch.bfloat16 and with_post_op and _has_onednn() and _has_bfloat16()


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and onednn_linear is not None


@functools.cache
def _has_convolution() -> bool:
    return torch.backends.mkldnn.is_available() and onednn_convolution is not None


@functools.cache
def _has_bfloat16() -> bool:
    return onednn_has_bfloat16 is not None and bool(onednn_has_bfloat16())


@functools.cache
def _is_amd_with_avx512() -> bool:
    found = torch.cpu.get_capabilities()
    return str(found.get("cpu_name", "")).startswith("AMD") and bool(found.get("avx512_f"))
