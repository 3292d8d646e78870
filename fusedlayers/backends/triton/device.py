"""Elementary functions that Triton has not, on float32 blocks."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


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
    return tl.where(x < 0, -t, t)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def _pow_on_device(x, p):
    return libdevice.pow(x, p)


@triton.jit
def _pow_interpreted(x, p):
    # The interpreter has no libdevice. For x >= 0, as far as exp2 and log2 carry.
    return tl.exp2(p * tl.log2(x))


INTERPRETED = not isinstance(_log1p, triton.JITFunction)
"""Whether TRITON_INTERPRET was set when this was imported."""

FUNCTIONS = {
    "_expm1": _expm1,
    "_log1p": _log1p,
    "_pow": _pow_interpreted if INTERPRETED else _pow_on_device,
    "_sign": _sign,
    "_tanh": _tanh,
}
