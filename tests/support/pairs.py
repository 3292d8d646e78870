"""Combinations of parameters for tests, where all of them would take long."""

from collections.abc import Callable, Collection
from itertools import combinations, product
from typing import Any


def covering(*parameters: Collection[Any], where: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Combinations of a value of each parameter that have every pair of values of two parameters, in the order of
    ``itertools.product`` and always the same: each next one has as many new pairs as any.

    ``where`` says which combinations there are; those alone have pairs.
    """
    values_of = [list(values) for values in parameters]
    allowed = [
        places
        for places in product(*(range(len(values)) for values in values_of))
        if where(*(values[place] for values, place in zip(values_of, places, strict=True)))
    ]
    pairs = {places: frozenset(combinations(enumerate(places), 2)) for places in allowed}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(allowed, key=lambda places: len(missing & pairs[places])))
        missing -= pairs[chosen[-1]]
    return [tuple(values[place] for values, place in zip(values_of, places, strict=True)) for places in sorted(chosen)]
