"""The branch of a folded activation, kept in the last mantissa bit of its ambiguous outputs.

A function that turns once takes some values twice: left of the turn and right of it. One of the two branches is the
*marked* one, and an ambiguous output is rounded to the nearest value of its dtype whose last bit says "on the marked
branch": no mask, no extra byte, and nothing moves by more than one unit in the last place.

Which outputs are ambiguous goes by their sign, the only thing that rounding never changes: "negative" (GELU falls to a
negative minimum and then rises: non-negative outputs are certain), "positive" (a square, a bell) or "both".

Both functions are written with float32 and int32 operations only and round by integer arithmetic, so that any backend
can trace them: a compiler may keep a 16-bit intermediate in float32, or round it in its own way, and the bit still
survives.

Conventions: an ambiguous zero is on the unmarked branch, so -0.0 is with GELU (z = -0.0 has the slope of z = 0). An
output that underflows on the marked branch becomes the smallest subnormal, which carries the bit. NaN stays NaN. An
infinite output has no last bit: it stays infinite, and counts as unmarked.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Ambiguous = Literal["negative", "positive", "both"]

#: How far the last mantissa bit of each dtype lies above float32's.
LAST_BIT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# float16 below 2^-14 is a multiple of 2^-24, wherever float32 keeps its bits.
_HALF_NORMAL = 2.0**-14
_HALF_UNIT = 2.0**-24
_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1
_INFINITY = 0x7F80_0000
#: The bits, in float32, of the largest number of each dtype.
_LARGEST = {torch.float32: 0x7F7F_FFFF, torch.bfloat16: 0x7F7F_0000, torch.float16: 0x477F_E000}


def encode(
    y: Tensor, marked: Tensor, dtype: torch.dtype, ambiguous: Ambiguous = "negative", *, bounded: bool = True
) -> Tensor:
    """Float32 ``y``, its ambiguous values rounded to ``dtype`` with the branch in the last bit.

    Args:
        y: float32 outputs, of an ambiguous sign (or 0) wherever ``marked`` is set.
        marked: bool, whether the input was on the marked branch.
        ambiguous: the signs of the outputs that both branches take.
        bounded: whether ambiguous outputs stay far from the largest number of ``dtype``.
    """
    bits = y.view(torch.int32)
    magnitude = torch.bitwise_and(bits, _MAGNITUDE)
    bit = torch.where(marked, 1, 0).to(torch.int32)
    rounded = _round_to_parity(magnitude, bit, LAST_BIT[dtype])
    if dtype is torch.float16:
        # y / 2^-24 fits in 24 bits here; its float32 fraction decides which neighbour of the right parity is nearer.
        fixed = y.abs() * (1.0 / _HALF_UNIT * 2.0**6)
        units = torch.bitwise_right_shift(_round_to_parity(fixed.to(torch.int32), bit, 6), 6)
        small = (units.to(torch.float32) * _HALF_UNIT).view(torch.int32)
        rounded = torch.where(y.abs() < _HALF_NORMAL, small, rounded)
    if not bounded:
        # The largest number is marked. What rounds up from the one before it must not become infinite, and infinity
        # must not become NaN, which it would with its last bit set.
        largest = torch.where(marked, _LARGEST[dtype], _LARGEST[dtype] - 2 ** LAST_BIT[dtype]).to(torch.int32)
        rounded = torch.where(rounded > largest, largest, rounded)
        overflowed = torch.where(magnitude > _INFINITY, magnitude, _INFINITY)
        rounded = torch.where(magnitude > _LARGEST[dtype], overflowed, rounded)
    if ambiguous == "negative":
        encoded, concerned = torch.bitwise_or(rounded, _SIGN), marked | (y < 0)
    elif ambiguous == "positive":
        encoded, concerned = rounded, marked | (y > 0)
    else:
        return torch.bitwise_or(rounded, torch.bitwise_and(bits, _SIGN)).view(torch.float32)
    return torch.where(concerned, encoded.view(torch.float32), y)


def decode(y: Tensor, dtype: torch.dtype, ambiguous: Ambiguous = "negative") -> Tensor:
    """Whether ``y``, float32 that holds values of ``dtype``, was encoded as on the marked branch."""
    bits = y.view(torch.int32)
    bit = torch.bitwise_and(torch.bitwise_right_shift(bits, LAST_BIT[dtype]), 1)
    if dtype is torch.float16:
        units = (y.abs() * (1.0 / _HALF_UNIT)).to(torch.int32)
        bit = torch.where(y.abs() < _HALF_NORMAL, torch.bitwise_and(units, 1), bit)
    if ambiguous == "both":
        return bit != 0
    return ((bits < 0) if ambiguous == "negative" else (bits > 0)) & (bit != 0)


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
