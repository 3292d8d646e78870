"""Places of repeated blocks as one group: what it saves and frees, and which groups are worth it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..utils.formatting import is_within, pattern_of
from .operations import BATCH_NORM, CHECKPOINT, GATE, PRODUCT
from .place import Place
from .region import Region
from .report import Skipped


@dataclass(eq=False)
class Group:
    """The places of repeated blocks: the same operation at paths that differ in their numbers."""

    places: list[Place]
    freed: int | None = None
    time_ms: float | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for place in self.places for path in place.paths)

    @property
    def calls(self) -> int:
        """But for small ones beside others."""
        return sum(max(place.calls, len(place.paths)) - _small_beside_others(place) for place in self.places)

    @property
    def is_useless(self) -> bool:
        """Whether it frees next to nothing, and would not on a larger example either."""
        least = sum(place.least_bytes for place in self.places)
        return (self.freed or 0) <= least and not (self.is_too_small or self.is_idle)

    @property
    def first(self) -> Place:
        return self.places[0]

    @property
    def saves(self) -> str:
        """What its places save, each with their number if they differ."""
        counts = Counter(map(saves_of, self.places))
        return "; ".join(f"{count}: {saves}" if len(counts) > 1 else saves for saves, count in counts.items())

    @property
    def is_too_small(self) -> bool:
        """Whether it frees nothing on the example for its size, or that of the batch norm before it."""
        return not self.freed and (self.first.is_small or self.first.small_norm is not None)

    @property
    def small_because(self) -> str:
        """Why it frees nothing then."""
        norm = self.first.small_norm
        return self.saves if norm is None or self.first.is_small else saves_of(norm)

    @property
    def is_idle(self) -> bool:
        """Whether it frees nothing on the example because nothing is saved of it, and would in other calls."""
        return self.freed == 0 and self.first.is_recomputed and self.first.keeps_less and not self.is_too_small

    def by_size(self) -> list[Group]:
        """What this package computes on the example, which frees it all, and what PyTorch does for its size."""
        small = [place for place in self.places if place.is_small]
        large = [place for place in self.places if not place.is_small]
        return [Group(large, self.freed, self.time_ms), Group(small)] if small and large else [self]

    def small_beside_others(self) -> Iterator[Skipped]:
        """Of calls that this package computes, those that PyTorch does for their size."""
        paths: dict[str, tuple[str, ...]] = {}
        for place in self.places:
            if small := _small_beside_others(place):
                reason = f"{small} of {place.calls} calls: {place.small_because}"
                paths[reason] = (*paths.get(reason, ()), *place.paths)
        for reason, alike in paths.items():
            yield Skipped(alike, *self.first.names, reason)

    def skipped(self, reason: str | None) -> Skipped:
        return Skipped(self.paths, *self.first.names, reason or "")

    def switch(self, on: bool) -> None:
        for place in self.places:
            Region.of(place.module).switch(place.kind, place.stand_in, on=on)


def _small_beside_others(place: Place) -> int:
    return place.small_calls if place.small_calls < place.calls else 0


def grouped(places: Sequence[Place], blocks: Sequence[Place] = ()) -> list[Group]:
    """The groups of blocks, and of places that lie in none of them."""
    groups: dict[object, Group] = {}
    for place in (*blocks, *places):
        outer = [path for block in blocks if block is not place for path in block.paths]
        if all(any(is_within(path, other) for other in outer) for path in place.paths):
            continue
        reasons = place.left_because, place.useless_because, place.is_recomputed
        key = place.kind, place.name, pattern_of(place.path), *reasons
        groups.setdefault(key, Group([])).places.append(place)
    return list(groups.values())


def saves_of(place: Place) -> str:
    """What a place saves, for reports."""
    if place.saves is not None:
        return place.saves
    if place.kind == PRODUCT:
        return "saves the factors, and not their product"
    if place.kind == GATE:
        return "saves the inputs of both factors"
    if place.kind == "dropout":
        return "saves one bit for each element, and none behind an activation"
    if place.kind == BATCH_NORM:
        return "saves nothing before an activation whose output determines its input"
    if place.kind == CHECKPOINT:
        return "saves the input of the block, and recomputes the rest"
    return "saves the output"


def without_the_useless(
    chosen: Sequence[Group], total: int, measured: Callable[[], int | None]
) -> tuple[int, list[Group], list[Group]]:
    """Switch off what frees nothing beside the others, or too little: first what costs most. A norm whose output nobody
    else keeps does, and without it the activation before it frees a buffer.

    Args:
        chosen: groups that are switched on.
        total: the bytes saved with all of them.
        measured: the bytes saved as things are.

    Returns:
        the bytes saved in the end, the groups that stay, and those that were switched off.
    """
    chosen, left = list(chosen), list[Group]()
    unknown, outdated = list(chosen), list[Group]()
    while unknown:
        for group in unknown:
            group.switch(False)
            without = measured()
            assert without is not None
            group.freed = without - total
            group.switch(True)
        useless = [group for group in chosen if group.is_useless]
        if useless:
            worst = min(useless, key=lambda group: group.freed or 0)
            worst.switch(False)
            chosen.remove(worst)
            useless.remove(worst)
            left.append(worst)
            total += worst.freed or 0
            # What others free may be another number without it: of a buffer that both kept.
            outdated = [group for group in chosen if group.freed and group not in useless]
        unknown, outdated = (useless, outdated) if useless else (outdated, [])
    return total, chosen, left
