"""The interface between autograd and a backend. A backend is a module with the functions of ``Backend``."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..activations import Activation


class GradientRequest(NamedTuple):
    """Which tensor was saved, and which gradients backward needs besides dz."""

    saved: Literal["output", "input"]
    #: Whether dz is written over the saved tensor.
    overwrite: bool
    needs_bias: bool
    needs_operands: tuple[bool, ...] = ()


class Backend(Protocol):
    """The functions of a backend. No argument is written to but ``out``, and others where the docstring says so."""

    def computes(self, activation: Activation) -> bool:
        """Whether this backend has, or can make, code for the activation."""
        ...

    def slow_because(self, activation: Activation, dtype: torch.dtype, *, may_build: bool = True) -> str | None:
        """Why backward from outputs of ``dtype`` takes several times PyTorch's time, or None where it does not; without
        ``may_build`` as far as that is known before any code is built."""
        ...

    def bias_act(
        self,
        z: Tensor,
        b: Tensor | None,
        activation: Activation,
        operands: Sequence[Tensor] = (),
        *,
        residual: Tensor | None = None,
        dim: int,
        encode: bool,
        out: Tensor | None,
    ) -> Tensor:
        """``activation(z + b + residual, *operands)``, in ``out`` (which may be z) or in a new buffer of z's memory
        format; b, and operands of more than one element, run along ``dim``.

        ``encode`` puts the branch of a folded activation in it.
        """
        ...

    def gradient(
        self,
        dy: Tensor,
        saved: Tensor,
        activation: Activation,
        operands: Sequence[Tensor],
        request: GradientRequest,
        *,
        dim: int,
    ) -> tuple[Tensor | None, ...]:
        """``dz = dy * f'``, the gradient of the bias, and those of the operands: None where not requested."""
        ...

    def gate(
        self, z: Tensor, up: Tensor, activation: Activation, operands: Sequence[Tensor], out: Tensor | None
    ) -> Tensor:
        """``activation(z, *operands) * up``, in ``out`` (which may be z) or in a new buffer. All are contiguous."""
        ...

    def gate_gradient(
        self,
        dy: Tensor,
        z: Tensor,
        up: Tensor,
        activation: Activation,
        operands: Sequence[Tensor],
        needs: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """Write the gradients of z and up over these, and over dy; return those of the operands. All are contiguous."""
        ...

    #: How many hidden bytes a chunk of a block's rows has, at least; a block that recomputes nothing is one chunk then.
    #: 0 where small chunks are as fast as large ones.
    CHUNK_BYTES: int
    #: Whether the bias is best added by ``bias_act`` instead of by the matmul.
    ADDS_BIAS: bool
