"""A driver for Triton that compiles for Hopper and launches nothing: what a call launches, and what a GPU will be asked
for, seen without a GPU. Tensors lie on the CPU, and results are whatever memory holds.

Triton decides as it is imported whether kernels are interpreted: the process must not have ``TRITON_INTERPRET`` set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    #: The storages that it is given, and their bytes.
    storages: dict[int, int]
    #: What it is given, in order; of tensors and functions only their type.
    numbers: tuple[Any, ...] = ()


class FakeDriver:
    """What Triton asks of a driver, for an H100 that is not there."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.launches: list[Launch] = []
        self.utils = _Utils()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        name = metadata.name if hasattr(metadata, "name") else metadata["name"]

        def launch(x: int, y: int, z: int, *arguments: Any, **_options: Any) -> None:
            storages = [t.untyped_storage() for t in arguments if isinstance(t, Tensor)]
            # The first six are the stream, the function, what Triton knows of both, and its hooks.
            numbers = tuple(
                a if isinstance(a, bool | int | float | str | tuple) else type(a).__name__ for a in arguments[6:]
            )
            self.launches.append(Launch(name, (x, y, z), {s.data_ptr(): s.nbytes() for s in storages}, numbers))

        return launch

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


class _Utils:
    def load_binary(self, *_arguments: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024  # the module, the function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "max_num_regs": 65536,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def unload_module(self, *_arguments: Any) -> None: ...


def install() -> FakeDriver:
    """Let all calls of this process run by Triton, on the fake device; the library multiplies."""
    from triton.runtime import driver

    from fusedlayers import kernels
    from fusedlayers.calls import sizes
    from fusedlayers.kernels import triton

    fake = FakeDriver()
    driver.set_active(fake)
    sizes.SMALL_BYTES = sizes.MEDIUM_BYTES = 0
    kernels.choose = lambda tensor, activation=None: triton
    return fake
