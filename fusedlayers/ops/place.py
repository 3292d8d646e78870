"""A tensor's place in the graph without its values: for second derivatives of nodes that do not save their input, and
for operations that begin where an earlier one began."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import unsafe_view
from ..utils.isolation import in_clean_state


def place_of(x: Tensor) -> Tensor:
    """A tensor at x's place in the graph, without values, and without a hold on those of x. It is not to be saved by
    ``save_for_backward``: hooks would copy it, at the size that it says it has."""
    place = unsafe_view(x, x.shape)  # an alias that is no view of x
    place.data = _nothing(x.dtype, x.device)
    return place


@functools.cache
@in_clean_state
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class AtPlace(Function):
    """Values, at a place in the graph."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
