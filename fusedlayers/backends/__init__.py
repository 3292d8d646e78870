"""Where the arithmetic is done. A backend is a module with the functions of ``Backend``; ``choose`` picks one."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..activations import Activation
from . import eager


class Backend(Protocol):
    """What autograd asks of a backend. No argument is changed but ``out``, and ``saved`` where that is said."""

    def multiplies(self, x: Tensor, w: Tensor) -> bool:
        """Whether ``linear`` is faster than ``F.linear`` for these."""
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """``x w^T + b`` in a new buffer: (..., in), (out, in), (out,) -> (..., out)."""
        ...

    def linear_act(self, x: Tensor, w: Tensor, b: Tensor | None, activation: Activation) -> Tensor:
        """``activation(x w^T + b)`` in one new buffer, exact: for calls without gradients."""
        ...

    def bias_act(
        self, z: Tensor, b: Tensor | None, activation: Activation, *, dim: int, encode: bool, out: Tensor | None
    ) -> Tensor:
        """``activation(z + b)``, b along ``dim``, in ``out`` (which may be z) or in a new buffer of z's memory format.

        ``encode`` puts the branch of a folded activation in it.
        """
        ...

    def gradient(
        self,
        dy: Tensor,
        saved: Tensor,
        activation: Activation,
        *,
        given: Literal["output", "input"],
        overwrite: bool,
        bias_dim: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``dz = dy * f'``, over ``saved`` if ``overwrite``, and its sum over all but ``bias_dim``, if asked for."""
        ...

    #: Whether the bias is best added by ``bias_act`` instead of by the matmul.
    ADDS_BIAS: bool


#: Device types that have been tried. On others layers are left to plain PyTorch.
DEVICES = ("cpu", "cuda")


def choose(tensor: Tensor) -> Backend:
    """The backend for a tensor's device: Triton on GPUs where it is installed, torch operations elsewhere.

    float64 stays with torch operations on GPUs too: the kernels compute in float32.
    """
    if tensor.is_cuda and tensor.dtype is not torch.float64:
        return _for_gpus()
    return eager


@functools.cache
def _for_gpus() -> Backend:
    # Triton is imported on the first use of a GPU, not with the package: it takes long, and need not be there.
    if importlib.util.find_spec("triton") is None:
        return eager
    from . import triton

    return triton
