"""What a call launches on a GPU, counted without one: a Triton driver that compiles for Hopper and launches nothing.

Tensors lie on the CPU, and their values are whatever memory holds: this counts launches, the operators of torch around
them, and the bytes that a launch gets beside its arguments. It needs a process in which Triton is not interpreted:

    python tests/fake_driver.py

prints, for each call of ``test_launches.py``, a JSON object of forward and backward.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1]))

import fusedlayers as fl


class Launch(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    #: The storages that it is given, and their bytes.
    storages: dict[int, int]


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
            self.launches.append(Launch(name, (x, y, z), {s.data_ptr(): s.nbytes() for s in storages}))

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

    def fill_tma_descriptor_tiled(self, *_arguments: Any) -> object:
        return object()


class Operators(TorchDispatchMode):
    """Counts the operators that compute something: on a GPU each launches a kernel, some of them several."""

    #: These make views, or memory that nobody writes, or compute nothing on a device.
    FREE = re.compile(
        "(_unsafe_)?view(_as)?|t|transpose|permute|expand|slice|select|(un)?squeeze|as_strided|alias|detach|split|unbind"
        "|chunk|reshape|lift_fresh|(new_)?empty(_like|_strided)?|promote_types"
    )

    def __init__(self) -> None:
        super().__init__()
        self.counted: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not self.FREE.fullmatch(name):
            self.counted[name] += 1
        return function(*args, **(kwargs or {}))


def install() -> FakeDriver:
    """Let all calls of this process run by Triton, on the fake device."""
    from triton.runtime import driver

    from fusedlayers import backends, plan
    from fusedlayers.backends import triton

    fake = FakeDriver()
    driver.set_active(fake)
    plan.SMALL_BYTES = plan.MEDIUM_BYTES = 0
    backends.choose = lambda tensor, activation=None: triton  # type: ignore[assignment]
    return fake


@contextlib.contextmanager
def matmuls(with_epilogues: bool) -> Iterator[None]:
    """Who multiplies, which on a GPU is measured: kernels with the activation as their epilogue, or the library."""
    from fusedlayers.backends.triton import dispatch, gemm

    tilings, choose = gemm.tilings, dispatch.choose
    gemm.tilings = lambda device, itemsize: {str(t): t for t in gemm.TILINGS["9"].get(itemsize, ())}  # type: ignore[assignment]
    dispatch.choose = lambda question, device, job: job.candidates[-1 if with_epilogues else 0]
    try:
        yield
    finally:
        gemm.tilings, dispatch.choose = tilings, choose


def counted(fake: FakeDriver, call: Callable[[], Any], known: list[Tensor]) -> dict[str, Any]:
    """What a call launches: kernels of Triton, operators of torch, and the most bytes that a launch is given beside
    ``known`` tensors and the results."""
    fake.launches.clear()
    with Operators() as operators:
        results = call()
    results = [results] if isinstance(results, Tensor) else [t for t in results if t is not None]
    theirs = {t.untyped_storage().data_ptr() for t in (*known, *results)}
    scratch = [sum(size for at, size in launch.storages.items() if at not in theirs) for launch in fake.launches]
    return {
        "kernels": dict(collections.Counter(launch.kernel for launch in fake.launches)),
        "operators": dict(operators.counted),
        "scratch_bytes": max(scratch, default=0),
    }


ROWS, WIDTH = 8192, 1024


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def _dense(**options: Any) -> tuple[Callable[..., Tensor], list[Tensor]]:
    return (
        lambda x, w, b: fl.dense_bias_act(x, w, b, **options),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,)),
    )


class Swish(torch.nn.Module):
    """Reads a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.beta * z)


#: Name -> a call and its tensors.
CALLS: dict[str, Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]] = {
    "dense gelu": lambda: _dense(activation="gelu"),
    "dense relu": lambda: _dense(activation="relu"),
    "bias_act": lambda: (lambda x, b: fl.bias_act(x, b, "gelu"), _tensors((ROWS, WIDTH), (WIDTH,))),
    "gelu": lambda: (fl.gelu, _tensors((ROWS, WIDTH))),
    "scalar parameter": lambda: (partial(fl.bias_act, bias=None, activation=Swish()), _tensors((ROWS, WIDTH))),
    "mlp": lambda: (
        lambda x, w1, b1, w2, b2: fl.mlp(x, w1, b1, w2, b2, "gelu"),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,), (256, WIDTH), (256,)),
    ),
    "mlp, one chunk": lambda: (
        lambda x, w1, b1, w2, b2: fl.mlp(x, w1, b1, w2, b2, "gelu", chunks=1),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH,), (256, WIDTH), (256,)),
    ),
    "gated mlp": lambda: (
        lambda x, g, u, d: fl.gated_mlp(x, g, None, u, None, d, None, "silu"),
        _tensors((ROWS, 256), (WIDTH, 256), (WIDTH, 256), (256, WIDTH)),
    ),
}


def measure() -> dict[str, Any]:
    fake = install()
    found: dict[str, Any] = {}
    for epilogues in (False, True):
        for name, make in CALLS.items():
            call, tensors = make()
            with matmuls(epilogues):
                y = call(*tensors)  # compiles
                dy = torch.zeros_like(y)
                torch.autograd.grad(y, tensors, dy)
                made: list[Tensor] = []
                forward = counted(fake, lambda: made.append(call(*tensors)) or made[0], tensors)  # noqa: B023
                y = made.pop()
                backward = counted(fake, lambda: torch.autograd.grad(y, tensors, dy), [*tensors, y, dy])  # noqa: B023
            found[f"{name}, epilogues" if epilogues else name] = {"forward": forward, "backward": backward}
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
