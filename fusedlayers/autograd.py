"""The calculus: what is saved, and dz, dx, dw, db from it. Arithmetic is the backends'; decisions are ``functional.py``'s.

A layer computes ``z = x w^T + b`` and ``y = f(z)``, and saves one of

* ``"output"``: y, which the next layer saves anyway; f' is had from it;
* ``"input"``: z, from which f' is exact. z is returned as a second output, which users do not see, so that autograd knows it
  as a function of the inputs and a second derivative can pass through it;
* ``"recompute"``: neither; z is computed again from the layer's own input;

x is saved only if the weight needs a gradient, w only if x does. Under ``create_graph`` the same formulas are written in
differentiable operations, with z computed again where all that it takes was saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from . import backends
from .activations import Activation, Saved
from .backends import Backend
from .ownership import is_ours_alone, saved_under_hooks


class Settings(NamedTuple):
    """What backward needs to know besides tensors."""

    activation: Activation
    save: Saved
    backend: Backend
    bias_dim: int
    hooked: bool


class DenseBiasAct(Function):
    """``y = f(x w^T + b)``; returns y, or (y, z) if ``save`` is "input"."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, save: Saved
    ) -> Tensor | tuple[Tensor, Tensor]:
        backend = backends.choose(x)
        z = None
        if save == "input":
            z = backend.linear(x, w, b)
            y = backend.bias_act(z, None, activation, dim=-1, encode=False, out=torch.empty_like(z))
        else:
            y = backend.linear_act(x, w, b, activation, encode=save == "output")

        needs_x, needs_w, *_ = ctx.needs_input_grad
        kept_x = x if needs_w or save == "recompute" else None
        kept_w = w if needs_x or save == "recompute" else None
        # A second derivative computes z again, if that costs no memory: a parameter is alive anyway, a cast copy is not.
        again = kept_x is not None and kept_w is not None and (b is None or b.is_leaf)
        kept_b = b if again or save == "recompute" else None
        ctx.save_for_backward(kept_x, kept_w, kept_b, y if save == "output" else z)
        ctx.settings = Settings(activation, save, backend, -1, saved_under_hooks())
        ctx.can_repeat = again
        ctx.set_materialize_grads(False)
        return y if z is None else (y, z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz_more: Tensor | None = None) -> Any:
        x, w, b, saved = ctx.saved_tensors
        settings: Settings = ctx.settings
        needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
        differentiable = torch.is_grad_enabled()
        save = settings.save
        if save == "recompute" or (differentiable and save == "output" and ctx.can_repeat):
            saved, save = F.linear(x, w, b) if differentiable else settings.backend.linear(x, w, b), "recompute"

        dz, db = _gradient(settings._replace(save=save), dy, dz_more, saved, needs_b)
        if dz is None:
            return None, None, None, None, None
        multiply = _DifferentiableMatmuls if differentiable else settings.backend
        dx = multiply.input_gradient(dz, w) if needs_x else None
        dw = multiply.weight_gradient(dz, x) if needs_w else None
        return dx, dw, db, None, None


class BiasAct(Function):
    """``y = f(x + b)``, b along ``dim``; returns y, or (y, z) if ``save`` is "input". ``inplace`` writes y over x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Tensor | None, activation: Activation, save: Saved, dim: int, inplace: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        backend = backends.choose(x)
        z = None
        if save == "input":
            z = x.clone() if b is None else x + along(b, dim, x.dim())
            y = backend.bias_act(z, None, activation, dim=dim, encode=False, out=x if inplace else torch.empty_like(z))
        else:
            out = x if inplace else torch.empty_like(x)
            y = backend.bias_act(x, b, activation, dim=dim, encode=save == "output", out=out)
        if inplace:
            ctx.mark_dirty(x)
        again = save == "recompute"
        ctx.save_for_backward(x if again else None, b if again else None, y if save == "output" else z)
        ctx.settings = Settings(activation, save, backend, dim, saved_under_hooks())
        ctx.set_materialize_grads(False)
        return y if z is None else (y, z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dz_more: Tensor | None = None) -> Any:
        x, b, saved = ctx.saved_tensors
        settings: Settings = ctx.settings
        if settings.save == "recompute":
            # Without a bias the input is z itself, which is not ours to write on.
            settings = settings._replace(save="recompute" if b is not None else "input", hooked=True)
            saved = x if b is None else x + along(b, settings.bias_dim, x.dim())
        dz, db = _gradient(settings, dy, dz_more, saved, ctx.needs_input_grad[1])
        return dz, db, None, None, None, None


def _gradient(
    settings: Settings, dy: Tensor | None, dz_more: Tensor | None, saved: Tensor, needs_b: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dz and db from dy, and from what a second derivative contributes to dz directly.

    ``settings.save`` says what ``saved`` is: an output, a saved input, or an input that was computed for this call alone.
    """
    activation, save, backend, bias_dim, hooked = settings
    if dy is None:
        dz, db = dz_more, None
    elif torch.is_grad_enabled():
        dz, db = _add(_differentiable_gradient(dy, saved, activation, save), dz_more), None
    else:
        ours = save == "recompute" or (not hooked and is_ours_alone(saved))
        out = saved if ours else torch.empty_like(saved)
        wanted = bias_dim if needs_b and dz_more is None else None
        given = "output" if save == "output" else "input"
        db = backend.gradient(dy, saved, activation, given=given, out=out, bias_dim=wanted)
        dz = _add(out, dz_more)
    if needs_b and db is None and dz is not None:
        db = dz.sum([i for i in range(dz.dim()) if i != bias_dim % dz.dim()]) if dz.dim() > 1 else dz
    return dz, db


def _differentiable_gradient(dy: Tensor, saved: Tensor, activation: Activation, save: Saved) -> Tensor:
    """``dy * f'`` in operations that autograd can differentiate again, in float32 or wider."""
    wide = torch.promote_types(saved.dtype, torch.float32)
    if save == "output":
        slope = activation.derivative_given_output(saved.to(wide), saved.dtype, differentiable=True)
        return (dy.to(wide) * slope).to(dy.dtype)
    z = saved.to(wide)
    (dz,) = torch.autograd.grad(activation.function(z), z, dy.to(wide), create_graph=True)
    return dz.to(dy.dtype)


class _DifferentiableMatmuls:
    """The backends' two matmuls, in operations that autograd can differentiate."""

    @staticmethod
    def input_gradient(dz: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(dz, w)

    @staticmethod
    def weight_gradient(dz: Tensor, x: Tensor) -> Tensor:
        return dz.reshape(-1, dz.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def along(b: Tensor, dim: int, dims: int) -> Tensor:
    """A 1-d tensor shaped to broadcast along ``dim`` of a tensor with ``dims`` dimensions."""
    return b.view(-1, *(1,) * (dims - 1 - dim % dims))


def _add(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a + b
