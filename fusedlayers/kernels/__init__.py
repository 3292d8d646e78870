"""Where the arithmetic is done: ``choose`` picks a backend."""

from __future__ import annotations

import functools
import importlib.util
import logging

from torch import Tensor, empty, float64
from torch import device as torch_device
from torch import dtype as torch_dtype

from ..activations import FLOAT64_IS_TORCHS, Activation
from . import cpu, gpu_settings, reference
from .interface import Backend, GradientRequest

__all__ = [
    "DEVICES",
    "Backend",
    "GradientRequest",
    "choose",
    "no_triton_because",
    "slow_on",
]


_log = logging.getLogger(__name__)

#: Device types that have been tried. On others layers are left to plain PyTorch, and no backend is asked for.
DEVICES = ("cpu", "cuda")


def choose(tensor: Tensor, activation: Activation | None = None) -> Backend:
    """The backend for a tensor's device: compiled loops on CPUs, Triton on GPUs where it is installed, the
    reference without it, and where the kernels are switched off (``gpu_settings.py``).

    float64 stays with torch operations on GPUs too (the kernels compute in float32), and so does what cannot be printed
    as device code.
    """
    if tensor.is_cpu:
        return cpu
    if tensor.is_cuda and tensor.dtype is not float64 and not gpu_settings.kernels_are_off():
        backend = _for_gpus()
        return backend if activation is None or backend.computes(activation) else reference
    return reference


def slow_on(device: torch_device, dtype: torch_dtype, activation: Activation) -> str | None:
    """Why layers on a device leave an activation to PyTorch although its output would do, as far as that shows before
    code is built; or None."""
    if dtype is float64:
        return FLOAT64_IS_TORCHS
    if device.type not in DEVICES or activation.output_refusal(dtype) is not None:
        return None
    backend = choose(empty(0, dtype=dtype, device=device), activation)
    return backend.slow_because(activation, dtype, may_build=False)


def no_triton_because() -> str | None:
    """Why Triton does not run here, or None where it does."""
    # Triton is imported on the first use of a GPU, not with the package: it takes long, and need not be there.
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from . import triton

    return triton.missing_because()


@functools.cache
def _for_gpus() -> Backend:
    reason = no_triton_because()
    if reason is None:
        from . import triton

        return triton
    _log.warning("fusedlayers: Triton does not run on this GPU, and torch operations compute in its place: %s", reason)
    return reference
