"""Bias, residual and activation: what is saved, and the gradients from it. Backends do the arithmetic.

A layer is two autograd nodes. The first is a matmul or a convolution, which makes z and does not need it for its own
gradients. The second is ``BiasAct``, which computes ``y = f(z + b)``, as a rule in place over z. f may read trainable
tensors, its operands. By the plan, ``BiasAct`` saves one of

* "output": y, which the next layer saves anyway; backward evaluates f' from it;
* "input": z, from which f' is exact;
* "recompute": neither; backward recomputes z from the layer's own arguments.

They are two nodes and not one because dy is then freed before the matmul's gradients are made.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import Node, saved_tensors_hooks_on_top, unsafe_view
from ..activations import upcast
from ..kernels import GradientRequest
from ..utils.caching import in_clean_state
from ..utils.layout import along, sum_along
from .saved_buffers import expected_from_hooks, saved_output, take_over
from .second_derivatives import AtPlace, SavedOutput, applied, gradients_through, needs_composite

if TYPE_CHECKING:
    from ..calls.plan import Plan


def place_of(x: Tensor) -> Tensor:
    """A tensor at x's place in the graph, without values, and without a hold on those of x. It is not to be saved by
    ``save_for_backward``: hooks would copy it, at the size that it says it has."""
    place = unsafe_view(x, x.shape)  # an alias that is not a view of x
    place.data = _nothing(x.dtype, x.device)
    return place


@functools.cache
@in_clean_state
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class BiasAct(Node):
    """``y = f(z + b + residual, *operands)``, b and operands along ``plan.dim``.

    With ``plan.saved == "input"`` the caller has added b and the residual; with "recompute" ``origin`` is x, w, b and
    the operation that makes z of them; with "output" the caller sets the node's ``places``, those of z, b and residual
    in the graph.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, z: Tensor, b: Tensor | None, residual: Tensor | None, origin: tuple[Any, ...] | None,
        *operands: Tensor,
    ) -> Tensor:  # fmt: skip
        overwrites = plan.overwrites
        y = plan.backend.bias_act(
            z, b, plan.activation, operands, residual=residual, dim=plan.dim, encode=plan.saved == "output",
            out=z if overwrites else None,
        )  # fmt: skip
        if overwrites:
            ctx.mark_dirty(z)
        if origin is not None:
            *tensors, ctx.operation = origin
            ctx.save_for_backward(*tensors, b, residual, *operands)
        else:
            ctx.save_for_backward(y if plan.saved == "output" else z, *operands)
        ctx.plan, ctx.version = plan, None if overwrites else y._version  # of y, for recipes
        is_hooked = plan.saved == "output" and saved_tensors_hooks_on_top(True) is not None
        ctx.expected = expected_from_hooks(y, is_dirty=overwrites) if is_hooked else None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, needs_z, needs_b, needs_residual, _, *needs = ctx.needs_input_grad
        dz, db, *dp = _gradients(ctx, grads[0], needs_b, needs)
        return None, dz if needs_z else None, db, dz if needs_residual else None, None, *dp


def _gradients(ctx: Any, dy: Tensor, needs_b: bool, needs: list[bool]) -> list[Any]:
    """dz, db and the gradients of the operands. dz is written over y where nobody else holds it, and over a z that is
    this call's own."""
    plan, is_composite, may_overwrite = ctx.plan, needs_composite(dy), False
    if plan.saved == "output":
        tensors = saved_output(ctx, plan.function, plan.activation)
        if not is_composite:
            may_overwrite, *_ = take_over(ctx, tensors)
        elif len(tensors) == 1:
            dz = SavedOutput(plan.activation, plan.backend, ctx.places, plan.dim).differentiable(dy, tensors[0])
            return [dz, sum_along(dz, plan.dim) if needs_b else None]
        else:  # as from the input that y tells
            y, *operands = tensors
            with torch.no_grad():
                _, z = applied(plan.activation.told, y, operands, plan.dim)
            tensors[0] = AtPlace.apply(z, plan.dim, *ctx.places) if torch.is_grad_enabled() else z
    else:
        tensors = list(ctx.saved_tensors)
        if plan.saved == "recompute":
            x, w, operation_b, b, residual, *operands = tensors
            # Two dtypes: the forward pass was under autocast, which cast the weight to the dtype of x. Whether backward
            # is under autocast does not matter.
            was_cast = w is not None and w.dtype is not x.dtype
            with torch.autocast(x.device.type, dtype=x.dtype, enabled=was_cast):
                z = ctx.operation(x, w, operation_b)
            z = z if b is None else z + along(b, plan.dim, z.dim())
            z = z if residual is None else z + residual
            tensors, may_overwrite = [z, *operands], z is not x
    given, *operands = tensors
    if is_composite:
        function = lambda z, *operands: applied(plan.activation.plain, z, operands, plan.dim)
        dz, *dp = gradients_through(function, tensors, (True, *needs), upcast(dy))
        return [dz, sum_along(dz, plan.dim) if needs_b else None, *dp]
    request = GradientRequest("output" if plan.saved == "output" else "input", may_overwrite, needs_b, tuple(needs))
    dz, db, *dp = plan.backend.gradient(dy, given, plan.activation, operands, request, dim=plan.dim)
    return [dz, db, *(None if d is None else d.view_as(p) for d, p in zip(dp, operands, strict=True))]
