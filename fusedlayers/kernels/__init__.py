"""Where the arithmetic is done: ``choose`` picks a backend."""

import functools
import importlib.util
import logging

from torch import Tensor, float64

from ..activations import Activation
from . import cpu, reference
from .cpu.build import is_off
from .interface import Backend, GradientRequest

__all__ = ["DEVICES", "VARIABLE", "Backend", "GradientRequest", "choose", "is_off", "no_triton_because"]


_log = logging.getLogger(__name__)

#: Of the environment: "off" leaves to PyTorch what needs kernels.
VARIABLE = "FUSEDLAYERS_KERNELS"
#: Device types that have been tried. On others layers are left to plain PyTorch, and no backend is asked for.
DEVICES = ("cpu", "cuda")


def choose(tensor: Tensor, activation: Activation | None = None) -> Backend:
    """The backend for a tensor's device: compiled loops on CPUs, Triton on GPUs where it is installed, the
    reference without it, and where the kernels are switched off.

    float64 stays with torch operations on GPUs too (the kernels compute in float32), and so does what cannot be printed
    as device code.
    """
    if tensor.is_cpu:
        return cpu
    if tensor.is_cuda and tensor.dtype is not float64:
        backend = _for_gpus()
        return backend if activation is None or backend.computes(activation) else reference
    return reference


def no_triton_because() -> str | None:
    """Why Triton does not run here, or None where it does."""
    # Triton is imported on the first use of a GPU, not with the package: it takes long, and need not be there.
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from . import triton

    return triton.missing_because()


@functools.cache
def _for_gpus() -> Backend:
    if is_off(VARIABLE):
        return reference
    reason = no_triton_because()
    if reason is None:
        from . import triton

        return triton
    _log.warning("fusedlayers: Triton does not run on this GPU, and torch operations compute in its place: %s", reason)
    return reference
