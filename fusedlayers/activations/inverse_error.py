"""How well outputs tell their inputs, for layers that have their input again from their output.

An output is rounded. What that does to the input depends on where it is: little where the function is steep, much next
to a fold and where the function flattens. So the error is measured, once for each activation and dtype, over cells of
inputs; ``InverseError`` then says, for inputs of some mean and standard deviation, what error to expect, and how far
off any single one may be.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.isolation import in_clean_state
from .record import Activation, upcast

#: Inputs are looked at in cells of this width, so many to both sides of 0, and so many in each.
CELL, CELLS, TRIED = 1 / 32, 1280, 32
#: So many in the cells at a fold, where the error is largest over less than a hundredth of one.
TRIED_AT_FOLD = 4096
#: Sizes of inputs beyond the cells that are looked at.
FAR = torch.logspace(1.61, 30, 256, dtype=torch.float64, device="cpu")
#: The accepted errors in units of the dtype's rounding: the root mean square over a channel, in relation to its
#: standard deviation. That reaches the gradient of x times the correlation of dz and xhat. At one unit the gradient of
#: x errs twice as much as torch's where dz runs along xhat, and as much elsewhere. Of folded activations dz itself is
#: off by ten units, which the error of x reaches at a correlation of one to six.
ACCEPTED, ACCEPTED_FOLDED = 1, 64
#: A fit errs to the same side all around, which no sum averages out: over this width it is below one unit.
LEAST_FOLDED = 0.25
#: Channels are told apart by their standard deviation, from so many octaves below 1 to as many above, and by how many
#: of these the mean is from 0. Of an octave, and of a standard deviation, this many steps are told apart.
OCTAVES, OFFSET, STEPS = 12, 16, 8
#: Parts of equal probability of normal numbers. The outer ones end where only one number in a thousand lies beyond.
PARTS = 32
#: A mean square error that no channel bears.
LOST = 1e6


@dataclass(frozen=True, eq=False)
class InverseError:
    """What outputs of a dtype tell of their inputs.

    Attributes:
        largest: error between 0 and the end of each cell, but at a fold, in relation to the input where that is above
            1; the first and the last are those of inputs beyond the cells.
        integral: of the mean square error of inputs from 0 to the end of each cell.
        rounding: of the input itself, the mean square in relation to its square.
        limit: the accepted root of the mean square error over a channel, in relation to its standard deviation.
        min_std: channels whose standard deviation is smaller are not told.
    """

    largest: Tensor
    integral: Tensor
    rounding: float
    limit: float
    min_std: float

    def rms(self, mean: Tensor, std: Tensor) -> Tensor:
        """The error to expect of channels: its root mean square, in relation to the standard deviation; of a normal
        distribution. Not a number where that is zero."""
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
        """The largest error of inputs between 0 and z, but at a fold; infinite where z is no number."""
        z = z.double()
        place = (z * (1 / CELL) + (CELLS + 1)).nan_to_num_(0.0).clamp_(0, 2 * CELLS + 1).long()
        largest, _ = _on(self, z.device)
        found = largest[place] * z.abs().clamp_min(1.0)
        return found.nan_to_num_(torch.inf, torch.inf)

    def is_acceptable(self, mean: Tensor, std: Tensor) -> Tensor:
        """Of which channels the error is below ``limit``; where it hardly is, it may say no."""
        mean, size = mean.float(), std.abs().float()
        _, good = _on(self, std.device)
        row = (torch.log2(size).mul_(STEPS) + STEPS * OCTAVES).nan_to_num_(0.0).clamp_(0, good.shape[0] - 1)
        column = (mean / size).mul_(STEPS).add_(STEPS * OFFSET).nan_to_num_(0.0).clamp_(0, good.shape[1] - 1)
        return good[row.long(), column.long()]

    @functools.cached_property
    def good(self) -> Tensor:
        """Whether the error is, over (logarithms of) standard deviations and means in units of these; it is computed
        once, for it takes as long as a small layer."""
        std = torch.exp2(torch.arange(2 * STEPS * OCTAVES + 1, dtype=torch.float64) / STEPS - OCTAVES)
        mean = torch.arange(2 * STEPS * OFFSET + 1, dtype=torch.float64) / STEPS - OFFSET
        good = self.rms(std.unsqueeze(1) * mean, std.unsqueeze(1).expand(-1, len(mean))) <= self.limit
        good &= (std >= self.min_std).unsqueeze(1)
        good = good[1:, 1:] & good[:-1, 1:] & good[1:, :-1] & good[:-1, :-1]
        return torch.nn.functional.pad(good[1:-1, 1:-1], (1, 1, 1, 1))  # what is further out is not told


@functools.lru_cache(256)
def _on(found: InverseError, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tables on a device."""
    return found.largest.to(device), found.good.to(device)


@functools.cache
@in_clean_state
def _normal() -> Tensor:
    """Where ``PARTS`` of equal probability end."""
    part = torch.arange(PARTS + 1, dtype=torch.float64) / PARTS
    return torch.special.ndtri(part.clamp(5e-4, 1 - 5e-4))


@functools.lru_cache(1024)
@in_clean_state
def measure_inverse_error(activation: Activation, dtype: torch.dtype) -> InverseError | None:
    """What outputs of the activation, in ``dtype``, tell of their inputs, or None if that is too little."""
    # The gradient of the weight is a sum over xhat, and torch has that from an x as exact as it was given: with outputs
    # of 16 bits it errs a hundred times as much.
    coarse = dtype.itemsize == 2 or (activation.is_folded and dtype is torch.float64)
    if coarse or not activation.has_inverse:
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
        largest[at_fold] = 0.0  # as many values as one expects there are part of the average
    integral = torch.cat([-squares[:CELLS].flip(0).cumsum(0).flip(0), torch.zeros(1), squares[CELLS:].cumsum(0)])
    below, above = (_errors(activation, dtype, sign * FAR).amax().view(1) for sign in (-1, 1))
    below = torch.cat([largest[:CELLS].flip(0), below]).cummax(0).values.flip(0)
    above = torch.cat([largest[CELLS:], above]).cummax(0).values
    accepted, min_std = (ACCEPTED_FOLDED, LEAST_FOLDED) if activation.is_folded else (ACCEPTED, 0.0)
    found = InverseError(torch.cat([below, above]), integral, eps**2 / 12, accepted * eps, min_std)
    return found if bool(found.is_acceptable(torch.zeros(1), torch.ones(1))) else None


def _errors(activation: Activation, dtype: torch.dtype, z: Tensor) -> Tensor:
    """How far off the inputs are that outputs tell, in relation to their size where that is above 1."""
    z = upcast(z.to(dtype))
    stored = activation.encoded(z, dtype).to(dtype)
    again = activation.input_given_output(upcast(stored), dtype)
    return ((again - z).double() / z.double().abs().clamp_min(1.0)).nan_to_num(torch.inf).abs()
