"""A tensor's place in the graph without its values: for second derivatives of nodes that do not save their input, and
for operations that begin where an earlier one began."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import unsafe_view
from ..utils.isolation import in_clean_state
from ..utils.layout import sum_along


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


class Places(NamedTuple):
    """Of the terms of ``z + b + residual`` that y was made of. Those of z and the residual are without values; b, along
    ``dim``, is itself."""

    z: Tensor | None
    b: Tensor | None
    residual: Tensor | None
    dim: int

    @classmethod
    def of(cls, z: Tensor, b: Tensor | None = None, residual: Tensor | None = None, dim: int = -1) -> Places:
        z_place, r_place = (place_of(t) if t is not None and t.requires_grad else None for t in (z, residual))
        return cls(z_place, b, r_place, dim)

    def output(self, y: Tensor, gradient: Gradient) -> Tensor:
        """y as a function of these, for second derivatives; not as the output that it is. What goes there passes the
        hooks of the user on that output, who would not see it in PyTorch, whose operation saves its input.

        Args:
            y: what the node has saved.
            gradient: ``gradient(dy, y)`` is that of the sum, in operations that autograd can differentiate again.
        """
        again: Tensor = _OutputAgain.apply(y.detach(), gradient, self, *self[:3])
        return again


Gradient = Callable[[Tensor, Tensor], Tensor]


class _OutputAgain(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Gradient, places: Places, *terms: Tensor | None) -> Tensor:
        ctx.save_for_backward(y)
        ctx.settings = gradient, places
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (y,) = grads, ctx.saved_tensors
        gradient, places = ctx.settings
        *_, needs_z, needs_b, needs_residual = ctx.needs_input_grad
        dz = gradient(dy, places.output(y, gradient) if torch.is_grad_enabled() else y)
        db = sum_along(dz, places.dim) if needs_b else None
        return None, None, None, dz if needs_z else None, db, dz if needs_residual else None


class AtPlace(Function):
    """Values, at a place in the graph."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
