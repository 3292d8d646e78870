"""Tables of cubics for ``loops.c``, and that of the normal distribution."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...utils.caching import in_clean_state

#: Four places within an interval, from 0 to 1, not at its ends: what is fitted may jump there.
PLACES = 0.5 - 0.49 * torch.tensor([math.cos(k * math.pi / 8) for k in (1, 3, 5, 7)], dtype=torch.float64)


#: Values in a smaller part of an interval than this have a line: a cubic through them would be mostly rounding error.
NARROW = 0.1


def cubics(values: Tensor, places: Tensor = PLACES) -> Tensor:
    """The coefficients of the cubics through values at four places of each interval, as a rule the same of all."""
    places = places.expand_as(values)
    width = places[:, -1] - places[:, 0]
    slope = torch.where(width > 1e-6, (values[:, -1] - values[:, 0]) / width, 0.0)
    found = torch.stack([values[:, 0] - slope * places[:, 0], slope, *torch.zeros(2, len(slope))], 1)
    is_wide = width > NARROW
    powers = places[is_wide].unsqueeze(-1) ** torch.arange(4)
    found[is_wide] = torch.linalg.solve(powers, values[is_wide].unsqueeze(-1)).squeeze(-1)
    return found.float()


class Normal(NamedTuple):
    """The part of a normal distribution below z, as cubics about ``z = i / steps``, from i = first to last. Below these
    it is 0 in float32, and above 1.

    A cubic errs by 5e-9 of its values where |z| < 4, and by 5e-7 in the tail, where rounding an exponential's argument
    does more. All cubics take 20 KiB; inputs of ordinary size need a third of them.
    """

    steps: int
    first: int
    last: int
    cubics: Tensor


@functools.cache
@in_clean_state
def normal() -> Normal:
    """The table of the normal distribution."""
    steps = 64  # a power of two, so that places are exact
    first, last = round(-14.25 * steps), round(5.75 * steps)
    places = PLACES - 0.5
    z = (torch.arange(first, last + 1, dtype=torch.float64).unsqueeze(1) + places) / steps
    return Normal(steps, first, last, cubics(torch.erfc(z * -math.sqrt(0.5)) / 2, places).contiguous())
