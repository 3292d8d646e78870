"""Gates, ``f(z) * up``, and their gradients: chunk by chunk, so that f(z) never has the size of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...activations import Activation
from ..interface import GradientRequest
from .chunks import by_rows, for_each
from .elementwise import bias_act, gradient


def gate(z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """``activation(z, *operands) * up``, in ``out`` (which may be z) or in a new buffer; with operands contiguous."""
    out = torch.empty_like(z) if out is None else out

    def multiply(z: Tensor, up: Tensor, out: Tensor) -> None:
        torch.mul(_activated(z, activation, operands), up, out=out)

    if operands:  # which run along channels, and a chunk has none
        multiply(z, up, out)
    else:
        by_rows(lambda *tensors: for_each(multiply, *tensors), (z, up), (out,))
    return out


def gate_gradient(
    dy: Tensor,
    z: Tensor,
    up: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    needs: tuple[bool, ...],
    out: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:
    """Write the gradients of z and up into ``out``, or else over these and over dy; return those of the operands, with
    which all are contiguous."""
    request = GradientRequest("input", True, False, needs)
    shares: list[Tensor | None] = []

    def differentiate(dy: Tensor, z: Tensor, up: Tensor, dz: Tensor, dup: Tensor) -> None:
        of_up = _activated(z, activation, operands).mul_(dy)
        of_activated = dy * up if out is not None else dy.mul_(up)
        dup.copy_(of_up)
        if out is not None:
            dz.copy_(z)
        shares[:] = gradient(of_activated, dz, activation, operands, request, dim=-1)[2:]

    if operands:
        differentiate(dy, z, up, *(out or (z, up)))
    else:
        by_rows(lambda *tensors: for_each(differentiate, *tensors), (dy, z, up), out or (z, up))
    return shares


def _activated(z: Tensor, activation: Activation, operands: Sequence[Tensor] = ()) -> Tensor:
    """``activation(z, *operands)`` in a new tensor. ATen's kernels are used where it has them for both function and
    derivative: the package's own functions take several operations."""
    if activation.native.gradient_given_input is not None:
        return activation.plain(z)
    return bias_act(z, None, activation, operands, dim=-1, encode=False, out=None)
