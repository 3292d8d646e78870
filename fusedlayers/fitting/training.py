"""A training step that is run again and again: what it takes, how long, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..memory import count_saved, device_of, peak_bytes
from ..profiling.step import Step
from ..profiling.timing import step_times
from ..utils.module_state import isolated_gradients
from ..utils.storages import trained_in

#: What a budget counts: bytes that are saved for the backward pass, or the most that is allocated in a step.
Of = Literal["saved", "peak"]
#: How far gradients may differ, of their norm. No test of accuracy: a stack of layers carries a difference in the last
#: bit far, and other random numbers are of another order.
SAME, SAME_16_BITS = 1e-2, 1e-1


class Training:
    """Every run starts with the same random numbers, and leaves gradients as they were.

    Attributes:
        refused_hooks: whether saved bytes were counted by the graph alone.
    """

    def __init__(self, step: Step, of: Of, reset_random: Callable[[], None]) -> None:
        self.step, self.of, self.reset_random = step, of, reset_random
        self.refused_hooks = False
        self._leaves = trained_in((step.model, step.args, step.kwargs))

    def bytes(self) -> int:
        """What the budget counts."""
        if self.of == "saved":
            return self.saved()
        self.reset_random()
        return step_peak(self.step, self._leaves)

    def saved(self) -> int:
        self.reset_random()
        buffers = self.step.model.buffers() if isinstance(self.step.model, nn.Module) else ()
        count = count_saved(self.step.forward, exclude=[*buffers, self.step.args, self.step.kwargs])
        self.refused_hooks |= count.refused_hooks
        return count.bytes

    def times_ms(self, variants: Sequence[Callable[[], None]]) -> list[float]:
        """Of a step, for each of the functions that make the model another one."""
        return step_times(self.step, variants, self.reset_random)

    def gradients(self) -> list[Tensor | None]:
        self.reset_random()
        with isolated_gradients(self._leaves):
            for leaf in self._leaves:
                leaf.grad = None
            self.step.run()
            return [leaf.grad for leaf in self._leaves]


def step_peak(step: Step, leaves: Sequence[Tensor]) -> int:
    """The most that a forward and a backward pass have allocated. The gradients of these leaves are there before."""
    with isolated_gradients(leaves, zeros=True):
        return peak_bytes(step.run, device=device_of((step.model, step.args, step.kwargs)))


def are_alike(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether gradients are the same but for rounding."""
    if [grad is None for grad in ours] != [grad is None for grad in theirs]:
        return False
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    if not pairs:
        return True
    norms = torch.stack([b.float().norm().cpu() for _, b in pairs])
    errors = torch.stack([(a - b).float().norm().cpu() for a, b in pairs])
    allowed = SAME_16_BITS if any(b.itemsize < 4 for _, b in pairs) else SAME
    return bool(errors.norm() <= allowed * norms.norm()) or not bool(norms.isfinite().all())
