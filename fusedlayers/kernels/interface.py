"""The interface between autograd and a backend. A backend is a module with the functions of ``Backend``."""

from __future__ import annotations

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


class RmsNormOptions(NamedTuple):
    """RMS norm over the last dimension (Zhang & Sennrich 2019), computed in float32 or wider: ``y = xhat (offset + w)``
    with ``xhat = x / sqrt(mean(x^2) + eps)``."""

    eps: float
    #: 1 in Gemma's norm.
    offset: float = 0.0
    #: Whether xhat is rounded to x's dtype before the weight multiplies it, as in the norms of LLaMA and T5.
    rounds_first: bool = False

    def __call__(self, x: Tensor, w: Tensor | None) -> Tensor:
        """By PyTorch's operations, which autograd differentiates; in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        xhat = x.to(wide)
        xhat = xhat * torch.rsqrt(xhat.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            xhat = xhat.to(x.dtype).to(wide)
        gain = self.gain(w, wide)
        return (xhat if gain is None else xhat * gain).to(x.dtype)

    def gain(self, w: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """``offset + w`` in ``dtype``; None for 1."""
        if w is None:
            return None
        return w.to(dtype) + self.offset if self.offset else w.to(dtype)


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
        """``activation(z, *operands) * up``, in ``out`` (which may be z) or in a new buffer. Without operands rows may
        have gaps between them, and elements too; with operands all are contiguous."""
        ...

    def gate_gradient(
        self,
        dy: Tensor,
        z: Tensor,
        up: Tensor,
        activation: Activation,
        operands: Sequence[Tensor],
        needs: tuple[bool, ...],
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Sequence[Tensor | None]:
        """Write the gradients of z and up into ``out``, or else over these and over dy; return those of the operands.
        Layouts as for ``gate``."""
        ...

    def rms_norm(self, options: RmsNormOptions, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of contiguous x, and by how much each row was multiplied: (rows, 1), in float32 or wider."""
        ...

    def rms_norm_gradient(
        self,
        options: RmsNormOptions,
        dy: Tensor,
        x: Tensor,
        w: Tensor | None,
        inverse_std: Tensor,
        *,
        needs_x: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and of w, the latter in any floating dtype; dy and x are contiguous."""
        ...

    def inverse(self, y: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
        """z with ``activation(z) = y``, in ``out`` (which may be y) or in a new buffer; y carries the branch."""
        ...

    #: How many hidden bytes a chunk of a block's rows has, at least; a block that recomputes nothing is one chunk then.
    #: 0 where small chunks are as fast as large ones.
    CHUNK_BYTES: int
    #: Whether the bias is best added by ``bias_act`` instead of by the matmul.
    ADDS_BIAS: bool
