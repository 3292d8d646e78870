"""A convolution whose node saves only what its gradients need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..kernels.operations import Convolution
from ..utils.layout import channels_last_format


class Conv(Node):
    """A convolution that saves x where w needs a gradient, and w where x does; torch's own saves both in any case."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, convolution: Convolution) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        ctx.convolution, ctx.shapes, ctx.format = convolution, (x.shape, w.shape), channels_last_format(x)
        return convolution(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        x, w = ctx.saved_tensors
        x_shape, w_shape = ctx.shapes
        # Of what was not saved only the shape is read, and the memory format: the gradient of x takes it from x.
        if ctx.needs_input_grad[0] and x is None and ctx.format is not None:
            x = torch.empty(x_shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.format)
        x, w = (dz.new_empty(1).expand(s) if t is None else t for t, s in ((x, x_shape), (w, w_shape)))
        return *ctx.convolution.gradients(dz, x, w, ctx.needs_input_grad[:3]), None
