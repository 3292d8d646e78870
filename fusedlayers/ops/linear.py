"""``x w^T + b`` by a backend's own matmuls, with or without the activation as their epilogue."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import Node
from ..activations import Activation
from ..backends import Backend
from ..backends.operations import MATMUL
from .pointwise import needs_composite


class Epilogue(NamedTuple):
    """What a matmul does before it writes its result: ``activation(z + b)``, as ``BiasAct`` would."""

    b: Tensor | None
    activation: Activation


class Dense(Node):
    """``x w^T + b``, where a backend's matmul is faster than torch's.

    With an epilogue the result is what ``BiasAct`` makes of it. The gradient that comes back is that of ``x w^T + b``
    in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, backend: Backend, epilogue: Epilogue | None = None
    ) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        ctx.backend = backend
        if epilogue is None:
            return backend.faster_linear(x, w, b)
        assert b is None  # the epilogue adds it
        return backend.operation_act(MATMUL, x, w, epilogue.b, epilogue.activation, encode=True)

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
        return dx, dw, dz.sum(0) if needs_b else None, None, None
