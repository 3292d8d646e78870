"""The plans of a model: in which way each block is trained, what is saved then, held at the peak, and how long a step
takes. ``checkpoint/search.py`` finds the best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..checkpoint.search import START, Option, Segment, State, cheapest, smallest_budget
from .blocks import Block, Mode
from .costs import BlockCosts, Costs
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
    """What lies outside of the blocks, trained in one way.

    Attributes:
        saved_bytes: what it saves before the last block's end, and so while the blocks' backward passes run.
        end_bytes: what it saves behind the last block.
        extra_bytes: what is held besides what is saved, when the model's last operations run.
        time_ms: of a step, without the blocks.
    """

    saved_bytes: int
    end_bytes: int
    extra_bytes: int
    time_ms: float


Timed = TypeVar("Timed", Costs, Rest)


class _Choices:
    """The ``Choices`` of the search: first the rest, then the blocks, then the model's end."""

    def __init__(
        self, blocks: Sequence[Block], costs: Sequence[dict[Mode, Costs]], mode: Mode, rest: Rest, of: Of
    ) -> None:
        self._blocks, self._costs, self._mode, self._rest, self._is_peak = blocks, costs, mode, rest, of == "peak"
        # Only a block that is called once shares what it reads with the one before it, if that is called once too.
        self._follows = [False] * (len(blocks) + 2)
        for i, (before, block) in enumerate(itertools.pairwise(blocks), 2):
            self._follows[i] = block.follows is before and before.calls == block.calls == 1
        self.smallest_budget = smallest_budget(self)

    def __len__(self) -> int:
        return len(self._blocks) + 2

    def most_bytes(self) -> int:
        return max(self.plan([mode] * len(self._blocks)).bytes for mode in ("eager", "all"))

    def edge(self, i: int) -> int:
        """What a block reads of the one before it."""
        if not self._follows[i] or self._blocks[i - 1].shares_input:
            return 0
        return max(costs.input_bytes for costs in self._costs[i - 1].values())

    def options(self, i: int) -> Iterator[tuple[Mode, int, list[Option]]]:
        rest = self._rest
        if i == 0:
            yield self._mode, 0, [Option(1, rest.saved_bytes, 0, rest.time_ms, False)]
        elif i == len(self) - 1:
            yield self._mode, 0, [Option(i + 1, rest.end_bytes, rest.extra_bytes if self._is_peak else 0, 0.0, False)]
        else:
            block, is_followed = self._blocks[i - 1], self._follows[i + 1]
            for mode, costs in self._costs[i - 1].items():
                of_output = 0 if block.shares_output else costs.output_bytes
                saved = block.calls * (costs.saved_bytes + (0 if is_followed else of_output))
                extra = costs.extra_bytes if self._is_peak else 0
                option = Option(i + 1, saved, extra, block.calls * costs.time_ms, is_followed and of_output > 0)
                yield mode, 0 if block.shares_input else block.calls_with_grad * costs.input_bytes, [option]

    def plan(self, modes: Sequence[Mode]) -> Plan:
        """The plan of these modes. A block that cannot be trained so is left to PyTorch, or, where it shares modules
        that keep outputs, trained in the first way that it can be."""
        state = START
        for i, wanted in enumerate((self._mode, *modes, self._mode)):
            found = {mode: (input_bytes, option) for mode, input_bytes, (option,) in self.options(i)}
            mode = next(mode for mode in (wanted, "eager", *found) if mode in found)
            input_bytes, option = found[mode]
            state = state.after(Segment(i, i + 1, mode), option, self.edge(i), input_bytes)
        return _plan_of(state)

    def best(self, budget: int) -> Plan:
        return _plan_of(cheapest(self, budget))


def _plan_of(state: State) -> Plan:
    modes = tuple(segment.recompute for segment in state.segments()[:-1])
    return Plan(modes, max(state.peak, state.saved), state.cost)


def _scaled(found: Timed, factor: float) -> Timed:
    return found._replace(time_ms=factor * found.time_ms)


class Plans:
    """All plans for these blocks.

    Args:
        costs: of each block, by how the rest is trained, and how the block is.
        rests: what lies outside of the blocks, by mode.
    """

    def __init__(self, blocks: Sequence[Block], costs: Sequence[BlockCosts], rests: dict[Mode, Rest], of: Of) -> None:
        self._blocks, self._costs, self._rests, self._of = blocks, costs, rests, of
        self._choices: dict[Mode, _Choices] = {}
        for mode, rest in rests.items():
            beside = [of_block[mode] for of_block in costs]
            if all(beside):  # else there is a block that cannot be trained so
                self._choices[mode] = _Choices(blocks, beside, mode, rest, of)

    def of_modes(self, modes: Collection[Mode]) -> Plans:
        """Those that train blocks, and the rest, in these ways alone."""
        costs = self._costs_by(lambda beside: {mode: found for mode, found in beside.items() if mode in modes})
        rests = {mode: rest for mode, rest in self._rests.items() if mode in modes}
        return Plans(self._blocks, costs, rests, self._of)

    def scaled(self, factor: float) -> Plans:
        """The same on a machine that takes ``factor`` times as long."""
        costs = self._costs_by(lambda beside: {mode: _scaled(cost, factor) for mode, cost in beside.items()})
        return Plans(self._blocks, costs, {m: _scaled(rest, factor) for m, rest in self._rests.items()}, self._of)

    def _costs_by(self, change: Callable[[dict[Mode, Costs]], dict[Mode, Costs]]) -> list[BlockCosts]:
        """The costs of each block, those beside each way to train the rest changed."""
        return [{rest: change(beside) for rest, beside in of_block.items()} for of_block in self._costs]

    @property
    def rests(self) -> list[Mode]:
        """The ways to train the rest that all blocks have a way for."""
        return [*self._choices]

    def smallest(self) -> Plan:
        """The plan of the smallest budget."""
        return min((c.best(c.smallest_budget) for c in self._choices.values()), key=lambda plan: plan.bytes)

    def best(self, budget: int) -> Plan:
        """The fastest within a budget that is no smaller."""
        found = [choices.best(budget) for choices in self._choices.values() if choices.smallest_budget <= budget]
        return min(found or [self.smallest()], key=lambda plan: (plan.time_ms, plan.bytes))

    def plan(self, modes: Sequence[Mode], rest: Mode) -> Plan:
        """The plan of these modes; "eager" for what cannot be trained so."""
        return self._choices[rest if rest in self._choices else "eager"].plan(modes)

    def of_mode(self, mode: Mode, rest: Mode = "eager") -> Plan:
        """All blocks trained in one way, as far as they can be."""
        return self.plan([mode] * len(self._blocks), rest)

    def undominated(self) -> list[Plan]:
        """Of plans for many budgets, those that no other is better than, from the smallest to the fastest."""
        least, most = self.smallest().bytes, max(choices.most_bytes() for choices in self._choices.values())
        tried = {self.best(least + (most - least) * k // BUDGETS) for k in range(BUDGETS + 1)}
        found: list[Plan] = []
        for plan in sorted(tried, key=lambda plan: (plan.bytes, plan.time_ms)):
            if not found or plan.time_ms < found[-1].time_ms:
                found.append(plan)
        return found

    def added_ms(self, plan: Plan) -> list[float]:
        """How much longer a step takes because of the rest, and because of each block, than where PyTorch trains it."""
        of_rest, *modes = plan.modes
        added = [self._rests[of_rest].time_ms - self._rests["eager"].time_ms]
        for block, costs, mode in zip(self._blocks, self._costs, modes, strict=True):
            added.append(block.calls * (costs[of_rest][mode].time_ms - costs["eager"]["eager"].time_ms))
        return added
