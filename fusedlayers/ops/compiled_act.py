"""The activation that ``torch.compile`` sees, which saves its output, in functional operations that Inductor fuses.

``torch.compile`` puts the call into its graph as it stands (``allow_in_graph``). AOTAutograd then traces it, and finds
that backward needs the output only, which the next layer saves anyway. Nothing is written in place, because in-place
results and saved outputs that are mutated later have been miscompiled (pytorch#184113, #174124).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import functorch_is_active
from ..activations import Activation, upcast
from ..activations.table import bound


class OutputSaved(Function):
    """``f(z)`` that saves only its output, with the branch bit in it where f is folded."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: Activation) -> Tensor:
        y = activation.encoded(upcast(z), z.dtype).to(z.dtype)
        ctx.save_for_backward(y)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        (y,) = ctx.saved_tensors
        slope = ctx.activation.derivative_given_output(upcast(y), y.dtype)
        return (upcast(dy) * slope).to(y.dtype), None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch has not annotated it
def output_saved(z: Tensor, name: str, parameters: tuple[tuple[str, float], ...]) -> Tensor:
    """``f(z)``, saving its output; the activation by name, because a graph holds tensors and constants only."""
    activation = bound(name, dict(parameters))
    if functorch_is_active():
        return activation.plain(z)
    y: Tensor = OutputSaved.apply(z, activation)
    return y
