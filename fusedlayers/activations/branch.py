"""The branch of a folded activation, kept in the last mantissa bit of negative outputs.

A function that falls to a negative minimum and then rises takes every negative value twice: left of the minimum and
right of it. Non-negative outputs are certain. So a negative output is rounded to the nearest value of its dtype whose
last bit says "left of the minimum": no mask, no extra byte, and nothing moves by more than one unit in the last place.

Both functions are written with float32 and int32 operations only and round by integer arithmetic, so that any backend
can trace them: a compiler may keep a 16-bit intermediate in float32, or round it in its own way, and the bit still
survives.

Conventions: -0.0 is on the right branch (z = -0.0 has the slope of z = 0). An output that underflows on the left branch
becomes the smallest negative subnormal, which carries the bit. NaN is on neither branch and stays NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: How far the last mantissa bit of each dtype lies above float32's.
LAST_BIT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# float16 below 2^-14 is a multiple of 2^-24, wherever float32 keeps its bits.
_HALF_NORMAL = 2.0**-14
_HALF_UNIT = 2.0**-24
_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1


def encode(y: Tensor, left: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 ``y``, its ambiguous values rounded to ``dtype`` with the branch in the last bit.

    Args:
        y: float32 outputs, at most 0 wherever ``left`` is set.
        left: bool, whether the input was left of the minimum.
    """
    bits = y.view(torch.int32)
    magnitude = torch.bitwise_and(bits, _MAGNITUDE)
    bit = torch.where(left, 1, 0).to(torch.int32)
    rounded = _round_to_parity(magnitude, bit, LAST_BIT[dtype])
    if dtype is torch.float16:
        # y / 2^-24 fits in 24 bits here; its float32 fraction decides which neighbour of the right parity is nearer.
        fixed = y.abs() * (1.0 / _HALF_UNIT * 2.0**6)
        units = torch.bitwise_right_shift(_round_to_parity(fixed.to(torch.int32), bit, 6), 6)
        small = (units.to(torch.float32) * _HALF_UNIT).view(torch.int32)
        rounded = torch.where(y.abs() < _HALF_NORMAL, small, rounded)
    encoded = torch.bitwise_or(rounded, _SIGN).view(torch.float32)
    return torch.where(left | (y < 0), encoded, y)


def decode(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether ``y``, float32 that holds values of ``dtype``, was encoded as left of the minimum."""
    bits = y.view(torch.int32)
    bit = torch.bitwise_and(torch.bitwise_right_shift(bits, LAST_BIT[dtype]), 1)
    if dtype is torch.float16:
        units = (y.abs() * (1.0 / _HALF_UNIT)).to(torch.int32)
        bit = torch.where(y.abs() < _HALF_NORMAL, torch.bitwise_and(units, 1), bit)
    return (bits < 0) & (bit != 0)


def _round_to_parity(magnitude: Tensor, bit: Tensor, shift: int) -> Tensor:
    """The multiple of 2^shift nearest to ``magnitude`` among those whose lowest digit is ``bit``.

    At shift 0 both neighbours of a value of the wrong parity are equally near: the last bit is set or cleared.
    """
    if shift == 0:
        return torch.bitwise_or(torch.bitwise_and(magnitude, -2), bit)
    base = torch.bitwise_left_shift(bit, shift)
    steps = torch.bitwise_right_shift(magnitude - base + 2**shift, shift + 1)
    steps = torch.where(steps < 0, 0, steps)
    return torch.bitwise_left_shift(steps, shift + 1) + base
