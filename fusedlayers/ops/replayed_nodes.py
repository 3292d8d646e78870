"""RMS norms that modules spell out, in one node, for ``fuse(model, exact=False)``.

The node saves its input, and one number for each row. Layers that read the result read a recipe (``recipes/``), which
computes it again from the input.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch import Node
from ..kernels import Backend
from ..kernels.interface import RmsNormOptions
from .second_derivatives import gradients_through, needs_composite


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
