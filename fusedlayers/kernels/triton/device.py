"""Elementary functions that Triton lacks, on float32 blocks.

All are in Triton's own operations, so that they run in the interpreter and on every vendor's devices. Where one needs a
polynomial it takes the polynomial as an argument (``ATAN``, ``EXP2``, ...): ``fitted.py`` makes those on first use.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ...derivative.polynomial import to_float32

#: Constants that float32 cannot hold, in two parts.
HALF_PI = tl.constexpr(to_float32(math.pi / 2))
HALF_PI_REST = tl.constexpr(math.pi / 2 - to_float32(math.pi / 2))
LOG_2 = tl.constexpr(math.log(2))
#: 2 / (3 ln 2), and its first 12 bits.
LOG2_SCALE = tl.constexpr(2 / (3 * math.log(2)))
LOG2_SCALE_HEAD = tl.constexpr(math.floor(4096 * 2 / (3 * math.log(2))) / 4096)
LOG2_SCALE_TAIL = tl.constexpr(2 / (3 * math.log(2)) - math.floor(4096 * 2 / (3 * math.log(2))) / 4096)
#: Where the polynomials of erfc meet, at |x|.
ERFC_NEAR = tl.constexpr(0.75)


@triton.jit
def _block(value, like):
    # Where one of two arguments may be a number; a subnormal one would be float64's. The compiler sees that nothing
    # depends on the comparison.
    return tl.where(like == like, value, value).to(tl.float32)


# --- signs and integers -----------------------------------------------------------------------------------------------


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def _signbit(x):
    return x.to(tl.int32, bitcast=True) < 0


@triton.jit
def _copysign(x, y):
    x = _block(x, y)
    y = _block(y, x)
    # 0x7FFFFFFF is all but the sign.
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    # Half to even, as the sum rounds: from 2^23 on there are no fractions.
    a = tl.abs(x)
    return tl.where(a < 8388608.0, _copysign((a + 8388608.0) - 8388608.0, x), x)


# --- exponentials and logarithms --------------------------------------------------------------------------------------


@triton.jit
def _log1p(x):
    # Kahan: the error of rounding 1 + x cancels in the quotient. At u = inf the quotient would be inf / inf.
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0, x, tl.where(u == float("inf"), u, tl.log(u) * (x / d)))


@triton.jit
def _expm1(x):
    # The same device in the other direction.
    u = tl.exp(x)
    d = u - 1.0
    near = tl.where(d == 0, x, d * (x / tl.log(u)))
    return tl.where(tl.abs(x) < 1.0, near, d)


@triton.jit
def _tanh(x):
    # tanh(x) = -m / (m + 2) with m = expm1(-2x), taken at |x| so that m stays within (-1, 0].
    m = _expm1(-2.0 * tl.abs(x))
    t = -m / (m + 2.0)
    return tl.where(x < 0, -t, tl.where(x == 0, x, t))


@triton.jit
def _tanh_coarse(x):
    # For results in 16 bits. 2 sigmoid(2x) - 1 errs by 2^-23, which near 0 is too much: x - x^3 / 3 there.
    return tl.where(tl.abs(x) < 0.03, x * (1.0 - x * x * 0.33333333), 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _asinh(x):
    a = tl.abs(x)
    square = a * a
    y = tl.where(a < 4096.0, _log1p(a + square / (1.0 + tl.sqrt(1.0 + square))), tl.log(a) + LOG_2)
    return tl.where(x < 0, -y, tl.where(x == 0, x, y))


# --- powers -----------------------------------------------------------------------------------------------------------


@triton.jit
def _head(x):
    # The first 12 bits of a significand. Products of two such are exact, so that it does not matter below whether the
    # compiler fuses them with a sum.
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def _times_power_of_two(x, n):
    # In two steps, so that subnormal results are rounded once; |n| <= 250.
    half = n >> 1
    return x * ((half + 127) << 23).to(tl.float32, bitcast=True) * ((n - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pow(x, p, LOG: tl.constexpr, EXP2: tl.constexpr):
    x = _block(x, p)
    p = _block(p, x)
    # 2^(p log2 |x|) with log2 in two parts, to 2^-35: p multiplies its error by up to 2^7 / log2|x|. The way of Sun's
    # e_powf.c (fdlibm), which splits significands instead of needing an exact fused multiply-add.
    a = tl.abs(x)
    subnormal = a < 1.1754943508222875e-38
    bits = tl.where(subnormal, a * 16777216.0, a).to(tl.int32, bitcast=True)
    bits -= 0x3F3504F3  # sqrt(1/2), so that m is as near to 1 as it can be
    e = (bits >> 23).to(tl.float32) - tl.where(subnormal, 24.0, 0.0)
    m = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)

    # log(m) = 2 atanh(s) with s = d / (2 + d).
    d = m - 1.0
    sum_ = m + 1.0
    sum_head = _head(sum_)
    sum_tail = (sum_ - sum_head) + (d - (sum_ - 2.0))
    s = d / sum_
    s_head = _head(s)
    s_tail = ((d - s_head * sum_head) - s_head * sum_tail) / sum_

    # 3 atanh(s) = s (3 + s^2 + r).
    square = s * s
    r = square * square * LOG(square) + s_tail * (s_head + s)
    factor_head = _head(3.0 + s_head * s_head + r)
    factor_tail = r - ((factor_head - 3.0) - s_head * s_head)
    product = s_head * factor_head
    rest = s_tail * factor_head + factor_tail * s
    product_head = _head(product + rest)
    product_tail = rest - (product_head - product)

    log_head = product_head * LOG2_SCALE_HEAD
    log_tail = product_head * LOG2_SCALE_TAIL + product_tail * LOG2_SCALE
    total_head = _head((log_head + log_tail) + e)
    total_tail = log_tail - ((total_head - e) - log_head)

    # Exponents beyond 2^40 would overflow here, and all do what 2^40 does.
    q = tl.where(p > 1.0995116e12, 1.0995116e12, tl.where(p < -1.0995116e12, -1.0995116e12, p))
    q_head = _head(q)
    y_head = q_head * total_head
    y_tail = (q - q_head) * total_head + q * total_tail
    inside = tl.abs(y_head) < 250.0
    y_tail = tl.where(inside, y_tail, 0.0)
    y_head = tl.where(inside, y_head, tl.where(y_head > 0, 250.0, -250.0))
    n = _round(y_head)
    power = _times_power_of_two(EXP2((y_head - n) + y_tail), n.to(tl.int32))

    grows = (a > 1.0) == (p > 0)
    power = tl.where((a == 0) | (a == float("inf")), tl.where(grows, float("inf"), 0.0), power)
    return _signed_power(power, x, p)


@triton.jit
def _signed_power(power, x, p):
    # From |x|^p to x^p.
    half = 0.5 * p
    whole = tl.floor(p) == p
    odd = whole & (tl.floor(half) != half)
    # 1 / x tells -0 from 0.
    negative = (x < 0) | ((x == 0) & (1.0 / x < 0))
    power = tl.where(negative & odd, power * -1.0, power)  # Triton 3.6 computes -0 as 0 - 0
    finite = (x < 0) & (x != -float("inf"))
    power = tl.where(finite & (whole == 0), float("nan"), power)
    power = tl.where((x != x) | (p != p), float("nan"), power)
    unit = (x == 1.0) | (p == 0) | ((x == -1.0) & (tl.abs(p) == float("inf")))
    return tl.where(unit, 1.0, power)


# --- trigonometric functions ------------------------------------------------------------------------------------------


@triton.jit
def _atan(x, ATAN: tl.constexpr):
    a = tl.abs(x)
    steep = a > 1.0
    t = tl.where(steep, 1.0 / a, a)
    square = t * t
    angle = t + t * square * ATAN(square)
    return _copysign(tl.where(steep, HALF_PI - (angle - HALF_PI_REST), angle), x)


# --- the complementary error function ---------------------------------------------------------------------------------


@triton.jit
def _erfc(x, FAR: tl.constexpr, NEAR: tl.constexpr):
    # Far from 0 as t exp(-x^2) P(t) with t = 1 / (1 + x/2): erfcx(x) / t, which P approximates, varies little over all
    # x in this variable, so that the relative error stays at rounding level until erfc underflows. Negative x by
    # erfc(-x) = 2 - erfc(x). Near 0 as (1 - x) - x Q(x^2), which is rounded little more than once. That is where GELU
    # has its minimum, and an output there has to determine the derivative, whose largest error was twice that of
    # torch's operations with P alone.
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
    e = t * tl.exp(-a * a) * FAR(t)
    return tl.where(a < ERFC_NEAR, (1.0 - x) - x * NEAR(a * a), tl.where(x < 0, 2.0 - e, e))


@triton.jit
def _erfc_coarse(x, LOG2: tl.constexpr):
    # 2^P(|x|), for results in 16 bits: one polynomial, of log2 erfc, and no quotient. From 10.3 on it is 0.
    a = tl.minimum(tl.abs(x), 10.3, tl.PropagateNan.ALL)
    e = tl.exp2(LOG2(a))
    return tl.where(x < 0, 2.0 - e, e)


FUNCTIONS = {
    name: value
    for name, value in globals().items()
    if name.startswith("_") and not name.startswith("__") and callable(value)
}
"""The functions that printed ones may call, by name."""
