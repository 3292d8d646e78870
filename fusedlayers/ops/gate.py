"""A gate, ``f(gate) * up``, that saves its two factors: where PyTorch also saves f(gate).

A product does not determine its factors, so these are what can be saved. What multiplies the product by a weight needs
it for the weight's gradient: it computes it from the factors once more (``product.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .._torch import Node
from ..activations import Activation
from ..backends import Backend
from ..utils.layout import is_dense, operand_along
from ..utils.profile_ranges import profile_range, range_name
from .buffer_reuse import hooks_move_tensors
from .pointwise import apart, gradients_through, needs_composite

Packing = Literal["gate_up", "up_gate", "interleaved"]


class Gate(NamedTuple):
    """What is computed from gate and up, or from one tensor that holds both along its last dimension."""

    activation: Activation
    backend: Backend
    packing: Packing | None

    def halves(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gate and up."""
        if self.packing is None:
            gate, up = tensors
            return gate, up
        return split(tensors[0], self.packing)

    def product(self, factors: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor:
        gate, up = self._laid_out(factors, operands)
        return self.backend.gate(gate, up, self.activation, operands, torch.empty_like(gate))

    def gradients(
        self, dy: Tensor, factors: Sequence[Tensor], operands: Sequence[Tensor], needs: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Of what was given, and of the operands."""
        alike = self.packing is None and factors[0].stride() == factors[1].stride()
        layout = torch.preserve_format if alike else torch.contiguous_format
        found = [torch.empty_like(t, memory_format=layout) for t in factors]
        gate, up = self._laid_out(factors, operands)
        if not found[0].is_contiguous():  # then all are laid out like gate
            dy = torch.empty_like(gate).copy_(dy)
        if not operands:
            out = self.halves(found)
            shares = self.backend.gate_gradient(dy, gate, up, self.activation, (), (), out)
            return [*found, *shares]
        own = torch.empty_like(gate), torch.empty_like(up)
        shares = self.backend.gate_gradient(dy.contiguous(), gate, up, self.activation, operands, needs, own)
        for whole, computed in zip(self.halves(found), own, strict=True):
            whole.copy_(computed)
        return [*found, *shares]

    def _laid_out(self, factors: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        gate, up = self.halves(factors)
        # Operands run along the last dimension of contiguous tensors.
        return (gate.contiguous(), up.contiguous()) if operands else (gate, up)

    def composite(self, factors: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor:
        """In operations that autograd can differentiate."""
        gate, up = self.halves(factors)
        if not operands:
            return self.activation.plain(gate) * up
        return self.activation.function(gate, *(operand_along(p, -1, gate.dim()) for p in operands)) * up


@profile_range(lambda gate, *_: range_name("gated_act", gate.activation.name))
def gated_act(gate: Gate, *tensors: Tensor) -> Tensor:
    """``gate.product``; ``tensors`` are its factors, or the one that holds both, and then the operands."""
    product: Tensor = GatedAct.apply(gate, *tensors)
    return product


class GatedAct(Node):
    """``gated_act`` in one node."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, *tensors: Tensor) -> Tensor:
        ctx.gate, ctx.count = gate, 2 if gate.packing is None else 1
        y = gate.product(tensors[: ctx.count], tensors[ctx.count :])
        ctx.save_for_backward(*tensors)
        ctx.version, ctx.is_moved = y._version, hooks_move_tensors()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        gate, count, (_, *needs) = ctx.gate, ctx.count, ctx.needs_input_grad
        tensors = ctx.saved_tensors
        if needs_composite(dy):
            with torch.enable_grad():
                sources = apart(*tensors)
                return None, *gradients_through(gate.composite(sources[:count], sources[count:]), dy, sources, needs)
        found = gate.gradients(dy, tensors[:count], tensors[count:], tuple(needs[count:]))
        shaped = [None if d is None else d.reshape(t.shape) for d, t in zip(found, tensors, strict=True)]
        return None, *shaped


def split(packed: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Gate and up, as views."""
    if packing == "interleaved":
        return packed[..., ::2], packed[..., 1::2]
    first, second = packed.chunk(2, -1)
    return (first, second) if packing == "gate_up" else (second, first)


def reads(gate: Tensor, up: Tensor) -> bool:
    """Whether the layouts are those that ``Gate`` computes: alike and without gaps, or rows."""
    return gate.dim() > 0 and (
        (gate.stride() == up.stride() and is_dense(gate)) or torch.empty_like(gate).is_contiguous()
    )
