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
    """What a module has, and what it has not, but could get in the place of what its class has. Other attributes may be
    added, for programs attach notes of all sorts to modules.

    The module is not among these: it is to hold them, and would hold itself.
    """

    children: dict[str, nn.Module | None]
    had: dict[str, object]
    had_not: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Attributes:
        kind: Any = type(module)
        had = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
        return cls(dict(module._modules), had, tuple(_of_class(kind) - had.keys()))

    def are_still_of(self, module: nn.Module) -> bool:
        own = vars(module)
        is_same = module._modules == self.children and not any(name in own for name in self.had_not)
        return is_same and all(name in own and _is(own[name], value) for name, value in self.had.items())


def _is(value: object, other: object) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


@lru_cache(1024)
def _of_class(kind: Any) -> frozenset[str]:
    """The names of a class's members, and those that ``getattr`` may ask for with a default."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__ and not issubclass(base, Mixin)]
    members = [(name, unwrapped(member)) for base in bases for name, member in vars(base).items()]
    codes = [member.__code__ for _, member in members if isinstance(member, types.FunctionType)]
    names = [name for name, _ in members]
    names += [name for code in codes if "getattr" in names_in(code) for name in _strings_in(code)]
    return frozenset(name for name in names if name.isidentifier() and not name.startswith("__"))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _strings_in(constant)
