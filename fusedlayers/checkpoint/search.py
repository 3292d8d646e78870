"""Of ways to run a sequence, the one of least cost within a number of bytes.

A step runs one or several neighbours in some way. It saves bytes until its backward pass, in which it holds further
ones; what belonged to later steps is gone by then.

Dynamic programming over (bytes saved so far, cost so far): states that are no better than another one in both are
dropped. The time is quadratic in the length of the sequence for each state, where steps may join neighbours. Of long
sequences not all states are continued, so that what is found may cost more than the best; it still fits the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

#: How finely the smallest budget is searched for: in steps of this part of the most that may be saved.
BUDGET_STEPS = 1024
#: How many states are continued, all together; a few neighbours have as many as they need.
MAX_STATES = 4096


class Option(NamedTuple):
    """A step that ends before ``stop``.

    Attributes:
        saved: bytes that it saves besides its input.
        extra: bytes that it holds in addition in its backward pass.
        cost: of it.
        saves_output: whether its output is among what is saved.
    """

    stop: int
    saved: int
    extra: int
    cost: float
    saves_output: bool


class Choices(Protocol):
    """The ways to run a sequence."""

    def __len__(self) -> int: ...

    def most_bytes(self) -> int:
        """What the way that saves most holds."""
        ...

    def edge(self, i: int) -> int:
        """Bytes of the input of i, which i - 1 has made."""
        ...

    def options(self, i: int) -> Iterable[tuple[Any, int, Sequence[Option]]]:
        """For steps that begin with i, by mode: what they save of their input, and the options, of which each holds
        more than those before it."""
        ...


class Segment(NamedTuple):
    """A step from ``start`` to before ``stop``."""

    start: int
    stop: int
    recompute: Any


class State(NamedTuple):
    """A way to run the first of the sequence: bytes saved, cost, whether the last output is among what is saved, the
    worst moment, the last step, and the state before it."""

    saved: int
    cost: float
    saves_output: bool
    peak: int
    segment: Segment | None = None
    before: State | None = None

    def after(self, segment: Segment, option: Option, edge: int, input_bytes: int) -> State:
        saved = self.saved + (edge if self.saves_output else input_bytes) + option.saved
        peak = max(self.peak, saved + option.extra)
        return State(saved, self.cost + option.cost, option.saves_output, peak, segment, self)

    def segments(self) -> tuple[Segment, ...]:
        found = []
        state: State | None = self
        while state is not None and state.segment is not None:
            found.append(state.segment)
            state = state.before
        return tuple(reversed(found))


START = State(0, 0.0, False, 0)


def smallest_budget(choices: Choices) -> int:
    """The smallest budget that there is a way within. To fit, saving less is all that counts, so that one state each
    will do."""
    options = [list(choices.options(i)) for i in range(len(choices))]
    most = choices.most_bytes()
    never = most + 1

    def fits(budget: int) -> bool:
        # The least that can be saved, by whether that includes the last output.
        least = [{False: never, True: never} for _ in range(len(choices) + 1)]
        least[0][False] = 0
        for i in range(len(choices)):
            for saves_input, before in least[i].items():
                for _, input_bytes, found in options[i]:
                    at = before + (choices.edge(i) if saves_input else input_bytes)
                    for stop, saved, extra, _, saves_output in found:
                        if at + saved + extra > budget:
                            break
                        least[stop][saves_output] = min(least[stop][saves_output], at + saved)
        return min(least[-1].values()) < never

    # To a thousandth of the most: nobody needs it closer.
    step = max(1, most // BUDGET_STEPS)
    too_small, enough = -1, -(-most // step)
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if fits(middle * step):
            enough = middle
        else:
            too_small = middle
    return enough * step


def cheapest(choices: Choices, budget: int) -> State:
    """The way of least cost that never holds more than ``budget``, which is no less than ``smallest_budget``."""
    states: list[list[State]] = [[] for _ in range(len(choices) + 1)]
    states[0].append(START)
    for i in range(len(choices)):
        options = list(choices.options(i))
        for state in _pareto_front(states[i], max(8, MAX_STATES // len(choices))):
            for mode, input_bytes, found in options:
                for option in found:
                    following = state.after(Segment(i, option.stop, mode), option, choices.edge(i), input_bytes)
                    if following.peak > budget:
                        break
                    states[option.stop].append(following)
    return min(states[-1], key=lambda state: (state.cost, state.peak))


def _pareto_front(states: list[State], most: int) -> list[State]:
    """Those that no other one beats in both bytes saved and cost, separately by whether the output is saved. Of many,
    some are taken, with the one that saves least among them: if any way fits, one that continues it does."""
    found: list[State] = []
    for saves_output in (False, True):
        front: list[State] = []
        for state in sorted((s for s in states if s.saves_output == saves_output), key=itemgetter(0, 1)):
            if not front or state.cost < front[-1].cost:
                front.append(state)
        last = len(front) - 1
        found += front if last < most else [front[k * last // (most - 1)] for k in range(most)]
    return found
