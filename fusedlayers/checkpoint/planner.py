"""Which children of a sequence to run again, and together with which: the fewest that a number of bytes allows.

A segment of children that runs again keeps its input, and while it does, all that its children keep, beside what the
segments before it have kept; those behind it are gone by then. Of the plans whose worst moment fits, that of the least
cost is found by dynamic programming over (bytes kept so far, cost), of which those that are no better than others in
both are dropped. Without a number of bytes the smallest that any plan needs is taken.

Not counted are gradients, and what an operator takes for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from ..utils.formatting import size_text
from .measurement import ChildCosts
from .recompute import Recompute

#: How finely the smallest plan is looked for: in such parts of what is kept if nothing runs again.
BUDGET_STEPS = 1024
#: How many states are gone on with, together; of few children each has as many as there are.
MAX_STATES = 4096


class Segment(NamedTuple):
    """Children from ``start`` to before ``stop``."""

    start: int
    stop: int
    recompute: Recompute


@dataclass(frozen=True)
class Plan:
    """What a ``SublinearSequential`` does.

    Attributes:
        segments: in order; children that run once stand alone.
        saved_bytes: kept from the forward pass.
        peak_bytes: kept at the worst moment, while a segment runs again.
        eager_bytes: kept if nothing ran again.
        recomputed: the part of the forward pass that runs twice, 0 to 1, by arithmetic and bytes moved.
    """

    segments: tuple[Segment, ...]
    saved_bytes: int
    peak_bytes: int
    eager_bytes: int
    recomputed: float

    def __str__(self) -> str:
        again = sum(segment.recompute != "nothing" for segment in self.segments)
        segments = "1 segment" if again == 1 else f"{again} segments"
        count = sum(segment.stop - segment.start for segment in self.segments if segment.recompute != "nothing")
        total = self.segments[-1].stop if self.segments else 0
        return (
            f"{count} of {total} children run again, in {segments}: {size_text(self.saved_bytes)} kept from the "
            f"forward pass, at most {size_text(self.peak_bytes)} in the backward pass, "
            f"{size_text(self.eager_bytes)} if nothing ran again"
        )


def plan_within_budget(children: Sequence[ChildCosts], budget: int | None, modes: Sequence[Recompute]) -> Plan:
    """The plan that recomputes least, of those that keep at most ``budget`` bytes at any moment; without a budget, at
    most what the smallest plan keeps.

    Raises:
        ValueError: no plan is that small.
    """
    sums = _PrefixSums(children)
    smallest = _smallest_budget(sums, modes)
    if budget is None:
        budget = smallest
    elif budget < smallest:
        raise ValueError(
            f"memory_budget_bytes={budget} is less than any plan needs: these {len(children)} children keep "
            f"{sums.eager()} bytes if nothing runs again, and {smallest} at least"
        )
    return _plan(sums, _cheapest_segments(sums, budget, modes))


def plan_balanced(children: Sequence[ChildCosts], count: int, mode: Recompute) -> Plan:
    """So many segments that keep about the same while they run again. The last one runs once: its backward pass
    comes at once."""
    sums = _PrefixSums(children)
    # Of the best split of the first j children: its largest segment, its squares (of splits with an equal largest one
    # the evenest is the best), and its segments' ends, negative: then that of which the last one, which runs once, is
    # the shortest.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for _ in range(min(count, len(children))):
        best = {
            j: min(_longer(best[i], sums.inside(i, j), j) for i in best if i < j)
            for j in range(min(best) + 1, len(children) + 1)
        }
    ends = [-end for end in best[len(children)][2]]
    return plan_of_lengths(children, [b - a for a, b in pairwise([0, *ends])], mode)


def _longer(split: tuple[int, int, list[int]], size: int, end: int) -> tuple[int, int, list[int]]:
    largest, squares, ends = split
    return max(largest, size), squares + size**2, [*ends, -end]


def plan_of_lengths(children: Sequence[ChildCosts], lengths: Sequence[int], mode: Recompute) -> Plan:
    """Segments of so many children each, the last of which runs once."""
    return _plan(_PrefixSums(children), segments_of_lengths(lengths, mode))


def segments_of_lengths(lengths: Sequence[int], mode: Recompute) -> tuple[Segment, ...]:
    stops = list(accumulate(lengths))
    starts = [0, *stops[:-1]]
    found = [Segment(start, stop, mode) for start, stop in zip(starts, stops, strict=True) if stop > start]
    return (*found[:-1], *(Segment(*last[:2], "nothing") for last in found[-1:]))


class _PrefixSums:
    """What runs of children add up to."""

    def __init__(self, children: Sequence[ChildCosts]) -> None:
        self.children = children
        selective = [child.selective or child for child in children]
        #: Where the results of products are kept.
        self._selective = self if selective == list(children) else _PrefixSums(selective)
        n = len(children)
        # What is kept between children, if they run once; the sequence's input is not its own.
        edges = [0] * (n + 1)
        for k in range(1, n):
            if children[k - 1].saves_output or children[k].saves_input:
                edges[k] = children[k].input_bytes
        self._saved = [0, *accumulate(child.saved_bytes for child in children)]
        self._edges = [0, *accumulate(edges)]
        self._cost = [0.0, *accumulate(child.cost for child in children)]
        self._between = [0.0, *accumulate(child.cost_without_products for child in children)]
        self._kept = [0, *accumulate(child.product_bytes for child in children)]
        self._shared = [0, *accumulate(child.saved_product_bytes for child in children)]
        product_edges = [0] * (n + 1)
        shared_edges = [0] * (n + 1)
        for k in range(1, n):
            if children[k - 1].output_is_product:
                product_edges[k] = children[k].input_bytes
                shared_edges[k] = min(edges[k], product_edges[k])
        self._product_edges = [0, *accumulate(product_edges)]
        self._shared_edges = [0, *accumulate(shared_edges)]

    def __len__(self) -> int:
        return len(self.children)

    def edge(self, k: int) -> int:
        """Bytes between the children k - 1 and k; what comes in and goes out is not the sequence's own."""
        return self.children[k].input_bytes if 0 < k < len(self) else 0

    def inside(self, i: int, j: int) -> int:
        """What the children from i to before j keep, without what comes in."""
        edges = self._edges[j] - self._edges[i + 1] if j > i else 0
        last = self.edge(j) if j > i and self.children[j - 1].saves_output else 0
        return self._saved[j] - self._saved[i] + edges + last

    def eager(self) -> int:
        return self.inside(0, len(self))

    def step(self, i: int, j: int, mode: Recompute) -> tuple[int, int, float, bool]:
        """Of a segment: what it keeps besides its input, what it keeps more while it runs again, what that costs, and
        whether its output is kept."""
        if mode == "cheap" and self._selective is not self:
            return self._selective.step(i, j, mode)
        inside = self.inside(i, j)
        if mode == "nothing":
            assert j == i + 1
            child = self.children[i]
            return child.saved_bytes, 0, 0.0, child.saves_output
        if mode == "all":
            return 0, inside, self._cost[j] - self._cost[i], False
        kept = self._kept[j] - self._kept[i] + self._product_edges[j] - self._product_edges[i + 1]
        shared = self._shared[j] - self._shared[i] + self._shared_edges[j] - self._shared_edges[i + 1]
        last = self.children[j - 1]
        if last.output_is_product and not last.saves_output:
            inside += self.edge(j)
        return kept, inside - shared, self._between[j] - self._between[i], last.output_is_product

    def takes_input(self, i: int, mode: Recompute) -> bool:
        return mode != "nothing" or self.children[i].saves_input

    @property
    def cost(self) -> float:
        return self._cost[-1]


class _Option(NamedTuple):
    """What can be done with the children from some one on to before ``stop``: see ``_PrefixSums.step``."""

    stop: int
    kept: int
    more: int
    cost: float
    keeps_output: bool


def _options(sums: _PrefixSums, modes: Sequence[Recompute]) -> list[list[tuple[Recompute, int, list[_Option]]]]:
    """For each child that a segment may begin with, for each mode: the bytes of the segment's input, if it alone keeps
    it, and the options, of which each takes more than those before it."""
    return [
        [
            (
                mode,
                sums.edge(i) if sums.takes_input(i, mode) else 0,
                [
                    _Option(j, *sums.step(i, j, mode))
                    for j in range(i + 1, i + 2 if mode == "nothing" else len(sums) + 1)
                ],
            )
            for mode in modes
        ]
        for i in range(len(sums))
    ]


class _State(NamedTuple):
    """The first children are planned: bytes kept, cost, whether the last output is among what must be kept, the worst
    moment, the last segment, and the state before it."""

    kept: int
    cost: float
    keeps_output: bool
    peak: int
    segment: Segment | None = None
    before: _State | None = None

    def segments(self) -> tuple[Segment, ...]:
        found = []
        state: _State | None = self
        while state is not None and state.segment is not None:
            found.append(state.segment)
            state = state.before
        return tuple(reversed(found))


_START = _State(0, 0.0, False, 0)


def _smallest_budget(sums: _PrefixSums, modes: Sequence[Recompute]) -> int:
    """The least budget that a plan fits in. To fit in it, keeping less is all that counts."""
    options = _options(sums, modes)
    never = sums.eager() + 1

    def fits(budget: int) -> bool:
        # The least that can be kept, by whether that includes the last output.
        least = [{False: never, True: never} for _ in range(len(sums) + 1)]
        least[0][False] = 0
        for i in range(len(sums)):
            for keeps_input, before in least[i].items():
                for _, input_bytes, found in options[i]:
                    at = before + (sums.edge(i) if keeps_input else input_bytes)
                    for stop, kept, more, _, keeps_output in found:
                        if at + kept + more > budget:
                            break
                        least[stop][keeps_output] = min(least[stop][keeps_output], at + kept)
        return min(least[-1].values()) < never

    # To a thousandth of what all keep: nobody needs it closer.
    step = max(1, sums.eager() // BUDGET_STEPS)
    too_small, enough = -1, -(-sums.eager() // step)
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if fits(middle * step):
            enough = middle
        else:
            too_small = middle
    return enough * step


def _cheapest_segments(sums: _PrefixSums, budget: int, modes: Sequence[Recompute]) -> tuple[Segment, ...]:
    states: list[list[_State]] = [[] for _ in range(len(sums) + 1)]
    states[0].append(_START)
    for i, options in enumerate(_options(sums, modes)):
        for state in _pareto_front(states[i], max(8, MAX_STATES // len(sums))):
            for mode, input_bytes, found in options:
                before = state.kept + (sums.edge(i) if state.keeps_output else input_bytes)
                for stop, kept, more, cost, keeps_output in found:
                    at = before + kept
                    peak = at + more
                    if peak > budget:
                        break
                    peak = max(peak, state.peak)
                    states[stop].append(
                        _State(at, state.cost + cost, keeps_output, peak, Segment(i, stop, mode), state)
                    )
    return min(states[-1], key=lambda state: (state.cost, state.peak)).segments()


def _pareto_front(states: list[_State], most: int) -> list[_State]:
    """Those that no other one is better than in both bytes kept and cost, the output being among what is kept or not;
    of many, some, with the one that keeps least among them: if any plan fits, its does."""
    found: list[_State] = []
    for keeps_output in (False, True):
        front: list[_State] = []
        for state in sorted((s for s in states if s.keeps_output == keeps_output), key=itemgetter(0, 1)):
            if not front or state.cost < front[-1].cost:
                front.append(state)
        last = len(front) - 1
        found += front if last < most else [front[k * last // (most - 1)] for k in range(most)]
    return found


def _plan(sums: _PrefixSums, segments: tuple[Segment, ...]) -> Plan:
    state = _START
    for start, stop, mode in segments:
        # A segment that runs once is as many children that do.
        for i, j in [(k, k + 1) for k in range(start, stop)] if mode == "nothing" else [(start, stop)]:
            kept, more, cost, keeps_output = sums.step(i, j, mode)
            at = state.kept + (sums.edge(i) if state.keeps_output or sums.takes_input(i, mode) else 0) + kept
            state = _State(at, state.cost + cost, keeps_output, max(state.peak, at + more))
    recomputed = state.cost / sums.cost if sums.cost else 0.0
    return Plan(segments, state.kept, max(state.peak, state.kept), sums.eager(), recomputed)
