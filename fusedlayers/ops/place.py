"""A tensor's place in the graph without its values: for second derivatives of nodes that do not save their input, and
for operations that begin where an earlier one began."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from .._torch import functorch_is_active, is_legacy_batched, unsafe_view
from ..utils.isolation import in_clean_state
from ..utils.layout import along


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

    generate_vmap_rule = True

    @staticmethod
    def forward(place: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class InputPlace(NamedTuple):
    """The place in the graph of an activation's input ``z + b + residual``: those of its terms that need gradients."""

    z: Tensor | None
    b: Tensor | None = None
    residual: Tensor | None = None

    @classmethod
    def of(cls, z: Tensor, b: Tensor | None = None, residual: Tensor | None = None) -> InputPlace:
        return cls(*(place_of(t) if t is not None and t.requires_grad else None for t in (z, b, residual)))

    def holding(self, values: Tensor, dim: int) -> Tensor:
        """Values of the input, there; b runs along ``dim``."""
        found: Tensor = values if self.z is None else AtPlace.apply(self.z, values)
        if self.b is not None:
            nothing = values.new_zeros(values.shape[dim])
            found = found + along(AtPlace.apply(self.b, nothing), dim, values.dim())
        return found if self.residual is None else found + AtPlace.apply(self.residual, torch.zeros_like(values))


#: ``gradient(dy, y)``: that of a node's input from its output; with gradients switched on in operations that autograd
#: can differentiate.
Gradient = Callable[[Tensor, Tensor], Tensor]


def differentiable(gradient: Gradient, dy: Tensor, y: Tensor, place: Tensor | None) -> Tensor:
    """``gradient(dy, y)`` of a node's input. Of it dy and y are kept, and the rest is computed again.

    What is to be differentiated again goes to the place of that input, if there is one. If it went to y it would pass
    the user's hooks on y, which in PyTorch, whose operation saves its input, it does not.
    """
    if not torch.is_grad_enabled():
        return gradient(dy, y)
    y = y if place is None else _output_at(place, y, gradient)
    if functorch_is_active() or is_legacy_batched(dy):  # where there are no saved-tensor hooks
        return gradient(dy, y)
    dz: Tensor = checkpoint(gradient, dy, y, use_reentrant=False, preserve_rng_state=False)
    return dz


def _output_at(place: Tensor, y: Tensor, gradient: Gradient) -> Tensor:
    found: Tensor = _OutputAt.apply(place, y.detach(), gradient)
    return found


class _OutputAt(Function):
    """The output of a node as a function of its input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(place: Tensor, y: Tensor, gradient: Gradient) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.place, y, ctx.gradient = inputs
        ctx.save_for_backward(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (y,) = grads, ctx.saved_tensors
        return differentiable(ctx.gradient, dy, y, ctx.place), None, None
