"""Several processes on this machine that form a process group."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import settings
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What waits for a process that does something else waits for ever. The tests take a tenth of it.
TIMEOUT_S = 300

Work = Callable[[int, int], Any]


def results(work: Work, count: int, folder: Path, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What ``work(rank, count)`` returns in each of ``count`` processes, which meet in an empty folder."""
    started = mp.spawn(_in_process, (work, count, str(folder)), count, join=False)
    end = time.monotonic() + timeout_s
    while not started.join(timeout=max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            for process in started.processes:
                process.kill()
            pytest.fail(f"{count} processes were not done after {timeout_s} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _in_process(rank: int, work: Work, count: int, folder: str) -> None:
    torch.set_num_threads(1)  # tests/conftest.py says why
    settings.fuse_little()
    settings.seed(os.environ["PYTEST_CURRENT_TEST"])
    warnings.filterwarnings("error", module=r"fusedlayers\.")  # pytest sees none of this process's
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    torch.save(work(rank, count), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
