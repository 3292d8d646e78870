"""A tensor's place in the graph without its values, for second derivatives of nodes that do not save their input."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


class Edge(Function):
    """x's place in the graph, without its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.new_empty(1).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Joined(Function):
    """Values, at the place of x in the graph."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
