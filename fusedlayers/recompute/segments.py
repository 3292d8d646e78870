"""Choose which children of a sequence to recompute, and in which segments: the least work within a number of bytes.

A recomputed segment saves its input. While it is recomputed, everything that its children save is held, besides what
the segments before it have saved; what belonged to later segments is gone by then. Not counted are gradients, and what
operators allocate for themselves.

Among the plans whose peak fits the budget, dynamic programming over (bytes saved so far, cost so far) finds the one of
least cost: states that are no better than another one in both are dropped. The time is quadratic in the length of the
sequence for each state. Of long sequences not all states are continued, so that what is found may cost more than the
best; it still fits the budget. Without a budget, the smallest one that any plan fits in is used (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost", for children of any size).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from ..calls.validation import is_whole
from ..utils.formatting import size_from, size_text
from .child_costs import ChildCosts
from .recompute import Recompute

#: How finely the smallest budget is searched for: in steps of this part of the most that may be saved.
BUDGET_STEPS = 1024
#: How many states are continued, all together; a few neighbours have as many as they need.
MAX_STATES = 4096


class Segment(NamedTuple):
    """The children from ``start`` to before ``stop``, and how they run."""

    start: int
    stop: int
    recompute: Recompute


@dataclass(frozen=True)
class Plan:
    """The segments of a ``SublinearSequential``, and their bytes and cost.

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


def budget_from(function: str, memory_budget_bytes: object) -> int:
    """The bytes that a number, or a size such as "8GiB", says.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(memory_budget_bytes, str):
        try:
            return size_from(memory_budget_bytes)
        except ValueError as error:
            raise ValueError(f"{function}: memory_budget_bytes: {error}") from None
    if not is_whole(memory_budget_bytes) or memory_budget_bytes < 0:
        raise ValueError(
            f'{function}: memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got '
            f"{memory_budget_bytes!r}"
        )
    return int(memory_budget_bytes)


def plan_within_budget(children: Sequence[ChildCosts], budget: int | None, modes: Sequence[Recompute]) -> Plan:
    """The plan that recomputes least, of those that hold at most ``budget`` bytes at any moment. Without a budget, the
    smallest one that a plan fits in.

    Raises:
        ValueError: no plan is that small.
    """
    steps = [[_steps(children, i, mode) for mode in modes] for i in range(len(children))]
    eager_bytes = _steps(children, 0, "all")[-1].extra
    # To a thousandth of the most: nobody needs it closer. Saving less is all that counts for a fit.
    unit = max(1, eager_bytes // BUDGET_STEPS)
    multiples = range(-(-eager_bytes // unit))
    smallest = unit * bisect_left(multiples, True, key=lambda k: bool(_search(children, steps, k * unit, 1)))
    if budget is None:
        budget = smallest
    elif budget < smallest:
        raise ValueError(
            f"memory_budget_bytes={budget} is less than any plan needs: these {len(children)} children save "
            f"{size_text(eager_bytes)} without recomputation, and at least {size_text(smallest)} ({smallest} bytes)"
        )
    found = _search(children, steps, budget, max(8, MAX_STATES // len(children)))
    return plan_of(children, min(found, key=lambda state: (state.cost, state.peak)).segments())


def plan_of(children: Sequence[ChildCosts], segments: tuple[Segment, ...]) -> Plan:
    """The bytes and the cost of these segments."""
    state = _State()
    for start, stop, mode in segments:
        # A segment that is not recomputed is as many children that are not.
        for i, j in pairwise(range(start, stop + 1)) if mode == "nothing" else [(start, stop)]:
            state = state.after(_steps(children, i, mode)[j - i - 1], _edge(children, i))
    whole = _steps(children, 0, "all")[-1]
    recomputed = state.cost / whole.cost if whole.cost else 0.0
    return Plan(segments, state.saved, max(state.peak, state.saved), whole.extra, recomputed)


def segments_of_lengths(lengths: Sequence[int], mode: Recompute) -> tuple[Segment, ...]:
    """Segments of so many children each, of which the last is not recomputed: its backward pass comes at once."""
    *others, last = [Segment(start, stop, mode) for start, stop in pairwise([0, *accumulate(lengths)]) if stop > start]
    return (*others, last._replace(recompute="nothing"))


# --- steps: one child, or several that are recomputed together --------------------------------------------------------


class _Step(NamedTuple):
    """A way to run some neighbours: bytes of their input that it saves, further bytes that it saves, those that it
    holds in addition in its backward pass, its cost, and whether its output is among what is saved."""

    segment: Segment
    input_bytes: int
    saved: int
    extra: int
    cost: float
    saves_output: bool


def _edge(children: Sequence[ChildCosts], k: int) -> int:
    """Bytes between the children k - 1 and k. The sequence's own input and output belong to others."""
    return children[k].input_bytes if 0 < k < len(children) else 0


def _steps(children: Sequence[ChildCosts], start: int, mode: Recompute) -> list[_Step]:
    """The steps that begin with this child, each of one child more, and of no fewer bytes than the one before it."""
    if mode == "cheap":
        children = [child.selective or child for child in children]
    first, edge = children[start], _edge(children, start)
    if mode == "nothing":
        segment = Segment(start, start + 1, mode)
        return [_Step(segment, edge * first.saves_input, first.saved_bytes, 0, 0.0, first.saves_output)]
    found = []
    # Bytes that the children save, those of their products' results, and those that are both.
    inside = products = shared = 0
    cost = 0.0
    for k in range(start, len(children)):
        child = children[k]
        if k > start:
            is_product, size = children[k - 1].output_is_product, _edge(children, k)
            is_saved = children[k - 1].saves_output or child.saves_input
            inside, products = inside + size * is_saved, products + size * is_product
            shared += size * (is_saved and is_product)
        inside, products = inside + child.saved_bytes, products + child.product_bytes
        shared += child.saved_product_bytes
        segment, last = Segment(start, k + 1, mode), _edge(children, k + 1)
        if mode == "all":
            cost += child.cost
            found.append(_Step(segment, edge, 0, inside + last * child.saves_output, cost, False))
        else:
            cost += child.cost_without_products
            extra = inside - shared + last * (child.saves_output or child.output_is_product)
            found.append(_Step(segment, edge, products, extra, cost, child.output_is_product))
    return found


class _State(NamedTuple):
    """A way to run the first of the sequence: bytes saved, cost, whether the last output is among what is saved, the
    worst moment, and the segments: a pair of those before the last one, and the last one."""

    saved: int = 0
    cost: float = 0.0
    saves_output: bool = False
    peak: int = 0
    path: Any = None

    def after(self, step: _Step, edge: int) -> _State:
        saved = self.saved + (edge if self.saves_output else step.input_bytes) + step.saved
        peak = max(self.peak, saved + step.extra)
        return _State(saved, self.cost + step.cost, step.saves_output, peak, (self.path, step.segment))

    def segments(self) -> tuple[Segment, ...]:
        found, path = [], self.path
        while path is not None:
            path, segment = path
            found.append(segment)
        return tuple(found[::-1])


# --- the search -------------------------------------------------------------------------------------------------------


def _search(
    children: Sequence[ChildCosts], steps: Sequence[Sequence[Sequence[_Step]]], budget: int, most: int
) -> list[_State]:
    """Ways to run all children that never hold more than ``budget``; of those to run the first ones, ``most`` are
    continued. ``steps``: those that begin with each child, by mode."""
    states: list[list[_State]] = [[] for _ in range(len(children) + 1)]
    states[0].append(_State())
    for i, of_modes in enumerate(steps):
        edge = _edge(children, i)
        for state in _pareto_front(states[i], most):
            for found in of_modes:
                for step in found:
                    following = state.after(step, edge)
                    if following.peak > budget:
                        break
                    states[step.segment.stop].append(following)
    return states[-1]


def _pareto_front(states: list[_State], most: int) -> list[_State]:
    """The plans that no other one beats in both bytes saved and cost, separately by whether the output is saved. Of
    many, some are taken, with the one that saves least among them: if any plan fits, one that continues it does."""
    found: list[_State] = []
    for saves_output in (False, True):
        front: list[_State] = []
        for state in sorted((s for s in states if s.saves_output == saves_output), key=itemgetter(0, 1)):
            if not front or state.cost < front[-1].cost:
                front.append(state)
        last = len(front) - 1
        found += front if last < most else [front[k * last // max(1, most - 1)] for k in range(most)]
    return found
