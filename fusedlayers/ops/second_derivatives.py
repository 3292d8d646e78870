"""Derivatives of gradients, for all nodes: PyTorch's own, of the node's function at its input.

Gradients come from kernels, which autograd cannot differentiate. Where it is to (``create_graph``), and where plain
operations are asked for (vmap, a tracer), a node that has saved its input, or recomputes it, runs its function once
more in plain operations (``gradients_through``).

A node that has saved its output finds the input that has this output (``derivative/input_of.py``). The gradient
itself still comes from the output, as it does without ``create_graph``; its derivatives are those of the function at
the input (``OutputGradient``). The fit of f' in terms of y cannot be differentiated: next to a fold f'' is
``(d f' / dy) f'``, infinity times 0.

What is differentiated goes to the place of the input in the graph, which ``pointwise.place_of`` keeps without values:
it passes no hooks on the output, where PyTorch's second derivatives of relu, tanh and sigmoid do.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _torch
from ..activations import Activation, upcast
from ..derivative.input_of import within_reach
from ..kernels import Backend, GradientRequest, reference
from ..utils.layout import operand_along, sum_along

_FROM_OUTPUT = GradientRequest("output", False, False)


def needs_composite(dy: Tensor) -> bool:
    """Whether backward runs plain operations, which autograd can differentiate again, and not kernels: with gradients
    switched on, under vmap (also that of ``is_grads_batched``), and where ``make_fx`` traces or tensors are fake."""
    if torch.is_grad_enabled() or _torch.is_legacy_batched(dy) or _torch.functorch_is_active():
        return True
    if not _torch.dispatch_mode_count():
        return False
    return any(_torch.infrastructure_mode(mode) is not None for mode in (_torch.PROXY_MODE, _torch.FAKE_MODE))


# --- from the input ---------------------------------------------------------------------------------------------------


def gradients_through(
    function: Callable[..., Tensor], sources: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> list[Any]:
    """The gradients of ``function(*sources)``, by those sources that need one, in operations that autograd can
    differentiate again. ``dy`` has the dtype of the result."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: one source may have been computed from another, or be the same tensor. Autograd would then count
        # what passes through both twice.
        own = [t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in sources]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(function(*own), wanted, dy, create_graph=again) if wanted else ())
    return [next(found) if need else None for need in needs]


def applied(function: Callable[..., Any], z: Tensor, operands: Sequence[Tensor], dim: int) -> Any:
    """``function(z, *operands)`` in float32 or wider, operands along ``dim``."""
    return function(upcast(z), *(operand_along(upcast(p), dim, z.dim()) for p in operands))


# --- from the output --------------------------------------------------------------------------------------------------


class SavedOutput(NamedTuple):
    """A node that has saved ``y = f(z + b + residual)``, b along ``dim``.

    Attributes:
        places: those of z, b and residual; of each that needs a gradient.
    """

    activation: Activation
    backend: Backend
    places: Sequence[Tensor | None]
    dim: int = -1

    def differentiable(self, dy: Tensor, y: Tensor) -> Tensor:
        """The gradient of the activation's input, in plain operations, or in some that autograd can differentiate."""
        if not torch.is_grad_enabled():
            return self.gradient(dy, y)
        y = y.detach()  # what is differentiated passes no hooks on the output
        dz: Tensor = OutputGradient.apply(AtPlace.apply(y, self.dim, *self.places), dy, y, self)
        return dz

    def gradient(self, dy: Tensor, y: Tensor) -> Tensor:
        """The gradient of the activation's input."""
        if needs_composite(dy):
            return reference.of_output(self.activation, dy, y).to(dy.dtype)
        dz, *_ = self.backend.gradient(dy, y, self.activation, (), _FROM_OUTPUT, dim=self.dim)
        assert dz is not None
        return dz

    def curvature(self, dy: Tensor, y: Tensor, g: Tensor) -> Tensor:
        """``g dy f''``, from the input that y tells: the gradient of ``(g * gradient(dy, y)).sum()`` by the input."""
        with torch.no_grad():
            wide = upcast(y)
            z = within_reach(self.activation.input_given_output(wide, y.dtype), wide)
        with torch.enable_grad():
            z = AtPlace.apply(z, self.dim, *self.places) if torch.is_grad_enabled() else z
            z = z if z.requires_grad else z.requires_grad_()
            (slope,) = torch.autograd.grad(self.activation.plain(z), z, torch.ones_like(z), create_graph=True)
        weight = upcast(g) * upcast(dy)
        if not slope.requires_grad:
            return torch.zeros_like(weight)
        (found,) = torch.autograd.grad(slope, z, weight, create_graph=torch.is_grad_enabled())
        return found


class OutputGradient(Function):
    """``saved.gradient(dy, y)``, as a function of dy and of the input that has the output y, at whose place is
    ``there``. Of it dy and y are kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(there: Tensor, dy: Tensor, y: Tensor, saved: SavedOutput) -> Tensor:
        return saved.gradient(dy, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, dy, y, ctx.saved = inputs
        ctx.save_for_backward(dy, y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (dy, y) = grads, ctx.saved_tensors
        needs_input, needs_dy, *_ = ctx.needs_input_grad
        dinput = ctx.saved.curvature(dy, y, g) if needs_input else None
        return dinput, ctx.saved.differentiable(g, y) if needs_dy else None, None, None


class AtPlace(Function):
    """Values of an activation's input ``z + b + residual``, at the place of these in the graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, dim: int, *places: Tensor | None) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        _, _, *needs = ctx.needs_input_grad
        found = [dz if need else None for need in needs]
        if len(needs) > 1 and needs[1]:
            found[1] = sum_along(dz, ctx.dim)
        return None, None, *found
