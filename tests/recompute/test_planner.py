"""Plans against all there are: what each keeps is counted here by going through it, storage by storage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from fusedlayers.recompute import segments
from fusedlayers.recompute.child_costs import ChildCosts
from fusedlayers.recompute.recompute import RECOMPUTE, Recompute
from fusedlayers.recompute.segments import BUDGET_STEPS, Plan, Segment, plan_of, plan_within_budget, segments_of_lengths

MODES: list[tuple[Recompute, ...]] = [("nothing", "all"), ("nothing", "cheap"), RECOMPUTE]
#: Of sizes: a few, so that plans tie, and many.
LARGEST = (3, 1000)

Storages = dict[tuple[str, int], int]


def children(seed: int) -> list[ChildCosts]:
    draw = random.Random(seed)
    largest = LARGEST[seed % len(LARGEST)]

    def size() -> int:
        return draw.choice((0, draw.randint(1, largest)))

    found = []
    for _ in range(draw.randint(1, 5)):
        saved, products = size(), size()
        between = draw.uniform(0, 10)
        found.append(
            ChildCosts(
                input_bytes=draw.randint(1, largest),
                saved_bytes=saved,
                saves_input=draw.random() < 0.5,
                saves_output=draw.random() < 0.5,
                product_bytes=products,
                saved_product_bytes=min(saved, products) if draw.random() < 0.5 else 0,
                output_is_product=draw.random() < 0.5,
                cost=between + draw.uniform(0, 100),
                cost_without_products=between,
            )
        )
    return found


def saved_by(sequence: Sequence[ChildCosts], k: int) -> Storages:
    child = sequence[k]
    found = {("product", k): child.saved_product_bytes, ("inside", k): child.saved_bytes - child.saved_product_bytes}
    if child.saves_input:
        found |= edge(sequence, k)
    return found | (edge(sequence, k + 1) if child.saves_output else {})


def products_of(sequence: Sequence[ChildCosts], k: int) -> Storages:
    child = sequence[k]
    found = {("product", k): child.saved_product_bytes, ("other product", k): child.product_bytes}
    found["other product", k] -= child.saved_product_bytes
    return found | (edge(sequence, k + 1) if child.output_is_product else {})


def edge(sequence: Sequence[ChildCosts], k: int) -> Storages:
    """Between two children; the sequence's own input and output are their owner's."""
    return {("edge", k): sequence[k].input_bytes} if 0 < k < len(sequence) else {}


def followed(sequence: Sequence[ChildCosts], segments: Sequence[Segment]) -> tuple[int, int, float]:
    """What a plan keeps, its worst moment, and its cost."""
    kept: Storages = {}
    peak, cost = 0, 0.0
    for start, stop, mode in segments:
        inside: Storages = {}
        for k in range(start, stop):
            inside |= saved_by(sequence, k)
            cost += {"all": sequence[k].cost, "cheap": sequence[k].cost_without_products, "nothing": 0.0}[mode]
            if mode == "cheap":
                kept |= products_of(sequence, k)
        kept |= inside if mode == "nothing" else edge(sequence, start)
        peak = max(peak, sum((kept | inside).values()))
    return sum(kept.values()), peak, cost


def all_plans(start: int, stop: int, modes: Sequence[Recompute]) -> Iterator[tuple[Segment, ...]]:
    if start == stop:
        yield ()
        return
    for mode in modes:
        for end in [start + 1] if mode == "nothing" else range(start + 1, stop + 1):
            for others in all_plans(end, stop, modes):
                yield (Segment(start, end, mode), *others)


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    if count == 0:
        yield ()
    for first in range(1, count + 1):
        for others in compositions(count - first):
            yield (first, *others)


def agrees(found: Plan, sequence: Sequence[ChildCosts]) -> None:
    kept, peak, cost = followed(sequence, found.segments)
    assert (found.saved_bytes, found.peak_bytes) == (kept, peak)
    total = sum(child.cost for child in sequence)
    assert found.recomputed == pytest.approx(cost / total)
    once = [Segment(k, k + 1, "nothing") for k in range(len(sequence))]
    assert found.eager_bytes == followed(sequence, once)[0]


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_keeps_and_costs_what_it_says(seed: int) -> None:
    sequence = children(seed)
    for lengths in compositions(len(sequence)):
        for mode in RECOMPUTE:
            agrees(plan_of(sequence, segments_of_lengths(lengths, mode)), sequence)


@pytest.mark.parametrize("modes", MODES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_within_a_budget_costs_less_and_no_smaller_budget_has_one(
    seed: int, modes: tuple[Recompute, ...]
) -> None:
    sequence = children(seed)
    plans = [followed(sequence, segments)[1:] for segments in all_plans(0, len(sequence), modes)]
    smallest = min(peak for peak, _ in plans)
    found = plan_within_budget(sequence, None, modes)
    agrees(found, sequence)
    resolution = max(1, found.eager_bytes // BUDGET_STEPS)
    assert smallest <= found.peak_bytes < smallest + resolution
    peaks = sorted({peak for peak, _ in plans if peak >= smallest + resolution})
    for budget in [*peaks[:: max(1, len(peaks) // 8)], found.eager_bytes + resolution]:
        cheapest = plan_within_budget(sequence, budget, modes)
        agrees(cheapest, sequence)
        assert cheapest.peak_bytes <= budget
        assert followed(sequence, cheapest.segments)[2] == pytest.approx(min(c for p, c in plans if p <= budget))


@pytest.mark.parametrize("seed", [0, 1, *range(3, 12)])  # the children of 2 save nothing
def test_a_budget_that_no_plan_fits_in_is_refused_with_one_that_does(seed: int) -> None:
    sequence = children(seed)
    smallest = min(followed(sequence, segments)[1] for segments in all_plans(0, len(sequence), RECOMPUTE))
    with pytest.raises(ValueError, match=r"is less than any plan needs: these \d+ children save") as raised:
        plan_within_budget(sequence, smallest - 1, RECOMPUTE)
    named = int(str(raised.value).split("(")[1].split()[0])
    assert plan_within_budget(sequence, named, RECOMPUTE).peak_bytes <= named


def test_the_last_of_segments_given_by_length_runs_once() -> None:
    assert segments_of_lengths([3, 2, 2], "cheap") == ((0, 3, "cheap"), (3, 5, "cheap"), (5, 7, "nothing"))


def test_many_children_are_planned_within_their_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all states are gone on with then."""
    sequence = [child for seed in range(20) for child in children(seed)][:40]
    eager = plan_within_budget(sequence, 10**9, RECOMPUTE).eager_bytes
    plans = []
    for states in (1, segments.MAX_STATES):
        monkeypatch.setattr(segments, "MAX_STATES", states)
        plans.append(plan_within_budget(sequence, eager // 2, RECOMPUTE))
        agrees(plans[-1], sequence)
        assert plans[-1].peak_bytes <= eager // 2
    assert plans[1].recomputed <= plans[0].recomputed < 1
