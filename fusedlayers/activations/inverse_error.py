"""The inverse error: how accurately a saved output determines its input, for layers that reconstruct their input.

An output is rounded to its dtype. The error of the reconstructed input is small where the function is steep, and large
next to a fold and where the function flattens. ``measure_inverse_error`` measures it once for each activation and
dtype, over cells of inputs. ``InverseError`` then gives the error to expect for inputs with a mean and standard
deviation, and a bound for single inputs.

What it does not do: the expected error assumes a normal distribution of the inputs, so ``worst`` has to be checked on
the real ones. Outputs of 16 bits are never accepted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from .record import Activation, upcast

#: The width of a cell, the number of cells on each side of 0, and the number of inputs measured in each.
CELL, CELLS, TRIED = 1 / 32, 1280, 32
#: The number of inputs in the cells at a fold, where the error peaks over less than a hundredth of a cell.
TRIED_AT_FOLD = 4096
#: The inputs measured beyond the cells.
FAR = torch.logspace(1.61, 30, 256, dtype=torch.float64, device="cpu")
#: The accepted root mean square error over a channel, divided by its standard deviation, in units of the dtype's eps.
#: This error enters the gradient of x, multiplied by the correlation of dz and xhat. At one unit the gradient of x errs
#: twice as much as torch's where dz is parallel to xhat, and as much elsewhere. With folded activations dz itself errs
#: by ten units; the error of x reaches that at a correlation of one to six.
ACCEPTED, ACCEPTED_FOLDED = 1, 64
#: The error of a fit has the same sign over a neighbourhood, so sums do not average it out. Over inputs with at least
#: this standard deviation it is below one unit.
MIN_STD_FOLDED = 0.25
#: The table of acceptable channels: standard deviations from 2^-OCTAVES to 2^OCTAVES, means up to OFFSET standard
#: deviations from 0, and STEPS steps per octave and per standard deviation.
OCTAVES, OFFSET, STEPS = 12, 16, 8
#: The number of parts of equal probability of the normal distribution. The outer ones end where one number in a
#: thousand lies beyond.
PARTS = 32
#: A mean square error that is acceptable in no channel.
LOST = 1e6


@dataclass(frozen=True, eq=False)
class InverseError:
    """The errors of inputs that are reconstructed from outputs of a dtype.

    Attributes:
        largest: the largest error between 0 and the end of each cell, cells at a fold left out; relative to the input
            where that is above 1. The first and the last entry are for inputs beyond the cells.
        integral: the integral of the mean square error from 0 to the end of each cell.
        rounding: the mean square of the input's own rounding error, relative to its square.
        limit: the accepted root mean square error over a channel, divided by its standard deviation.
        min_std: channels with a smaller standard deviation are not acceptable.
    """

    largest: Tensor
    integral: Tensor
    rounding: float
    limit: float
    min_std: float

    def rms(self, mean: Tensor, std: Tensor) -> Tensor:
        """The root mean square error to expect of normally distributed channels, divided by their standard deviation;
        NaN where that is 0."""
        mean, std = mean.double(), std.double()
        ends = torch.addcmul(mean.unsqueeze(-1), std.unsqueeze(-1), _normal().to(std.device))
        place = (ends * (1 / CELL) + CELLS).clamp_(0, 2 * CELLS).nan_to_num_(0.0)
        cell = place.floor().clamp_(max=2 * CELLS - 1)
        integral = self.integral.to(std.device)
        index = cell.long()
        sums = torch.lerp(integral[index], integral[index + 1], place - cell)
        squares = (sums.diff() / ends.diff()).mean(-1)
        return ((squares + self.rounding * (mean.square() + std.square())) / std.square()).sqrt()

    def worst(self, z: Tensor) -> Tensor:
        """The largest error of inputs between 0 and z, cells at a fold left out; infinite where z is NaN."""
        z = z.double()
        place = (z * (1 / CELL) + (CELLS + 1)).nan_to_num_(0.0).clamp_(0, 2 * CELLS + 1).long()
        largest, _ = _tables_on(self, z.device)
        error = largest[place] * z.abs().clamp_min(1.0)
        return error.nan_to_num_(torch.inf, torch.inf)

    def is_acceptable(self, mean: Tensor, std: Tensor) -> Tensor:
        """Whether the error of each channel is below ``limit``. Slightly below it the answer may be no."""
        mean, size = mean.float(), std.abs().float()
        _, acceptable = _tables_on(self, std.device)
        row = (torch.log2(size).mul_(STEPS) + STEPS * OCTAVES).nan_to_num_(0.0).clamp_(0, acceptable.shape[0] - 1)
        column = (mean / size).mul_(STEPS).add_(STEPS * OFFSET).nan_to_num_(0.0).clamp_(0, acceptable.shape[1] - 1)
        return acceptable[row.long(), column.long()]

    @functools.cached_property
    def acceptable(self) -> Tensor:
        """``is_acceptable`` as a table, over logarithms of standard deviations and over means in units of these.
        Computing the error for every call would take as long as a small layer."""
        std = torch.exp2(torch.arange(2 * STEPS * OCTAVES + 1, dtype=torch.float64) / STEPS - OCTAVES)
        mean = torch.arange(2 * STEPS * OFFSET + 1, dtype=torch.float64) / STEPS - OFFSET
        good = self.rms(std.unsqueeze(1) * mean, std.unsqueeze(1).expand(-1, len(mean))) <= self.limit
        good &= (std >= self.min_std).unsqueeze(1)
        good = good[1:, 1:] & good[:-1, 1:] & good[1:, :-1] & good[:-1, :-1]
        return torch.nn.functional.pad(good[1:-1, 1:-1], (1, 1, 1, 1))  # not acceptable beyond the table


@functools.lru_cache(256)
def _tables_on(error: InverseError, device: torch.device) -> tuple[Tensor, Tensor]:
    return error.largest.to(device), error.acceptable.to(device)


@functools.cache
@in_clean_state
def _normal() -> Tensor:
    """The ends of ``PARTS`` parts of equal probability."""
    part = torch.arange(PARTS + 1, dtype=torch.float64) / PARTS
    ends: Tensor = torch.special.ndtri(part.clamp(5e-4, 1 - 5e-4))
    return ends


@functools.lru_cache(1024)
@in_clean_state
def measure_inverse_error(activation: Activation, dtype: torch.dtype) -> InverseError | None:
    """The inverse error of the activation for outputs of ``dtype``, or None if even N(0, 1) is not acceptable."""
    # The gradient of the weight is a sum over xhat, which torch computes from the exact x: from outputs of 16 bits it
    # would err a hundred times as much.
    if dtype is not torch.float32 or not activation.has_inverse:
        return None
    eps = torch.finfo(dtype).eps
    cells = torch.arange(2 * CELLS)
    largest, squares = torch.empty(2, len(cells), dtype=torch.float64)
    places = [(cells, TRIED)]
    if activation.fold is not None:
        at_fold = int(activation.fold.position // CELL) + CELLS + torch.arange(-1, 2)
        places.append((at_fold, TRIED_AT_FOLD))
    for these, tried in places:
        z = (these.unsqueeze(1) + (torch.arange(tried, dtype=torch.float64) + 0.5) / tried - CELLS) * CELL
        errors = _errors(activation, dtype, z)
        largest[these] = errors.amax(1)
        squares[these] = (errors * z.abs().clamp_min(1.0)).square().mean(1).clamp_max(LOST) * CELL
    if activation.fold is not None:
        largest[at_fold] = 0.0  # the average accounts for inputs at the fold
    integral = torch.cat([-squares[:CELLS].flip(0).cumsum(0).flip(0), torch.zeros(1), squares[CELLS:].cumsum(0)])
    below, above = (_errors(activation, dtype, sign * FAR).amax().view(1) for sign in (-1, 1))
    below = torch.cat([largest[:CELLS].flip(0), below]).cummax(0).values.flip(0)
    above = torch.cat([largest[CELLS:], above]).cummax(0).values
    accepted, min_std = (ACCEPTED_FOLDED, MIN_STD_FOLDED) if activation.is_folded else (ACCEPTED, 0.0)
    error = InverseError(torch.cat([below, above]), integral, eps**2 / 12, accepted * eps, min_std)
    return error if bool(error.is_acceptable(torch.zeros(1), torch.ones(1))) else None


def _errors(activation: Activation, dtype: torch.dtype, z: Tensor) -> Tensor:
    """The errors of reconstructed inputs, relative to the inputs where these are above 1."""
    z = upcast(z.to(dtype))
    stored = activation.encoded(z, dtype).to(dtype)
    reconstructed = activation.input_given_output(upcast(stored), dtype)
    return ((reconstructed - z).double() / z.double().abs().clamp_min(1.0)).nan_to_num(torch.inf).abs()
