"""Whether a module is still what it was."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ..activations.python import names_in, unwrapped
from .derived import Mixin

#: What is compared by value. Other objects are themselves, or copied together with the module.
_PLAIN = (bool, int, float, complex, str, bytes)
#: What any module has, whatever it computes: fused are modules that compute the same in training and evaluation.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class Attributes(NamedTuple):
    """What a module has, and which of the names in its code it has not: those may get a value that is of its class now.
    Other attributes may be added, for programs attach notes of all sorts to modules.

    The module is not among these: it is to hold them, and would hold itself.
    """

    children: dict[str, nn.Module | None]
    had: dict[str, object]
    had_not: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Attributes:
        kind: Any = type(module)
        had = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
        return cls(dict(module._modules), had, _names(kind) - had.keys() - _OF_ANY_MODULE)

    def are_still_of(self, module: nn.Module) -> bool:
        own = vars(module)
        is_same = module._modules == self.children and self.had_not.isdisjoint(own)
        return is_same and all(name in own and _is(own[name], value) for name, value in self.had.items())


def _is(value: object, other: object) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


@lru_cache(1024)
def _names(kind: Any) -> frozenset[str]:
    """What the methods of a class name, and what they may ask for by a string."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__ and not issubclass(base, Mixin)]
    functions = [unwrapped(member) for base in bases for name, member in vars(base).items() if name != "__init__"]
    codes = [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    return frozenset().union(*map(names_in, codes), *map(_strings_in, codes))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _strings_in(constant)
