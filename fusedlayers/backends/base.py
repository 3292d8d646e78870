"""The interface between autograd and a backend. A backend is a module with the functions of ``Backend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..activations import Activation, InverseError
from .norms import GroupNorm, Kept, RowNorm, RowNormResult
from .operations import BatchNorm
from .rms_norm import RmsNormOptions


class GradientRequest(NamedTuple):
    """Which tensor was saved, and which gradients backward needs besides dz."""

    saved: Literal["output", "input"]
    #: Whether dz is written over the saved tensor.
    overwrite: bool
    needs_bias: bool
    needs_operands: tuple[bool, ...] = ()


class ChannelPasses(Protocol):
    """What all passes of a batch norm have: statistics, and the gradient of x."""

    def statistics(self, x: Tensor, norm: BatchNorm, part: float) -> tuple[Tensor, Tensor]:
        """The mean of each channel of x, and ``1 / sqrt(var + eps)``. The norm's running statistics become
        ``1 - part`` of themselves and ``part`` of the batch's."""
        ...

    def combine(self, dz: Tensor, v: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
        """``scale dz + slope v + offset`` over dz, the factors along the channels."""
        ...


class InputPasses(ChannelPasses, Protocol):
    """Batch norm and the activation behind it, in passes of their own, from x."""

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """``f(z)`` with ``z = (x - mean) scale + shift``."""
        ...

    def gradient(
        self, dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dz = dy * f'(z)``; for each channel the sums of dz and of ``dz (x - mean)``."""
        ...

    def factors(
        self, mean: Tensor, inverse_std: Tensor, w: Tensor | None, total: Tensor, product: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of w, and the factors of that of x for ``combine``, from the sums that ``gradient`` finds over
        the ``count`` numbers of each channel."""
        ...


class NormPasses(ChannelPasses, Protocol):
    """Batch norm and the activation behind it, in passes over x and, backward, over y, which determines x."""

    def norm_act(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """``y = f(z)`` with ``z = (x - mean) scale + shift``, y with its branch; the smallest and the largest z of each
        channel."""
        ...

    def act(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """``f(z)`` with its branch in y, which may be z; the smallest and the largest z of each channel."""
        ...

    def inexact_channels(
        self,
        error: InverseError,
        mean: Tensor,
        inverse_std: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        ends: tuple[Tensor, Tensor],
        count: int,
        centred: float,
        eps: float,
    ) -> Tensor | None:
        """The channels, of ``count`` numbers each, of which y does not determine the input: by the smallest and the
        largest z of each, and where the mean is more than ``centred`` standard deviations from 0. None where there is
        none. ``eps``: what was added to the variances; 0 where these are not the batch's."""
        ...

    def gradient(self, dy: Tensor, y: Tensor, center: Tensor, overwrite: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dz = dy * f'`` and z from y, over which z may be written; for each channel the sums of dz and of
        ``dz (z - center)``."""
        ...

    def factors(
        self,
        mean: Tensor,
        inverse_std: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        total: Tensor,
        product: Tensor,
        kept: Tensor | None,
        count: int,
        rounds_shift: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of w, and the factors of that of x for ``combine``, from the sums that ``gradient`` finds over
        the ``count`` numbers of each channel.

        Args:
            kept: the channels whose input is known instead of z, in order.
            rounds_shift: whether z was made by a kernel of torch's whose error is known.
        """
        ...


class Backend(Protocol):
    """What a backend computes. No argument is written to but ``out``, and others where the docstring says so."""

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

    def drop(self, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        """``F.dropout(x, p)`` of dense x, in a new tensor, and a bit for each element that is kept."""
        ...

    def drop_gradient(self, dy: Tensor, bits: Tensor, factor: float) -> Tensor:
        """The gradient of x, in a new tensor, for dense dy, laid out like x."""
        ...

    def drop_marked(self, y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
        """The dropout of the activation's outputs y, which carry the branch, in ``out``, which may be y; what was
        dropped is marked as ``torch/dropout.py`` says. All are dense and laid out alike."""
        ...

    def drop_marked_gradient(self, dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
        """The gradient through both, from y, in ``out``, which may be y; all are dense and laid out alike."""
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

    def norm_passes(self, tensor: Tensor, activation: Activation) -> NormPasses | None:
        """The passes over x or y, or None where torch's own kernels serve."""
        ...

    def input_passes(self, activation: Activation, dtype: torch.dtype) -> InputPasses | None:
        """The passes over x of this dtype, contiguous or channels-last, or None where torch's own kernels serve."""
        ...

    def row_norm(self, norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None) -> RowNormResult:
        """The norm of contiguous x, and its statistics."""
        ...

    def row_norm_gradient(
        self,
        norm: RowNorm,
        dy: Tensor,
        y: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        inverse_std: Tensor,
        kept: Kept | None,
        *,
        needs_x: bool,
        overwrite: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, in y if ``overwrite``, and of the rows that w and b are, in a floating dtype; dy and y
        are contiguous."""
        ...

    def group_norm_gradient(
        self,
        norm: GroupNorm,
        dy: Tensor,
        y: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        inverse_std: Tensor,
        kept: Kept | None,
        *,
        needs_x: bool,
        overwrite: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, of w and of b, of the last two in any floating dtype; y may be overwritten, and dy is
        laid out like it."""
        ...

    def row_norm_slow_because(self, dtype: torch.dtype, *, may_build: bool = True) -> str | None:
        """Why ``row_norm_gradient`` takes several times PyTorch's time, or None where it does not; ``may_build`` as
        above."""
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

    def inexact_columns(self, gain: Tensor, b: Tensor | None, ratio: float, least: float, most: float) -> Tensor | None:
        """The columns whose factor is too small, too large, or much smaller than b; None where there is none."""
        ...

    def inverse(self, y: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
        """z with ``activation(z) = y``, in ``out`` (which may be y) or in a new buffer; y carries the branch."""
        ...

    #: How many hidden bytes a chunk of a block's rows has, at least; a block that recomputes nothing is one chunk then.
    #: 0 where small chunks are as fast as large ones.
    CHUNK_BYTES: int
    #: Whether the bias is best added by ``bias_act`` instead of by the matmul.
    ADDS_BIAS: bool
