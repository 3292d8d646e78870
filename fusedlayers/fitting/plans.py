"""The plans of a model: in which way each block is trained, what is saved then, held at the peak, and how long a step
takes. ``checkpoint/search.py`` finds the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..checkpoint.search import START, Option, Segment, State, cheapest, smallest_budget
from .blocks import Block, Mode
from .costs import Costs
from .training import Of

#: How many budgets are tried for the picture.
BUDGETS = 24


@dataclass(frozen=True)
class Plan:
    """A way to train the model.

    Attributes:
        modes: for what lies outside of the blocks, and for each block.
        bytes: saved, or allocated at the peak.
        time_ms: of a step.
    """

    modes: tuple[Mode, ...]
    bytes: int
    time_ms: float


class Rest(NamedTuple):
    """What lies outside of the blocks.

    Attributes:
        saved_bytes, time_ms: by mode; of the bytes those that are saved until the last block's backward pass.
        end_bytes: those that are saved behind the last block.
        extra_bytes: what is held besides what is saved, when the model's last operations run.
    """

    saved_bytes: dict[Mode, int]
    time_ms: dict[Mode, float]
    end_bytes: int
    extra_bytes: int


class Plans:
    """All plans for these blocks (``Choices`` of the search: first the rest, then the blocks, then the model's end)."""

    def __init__(self, blocks: Sequence[Block], costs: Sequence[dict[Mode, Costs]], rest: Rest, of: Of) -> None:
        self._blocks, self._costs, self._rest, self._of = blocks, costs, rest, of
        # Only a block that is called once, from the one before it, shares what it reads with that one.
        self._follows = [False, *(block.follows and block.calls == 1 for block in blocks), False]

    def __len__(self) -> int:
        return len(self._blocks) + 2

    def most_bytes(self) -> int:
        return max(self.of_mode(mode).bytes for mode in ("eager", "all"))

    def edge(self, i: int) -> int:
        """What a block reads of the one before it."""
        if not self._follows[i] or self._blocks[i - 1].shares_input:
            return 0
        return max(costs.input_bytes for costs in self._costs[i - 1].values())

    def options(self, i: int) -> Iterator[tuple[Mode, int, list[Option]]]:
        is_peak = self._of == "peak"
        if i == 0:
            for mode, saved in self._rest.saved_bytes.items():
                yield mode, 0, [Option(1, saved, 0, self._rest.time_ms[mode], False)]
        elif i == len(self) - 1:
            extra = self._rest.extra_bytes if is_peak else 0
            yield "eager", 0, [Option(i + 1, self._rest.end_bytes, extra, 0.0, False)]
        else:
            block, is_followed = self._blocks[i - 1], self._follows[i + 1]
            for mode, costs in self._costs[i - 1].items():
                of_output = 0 if block.shares_output else costs.output_bytes
                saved = block.calls * (costs.saved_bytes + (0 if is_followed else of_output))
                extra = costs.extra_bytes if is_peak else 0
                option = Option(i + 1, saved, extra, block.calls * costs.time_ms, is_followed and of_output > 0)
                yield mode, 0 if block.shares_input else block.calls * costs.input_bytes, [option]

    # --- what is asked of them ----------------------------------------------------------------------------------------

    def smallest(self) -> Plan:
        """The plan of the smallest budget."""
        return self._plan(cheapest(self, smallest_budget(self)))

    def best(self, budget: int) -> Plan:
        """The fastest within a budget that is no smaller."""
        return self._plan(cheapest(self, budget))

    def plan(self, modes: Sequence[Mode], rest: Mode) -> Plan:
        """The plan of these modes; "eager" for blocks that cannot be trained so."""
        state = START
        rest = rest if rest in self._rest.saved_bytes else "eager"
        for i, wanted in enumerate((rest, *modes, "eager")):
            found = {mode: (input_bytes, option) for mode, input_bytes, (option,) in self.options(i)}
            mode = wanted if wanted in found else "eager"
            input_bytes, option = found[mode]
            state = state.after(Segment(i, i + 1, mode), option, self.edge(i), input_bytes)
        return self._plan(state)

    def of_mode(self, mode: Mode) -> Plan:
        """All blocks trained in one way, as far as they can be, and the rest as PyTorch does."""
        return self.plan([mode] * len(self._blocks), "eager")

    def undominated(self) -> list[Plan]:
        """Of plans for many budgets, those that no other is better than, from the smallest to the fastest."""
        least, most = self.smallest().bytes, self.most_bytes()
        tried = {self.best(least + (most - least) * k // BUDGETS) for k in range(BUDGETS + 1)}
        found: list[Plan] = []
        for plan in sorted(tried, key=lambda plan: (plan.bytes, plan.time_ms)):
            if not found or plan.time_ms < found[-1].time_ms:
                found.append(plan)
        return found

    def added_ms(self, i: int, mode: Mode) -> float:
        """How much longer a step takes where block ``i - 1``, or for 0 the rest, is not trained as PyTorch does."""
        times = {mode: option.cost for mode, _, (option,) in self.options(i)}
        return times[mode] - times["eager"]

    @staticmethod
    def _plan(state: State) -> Plan:
        modes = tuple(segment.recompute for segment in state.segments()[:-1])
        return Plan(modes, max(state.peak, state.saved), state.cost)
