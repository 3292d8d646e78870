"""A training step that is run again and again: its bytes, its times and its gradients.

In a distributed job all processes follow the first one, because their times differ. A budget is compared with the most
that one of them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ..memory import device_of, peak_bytes, saved_bytes
from ..reports.step import Step, step_times
from ..utils.formatting import first_line
from ..utils.module_state import isolated_gradients
from ..utils.storages import trained_in

#: What a budget counts: bytes that are saved for the backward pass, or the most that is allocated in a step.
Of = Literal["saved", "peak"]
T = TypeVar("T")
COUNTED = {"saved": "saved for backward", "peak": "allocated at the peak"}


@dataclass(frozen=True)
class Measurement:
    """Bytes that count for the budget, and milliseconds of a step."""

    bytes: int
    time_ms: float


class Training:
    """Every run starts with the same random numbers, and leaves gradients as they were."""

    def __init__(self, step: Step, of: Of, reset_random: Callable[[], None]) -> None:
        self.step, self.of, self.reset_random = step, of, reset_random
        self._leaves = trained_in((step.model, step.args, step.kwargs))

    def bytes(self) -> int:
        """The bytes that the budget counts."""
        if self.of == "saved":
            return self.saved()
        self.reset_random()
        with isolated_gradients(self._leaves, zeros=True):
            return peak_bytes(self.step.run, device=device_of((self.step.model, self.step.args, self.step.kwargs)))

    def saved(self) -> int:
        """The bytes that are saved for the backward pass."""
        self.reset_random()
        buffers = self.step.model.buffers() if isinstance(self.step.model, nn.Module) else ()
        return saved_bytes(self.step.forward, exclude=[*buffers, self.step.args, self.step.kwargs])

    def times_ms(self, variants: Sequence[Callable[[], None]]) -> list[float]:
        """Of a step, for each of the functions that make the model another one."""
        return step_times(self.step, variants, self.reset_random)

    def gradients(self) -> list[Tensor | None]:
        """Of all parameters, and of inputs that need one."""
        self.reset_random()
        with isolated_gradients(self._leaves):
            for leaf in self._leaves:
                leaf.grad = None
            self.step.run()
            return [leaf.grad for leaf in self._leaves]


def everyone(value: T) -> list[T]:
    """The values of all processes, on all."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def together(work: Callable[[], T]) -> list[T]:
    """The results of ``work`` in all processes. An error of one is raised in all, so that none waits for it."""
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        problem = error
    found = everyone((result, problem and f"{type(problem).__name__}: {first_line(problem)}"))
    if problem is not None:
        raise problem
    for _, reason in found:
        if reason is not None:
            raise ValueError(f"fit: another process has raised {reason}")
    return [result for result, _ in found]  # type: ignore[misc]  # nobody has raised
