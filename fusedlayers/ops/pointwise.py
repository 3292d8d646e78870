"""Bias, residual and activation: what is saved, and the gradients from it. Backends do the arithmetic.

A layer is two autograd nodes. The first is a matmul or a convolution, which makes z and does not need it for its own
gradients. The second is ``BiasAct``, which computes ``y = f(z + b)``, as a rule in place over z. f may read trainable
tensors, its operands. By the plan, ``BiasAct`` saves one of

* "output": y, which the next layer saves anyway; backward evaluates f' from it. If the plan says ``keeps_origin``, x
  and w are saved too, at no cost, because the matmul's node saves them. Second derivatives read them;
* "input": z, from which f' is exact;
* "recompute": neither; backward recomputes z from its ``Origin``, the layer's own arguments.

They are two nodes and not one because dy is then freed before the matmul's gradients are made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _torch
from .._torch import Node
from ..activations import KEPT_BY_TORCH, Activation, upcast
from ..backends import Backend, GradientRequest
from ..backends import torch as reference
from ..backends.operations import Recompute
from ..utils.layout import along, operand_along, sum_along
from .buffer_reuse import is_ours_alone
from .edits import expected_from_hooks, saved_tensors
from .place import InputPlace, differentiable

if TYPE_CHECKING:
    from ..plan import Plan


_FROM_OUTPUT = GradientRequest("output", False, False)


class Origin(NamedTuple):
    """How z can be recomputed: ``recompute(x, w, b)``."""

    x: Tensor
    w: Tensor | None
    b: Tensor | None
    recompute: Recompute


class BiasAct(Node):
    """``y = f(z + b + residual, *operands)``, b and operands along ``plan.dim``.

    With ``plan.saved == "input"`` the caller has added b and the residual. ``origin`` is given where the
    plan says ``keeps_origin``.

    Where y is saved, and no ``origin``, the caller sets the node's ``place``, that of the activation's input in the
    graph, as what ``InputPlace`` is made of. Second derivatives go there, unless PyTorch's operation saves y as well
    (``passes_output``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        z: Tensor,
        b: Tensor | None,
        residual: Tensor | None,
        origin: Origin | None,
        *operands: Tensor,
    ) -> Tensor:
        y = plan.backend.bias_act(
            z, b, plan.activation, operands, residual=residual, dim=plan.dim, encode=plan.saved == "output",
            out=z if plan.overwrites else None,
        )  # fmt: skip
        if plan.overwrites:
            ctx.mark_dirty(z)
        if plan.saved == "recompute":
            assert origin is not None
            x, w, operation_b, ctx.recompute = origin
            ctx.save_for_backward(x, w, b, operation_b, residual, *operands)
        elif origin is None:
            ctx.save_for_backward(y if plan.saved == "output" else z, *operands)
        else:
            x, w, operation_b, ctx.recompute = origin
            ctx.save_for_backward(y, x, w)
            # Only second derivatives read the bias. It bypasses save_for_backward so that in-place edits stay legal.
            ctx.biases = b, operation_b
            bias = b if operation_b is None else operation_b
            ctx.bias_version = None if bias is None else bias._version
        ctx.plan, ctx.place, ctx.version = plan, None, None if plan.overwrites else y._version
        is_checked = plan.is_hooked and plan.saved == "output"
        ctx.expected = expected_from_hooks(y, is_dirty=plan.overwrites) if is_checked else None
        return y

    @staticmethod
    def replay(graph: Any, node: Any, result: Tensor | None) -> Any:
        """For ``recipes/replays.py``: the function and operands of y, where z is saved."""
        plan, values = node.plan, graph.saved_tensors(node)
        if plan.saved != "input" or values is None:
            return None

        def activated(z: Tensor, *operands: Tensor) -> Any:
            return plan.backend.bias_act(z, None, plan.activation, operands, dim=plan.dim, encode=False, out=None)

        return activated, values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        plan = ctx.plan
        _, needs_z, needs_b, needs_residual, _, *needs = ctx.needs_input_grad
        is_differentiable = needs_composite(dy)
        given_output = plan.saved == "output"
        saved, *operands = saved_tensors(ctx, plan.function, plan.activation) if given_output else ctx.saved_tensors
        # y may be overwritten where nobody else holds it, and a z that is recomputed is this call's own.
        overwrite = given_output and not plan.is_hooked and is_ours_alone(saved)
        if plan.saved == "recompute":
            w, b, operation_b, residual, *operands = operands
            z = _recomputed(Origin(saved, w, operation_b, ctx.recompute), b, residual, plan.dim)
            saved, overwrite = z, z is not saved
        elif plan.keeps_origin:
            # Second derivatives go through the exact z.
            x, w = operands
            operands = []
            b, operation_b = ctx.biases
            bias = b if operation_b is None else operation_b
            has_origin = not passes_output(plan) and (bias is None or bias._version == ctx.bias_version)
            if torch.is_grad_enabled() and has_origin:
                saved = _recomputed(Origin(x, w, operation_b, ctx.recompute), b, None, plan.dim)
                given_output = overwrite = False

        if is_differentiable:
            if given_output:
                place = None if ctx.place is None or passes_output(plan) else InputPlace(*ctx.place)
                found: list[Any] = [_differentiable_given_output(plan, dy, saved, place)]
            else:
                found = differentiable_gradients(dy, saved, plan.activation, operands, needs, plan.dim)
            dz, *dp = found
            db = sum_along(dz, plan.dim) if needs_b and dz is not None else None
        else:
            request = GradientRequest("output" if given_output else "input", overwrite, needs_b, tuple(needs))
            dz, db, *dp = plan.backend.gradient(dy, saved, plan.activation, operands, request, dim=plan.dim)
            dz = dz.detach() if dz is saved else dz  # which is a result, and knows its node
            dp = [None if d is None else d.view_as(p) for d, p in zip(dp, operands, strict=True)]
        return None, dz if needs_z else None, db, dz if needs_residual else None, None, *dp


def passes_output(plan: Plan) -> bool:
    """Whether second derivatives of the activation pass its output, and so the hooks on it, because PyTorch's operation
    saves that too."""
    activation = plan.activation
    is_in_place = plan.overwrites and plan.function == "bias_act"
    return activation.in_place is not None if is_in_place else activation.name in KEPT_BY_TORCH


def needs_composite(dy: Tensor) -> bool:
    """Whether backward runs plain operations, which autograd can differentiate again, and not kernels: with gradients
    switched on, under vmap (also that of ``is_grads_batched``), and where ``make_fx`` traces or tensors are fake."""
    if torch.is_grad_enabled() or _torch.is_legacy_batched(dy) or _torch.functorch_is_active():
        return True
    if not _torch.dispatch_mode_count():
        return False
    return any(_torch.infrastructure_mode(mode) is not None for mode in (_torch.PROXY_MODE, _torch.FAKE_MODE))


def _recomputed(origin: Origin, b: Tensor | None, residual: Tensor | None, dim: int) -> Tensor:
    x, w, operation_b, recompute = origin
    # Two dtypes: the forward pass was under autocast, which cast the weight to the dtype of x. Whether backward is
    # under autocast does not matter.
    with torch.autocast(x.device.type, dtype=x.dtype, enabled=w is not None and w.dtype is not x.dtype):
        z = recompute(x, w, operation_b)
    z = z if b is None else z + along(b, dim, z.dim())
    return z if residual is None else z + residual


def apart(*tensors: Tensor | None) -> list[Any]:
    """Aliases of the tensors that a node reads, as sources of its gradients. One source may have been computed from
    another, or be the same tensor: autograd would then count what passes through both twice."""
    return [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def gradients_through(
    z: Tensor, dz: Tensor, sources: Sequence[Tensor | None], needs: Sequence[bool], *, create_graph: bool = True
) -> list[Any]:
    """The gradients of those sources that need one, which autograd can differentiate again."""
    wanted = [t for t, need in zip(sources, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(z, wanted, dz, create_graph=create_graph))
    return [next(found) if need else None for need in needs]


def differentiable_gradients(
    dy: Tensor,
    z: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    needs: Sequence[bool],
    dim: int,
) -> list[Tensor | None]:
    """``dy * f'`` and the gradients of the operands that need one, from z, in operations that autograd can
    differentiate again, in float32 or wider."""
    with torch.enable_grad():
        z, *own = apart(upcast(z), *operands)
        given = [operand_along(upcast(p), dim, z.dim()) for p in own if p is not None]
        y = activation.function(z, *given) if given else activation.plain(z)
        sources = [z, *(p for p, need in zip(own, needs, strict=True) if need)]
        dz, *found = torch.autograd.grad(y, sources, upcast(dy), create_graph=True)
    return [dz.to(dy.dtype), *(found.pop(0) if need else None for need in needs)]


def _differentiable_given_output(plan: Plan, dy: Tensor, y: Tensor, place: InputPlace | None) -> Tensor:
    if place is not None and torch.is_grad_enabled() and plan.activation.is_fitted:
        slope = SlopeOfInput(plan.activation, plan.backend, place, plan.dim).from_output(y)
        return (upcast(dy) * slope).to(dy.dtype)
    there = None if place is None else place.holding(y.detach(), plan.dim)
    return differentiable(functools.partial(_gradient_given_output, plan), dy, y, there)


class SlopeOfInput(NamedTuple):
    """A fitted derivative as a function of the activation's input, at its ``place``: its values are what saved outputs
    tell, and its own derivatives those of the function at the input that they tell. A fit is not to be differentiated:
    next to a fold its derivative errs by the root of its own error, and the next one by all of its size.

    Attributes:
        dim: along which a bias runs.
        kept: the part of the outputs that a dropout kept, by which it divided the rest.
    """

    activation: Activation
    backend: Backend
    place: InputPlace
    dim: int = -1
    kept: float = 1.0

    def from_output(self, y: Tensor) -> Tensor:
        """f', in float32 or wider. Of it y is kept."""
        with torch.no_grad():
            if self._has_kernels(y):
                request = GradientRequest("output", False, False)
                slope, *_ = self.backend.gradient(torch.ones_like(y), y, self.activation, (), request, dim=self.dim)
            else:
                slope = reference.slope(self.activation, upcast(y), y.dtype, self.kept)
        found: Tensor = _FromOutput.apply(self.place.holding(y.detach(), self.dim), slope, y.detach(), self)
        return found

    def gradient(self, y: Tensor, dslope: Tensor) -> Tensor:
        """The input's, in operations that autograd can differentiate again."""
        with torch.no_grad():
            if self._has_kernels(y) and self.activation.has_inverse:
                z = self.backend.inverse(y, self.activation, None)
            else:
                wide = upcast(y)
                z = self.activation.input_given_output(wide * self.kept, y.dtype, self.activation.marked(wide, y.dtype))
        with torch.enable_grad():
            z = self.place.holding(z, self.dim)
            (slope,) = differentiable_gradients(z.new_ones(()).expand(z.shape), z, self.activation, (), (), self.dim)
        assert slope is not None
        if not slope.requires_grad:
            return torch.zeros_like(dslope)
        (dz,) = torch.autograd.grad(slope, z, dslope, create_graph=torch.is_grad_enabled())
        return dz

    def _has_kernels(self, y: Tensor) -> bool:
        """Whether a backend's kernels serve, which round to the dtype of y, and know of no dropout."""
        return y.dtype is torch.float32 and self.kept == 1.0 and not needs_composite(y)


class _FromOutput(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(there: Tensor, slope: Tensor, y: Tensor, of_input: SlopeOfInput) -> Tensor:
        return slope.view_as(slope)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, y, ctx.of_input = inputs
        ctx.save_for_backward(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dslope,), (y,) = grads, ctx.saved_tensors
        return ctx.of_input.gradient(y, dslope), None, None, None


def _gradient_given_output(plan: Plan, dy: Tensor, y: Tensor) -> Tensor:
    if not needs_composite(dy):
        return cast("Tensor", plan.backend.gradient(dy, y, plan.activation, (), _FROM_OUTPUT, dim=plan.dim)[0])
    slope = plan.activation.derivative_given_output(upcast(y), y.dtype, differentiable=True)
    return (upcast(dy) * slope).to(dy.dtype)
