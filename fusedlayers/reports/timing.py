"""How long a training step takes, for variants of a model that take turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from operator import truediv

import torch
from torch import Tensor

from ..utils.module_state import isolated_gradients
from ..utils.progress import OnStage
from .step import Step

#: Each time is of so many steps, after one that is not timed. The variants take turns, so that a busy machine slows all
#: of them.
ROUNDS = 7


def step_times(
    step: Step, variants: Sequence[Callable[[], None]], restore_random_state: Callable[[], None]
) -> list[float]:
    """The milliseconds of forward and backward, for each of the ``variants``: functions that make the model one."""
    modules = step.model.modules() if isinstance(step.model, torch.nn.Module) else ()
    leaves: list[Tensor] | None = None
    times: list[list[float]] = [[] for _ in variants]
    for number in range(ROUNDS + 1):
        for switch, found in zip(variants, times, strict=True):
            switch()
            leaves = step.trained(step.forward(), modules) if leaves is None else leaves
            restore_random_state()
            time_ms = step_time(step, leaves)
            if number:  # the first step makes plans, and compiles
                found.append(time_ms)
    return medians(times)


def telling(variant: Callable[[], None], on_stage: OnStage) -> Callable[[], None]:
    """The first of the variants; it tells when a round begins."""
    rounds = itertools.count()

    def tell() -> None:
        done = next(rounds)
        on_stage(f"timing steps, round {done + 1}", done / (ROUNDS + 1))
        variant()

    return tell


def medians(times: Sequence[Sequence[float]]) -> list[float]:
    """The median of the first times; of the others that of their ratio to the first in the same round, because how fast
    a machine is changes between rounds."""
    first = times[0]
    return [statistics.median(first) * statistics.median(map(truediv, found, first)) for found in times]


def step_time(step: Step, leaves: Sequence[Tensor]) -> float:
    """The milliseconds of forward and backward. The gradients of these leaves stay as they are."""
    with isolated_gradients(leaves):
        start = now()
        step.run()
        return 1e3 * (now() - start)


def now() -> float:
    """Seconds, when the GPU has done all its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
