"""Gates, ``f(z) * up``, and their gradients: chunk by chunk, so that f(z) never has the size of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...activations import Activation
from ..base import GradientRequest
from .chunks import for_each
from .elementwise import bias_act, gradient


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``activation(z, *operands) * up``, contiguous all, in ``out`` (which may be z) or in a new buffer."""
    out = torch.empty_like(z) if out is None else out
    if operands:  # which run along channels, and a chunk has none
        return torch.mul(_activated(z, activation, operands), up, out=out)
    for_each(lambda z, up, out: torch.mul(_activated(z, activation), up, out=out), z, up, out)
    return out


def gate_gradient(
    dy: Tensor,
    z: Tensor,
    up: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Write the gradients of z and up over these, contiguous all, and return those of the operands; dy is overwritten
    too."""
    request = GradientRequest("input", True, False, needs)
    shares: list[Tensor | None] = []

    def differentiate(dy: Tensor, z: Tensor, up: Tensor) -> None:
        of_up = _activated(z, activation, operands).mul_(dy)
        dy.mul_(up)
        up.copy_(of_up)
        shares[:] = gradient(dy, z, activation, operands, request, dim=-1)[2:]

    if operands:
        differentiate(dy, z, up)
    else:
        for_each(differentiate, dy, z, up)
    return shares


def _activated(z: Tensor, activation: Activation, operands: Sequence[Tensor] = ()) -> Tensor:
    """``activation(z, *operands)`` in a new tensor. ATen's kernels are used where it has them for both function and
    derivative: the package's own functions take several operations."""
    if activation.native.gradient_given_input is not None:
        return activation.plain(z)
    return bias_act(z, None, activation, operands, dim=-1, encode=False, out=None)
