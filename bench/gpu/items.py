"""What ``gpu-check`` looks at in processes of its own: items, each a list of cases.

A process of an item prints a line of JSON when a case begins and one when it has ended, so that the parent knows which
one hangs or crashes. Here are the machine and the activations' kernels; ``models.py`` has the rest.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl
from fusedlayers.calls import sizes

from .. import machine, measure
from . import fake

#: In the environment of the processes: "fake" or "real", as the driver is.
GPU = "BENCH_GPU"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "elu": F.elu}
ROWS, COLUMNS = 1027, 1000
#: How often a kernel has to compute the same bits.
REPEATS = 50
#: y is rounded to its dtype, and so is the derivative that it tells: relative errors beside twice eager's.
FLOORS = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Findings = dict[str, Any]


class Case(NamedTuple):
    id: str
    run: Callable[[], Findings]


class Wrong(Exception):
    """Results are not what they should be."""


def prepare() -> None:
    """Install the fake driver if it is asked for, before anything is launched. What is looked at are the kernels, also
    where a layer would be left to PyTorch."""
    sizes.GPU_BYTES = 0
    if is_fake():
        fake.install()


def is_fake() -> bool:
    return os.environ.get(GPU) == "fake"


def device() -> torch.device:
    return torch.device("cpu" if is_fake() else "cuda")


def run_item(name: str, cases: Iterable[Case], done: Sequence[str]) -> int:
    """Run the cases of an item that are not done, and print what came of each."""
    failed = 0
    for case in cases:
        if case.id in done:
            continue
        _say(item=name, case=case.id, state="begins")
        start = time.monotonic()
        try:
            found = case.run()
            if not is_fake():
                torch.cuda.synchronize()
            state: dict[str, Any] = {"state": "passed", **found}
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {str(error)[:500]}"
            state = {"state": "failed", "error": message, "at": f"{os.path.basename(where.filename)}:{where.lineno}"}
        _say(item=name, case=case.id, seconds=round(time.monotonic() - start, 3), **state)
    return 1 if failed else 0


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device())


# --- the machine ------------------------------------------------------------------------------------------------------


def environment() -> Iterator[Case]:
    yield Case("versions", _versions)


def _versions() -> Findings:
    found = machine.describe(device())
    if not is_fake():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "capability": f"{properties.major}.{properties.minor}",
            "bytes": properties.total_memory,
            "free_bytes": torch.cuda.mem_get_info()[0],
            "processors": properties.multi_processor_count,
        }
    return found


# --- the kernels of activations, beside float64 and torch -------------------------------------------------------------


def kernels() -> Iterator[Case]:
    for dtype in DTYPES:
        for save in ("output", "input"):
            for name in ACTIVATIONS:
                run = partial(_check_activation, name, save, dtype)
                yield Case(f"{name}, save={save}, {str(dtype).removeprefix('torch.')}", run)


def _check_activation(name: str, save: str, dtype: torch.dtype) -> Findings:
    """The output and the gradients of z and b."""
    z = normal(ROWS, COLUMNS, dtype=dtype, scale=3.0)
    b, dy = normal(COLUMNS, dtype=dtype, seed=1), normal(ROWS, COLUMNS, dtype=dtype, seed=2)
    function = ACTIVATIONS[name]

    def results(call: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (z.detach(), b.detach())]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    def ours() -> list[Tensor]:
        return results(lambda z, b: fl.bias_act(z, b, name, save=save))

    found = ours()
    if is_fake():
        return {}
    for _ in range(REPEATS):
        measure.expect_same(ours(), found, 0.0)
    torchs, exact = results(lambda z, b: function(z + b)), results(lambda z, b: function(z + b), torch.float64)
    floors = [0.0, *[FLOORS[dtype] if save == "output" else 0.0] * 2]
    compared = zip(("y", "dz", "db"), found, torchs, exact, floors, strict=True)
    return {what: compare(our, theirs, right, floor) for what, our, theirs, right, floor in compared}


def compare(ours: Tensor, torchs: Tensor, exact: Tensor, floor: float) -> Findings:
    """The errors of both, relative to the norm; ours may be twice torch's, or ``floor``."""
    norm = float(exact.norm())
    error, torchs_error = (float((t.double() - exact).norm()) / norm for t in (ours, torchs))
    if not error <= 2 * torchs_error + floor + 1e-6:
        raise Wrong(f"errs by {error:.2e} of the norm, torch by {torchs_error:.2e}, and {floor:.0e} is allowed")
    return {"error": error, "torchs_error": torchs_error}
