"""The calculus: what is saved, and the gradients from it. Backends do the arithmetic, ``routes.py`` decides.

A layer is two nodes: a matmul or a convolution that makes z, and ``BiasAct``, which makes ``y = f(z + b)`` and usually
writes it over z, for these do not need their own result. f may read trainable tensors, its operands. ``BiasAct`` saves
one of

* "output": y, which the next layer saves anyway; f' is had from it;
* "input": its input, from which f' is exact;
* "recompute": neither; the input is computed again from its ``Origin``, the layer's own arguments.

Two nodes and not one: by the time the product's gradients are made, dy is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .. import backends
from .._torch import functorch_is_active, is_legacy_batched
from ..activations import Activation, Saved, upcast
from ..backends import Backend, GradientRequest
from ..backends.operations import MATMUL, Convolution, Recompute
from ..utils.layout import along, channels_last_format, operand_along, sum_along
from .buffer_reuse import is_ours_alone, saved_under_hooks


class Origin(NamedTuple):
    """How an input z can be had again: ``again(x, w, b)``, or (without ``again``) x itself."""

    x: Tensor
    w: Tensor | None = None
    b: Tensor | None = None
    again: Recompute | None = None


class Held(NamedTuple):
    """Tensors that second derivatives alone read. Saved, they must not be edited before backward, and for these alone
    that is too much to ask: so they are held, and whether they were edited is seen when they are read."""

    tensors: tuple[Tensor | None, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, *tensors: Tensor | None) -> Held:
        return cls(tensors, _versions(tensors))

    @property
    def are_edited(self) -> bool:
        return _versions(self.tensors) != self.versions


def _versions(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None)


class Settings(NamedTuple):
    """What backward needs to know besides tensors."""

    activation: Activation
    save: Saved
    dim: int
    backend: Backend
    hooked: bool
    again: Recompute | None


Writes = Literal["a new buffer", "over z", "nothing"]
"""Where y goes. Nothing is written where z is y already: the product had the activation as its epilogue."""


class BiasAct(Function):
    """``y = f(z + b + residual, *operands)``, b and operands along ``dim``.

    With ``save="input"`` b and the residual are None: whoever calls adds them.

    ``origin`` is needed for "recompute". With "output" it may be given, without a residual, where the product saves x
    and w anyway: a second derivative is then taken through the exact input instead of the rounded output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        b: Tensor | None,
        residual: Tensor | None,
        activation: Activation,
        save: Saved,
        dim: int,
        writes: Writes,
        origin: Origin | None,
        *operands: Tensor,
    ) -> Tensor:
        backend = backends.choose(z, activation)
        if writes == "nothing":
            y = z
        else:
            encode, out = save == "output", z if writes == "over z" else None
            y = backend.bias_act(z, b, activation, operands, residual=residual, dim=dim, encode=encode, out=out)
        if writes != "a new buffer":
            ctx.mark_dirty(z)
        x, w, operation_b, again = origin or (None, None, None, None)
        biases = (None if origin is None else b, operation_b)
        kept = {"output": y, "input": z}.get(save)
        if save == "recompute":
            ctx.save_for_backward(kept, x, w, *biases, residual, *operands)
        else:
            ctx.save_for_backward(kept, x, w, None, None, None, *operands)
            ctx.held = Held.of(*biases)
        ctx.settings = Settings(activation, save, dim, backend, saved_under_hooks(), again)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        saved, x, w, b, operation_b, residual, *operands = ctx.saved_tensors
        activation, save, dim, backend, hooked, again = ctx.settings
        needs_z, needs_b, needs_residual, *_ = ctx.needs_input_grad
        needs = ctx.needs_input_grad[-len(operands) :] if operands else ()
        differentiable = torch.is_grad_enabled()
        is_known = x is not None
        if is_known and save == "output":
            b, operation_b = ctx.held.tensors
            is_known = not ctx.held.are_edited

        # Inputs that were computed for this call alone may be overwritten, and outputs that nobody else holds.
        overwrite = save == "output" and not hooked and is_ours_alone(saved)
        if is_known and (save == "recompute" or differentiable):
            saved, save = _again(Origin(x, w, operation_b, again), b, residual, dim), "input"
            overwrite = saved is not x

        if differentiable or is_batched(dy):
            dz, *dp = differentiable_gradients(dy, saved, activation, save, operands, needs, dim)
            db = sum_along(dz, dim) if needs_b and dz is not None else None
        else:
            wanted = GradientRequest("output" if save == "output" else "input", overwrite, needs_b, needs)
            dz, db, *dp = backend.gradient(dy, saved, activation, operands, wanted, dim=dim)
            dz = dz.detach() if dz is saved else dz  # which is a result, and knows its node
            dp = [None if d is None else d.view_as(p) for d, p in zip(dp, operands, strict=True)]
        dr = dz if needs_residual else None
        return dz if needs_z else None, db, dr, None, None, None, None, None, *dp


def is_batched(dy: Tensor) -> bool:
    """Whether backward runs under vmap, also the one of ``is_grads_batched``: for plain operations, not for kernels."""
    batched = is_legacy_batched(dy)
    return batched or functorch_is_active()


def _again(origin: Origin, b: Tensor | None, residual: Tensor | None, dim: int) -> Tensor:
    x, w, operation_b, again = origin
    if again is None:
        z = x
    else:
        # Two dtypes: the forward pass was under autocast, which cast the weight to that of x. Whether backward is under
        # autocast does not matter.
        with torch.autocast(x.device.type, dtype=x.dtype, enabled=w is not None and w.dtype is not x.dtype):
            z = again(x, w, operation_b)
    z = z if b is None else z + along(b, dim, z.dim())
    return z if residual is None else z + residual


def apart(*tensors: Tensor | None) -> list[Any]:
    """Aliases of tensors that a node reads, to take its gradients by. Of the tensors themselves autograd would return
    what goes through another of them too, if that was made from it or is the same, and then add it up once more."""
    return [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def differentiable_gradients(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    save: Saved,
    operands: Sequence[Tensor],
    needs: Sequence[bool],
    dim: int,
) -> list[Tensor | None]:
    """``dy * f'`` and the gradients of the operands that need one, in operations that autograd can differentiate again,
    in float32 or wider."""
    if save == "output":
        slope = activation.derivative_given_output(upcast(saved), saved.dtype, differentiable=True)
        return [(upcast(dy) * slope).to(dy.dtype)]
    with torch.enable_grad():
        z, *own = apart(upcast(saved), *operands)
        y = activation.function(z, *(operand_along(upcast(p), dim, z.dim()) for p in own if p is not None))
        sources = [z, *(p for p, need in zip(own, needs, strict=True) if need)]
        dz, *found = torch.autograd.grad(y, sources, upcast(dy), create_graph=True)
    return [dz.to(dy.dtype), *(found.pop(0) if need else None for need in needs)]


class Epilogue(NamedTuple):
    """What a matmul does before it writes its result: ``activation(z + b)``, as ``BiasAct`` would."""

    b: Tensor | None
    activation: Activation


class Dense(Function):
    """``x w^T + b`` through a backend's own matmuls: for where those beat torch's, which need no Function.

    With an epilogue the result is what ``BiasAct`` makes of it. The gradient that comes back is that of ``x w^T + b``
    anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, epilogue: Epilogue | None = None) -> Tensor:
        needs_x, needs_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_w else None, w if needs_x else None)
        ctx.backend = backends.choose(x)
        if epilogue is not None:
            assert b is None  # the epilogue adds it
            return ctx.backend.operation_act(MATMUL, x, w, epilogue.b, epilogue.activation, encode=True)
        return ctx.backend.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched(dz):
            dx = torch.matmul(dz, w) if needs_x else None
        else:
            dx = ctx.backend.linear(dz, w.t(), None) if needs_x else None
        dw = torch.mm(dz.t(), x) if needs_w else None
        return dx, dw, dz.sum(0) if needs_b else None, None


class Conv(Function):
    """A convolution that saves x where w needs a gradient, and w where x does; torch's own saves both at any rate."""

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
        # Of what was not saved the shape is all that is asked for, and the format: the gradient of x takes it from x.
        if ctx.needs_input_grad[0] and x is None and ctx.format is not None:
            x = torch.empty(x_shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.format)
        x, w = (dz.new_empty(1).expand(s) if t is None else t for t, s in ((x, x_shape), (w, w_shape)))
        return *ctx.convolution.gradients(dz, x, w, ctx.needs_input_grad[:3]), None
