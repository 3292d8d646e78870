"""The branch bit: the last mantissa bit of a folded activation's output records the branch of its input.

A function with one fold takes some values twice, left and right of the fold. One of the two branches is the *marked*
one. ``encode`` rounds an ambiguous output to the nearest value of its dtype whose last bit is set on the marked branch
and clear on the other; ``decode`` reads the bit. This needs no mask and no extra byte, and moves outputs by at most one
unit in the last place. The cost: the derivative at a GELU output errs by 1.1e-6 instead of 5.4e-7 (float32, relative
rms over N(0, 1)), 8.3e-4 instead of 6.2e-4 (float16), 4.2e-3 instead of 2.4e-3 (bfloat16).

The sign of an output says whether it is ambiguous, because rounding never changes the sign: "negative" (GELU falls to a
negative minimum and then rises, so only negative outputs are ambiguous), "positive" (a square, a bell) or "both".

Both functions use only float32 and int32 operations and round by integer arithmetic, so that any backend can trace
them: the bit survives a compiler that keeps a 16-bit intermediate in float32, or rounds it in another way.

Conventions: the sign of a zero records its branch: -0.0 is marked, 0.0 is not. So zeros stay zeros (hardswish of -5 is
-0.0, GELU of -0.0 is 0.0). An ambiguous output below ``LEAST`` becomes a zero, because a matmul of subnormal numbers
takes up to 20 times as long on CPUs. NaN stays NaN. An infinite output has no last bit: it stays infinite and counts as
unmarked.

What it does not do: a function with two folds would need two bits, and float64 outputs carry none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Ambiguous = Literal["negative", "positive", "both"]

#: The position of each dtype's last mantissa bit in the bits of float32.
LAST_BIT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# float16 numbers below 2^-14 are multiples of 2^-24, so their last bit has no fixed position in float32's bits.
_HALF_NORMAL = 2.0**-14
_HALF_UNIT = 2.0**-24
_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1
_INFINITY = 0x7F80_0000
#: The bits, in float32, of the largest number of each dtype.
_LARGEST = {torch.float32: 0x7F7F_FFFF, torch.bfloat16: 0x7F7F_0000, torch.float16: 0x477F_E000}
#: The least size of an ambiguous output that is not 0: the smallest normal number; of float16, where that is 6e-5, the
#: smallest subnormal.
LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: _HALF_UNIT}
#: The largest size that rounds to 0: a small negative output must not become -0.0 where that is marked.
_NOTHING = {torch.float32: 0.0, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


def encode(
    y: Tensor, marked: Tensor, dtype: torch.dtype, ambiguous: Ambiguous = "negative", *, bounded: bool = True
) -> Tensor:
    """``y`` with its ambiguous values rounded to ``dtype`` and the branch in their last bit.

    Args:
        y: float32 outputs, with an ambiguous sign (or 0) wherever ``marked`` is set.
        marked: bool, whether the input is on the marked branch.
        ambiguous: the signs of the outputs that both branches take.
        bounded: whether ambiguous outputs stay far from the largest number of ``dtype``.

    Returns:
        float32 values that ``dtype`` holds exactly where they are ambiguous.
    """
    if ambiguous == "negative" and bounded and dtype is not torch.float16:
        return _encode_negative(y, marked, dtype)
    bits = y.view(torch.int32)
    magnitude = torch.bitwise_and(bits, _MAGNITUDE)
    bit = torch.where(marked, 1, 0).to(torch.int32)
    rounded = _round_to_parity(magnitude, bit, LAST_BIT[dtype])
    if dtype is torch.float16:
        # y / 2^-24 fits in 24 bits here. Its fraction decides which neighbour of the right parity is nearer.
        fixed = y.abs() * (1.0 / _HALF_UNIT * 2.0**6)
        units = torch.bitwise_right_shift(_round_to_parity(fixed.to(torch.int32), bit, 6), 6)
        small = (units.to(torch.float32) * _HALF_UNIT).view(torch.int32)
        rounded = torch.where(y.abs() < _HALF_NORMAL, small, rounded)
    if not bounded:
        # The largest number's last bit is set. The number before it must not round up to infinity, and infinity must
        # not become NaN, as it would with its last bit set.
        largest = torch.where(marked, _LARGEST[dtype], _LARGEST[dtype] - 2 ** LAST_BIT[dtype]).to(torch.int32)
        rounded = torch.where(rounded > largest, largest, rounded)
        overflowed = torch.where(magnitude > _INFINITY, magnitude, _INFINITY)
        rounded = torch.where(magnitude > _LARGEST[dtype], overflowed, rounded)
    if ambiguous == "negative":
        encoded = torch.bitwise_or(rounded, _SIGN)
    elif ambiguous == "positive":
        encoded = rounded
    else:
        encoded = torch.bitwise_or(rounded, torch.bitwise_and(bits, _SIGN))
    encoded = _with_zeros(encoded, y, marked, dtype)
    if ambiguous == "both":
        return encoded
    return torch.where(marked | ((y <= 0) if ambiguous == "negative" else (y >= -_NOTHING[dtype])), encoded, y)


def _encode_negative(y: Tensor, marked: Tensor, dtype: torch.dtype) -> Tensor:
    """The same for GELU and its like in nine operations of a GPU: the sign is rounded with the rest."""
    bits, unit = y.view(torch.int32), 1 << LAST_BIT[dtype]
    base = torch.where(marked, _SIGN + unit, _SIGN).to(torch.int32)  # what the result has to contain
    if unit > 1:
        bits = bits + torch.bitwise_xor(base, _SIGN + unit)  # 0 where marked, else a unit
    rounded = torch.bitwise_or(torch.bitwise_and(bits, -2 * unit), base)
    return torch.where(marked | (y <= 0), _with_zeros(rounded, y, marked, dtype), y)


def _with_zeros(encoded: Tensor, y: Tensor, marked: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of these bits, with zeros of the branch's sign where ``y`` is below ``LEAST``."""
    zero = torch.where(marked, _SIGN, 0).to(torch.int32)
    return torch.where(y.abs() < LEAST[dtype], zero, encoded).view(torch.float32)


def decode(y: Tensor, dtype: torch.dtype, ambiguous: Ambiguous = "negative") -> Tensor:
    """Whether ``y``, values of ``dtype`` in float32, was encoded as marked."""
    bits = y.view(torch.int32)
    bit = torch.bitwise_and(torch.bitwise_right_shift(bits, LAST_BIT[dtype]), 1)
    if dtype is torch.float16:
        units = (y.abs() * (1.0 / _HALF_UNIT)).to(torch.int32)
        bit = torch.where(y.abs() < _HALF_NORMAL, torch.bitwise_and(units, 1), bit)
    is_set = bit != 0
    if ambiguous != "both":
        is_set = ((bits < 0) if ambiguous == "negative" else (bits > 0)) & is_set
    return is_set | (bits == _SIGN)


def _round_to_parity(magnitude: Tensor, bit: Tensor, shift: int) -> Tensor:
    """The multiple of 2^shift nearest to ``magnitude`` among those whose lowest digit is ``bit``.

    At shift 0 both neighbours of a value of the wrong parity are equally near: the last bit is set or cleared.
    """
    if shift == 0:
        return torch.bitwise_or(torch.bitwise_and(magnitude, -2), bit)
    base = torch.bitwise_left_shift(bit, shift)
    return torch.bitwise_or(torch.bitwise_and(magnitude + (1 << shift) - base, -2 << shift), base)
