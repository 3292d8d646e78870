"""Which kernels may run on GPUs, for a part of a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from .backends import gpu_settings
from .plan import forget_plans


def use_kernels(kernels: str) -> AbstractContextManager[None]:
    """Say which kernels may run on GPUs while this is open, on all threads; the environment variable
    ``FUSEDLAYERS_KERNELS`` says so for the whole process.

    Args:
        kernels: "off" for none of this package: what needs them is left to PyTorch. "rule": matmuls are the vendor's,
            but for what a fixed table says, which is the same everywhere. "tuned", the default: what ``fl.tune`` has
            written down for this device counts first.

    Raises:
        ValueError: another word.

    >>> import torch, fusedlayers as fl
    >>> with fl.use_kernels("off"):
    ...     y = fl.gelu(torch.ones(2))
    """
    return _using(gpu_settings.checked("use_kernels", kernels))


@contextmanager
def _using(wanted: gpu_settings.Kernels) -> Iterator[None]:
    before = gpu_settings.allowed()
    gpu_settings.allow(wanted)
    forget_plans()
    try:
        yield
    finally:
        gpu_settings.allow(before)
        forget_plans()
