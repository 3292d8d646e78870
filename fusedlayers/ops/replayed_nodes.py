"""Gates and RMS norms of fused models: nodes that save their inputs alone, and whose results a recipe replays.

A product does not determine its factors, so a gate ``f(gate) * up`` saves these; backward writes the gradients over
them. An RMS norm saves its input, which the layer before it saves anyway, and one number for each row; of modules that
spell the norm out PyTorch saves six tensors of that size. Layers that read a result read a recipe (``recipes/``), which
computes it again from what the node has saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..activations import Activation
from ..kernels import Backend
from ..kernels.interface import RmsNormOptions
from ..utils.layout import are_rows, is_dense
from .saved_buffers import take_over
from .second_derivatives import gradients_through, needs_composite


def gate_act(activation: Activation, backend: Backend, gate: Tensor, up: Tensor, activated: Tensor) -> Tensor:
    """``activated * up``, where ``activated`` is ``activation(gate)``.

    Both factors need a gradient, and are laid out as ``can_gate`` asks."""
    product: Tensor = GateAct.apply(activation, backend, gate, up, activated.detach())
    return product


class GateAct(Node):
    """``gate_act`` in one node."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, backend: Backend, gate: Tensor, up: Tensor, activated: Tensor
    ) -> Tensor:
        y = activated * up
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.backend, ctx.version = activation, backend, y._version
        return y

    @staticmethod
    def replay(graph: Any, node: Any, result: Tensor | None) -> Any:
        """For ``recipes/replays.py``: the function and operands of y."""
        values, activation, backend = graph.saved_tensors(node), node.activation, node.backend
        if values is None:
            return None
        return lambda gate, up: backend.gate(gate, up, activation, (), torch.empty_like(gate)), values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        saved = list(ctx.saved_tensors)
        if needs_composite(dy):
            plain = ctx.activation.plain
            found = gradients_through(lambda gate, up: plain(gate) * up, saved, ctx.needs_input_grad[2:4], dy)
            return None, None, *found, None
        may_overwrite = take_over(ctx, saved)
        own = tuple(t if may else torch.empty_like(t) for t, may in zip(saved, may_overwrite, strict=True))
        gate, up = saved
        if dy.stride() != gate.stride():
            dy = torch.empty_like(gate).copy_(dy)
        ctx.backend.gate_gradient(dy, gate, up, ctx.activation, (), (), own)
        return None, None, *own, None


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether the layouts are those that kernels read and write: alike and without gaps, or rows."""
    return gate.dim() > 0 and ((gate.stride() == up.stride() and is_dense(gate)) or (are_rows(gate) and are_rows(up)))


class RmsNorm(Node):
    """``options(x, w)`` of x that has one row after the other."""

    @staticmethod
    def forward(ctx: Any, options: RmsNormOptions, backend: Backend, x: Tensor, w: Tensor | None) -> Tensor:
        x = x.contiguous()
        y, inverse_std = backend.rms_norm(options, x, w)
        ctx.save_for_backward(x, inverse_std, *(() if w is None else (w,)))
        ctx.options, ctx.backend, ctx.version = options, backend, y._version
        return y

    @staticmethod
    def replay(graph: Any, node: Any, result: Tensor | None) -> Any:
        """For ``recipes/replays.py``: the function and operands of y."""
        values = graph.saved_tensors(node)
        if values is None:
            return None
        options, backend = node.options, node.backend
        x, _, *w = values
        return (lambda x, w=None: backend.rms_norm(options, x.contiguous(), w)[0]), (x, *w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, inverse_std, *weights = ctx.saved_tensors
        w = weights[0] if weights else None
        _, _, *needs = ctx.needs_input_grad
        if needs_composite(dy):
            return None, None, *gradients_through(ctx.options, (x, w), needs, dy)
        dx, dw = ctx.backend.rms_norm_gradient(
            ctx.options, dy.contiguous(), x.contiguous(), w, inverse_std, needs_x=needs[0]
        )
        return None, None, dx, dw.to(w.dtype) if w is not None and needs[1] else None
