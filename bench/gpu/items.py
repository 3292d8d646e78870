"""What ``gpu-check`` looks at in processes of its own: items, each a list of cases.

A process of an item prints a line of JSON when a case begins and one when it has ended, so that the parent knows which
one hangs or crashes. Here is the machine; ``models.py`` has the rest.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedlayers.calls import sizes

from .. import machine
from . import fake

#: In the environment of the processes: "fake" or "real", as the driver is.
GPU = "BENCH_GPU"
Findings = dict[str, Any]


class Case(NamedTuple):
    id: str
    #: What it finds beside that it passes, if anything.
    run: Callable[[], Findings | None]


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
            state: dict[str, Any] = {"state": "passed", **(found or {})}
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
