"""Plans: which blocks are saved once and which are recomputed, by what each kind of blocks costs.

Where all blocks are recomputed a model takes least. A block that is saved once takes more bytes, and its forward pass
runs once less. Blocks are saved in the order of milliseconds per byte, as long as the budget holds: greedy, and so at
most one block from the best. Of alike blocks the last ones are saved: at the peak, where backward begins, a recomputed
last block holds as much as a saved one, and early ones are recomputed when the others are freed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import NamedTuple

from ..reports.timing import now
from .blocks import Block, Blocks
from .training import Measurement, Of, Training, everyone

#: Predicted bytes are corrected by those that were measured, so often.
TRIES = 5


class Cost(NamedTuple):
    """How many more bytes are saved where a block is not recomputed, and the time of its recomputation."""

    bytes: int
    time_ms: float


class Plan(NamedTuple):
    """The blocks that are saved once, and what that takes, as predicted."""

    saved: frozenset[Block]
    found: Measurement


class Plans:
    """All plans for blocks with these costs, in the order of their calls. ``least``: the one that recomputes all."""

    def __init__(self, costs: Mapping[Block, Cost], least: Measurement, of: Of) -> None:
        self._costs, self.least, self._of = costs, least, of
        per_byte = {block: ms / size if size > 0 else math.inf for block, (size, ms) in costs.items()}
        self._order = sorted(costs, key=lambda block: per_byte[block])[::-1]  # the last of alike blocks first

    def _plan(self, saved: Collection[Block]) -> Plan:
        more = self._held(saved) - self._held(())
        faster_ms = sum(self._costs[block].time_ms for block in saved)
        return Plan(frozenset(saved), Measurement(self.least.bytes + more, self.least.time_ms - faster_ms))

    def _held(self, saved: Collection[Block]) -> int:
        """The bytes of blocks. The backward pass of each holds all of its own, and those of blocks before it that are
        saved once."""
        total = most = 0
        for block, cost in self._costs.items():
            most = max(most, total + cost.bytes)
            total += cost.bytes if block in saved else 0
        return total if self._of == "saved" else most

    def best(self, budget: int) -> Plan:
        """The fastest within a budget; the smallest where none is within it."""
        plan = self._plan(())
        for block in self._order:
            more = self._plan({*plan.saved, block})
            plan = more if more.found.bytes <= budget else plan
        return plan

    def within(self, budget: int, bytes_with: Callable[[Collection[Block]], int]) -> tuple[Plan, int]:
        """The fastest of the plans tried whose bytes, as measured, keep to a budget, which the smallest does."""
        tried = {self._plan(()): self.least.bytes}
        allowed = budget
        for _ in range(TRIES):
            plan = self.best(allowed)
            if plan not in tried:
                tried[plan] = bytes_with(plan.saved)
            allowed = budget - (tried[plan] - plan.found.bytes)
        plan = min((plan for plan, size in tried.items() if size <= budget), key=lambda plan: plan.found.time_ms)
        return plan, tried[plan]


def measured(blocks: Blocks, training: Training, least: int, recompute_all: Callable[[], None]) -> Plans:
    """The plans, by a few steps that recompute all blocks, and by the bytes of one block of each kind saved once."""
    calls_ms: dict[int, list[float]] = defaultdict(list)
    began: list[float] = []

    def leave(block: Block, *_: object) -> None:
        calls_ms[block.kind].append(1e3 * (now() - began.pop()))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(lambda *_: began.append(now())).remove)
            stack.callback(block.module.register_forward_hook(partial(leave, block)).remove)
        (least_ms,) = training.together(lambda: training.times_ms([recompute_all]))[0]
    saved: dict[int | None, int] = {}
    of_kind: dict[int | None, list[Block]] = {None: [], **{block.kind: [block] for block in blocks}}
    for kind, kept in of_kind.items():
        blocks.save(kept)
        saved[kind] = max(training.together(training.saved))
    costs = [Cost(saved[b.kind] - saved[None], b.calls * median(calls_ms[b.kind])) for b in blocks]
    return Plans(dict(zip(blocks, everyone(costs)[0], strict=True)), Measurement(least, least_ms), training.of)
