"""The complementary error function, on float32 blocks, in Triton's own operations.

Capital arguments are polynomials, which ``fitted.py`` makes on first use.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Where the polynomials meet, at |x|.
ERFC_NEAR = tl.constexpr(0.75)


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


FUNCTIONS = {function.__name__: function for function in (_erfc, _erfc_coarse)}
"""What printed functions may call, by name."""
