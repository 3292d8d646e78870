"""Random number generators, for recomputations that draw the numbers of the first run.

A state is kept only of a generator that the first run drew from. All must be looked at before it and after it: for each
block of a model that is most of what a recomputation costs the host. Python's own generator copies its 624 words into a
tuple of numbers, 10 to 30 microseconds. CPython's is a struct whose words follow the object's header: they are read
from there, where a look at the import has shown that this is so.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import dispatch_mode_count, no_dispatch


class Generator(NamedTuple):
    """A generator by how its state is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    @classmethod
    def of(cls, generator: torch.Generator) -> Generator:
        return cls(generator.get_state, generator.set_state)

    @classmethod
    def of_device(cls, device: torch.device) -> Generator:
        module = torch.get_device_module(device)
        return cls(functools.partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device))

    def has_moved(self, state: Any) -> bool:
        """Whether numbers were drawn since it had this state."""
        now = self.get()
        if not isinstance(now, Tensor):
            return bool(now != state)
        if not dispatch_mode_count():
            return not torch.equal(now, state)
        with no_dispatch():  # states are real tensors, also under a FakeTensorMode
            return not torch.equal(now, state)


#: How many of the words are used up, and the words.
_WORDS = struct.Struct("i624I")


def _of_python() -> Generator:
    """Of ``random``."""
    generator = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
    place = id(generator) + object.__basicsize__

    def get() -> tuple[bytes, float | None]:
        return ctypes.string_at(place, _WORDS.size), generator.gauss_next

    def set_(state: tuple[bytes, float | None]) -> None:
        words, normal = state
        used, *numbers = _WORDS.unpack(words)
        generator.setstate((version, (*numbers, used), normal))

    version, (*numbers, used), _ = generator.getstate()
    is_as_expected = len(numbers) == 624 and type(generator).__basicsize__ >= object.__basicsize__ + _WORDS.size
    if is_as_expected and get()[0] == _WORDS.pack(used, *numbers):
        return Generator(get, set_)
    return Generator(generator.getstate, generator.setstate)


#: Those that there are without being made.
GENERATORS = (Generator.of(torch.default_generator), _of_python())
