"""Polynomials and functions that are made when a printed function first uses them.

``POLYNOMIALS`` says which function each polynomial approximates, where and how closely; ``shortest`` finds the one of
the lowest degree that does, from torch's float64. Polygamma of each order is printed from its series. No coefficient is
written down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ...derivative.polynomial import Piece, interpolate
from ...utils.isolation import in_clean_state
from . import special

Function = Callable[[Tensor], Tensor]

#: A fifth of float32's rounding: such errors no longer show.
NEGLIGIBLE = 2.0**-24 / 5
MAXIMUM_DEGREE = 24


@dataclass(frozen=True)
class Target:
    """The function that a polynomial approximates on ``[start, stop]``, to ``tolerance`` (absolute; values are of the
    order of 1)."""

    function: Function
    start: float
    stop: float
    tolerance: float = NEGLIGIBLE


def _erfcx_ratio(t: Tensor) -> Tensor:
    ratio: Tensor = torch.special.erfcx(2 / t - 2) / t
    return ratio


def _log2_erfc(x: Tensor) -> Tensor:
    return torch.log2(torch.special.erfcx(x)) - math.log2(math.e) * x * x


def _erf_quotient(square: Tensor) -> Tensor:
    x = torch.sqrt(square)
    return torch.erf(x) / x - 1


def _erfinv_ratio(w: Tensor) -> Tensor:
    x = torch.sqrt(-torch.expm1(-w))
    return torch.erfinv(x) / x


def _erfinv_ratio_of_root(root: Tensor) -> Tensor:
    return _erfinv_ratio(root**2)


def _ndtri_ratio(inverse: Tensor) -> Tensor:
    ratio: Tensor = -torch.special.ndtri(torch.exp(-0.5 / inverse**2)) * inverse
    return ratio


def _lgamma_quotient(d: Tensor) -> Tensor:
    return torch.lgamma(1 + d) / (d * (d - 1))


def _lgamma_rest(square: Tensor) -> Tensor:
    x = torch.rsqrt(square)
    rest: Tensor = x * (torch.lgamma(x) - (x - 0.5) * (torch.log(x) - 1) - special.STIRLING.value)
    return rest


def _digamma_rest(square: Tensor) -> Tensor:
    x = torch.rsqrt(square)
    return x * (x * (torch.log(x) - torch.digamma(x)) - 0.5)


def _i0e_ratio(t: Tensor) -> Tensor:
    x = (1 / t - 1) / special.BESSEL_SCALE.value
    ratio: Tensor = torch.special.i0e(x) * torch.sqrt(1 + x)
    return ratio


def _i1e_ratio(t: Tensor) -> Tensor:
    x = ((1 / t - 1) / special.BESSEL_SCALE.value).clamp(min=1e-9)  # at 0 it would be 0 / 0
    ratio: Tensor = torch.special.i1e(x) / x * (1 + x) ** 1.5
    return ratio


def _atan_quotient(square: Tensor) -> Tensor:
    t = torch.sqrt(square)
    return (torch.atan(t) / t - 1) / square


def _asin_quotient(square: Tensor) -> Tensor:
    t = torch.sqrt(square)
    return (torch.asin(t) / t - 1) / square


def _atanh_quotient(square: Tensor) -> Tensor:
    t = torch.sqrt(square)
    return 3 * ((torch.atanh(t) / t - 1) / square - 1 / 3) / square


_NEAR = special.ERFC_NEAR.value

POLYNOMIALS = {
    "_ASIN": Target(_asin_quotient, 0.0, 0.25, 4 * NEGLIGIBLE),
    "_ATAN": Target(_atan_quotient, 0.0, 1.0),
    "_DIGAMMA_FAR": Target(_digamma_rest, 1e-4, special.GAMMA_NEAR.value**-2),
    # t down to where erfc(x) has left float32's range.
    "_ERFC_FAR": Target(_erfcx_ratio, 1 / (1 + 10.1 / 2), 1 / (1 + _NEAR / 2), NEGLIGIBLE / 2),
    "_ERFC_NEAR": Target(_erf_quotient, 0.0, _NEAR**2),
    "_ERFCX": Target(_erfcx_ratio, 1e-4, 1.0, NEGLIGIBLE / 2),
    # 1 - x^2 down to where x is the last float32 number below 1.
    "_ERFINV_FAR": Target(_erfinv_ratio_of_root, special.ERFINV_NEAR.value**0.5, 4.0),
    "_ERFINV_NEAR": Target(_erfinv_ratio, 0.0, special.ERFINV_NEAR.value),
    "_EXP2": Target(torch.exp2, -0.5001, 0.5001),
    "_I0E": Target(_i0e_ratio, 1e-4, 1.0, NEGLIGIBLE / 2),
    "_I1E": Target(_i1e_ratio, 1e-4, 1.0, NEGLIGIBLE / 2),
    "_LGAMMA_FAR": Target(_lgamma_rest, 1e-4, special.GAMMA_NEAR.value**-2),
    "_LGAMMA_NEAR": Target(_lgamma_quotient, 0.0, special.GAMMA_NEAR.value - 1, NEGLIGIBLE / 2),
    # Up to where log2's argument is sqrt(2). Its terms are small beside the 3 that they are added to.
    "_LOG": Target(_atanh_quotient, 0.0, 0.0295, 2.0**-20),
    # A sixteenth of the rounding of bfloat16, and of float16's. Up to where erfc has left float32's range.
    "_LOG2_ERFC_BFLOAT16": Target(_log2_erfc, 0.0, 10.3, 2.0**-13),
    "_LOG2_ERFC_FLOAT16": Target(_log2_erfc, 0.0, 10.3, 2.0**-16),
    # p down to the smallest subnormal.
    "_NDTRI_TAIL": Target(_ndtri_ratio, 1 / 14.5, 1 / 2.1),
}
"""By the name that printed functions have for them."""


@functools.cache
def shortest(name: str) -> Piece:
    """The polynomial of the lowest degree that meets the target called ``name``."""
    target = POLYNOMIALS[name]
    # Not at the ends, where some functions are 0 / 0.
    v = target.start + (target.stop - target.start) * torch.linspace(1e-3, 1 - 1e-3, 2001, dtype=torch.float64)
    truth = target.function(v)
    for degree in range(2, MAXIMUM_DEGREE + 1):
        piece = interpolate(target.function, target.start, target.stop, degree)
        if float((piece(v) - truth).abs().max()) <= target.tolerance:
            return piece
    raise AssertionError(f"{name}: no polynomial up to degree {MAXIMUM_DEGREE} meets {target.tolerance:g}")


@functools.cache
@in_clean_state
def polynomial_source(name: str) -> str:
    """The text of a device function that evaluates the polynomial of this name."""
    piece = shortest(name)
    return "\n".join(
        [
            f"def {name}(v):",
            f"    s = v * {piece.scale} + {piece.offset}",
            f"    p = {piece.coefficients[-1]}",
            *(f"    p = p * s + {c}" for c in piece.coefficients[-2::-1]),
            "    return p",
            "",
        ]
    )


#: Up to this order no intermediate overflows unless the result does.
HIGHEST_ORDER = 12


@functools.cache
def polygamma_source(order: int) -> str:
    """The n-th derivative of digamma, for n from 1 to ``HIGHEST_ORDER``.

    For x > 0 by its recurrence up to y = x + n + 4, and from there by the asymptotic series (DLMF 5.15.8)

        (-1)^(n+1) [(n-1)! / y^n + n! / (2 y^(n+1)) + sum_k B_2k (2k+n-1)! / ((2k)! y^(2k+n))].

    Negative x by reflection (DLMF 5.15.6): polygamma(n, x) = (-1)^n polygamma(n, 1 - x) - pi (d/dx)^n cot(pi x), and
    the derivatives of the cotangent are polynomials in it.
    """
    shift = order + 4
    sign = "-" if order % 2 == 0 else ""

    coefficients = [math.factorial(order - 1), math.factorial(order) / 2]
    series = []
    k = 1
    while True:
        term = bernoulli(2 * k) * math.factorial(2 * k + order - 1) / math.factorial(2 * k)
        if abs(term) / shift ** (2 * k) < NEGLIGIBLE / 8 * coefficients[0]:
            break
        series.append(float(term))
        k += 1
    lines = [
        f"def _polygamma_{order}(x):",
        "    a = tl.where(x < 0, 1.0 - x, x)",
        f"    r = 1.0 / (a + {shift}.0)",
        "    square = r * r",
        f"    p = {series[-1]}",
        *(f"    p = p * square + {c}" for c in series[-2::-1]),
        # The powers one factor after the other: they underflow before the results do.
        f"    value = ({float(coefficients[0])} + r * {coefficients[1]} + square * p){' * r' * order}",
    ]
    for step in reversed(range(shift)):  # the largest last
        lines += [f"    q = 1.0 / (a + {step}.0)", f"    value += {float(math.factorial(order))}{' * q' * (order + 1)}"]
    derivative = cotangent_derivative(order)
    scaled = [c * math.pi ** (order + 1) for c in derivative]
    lines += [
        f"    value = {sign}value",
        "    angle = (x - _round(x)) * PI",
        "    c = tl.cos(angle) / tl.sin(angle)",
        f"    d = {scaled[-1]}",
        *(f"    d = d * c + {coefficient}" for coefficient in scaled[-2::-1]),
        f"    value = tl.where(x < 0, {'' if order % 2 == 0 else '-'}value - d, value)",
        f'    return tl.where((x <= 0) & (angle == 0), {sign}float("inf"), value)',
        "",
    ]
    return "\n".join(lines)


def bernoulli(n: int) -> Fraction:
    """B_n, by its recurrence (DLMF 24.5.3)."""
    numbers = [Fraction(1)]
    for m in range(1, n + 1):
        numbers.append(-sum((math.comb(m + 1, j) * numbers[j] for j in range(m)), Fraction(0)) / (m + 1))
    return numbers[n]


def cotangent_derivative(order: int) -> list[int]:
    """The coefficients of (d/du)^order cot(u) in powers of cot(u), lowest first: cot' = -(1 + cot^2)."""
    polynomial = [0, 1]
    for _ in range(order):
        slope = [k * c for k, c in enumerate(polynomial)][1:]
        polynomial = [0] * (len(slope) + 2)
        for k, c in enumerate(slope):
            polynomial[k] -= c
            polynomial[k + 2] -= c
    return polynomial
