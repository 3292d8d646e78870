"""How long a training step takes with some of the places fused, for ``fuse(..., dry_run=True)``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..profiling.step import Step, tensors_of

#: Each time is the median of so many steps. The variants take turns, so that a busy machine slows all of them.
ROUNDS = 7


def step_times(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    variants: Sequence[Callable[[], None]],
    restore_random_state: Callable[[], None],
) -> list[float]:
    """The milliseconds of forward and backward, for each of the ``variants``: functions that make the model one. No
    gradient is accumulated."""
    step = Step(model, args, kwargs, function="fuse")
    leaves = [t for t in (*model.parameters(), *tensors_of((args, kwargs))) if t.requires_grad]
    times: list[list[float]] = [[] for _ in variants]
    for number in range(ROUNDS + 1):
        for switch, found in zip(variants, times, strict=True):
            switch()
            restore_random_state()
            start = _now()
            torch.autograd.grad(step.forward(), leaves, allow_unused=True)
            if number:  # the first step makes plans, and compiles
                found.append(_now() - start)
    return [1e3 * statistics.median(found) for found in times]


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
