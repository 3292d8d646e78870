"""Polynomials on an interval, and the accuracy of the fits of derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Precision:
    """The accuracy of a fit: the largest absolute error, and the degree that ``piecewise.py`` tries first."""

    tolerance: float
    degree: int


#: By dtype of the output. Rounding the output and the branch bit leave the derivative uncertain by 1e-6, 7e-4 and 4e-3
#: (rms). Fits with these errors add little to that; a coarser fit is a shorter program.
PRECISIONS = {
    torch.float32: Precision(6e-7, 8),
    torch.float16: Precision(1e-4, 5),
    torch.bfloat16: Precision(5e-4, 4),
}
MAXIMUM_DEGREE = 20


@dataclass(frozen=True)
class Piece:
    """A polynomial on ``[start, stop]``, in powers of ``t = (v - center) * scale``, which lies in [-1, 1]."""

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
        return self.of_t(v * self.scale + self.offset)

    def of_t(self, t: Tensor) -> Tensor:
        value = t * self.coefficients[-1] + self.coefficients[-2]
        for coefficient in self.coefficients[-3::-1]:
            value = value * t + coefficient
        return value


def interpolate(function: Function, start: float, stop: float, degree: int) -> Piece:
    """Chebyshev interpolation, converted to powers of t. (At these degrees and on [-1, 1] that costs no accuracy.)"""
    count = degree + 1
    angle = (torch.arange(count, dtype=torch.float64) + 0.5) * (math.pi / count)
    t = torch.cos(angle)
    values = function((start + stop) / 2 + t * (stop - start) / 2)
    weights = [float((values * torch.cos(k * angle)).sum()) * (1 if k == 0 else 2) / count for k in range(count)]
    return Piece(start, stop, powers_of(weights))


def chebyshev(t: Tensor, degree: int) -> Tensor:
    """The Chebyshev polynomials up to a degree at t: ``(len(t), degree + 1)``."""
    columns = [torch.ones_like(t), t]
    for _ in range(degree - 1):
        columns.append(2 * t * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], 1)


def powers_of(weights: Sequence[float]) -> tuple[float, ...]:
    """From the coefficients of Chebyshev polynomials to those of powers."""
    powers = [0.0] * len(weights)
    previous, current = [1.0], [0.0, 1.0]
    for k, weight in enumerate(weights):
        if k > 1:
            following = [0.0, *(2 * c for c in current)]
            for i, c in enumerate(previous):
                following[i] -= c
            previous, current = current, following
        for i, c in enumerate(previous if k == 0 else current):
            powers[i] += weight * c
    return tuple(powers)
