"""The branch bit: the last mantissa bit of a folded activation's output records the branch of its input.

A folded function falls to one negative minimum and then rises, so it takes negative values twice. Inputs left of the
minimum lie on the *marked* branch. ``encode`` rounds a negative output to the nearest value of its dtype whose last bit
is set on the marked branch and clear on the other; ``decode`` reads the bit. This needs no mask and no extra byte, and
moves outputs by at most one unit in the last place. The cost: the derivative at a GELU output errs by 1.1e-6 instead of
5.4e-7 (float32, relative rms over N(0, 1)), 8.3e-4 instead of 6.2e-4 (float16), 4.2e-3 instead of 2.4e-3 (bfloat16).

Both functions use only float32 and int32 operations and round by integer arithmetic, so that any backend can trace
them: the bit survives a compiler that keeps a 16-bit intermediate in float32, or rounds it in another way.

Conventions: the sign of a zero records its branch: -0.0 is marked, 0.0 is not. So zeros stay zeros (hardswish of -5 is
-0.0, GELU of -0.0 is 0.0). A negative output above ``-LEAST`` becomes a zero, because a matmul of subnormal numbers
takes up to 20 times as long on CPUs. NaN stays NaN.

What it does not do: outputs that are positive on both branches (a square, a bell), two folds, float64 outputs.
"""

import torch
from torch import Tensor

#: The position of each dtype's last mantissa bit in the bits of float32.
LAST_BIT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

# float16 numbers below 2^-14 are multiples of 2^-24, so their last bit has no fixed position in float32's bits.
_HALF_NORMAL = 2.0**-14
_HALF_UNIT = 2.0**-24
_SIGN = -(2**31)
#: The least size of a negative output that is not 0: the smallest normal number; of float16, where that is 6e-5, the
#: smallest subnormal.
LEAST = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: _HALF_UNIT}


def encode(y: Tensor, marked: Tensor, dtype: torch.dtype) -> Tensor:
    """``y`` with its negative values rounded to ``dtype`` and the branch in their last bit.

    Args:
        y: float32 outputs, not positive wherever ``marked`` is set.
        marked: bool, whether the input is on the marked branch.

    Returns:
        float32 values that ``dtype`` holds exactly where they are negative.
    """
    # The sign is rounded with the rest, which takes nine operations of a GPU.
    bits, unit = y.view(torch.int32), 1 << LAST_BIT[dtype]
    base = torch.where(marked, _SIGN + unit, _SIGN).to(torch.int32)  # what the result has to contain
    if unit > 1:
        bits = bits + torch.bitwise_xor(base, _SIGN + unit)  # 0 where marked, else a unit
    rounded = torch.bitwise_or(torch.bitwise_and(bits, -2 * unit), base)
    if dtype is torch.float16:
        # y / 2^-24 fits in 24 bits here, and six bits of its fraction say which number of the right parity is nearer.
        fixed, bit = (y.abs() * (2.0**6 / _HALF_UNIT)).to(torch.int32), torch.where(marked, 64, 0).to(torch.int32)
        units = torch.bitwise_or(torch.bitwise_and(fixed + 64 - bit, -128), bit)
        small = torch.bitwise_or((units.to(torch.float32) * (_HALF_UNIT / 2.0**6)).view(torch.int32), _SIGN)
        rounded = torch.where(y.abs() < _HALF_NORMAL, small, rounded)
    zero = torch.where(marked, _SIGN, 0).to(torch.int32)
    encoded = torch.where(y.abs() < LEAST[dtype], zero, rounded).view(torch.float32)
    return torch.where(marked | (y <= 0), encoded, y)


def decode(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether ``y``, values of ``dtype`` in float32, was encoded as marked."""
    bits = y.view(torch.int32)
    bit = torch.bitwise_and(torch.bitwise_right_shift(bits, LAST_BIT[dtype]), 1)
    if dtype is torch.float16:
        units = (y.abs() * (1.0 / _HALF_UNIT)).to(torch.int32)
        bit = torch.where(y.abs() < _HALF_NORMAL, torch.bitwise_and(units, 1), bit)
    return ((bits < 0) & (bit != 0)) | (bits == _SIGN)
