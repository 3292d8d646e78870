"""``x w^T + b`` by a backend's own matmuls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..backends import Backend
from .pointwise import needs_composite


class Dense(Node):
    """``x w^T + b``, where a backend's matmul is faster than torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, backend: Backend) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        ctx.backend = backend
        return backend.faster_linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        if needs_composite(dz):
            dx = torch.matmul(dz, w) if needs_x else None
        else:
            dx = ctx.backend.linear(dz, w.t(), None) if needs_x else None
        dw = torch.mm(dz.t(), x) if needs_w else None
        return dx, dw, dz.sum(0) if needs_b else None, None
