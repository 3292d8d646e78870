"""Whether a module is still what it was."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from ..activations.python_values import names_in
from .code import codes_of
from .derived import Mixin

#: What is compared by value. Other objects are themselves, or copied together with the module.
_PLAIN = (bool, int, float, complex, str, bytes)
#: What any module has, whatever it computes: fused are modules that compute the same in training and evaluation.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


class Attributes(NamedTuple):
    """What a module has: children, which parameters and buffers, and other attributes. Of those that are added none may
    be one that its code names; others may, for programs attach notes of all sorts.

    The module is not among these: it is to hold them, and would hold itself.
    """

    children: dict[str, nn.Module | None]
    tensors: tuple[tuple[str, bool], ...]
    had: dict[str, object]
    had_not: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Attributes:
        kind: Any = type(module)
        had = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
        return cls(dict(module._modules), _tensors_of(module), had, tuple(_named_by(kind) - had.keys()))

    def are_still_of(self, module: nn.Module) -> bool:
        own = vars(module)
        if module._modules != self.children or _tensors_of(module) != self.tensors:
            return False
        is_same = all(name in own and _is(own[name], value) for name, value in self.had.items())
        return is_same and not any(name in own for name in self.had_not)


def _tensors_of(module: nn.Module) -> tuple[tuple[str, bool], ...]:
    """Which there are: what they are is read at every call."""
    registered = (*module._parameters.items(), *module._buffers.items())
    return tuple([(name, tensor is None) for name, tensor in registered])


def _is(value: object, other: object) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


@lru_cache(1024)
def _named_by(kind: Any) -> frozenset[str]:
    """The members of a class, and what its code names or may ask for by a string."""
    kind = kind.original if issubclass(kind, Mixin) else kind
    names = {name for base in kind.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    for code in codes_of(kind):
        names.update(names_in(code), _strings_in(code))
    return frozenset(name for name in names - _OF_ANY_MODULE if name.isidentifier() and not name.startswith("__"))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _strings_in(constant)
