"""A convolution whose node saves only what its gradients need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..backends.operations import Convolution
from ..utils.layout import channels_last_format
from .pointwise import needs_composite
from .product import Product


class Conv(Function):
    """A convolution that saves x where w needs a gradient, and w where x does; torch's own saves both in any case. Of
    an x that is the product of saved ``factors``, these are saved in its place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        convolution: Convolution,
        product: Product | None = None,
        factors: Sequence[Tensor] = (),
    ) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w and product is None else None, w if needs_x else None, *factors)
        ctx.convolution, ctx.shapes, ctx.format = convolution, (x.shape, w.shape), channels_last_format(x)
        ctx.multiply = None if product is None else (product.multiply, product.composite)
        return convolution(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        x, w, *factors = ctx.saved_tensors
        if ctx.multiply is not None and ctx.needs_input_grad[1]:
            multiply, composite = ctx.multiply
            x = (composite if needs_composite(dz) else multiply)(*factors)
        x_shape, w_shape = ctx.shapes
        # Of what was not saved only the shape is read, and the memory format: the gradient of x takes it from x.
        if ctx.needs_input_grad[0] and x is None and ctx.format is not None:
            x = torch.empty(x_shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.format)
        x, w = (dz.new_empty(1).expand(s) if t is None else t for t, s in ((x, x_shape), (w, w_shape)))
        return *ctx.convolution.gradients(dz, x, w, ctx.needs_input_grad[:3]), None, None, None
