"""Whether what the code of a module names of it is still what it was."""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ..activations.python import names_in, unwrapped
from .derived import Mixin
from .known import OF_ANY_MODULE

#: What is compared by value. Other objects are themselves, or copied together with the module.
_PLAIN = (bool, int, float, complex, str, bytes)
#: Code with one of these names may read attributes that it does not name.
_ANY_NAME = frozenset({"getattr", "vars", "__dict__"})


class Attributes(NamedTuple):
    """What a module has: the children, and the attributes that its code names. Programs attach notes of all sorts to
    modules, and none of these counts."""

    module: nn.Module
    children: dict[str, nn.Module | None]
    had: dict[str, object]
    had_not: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Attributes:
        kind: Any = type(module)
        own, names = vars(module), _names(kind) - OF_ANY_MODULE
        if not names.isdisjoint(_ANY_NAME):
            names |= own.keys() - OF_ANY_MODULE
        had = {name: own[name] for name in names if name in own}
        return cls(module, dict(module._modules), had, names - own.keys())

    def are_still(self) -> bool:
        module, children, had, had_not = self
        own = vars(module)
        is_same = module._modules == children and had_not.isdisjoint(own)
        return is_same and all(name in own and _is(own[name], value) for name, value in had.items())


def _is(value: object, other: object) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


@lru_cache(1024)
def _names(kind: Any) -> frozenset[str]:
    """What the methods of a class name."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__ and not issubclass(base, Mixin)]
    functions = (unwrapped(member) for base in bases for name, member in vars(base).items() if name != "__init__")
    return frozenset().union(*(names_in(f.__code__) for f in functions if isinstance(f, types.FunctionType)))
