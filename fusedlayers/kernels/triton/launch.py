"""Launches that cost the host little: what Triton works out at every call is kept for the next one.

Triton binds the arguments, specialises them, and looks the compiled kernel up: on the machine on which a bare
autograd.Function takes 31 us that is 75 us. A ``Launch`` is a kernel with all its arguments but the tensors. Its first
call goes through Triton, and later calls give their tensors to the compiled kernel.

That is right where tensors have the dtypes of the first call, which is up to who keeps the ``Launch``, and addresses
that are multiples of 16, of which Triton makes use. Others go through Triton, and so does everything on AMD's GPUs,
where Triton also looks at the extents of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.knobs import runtime
from triton.runtime import driver

from ...utils.caching import in_clean_state

_NOTHING = nullcontext()


class Launch:
    """A launch but for its tensors, which are the kernel's first arguments; then come numbers, then constants."""

    __slots__ = ("_compiled", "_constants", "_grid", "_kernel", "_numbers", "_tail")

    def __init__(self, kernel: Any, grid: Sequence[int], numbers: Sequence[Any], constants: dict[str, Any]) -> None:
        self._kernel, self._numbers, self._constants = kernel, tuple(numbers), constants
        self._grid = (*grid, 1, 1)[:3]
        self._tail = (*self._numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current device, which must be the tensors'."""
        is_aligned = True
        for tensor in tensors:
            if tensor.data_ptr() & 15:
                is_aligned = False
                break
        compiled = self._compiled
        if compiled is not None and is_aligned and not (_is_hooked("enter") or _is_hooked("exit")):
            # What ``compiled[grid](...)`` does, less what is for hooks.
            active = driver.active
            stream = active.get_current_stream(active.get_current_device())
            function, metadata = compiled.function, compiled.packed_metadata
            compiled.run(*self._grid, stream, function, metadata, None, None, None, *tensors, *self._tail)
            return
        try:
            compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
        except Exception as error:
            error.add_note("With FUSEDLAYERS_KERNELS=off in the environment PyTorch computes without Triton's kernels.")
            raise
        if is_aligned and isinstance(compiled, CompiledKernel) and torch.version.hip is None:
            self._compiled = compiled


def _is_hooked(which: str) -> bool:
    """Whether somebody, a profiler say, looks at each launch."""
    hook = getattr(runtime, f"launch_{which}_hook")
    return hook is not None and bool(getattr(hook, "calls", True))


@triton.jit
def one_kernel(out_ptr):
    """The least that a GPU can run."""
    tl.store(out_ptr, 1.0)


@in_clean_state
def missing_because() -> str | None:
    """Why no kernel can run here, or None. One is compiled and launched: a driver that is not there, a GPU that Triton
    does not know, or a C compiler that its launcher lacks shows then, and not in the middle of a training."""
    try:
        driver.active.get_current_target()
        one_kernel[(1,)](torch.empty(1, device="cuda"))
    except Exception as error:  # of whatever kind
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return None


def on(tensor: Tensor) -> Any:
    """Triton launches on the current device, which need not be the tensor's. (Interpreted tensors lie on none.)"""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device_of(tensor)


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up: ``triton.cdiv`` takes 10 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The next power of 2: ``triton.next_power_of_2`` takes as long."""
    return 1 << (n - 1).bit_length()
