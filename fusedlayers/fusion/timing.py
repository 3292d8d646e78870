"""How long a training step takes with some of the places fused, for ``fuse(..., dry_run=True)``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ..profiling.step import Step
from ..utils.storages import tensors_in

#: Each time is the median of so many steps. The variants take turns, so that a busy machine slows all of them.
ROUNDS = 7


def step_times(
    step: Step, variants: Sequence[Callable[[], None]], restore_random_state: Callable[[], None]
) -> list[float]:
    """The milliseconds of forward and backward, for each of the ``variants``: functions that make the model one. No
    gradient is accumulated."""
    leaves = [t for t in tensors_in((step.model, step.args, step.kwargs)) if t.requires_grad]
    times: list[list[float]] = [[] for _ in variants]
    for number in range(ROUNDS + 1):
        for switch, found in zip(variants, times, strict=True):
            switch()
            restore_random_state()
            start = now()
            torch.autograd.grad(step.forward(), leaves, allow_unused=True)
            if number:  # the first step makes plans, and compiles
                found.append(now() - start)
    return [1e3 * statistics.median(found) for found in times]


def now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
