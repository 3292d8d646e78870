"""Where the arithmetic is done. A backend is a module with the functions of ``Backend``; ``choose`` picks one by device."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, Protocol

from torch import Tensor

from ..activations import Activation


class Backend(Protocol):
    """What autograd asks of a backend. Buffers that are written are dense in memory; no argument is changed but ``out``."""

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """``x w^T + b`` in a new buffer: (..., in), (out, in), (out,) -> (..., out)."""
        ...

    def linear_act(self, x: Tensor, w: Tensor, b: Tensor | None, activation: Activation, *, encode: bool) -> Tensor:
        """``activation(x w^T + b)`` in one new buffer; ``encode`` puts the branch of a folded activation in it."""
        ...

    def bias_act(
        self, z: Tensor, b: Tensor | None, activation: Activation, *, dim: int, encode: bool, out: Tensor
    ) -> Tensor:
        """Write ``activation(z + b)`` to ``out``, which may be z; b runs along ``dim``."""
        ...

    def gradient(
        self,
        dy: Tensor,
        saved: Tensor,
        activation: Activation,
        *,
        given: Literal["output", "input"],
        out: Tensor,
        bias_dim: int | None,
    ) -> Tensor | None:
        """Write ``dy * f'`` to ``out``, which may be ``saved``; return its sum over all but ``bias_dim``, if asked for."""
        ...

    def input_gradient(self, dz: Tensor, w: Tensor) -> Tensor:
        """``dz w``: (..., out), (out, in) -> (..., in)."""
        ...

    def weight_gradient(self, dz: Tensor, x: Tensor) -> Tensor:
        """``dz^T x``: (..., out), (..., in) -> (out, in)."""
        ...


#: Device types that have been tried. On others layers are left to plain PyTorch.
DEVICES = ("cpu", "cuda")


def choose(tensor: Tensor) -> Backend:
    """The backend for a tensor's device: Triton on GPUs where it is installed, torch operations elsewhere."""
    if tensor.is_cuda and has_triton():
        from . import triton

        return triton
    from . import eager

    return eager


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
