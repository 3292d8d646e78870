"""Activations that can be inverted, of the table: monotone ones by a formula, folded ones by their branch bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import Activation, resolve, widened
from ..functional import bias_act
from .module import InvertibleModule


class InvertibleActivation(InvertibleModule):
    """An activation whose output tells its input.

    Monotone ones (leaky_relu, elu, selu, celu, softplus, softsign, tanh, sigmoid, ...) are inverted by a formula.
    Folded ones (gelu, silu, mish, ...) fall and rise, and their outputs carry in the last bit which of the two it was;
    their inverse is fitted, for float32 and half precision, and with gradients only. Where a function is flat, an
    output tells little of its input: tanh and sigmoid far from zero, folded ones next to their minimum and in their
    tail. ``check`` says how little; leaky_relu loses nothing. In float64 folded activations keep their input.

    Args:
        activation: a name, ``nn.Module`` or function, as for ``fusedlayers.bias_act``.

    Raises:
        ValueError: an activation whose output does not tell its input (relu, hardswish), or whose inverse is not known.

    Shapes: any.

    >>> import fusedlayers as fl
    >>> fl.InvertibleActivation("leaky_relu")
    InvertibleActivation(leaky_relu)
    """

    def __init__(self, activation: object = "leaky_relu") -> None:
        super().__init__()
        found = resolve(activation, "InvertibleActivation")
        if not found.has_inverse or found.needs_input_because is not None:
            reason = (
                found.needs_input_because or f"the output of {found!r} does not tell its input, or it is not known how"
            )
            raise ValueError(f"InvertibleActivation: {reason}; {', '.join(_invertible())} can be inverted")
        self.activation: Activation = found

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # of others it is what the class says
        return not self.activation.is_folded  # the branch is in outputs of the function only

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.invertible and self.activation.is_folded and any(x.dtype is torch.float64 for x in inputs):
            with self.temp_mode(invertible=False):
                return super().forward(*inputs, **options)
        return super().forward(*inputs, **options)

    def function(self, x: Tensor) -> Tensor:
        refused = self.activation.output_refused_because(x.dtype)
        return bias_act(x, None, self.activation, save="input" if refused else "output")

    def inverse(self, y: Tensor) -> Tensor:
        wide, limits = widened(y), torch.finfo(y.dtype)
        x = self.activation.input_given_output(wide, y.dtype)
        # An output that was rounded to what the function tends to is that of all inputs from some number on, which the
        # next output tells: an infinite one would make upstream gradients NaN, as a product with a derivative of zero.
        inside = wide - x.sign() * wide.abs().clamp(min=limits.tiny) * limits.eps
        return torch.where(x.isinf(), self.activation.input_given_output(inside, y.dtype), x).to(y.dtype)

    def described(self) -> str:
        return repr(self.activation)


def _invertible() -> list[str]:
    from ..activations.spec import named  # all that are registered by now

    return sorted(name for name, row in named.items() if row.has_inverse and not row.is_identity)
