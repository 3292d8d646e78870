"""Random number generators, for recomputations that draw the numbers of the first run.

A state is kept only of a generator that the first run drew from. All must be looked at before it and after it, for
each block of a model. Python's own generator copies its 624 words into a tuple of numbers, which takes 9 microseconds
and more with cold caches. CPython's is a struct whose words follow the object's header: they are read from there, in
half a microsecond, where a look at the import has shown that this is so.
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


class _PythonsMemory:
    """The state of a ``random.Random``, as it lies in CPython's memory behind the object's header."""

    #: How many of the words are used up, and the words.
    WORDS = struct.Struct("i624I")

    def __init__(self, generator: random.Random) -> None:
        self._generator: Any = generator
        self._place = id(generator) + object.__basicsize__
        self._version, *_ = generator.getstate()

    @property
    def is_there(self) -> bool:
        """Whether what lies there is the state."""
        _, (*words, used), _ = self._generator.getstate()
        is_long_enough = type(self._generator).__basicsize__ >= object.__basicsize__ + self.WORDS.size
        return is_long_enough and len(words) == 624 and self.get()[0] == self.WORDS.pack(used, *words)

    def get(self) -> tuple[bytes, float | None]:
        """The words, and what is left of a pair of normal numbers."""
        return ctypes.string_at(self._place, self.WORDS.size), self._generator.gauss_next

    def set(self, state: tuple[bytes, float | None]) -> None:
        """Put a state back, by Python's own function."""
        words, normal = state
        used, *numbers = self.WORDS.unpack(words)
        self._generator.setstate((self._version, (*numbers, used), normal))


def _of_python() -> Generator:
    """Of ``random``'s functions."""
    generator = getattr(random.getstate, "__self__", None)
    if type(generator) is random.Random:
        memory = _PythonsMemory(generator)
        if memory.is_there:
            return Generator(memory.get, memory.set)
    return Generator(random.getstate, random.setstate)


#: Those that there are without being made.
GENERATORS = (Generator.of(torch.default_generator), _of_python())
