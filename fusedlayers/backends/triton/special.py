"""The error, gamma and Bessel functions and their relatives, on float32 blocks, in Triton's own operations.

Capital arguments are polynomials, which ``fitted.py`` makes on first use.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .device import PI, _log1p, _round

#: Where the polynomials meet: at |x|, at -log(1 - x^2), at p, and at |x|.
ERFC_NEAR = tl.constexpr(0.75)
ERFINV_NEAR = tl.constexpr(5.0)
NDTRI_NEAR = tl.constexpr(0.1)
GAMMA_NEAR = tl.constexpr(2.5)
BESSEL_SCALE = tl.constexpr(1 / 6)
INVERSE_PI = tl.constexpr(1 / math.pi)
SQRT_2 = tl.constexpr(math.sqrt(2))
STIRLING = tl.constexpr(0.5 * math.log(2 * math.pi) - 0.5)


# --- error functions --------------------------------------------------------------------------------------------------


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


@triton.jit
def _erfcx(x, ERFCX: tl.constexpr):
    # As erfc, with t down to 0; erfcx(-x) = 2 exp(x^2) - erfcx(x).
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
    y = t * ERFCX(t)
    return tl.where(x < 0, 2.0 * tl.exp(a * a) - y, y)


@triton.jit
def _erfinv(x, NEAR: tl.constexpr, FAR: tl.constexpr):
    # Giles, "Approximating the erfinv function": erfinv(x) / x is smooth in w = -log(1 - x^2), and far out in sqrt(w).
    a = tl.abs(x)
    w = -tl.log((1.0 - a) * (1.0 + a))
    w = tl.where(a < 0.25, -_log1p(-a * a), w)
    y = x * tl.where(w < ERFINV_NEAR, NEAR(w), FAR(tl.sqrt(w)))
    return tl.where(a == 1.0, x * float("inf"), y)


@triton.jit
def _ndtri(p, MIDDLE: tl.constexpr, NEAR_TAIL: tl.constexpr, TAIL: tl.constexpr):
    # The tail over t = sqrt(-2 log p) varies little in 1 / t.
    q = tl.where(p < 0.5, p, 1.0 - p)
    t = tl.sqrt(-2.0 * tl.log(q))
    tail = t * TAIL(1.0 / t)
    tail = tl.where(q == 0, float("inf"), tail)
    tail = tl.where(p < 0.5, -tail, tail)
    return tl.where(q < NDTRI_NEAR, tail, SQRT_2 * _erfinv(2.0 * p - 1.0, MIDDLE, NEAR_TAIL))


# --- gamma functions --------------------------------------------------------------------------------------------------


@triton.jit
def _lgamma(x, NEAR: tl.constexpr, FAR: tl.constexpr):
    # lgamma(1 + d) = d (d - 1) NEAR(d) for d in [0, 1.5], which keeps both roots. Beyond Stirling's series, in 1 / x^2.
    # Below 1 through lgamma(x) = lgamma(1 + x) - log(x), and through the reflection for negative x:
    # lgamma(-a) = log(pi / |sin(pi a)|) - lgamma(1 + a).
    a = tl.abs(x)
    d = tl.where(a < 1.0, a, a - 1.0)
    near = d * (d - 1.0) * NEAR(d)
    inverse = 1.0 / a
    log = tl.log(a)
    far = (a - 0.5) * (log - 1.0) + (STIRLING + inverse * FAR(inverse * inverse))
    value = tl.where(a < GAMMA_NEAR, near, far)  # of lgamma(1 + a) below 1, else of lgamma(a)
    fraction = tl.abs(a - _round(a))
    # Devices may flush the sine of a subnormal number to 0.
    sine = tl.where(fraction < 1e-4, fraction, tl.sin(fraction * PI) * INVERSE_PI)
    reflected = -tl.log(sine) - tl.where(a < 1.0, value, value + log)
    y = tl.where(x < 0, reflected, tl.where(a < 1.0, value - log, value))
    pole = (x <= 0) & (fraction == 0)
    return tl.where(pole | (a == float("inf")), float("inf"), y)


@triton.jit
def _digamma(x, FAR: tl.constexpr):
    # log(y) - 1/(2y) - FAR(1/y^2)/y^2, with y = x + 3 for small x, and digamma(-a) = digamma(1 + a) + pi / tan(pi a).
    a = tl.abs(x)
    inverse = 1.0 / a
    small = a < GAMMA_NEAR
    y = 1.0 / tl.where(small, a + 3.0, a)
    value = -tl.log(y) - y * (0.5 + y * FAR(y * y))
    value = tl.where(small, value - 1.0 / (a + 1.0) - 1.0 / (a + 2.0), value)  # of digamma(1 + a), or of digamma(a)
    angle = (a - _round(a)) * PI
    reflected = tl.where(small, value, value + inverse) + PI * (tl.cos(angle) / tl.sin(angle))
    reflected = tl.where(angle == 0, float("nan"), reflected)
    value = tl.where(x < 0, reflected, tl.where(small, value - inverse, value))
    return tl.where(x == 0, -1.0 / x, value)


# --- Bessel functions -------------------------------------------------------------------------------------------------


@triton.jit
def _i0e(x, I0E: tl.constexpr):
    # exp(-|x|) I0(x) sqrt(1 + |x|) varies little in 1 / (1 + |x| / 6).
    a = tl.abs(x)
    return I0E(1.0 / (1.0 + a * BESSEL_SCALE)) / tl.sqrt(1.0 + a)


@triton.jit
def _i1e(x, I1E: tl.constexpr):
    a = tl.abs(x)
    # x / (1 + a)^(3/2) starts and ends as I1 does.
    shape = (x / (1.0 + a)) / tl.sqrt(1.0 + a)
    return I1E(1.0 / (1.0 + a * BESSEL_SCALE)) * tl.where(a == float("inf"), 0.0, shape)


@triton.jit
def _i0(x, I0E: tl.constexpr):
    # In two factors: exp(|x|) overflows a little before I0 does. NaN at infinity, as torch's.
    root = tl.exp(0.5 * tl.abs(x))
    return root * (root * _i0e(x, I0E))


@triton.jit
def _i1(x, I1E: tl.constexpr):
    root = tl.exp(0.5 * tl.abs(x))
    return root * (root * _i1e(x, I1E))


FUNCTIONS = {
    function.__name__: function
    for function in (_digamma, _erfc, _erfc_coarse, _erfcx, _erfinv, _i0, _i0e, _i1, _i1e, _lgamma, _ndtri)
}
"""What printed functions may call, by name."""
