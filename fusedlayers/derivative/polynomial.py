"""Polynomials on an interval, how they are fitted, and the accuracy of the fits of derivatives."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]

#: The floor of distances, the smallest normal float32 number: at 0 a root has no derivative.
TINY = 2.0**-126


def to_float32(value: float) -> float:
    """The float32 number next to a value."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Precision:
    """The accuracy of a fit: the largest absolute error, and the degree that ``monotone.py`` tries first."""

    tolerance: float
    degree: int


#: By dtype of the output. Rounding the output and the branch bit leave the derivative uncertain by 1e-6, 7e-4 and 4e-3
#: (rms). Fits with these errors add little to that; a coarser fit is a shorter program.
PRECISIONS = {torch.float32: Precision(6e-7, 8), torch.float16: Precision(1e-4, 5), torch.bfloat16: Precision(5e-4, 4)}


@dataclass(frozen=True)
class Piece:
    """A polynomial on ``[start, stop]``, in powers of ``t = (v - center) * scale``, which lies in [-1, 1].

    At the degrees of this package powers of t cost no accuracy beside Chebyshev polynomials.
    """

    start: float
    stop: float
    coefficients: tuple[float, ...]

    @property
    def scale(self) -> float:
        return 2.0 / (self.stop - self.start)

    @property
    def offset(self) -> float:
        return -(self.start + self.stop) / (self.stop - self.start)

    def __call__(self, v: Tensor) -> Tensor:
        t = v * self.scale + self.offset
        value = t * self.coefficients[-1] + self.coefficients[-2]
        for coefficient in self.coefficients[-3::-1]:
            value = value * t + coefficient
        return value


def interpolate(function: Function, start: float, stop: float, degree: int) -> Piece:
    """The polynomial through the function's values at the Chebyshev nodes."""
    t = torch.cos((torch.arange(degree + 1, dtype=torch.float64) + 0.5) * (math.pi / (degree + 1)))
    values = function((start + stop) / 2 + t * (stop - start) / 2)
    return Piece(start, stop, tuple(torch.linalg.solve(_powers(t, degree), values).tolist()))


def fitted(
    v: Tensor, values: Tensor, degree: int, allowed: Tensor | float, weight: Tensor | None = None
) -> Piece | None:
    """The least-squares polynomial through the samples next to Chebyshev nodes; v rises. None if these are few, or if
    it errs by more than ``allowed`` at any sample."""
    if len(v) == 0:
        return None
    start, stop = float(v[0]), float(v[-1])
    if not (stop > start and math.isfinite(start + stop)):
        return None
    t = (v * 2 - (start + stop)) / (stop - start)
    nodes = -torch.cos(torch.arange(3 * degree + 1, dtype=torch.float64) * (math.pi / (3 * degree)))
    after = torch.searchsorted(t, nodes).clamp_max(len(t) - 1)
    before = (after - 1).clamp_min(0)
    near = torch.where((t[before] - nodes).abs() < (t[after] - nodes).abs(), before, after).unique()
    if len(near) < degree + 3:
        return None
    factor = torch.ones(len(near), 1, dtype=v.dtype) if weight is None else weight[near].unsqueeze(1)
    powers = _powers(t[near], degree)
    solved = torch.linalg.lstsq(powers * factor, values[near].unsqueeze(1) * factor, driver="gels").solution
    piece = Piece(start, stop, tuple(solved[:, 0].tolist()))
    return piece if bool(((piece(v) - values).abs() <= allowed).all()) else None


def longest(attempt: Callable[[int, int], Piece | None], first: int, last: int) -> tuple[int, Piece | None]:
    """The furthest sample up to ``last`` that a polynomial from sample ``first`` on reaches, found by halving, and the
    polynomial; ``attempt`` fits one to the samples between two."""
    good, bad, end, best = first, last + 1, last, None
    while bad - good > 1 and good < last:
        piece = attempt(first, end)
        if piece is None:
            bad = end
        else:
            best, good = piece, end
        end = (good + bad) // 2
    return good, best


def _powers(t: Tensor, degree: int) -> Tensor:
    return t.unsqueeze(1) ** torch.arange(degree + 1)
