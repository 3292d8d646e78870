"""Gates, ``f(z) * up``, and their gradients: chunk by chunk, so that f(z) is never as large as the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...activations import Activation
from ..base import GradientRequest
from .chunks import Chunkwise, for_each
from .elementwise import activate_, bias_act, gradient


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``activation(z, *operands) * up``, contiguous all, in ``out`` (which may be z) or in a new buffer."""
    out = torch.empty_like(z) if out is None else out
    if operands:
        activated = bias_act(z, None, activation, operands, dim=-1, encode=False, out=None)
        return torch.mul(activated, up, out=out)

    for_each(Chunkwise(lambda z, up, out: torch.mul(_activated(z, activation), up, out=out)), z, up, out)
    return out


def gate_gradient(
    dy: Tensor,
    z: Tensor,
    up: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Write the gradients of z and up over these, contiguous all, and return those of the operands; dy is written
    over too."""
    request = GradientRequest("input", True, False, needs)
    if operands:
        activated = bias_act(z, None, activation, operands, dim=-1, encode=False, out=None).mul_(dy)
        dy.mul_(up)
        up.copy_(activated)
        _, _, *shares = gradient(dy, z, activation, operands, request, dim=-1)
        return shares

    native = activation.native.gradient_given_input

    def differentiate(dy: Tensor, z: Tensor, up: Tensor) -> Tensor:
        of_up = _activated(z, activation).mul_(dy)
        dy.mul_(up)
        up.copy_(of_up)
        if native is not None:
            return z.copy_(native(dy, z, **activation.parameters))
        gradient(dy, z, activation, (), request, dim=-1)
        return z

    for_each(Chunkwise(differentiate), dy, z, up)
    return []


def _activated(part: Tensor, activation: Activation) -> Tensor:
    """In a new tensor. Where ATen has kernels for function and derivative, these: what is said of tables and their
    exactness in ``elementwise.py`` is worth less than a third of the time, where one of them serves two products."""
    if activation.native.gradient_given_input is not None:
        return activation.plain(part)
    activated = part.clone()
    activate_(activated, activation, encode=False)
    return activated
