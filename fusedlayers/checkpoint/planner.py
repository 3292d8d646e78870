"""Choose which children of a sequence to recompute, and in which segments: the least work within a number of bytes.

A recomputed segment saves its input. While it is recomputed, everything that its children save is held, besides what
the segments before it have saved; what belonged to later segments is gone by then.

Among the plans whose peak fits the budget, ``search.py`` finds the one of least cost. Without a budget, the smallest
one that any plan fits in is used (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", for children of
any size).

Not counted are gradients, and what operators allocate for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..utils.formatting import size_text
from .measurement import ChildCosts
from .recompute import Recompute
from .search import START, Option, Segment, cheapest, smallest_budget


@dataclass(frozen=True)
class Plan:
    """What a ``SublinearSequential`` does.

    Attributes:
        segments: in order; children that are not recomputed stand alone.
        saved_bytes: saved in the forward pass.
        peak_bytes: held at the worst moment, while a segment is recomputed.
        eager_bytes: saved if nothing were recomputed.
        recomputed: the part of the forward pass that is recomputed, 0 to 1, by arithmetic and bytes moved.
    """

    segments: tuple[Segment, ...]
    saved_bytes: int
    peak_bytes: int
    eager_bytes: int
    recomputed: float

    def __str__(self) -> str:
        lengths = [segment.stop - segment.start for segment in self.segments if segment.recompute != "nothing"]
        segments = "1 segment" if len(lengths) == 1 else f"{len(lengths)} segments"
        total = self.segments[-1].stop if self.segments else 0
        return (
            f"{sum(lengths)} of {total} children are recomputed, in {segments}: {size_text(self.saved_bytes)} saved in "
            f"the forward pass, at most {size_text(self.peak_bytes)} held in the backward pass, "
            f"{size_text(self.eager_bytes)} without recomputation"
        )


def plan_within_budget(children: Sequence[ChildCosts], budget: int | None, modes: Sequence[Recompute]) -> Plan:
    """The plan that recomputes least, of those that hold at most ``budget`` bytes at any moment. Without a budget, the
    smallest one that a plan fits in.

    Raises:
        ValueError: no plan is that small.
    """
    sums = _PrefixSums(children, modes)
    smallest = smallest_budget(sums)
    if budget is None:
        budget = smallest
    elif budget < smallest:
        raise ValueError(
            f"memory_budget_bytes={budget} is less than any plan needs: these {len(children)} children save "
            f"{size_text(sums.most_bytes())} without recomputation, and at least {size_text(smallest)} "
            f"({smallest} bytes)"
        )
    return _plan(sums, cheapest(sums, budget).segments())


def plan_balanced(children: Sequence[ChildCosts], count: int, mode: Recompute) -> Plan:
    """``count`` segments that hold about the same while they are recomputed. The last one is not: its backward pass
    comes at once."""
    sums = _PrefixSums(children)
    # Of the best split of the first j children: its largest segment, its squares (of splits with the same largest one
    # the most even is best), and its segments' ends, negated: then the one whose last segment is the shortest.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for _ in range(min(count, len(children))):
        best = {
            j: min(_with_segment(best[i], sums.inside(i, j), j) for i in best if i < j)
            for j in range(min(best) + 1, len(children) + 1)
        }
    ends = [-end for end in best[len(children)][2]]
    return plan_of_lengths(children, [b - a for a, b in pairwise([0, *ends])], mode)


def _with_segment(split: tuple[int, int, list[int]], size: int, end: int) -> tuple[int, int, list[int]]:
    largest, squares, ends = split
    return max(largest, size), squares + size**2, [*ends, -end]


def plan_of_lengths(children: Sequence[ChildCosts], lengths: Sequence[int], mode: Recompute) -> Plan:
    """Segments of these numbers of children; the last one is not recomputed."""
    return _plan(_PrefixSums(children), segments_of_lengths(lengths, mode))


def segments_of_lengths(lengths: Sequence[int], mode: Recompute) -> tuple[Segment, ...]:
    """Segments of so many children each, of which the last is not recomputed."""
    ends = pairwise([0, *accumulate(lengths)])
    found = [Segment(start, stop, mode) for start, stop in ends if stop > start]
    return (*found[:-1], *(Segment(*last[:2], "nothing") for last in found[-1:]))


class _PrefixSums:
    """What any run of consecutive children adds up to, from sums over the first ones."""

    def __init__(self, children: Sequence[ChildCosts], modes: Sequence[Recompute] = ()) -> None:
        self.children, self._modes = children, modes
        selective = [child.selective or child for child in children]
        #: For segments whose products' results are saved.
        self._selective = self if selective == list(children) else _PrefixSums(selective)
        # Bytes between two children: what is saved there without recomputation, of products' results, and of both. The
        # sequence's own input and output belong to others.
        edges, product_edges, shared_edges = ([0] * (len(children) + 1) for _ in range(3))
        for k in range(1, len(children)):
            size = children[k].input_bytes
            edges[k] = size if children[k - 1].saves_output or children[k].saves_input else 0
            product_edges[k] = size if children[k - 1].output_is_product else 0
            shared_edges[k] = min(edges[k], product_edges[k])
        self._saved = [0, *accumulate(child.saved_bytes for child in children)]
        self._products = [0, *accumulate(child.product_bytes for child in children)]
        self._shared = [0, *accumulate(child.saved_product_bytes for child in children)]
        self._edges, self._product_edges, self._shared_edges = (
            [0, *accumulate(sizes)] for sizes in (edges, product_edges, shared_edges)
        )
        self._cost = [0.0, *accumulate(child.cost for child in children)]
        self._cost_without_products = [0.0, *accumulate(child.cost_without_products for child in children)]

    def __len__(self) -> int:
        return len(self.children)

    def edge(self, k: int) -> int:
        """Bytes between the children k - 1 and k."""
        return self.children[k].input_bytes if 0 < k < len(self) else 0

    def inside(self, i: int, j: int) -> int:
        """What the children from i to before j save, without the input of the first."""
        if j <= i:
            return 0
        last = self.edge(j) if self.children[j - 1].saves_output else 0
        return self._saved[j] - self._saved[i] + self._edges[j] - self._edges[i + 1] + last

    def most_bytes(self) -> int:
        return self.inside(0, len(self))

    def input_bytes(self, i: int, mode: Recompute) -> int:
        """What a segment that begins with i saves of its input."""
        return self.edge(i) if mode != "nothing" or self.children[i].saves_input else 0

    def option(self, i: int, j: int, mode: Recompute) -> Option:
        if mode == "cheap" and self._selective is not self:
            return self._selective.option(i, j, mode)
        last = self.children[j - 1]
        if mode == "nothing":
            assert j == i + 1
            return Option(j, last.saved_bytes, 0, 0.0, last.saves_output)
        inside = self.inside(i, j)
        if mode == "all":
            return Option(j, 0, inside, self._cost[j] - self._cost[i], False)
        saved = self._products[j] - self._products[i] + self._product_edges[j] - self._product_edges[i + 1]
        shared = self._shared[j] - self._shared[i] + self._shared_edges[j] - self._shared_edges[i + 1]
        if last.output_is_product and not last.saves_output:
            inside += self.edge(j)
        cost = self._cost_without_products[j] - self._cost_without_products[i]
        return Option(j, saved, inside - shared, cost, last.output_is_product)

    def options(self, i: int) -> Iterator[tuple[Recompute, int, list[Option]]]:
        for mode in self._modes:
            stops = range(i + 1, i + 2 if mode == "nothing" else len(self) + 1)
            yield mode, self.input_bytes(i, mode), [self.option(i, j, mode) for j in stops]

    @property
    def cost(self) -> float:
        return self._cost[-1]


def _plan(sums: _PrefixSums, segments: tuple[Segment, ...]) -> Plan:
    state = START
    for segment in segments:
        start, stop, mode = segment
        # A segment that is not recomputed is as many children that are not.
        for i, j in pairwise(range(start, stop + 1)) if mode == "nothing" else [(start, stop)]:
            state = state.after(segment, sums.option(i, j, mode), sums.edge(i), sums.input_bytes(i, mode))
    recomputed = state.cost / sums.cost if sums.cost else 0.0
    return Plan(segments, state.saved, max(state.peak, state.saved), sums.most_bytes(), recomputed)
