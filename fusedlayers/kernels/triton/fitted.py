"""Polynomials that are made when a printed function first uses them.

``POLYNOMIALS`` says which function each polynomial approximates, where and how closely; ``shortest`` finds the one of
the lowest degree that does, from torch's float64. No coefficient is written down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...derivative.polynomial import Piece, interpolate
from ...utils.caching import in_clean_state
from . import device

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


def _atan_quotient(square: Tensor) -> Tensor:
    t = torch.sqrt(square)
    return (torch.atan(t) / t - 1) / square


def _atanh_quotient(square: Tensor) -> Tensor:
    t = torch.sqrt(square)
    return 3 * ((torch.atanh(t) / t - 1) / square - 1 / 3) / square


_NEAR = device.ERFC_NEAR.value

POLYNOMIALS = {
    "_ATAN": Target(_atan_quotient, 0.0, 1.0),
    # t down to where erfc(x) has left float32's range.
    "_ERFC_FAR": Target(_erfcx_ratio, 1 / (1 + 10.1 / 2), 1 / (1 + _NEAR / 2), NEGLIGIBLE / 2),
    "_ERFC_NEAR": Target(_erf_quotient, 0.0, _NEAR**2),
    "_EXP2": Target(torch.exp2, -0.5001, 0.5001),
    # Up to where log2's argument is sqrt(2). Its terms are small beside the 3 that they are added to.
    "_LOG": Target(_atanh_quotient, 0.0, 0.0295, 2.0**-20),
    # A sixteenth of the rounding of bfloat16, and of float16's. Up to where erfc has left float32's range.
    "_LOG2_ERFC_BFLOAT16": Target(_log2_erfc, 0.0, 10.3, 2.0**-13),
    "_LOG2_ERFC_FLOAT16": Target(_log2_erfc, 0.0, 10.3, 2.0**-16),
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
