"""What a function can reach: the modules, tensors and generators that it works with besides its arguments."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import tree_leaves


class FreeState(NamedTuple):
    """What a function runs, or, unless it ``runs_all``, can reach; of generators and tensors those that it closes over
    or is given by name."""

    modules: Sequence[nn.Module]
    generators: Sequence[torch.Generator] = ()
    tensors: Sequence[Tensor] = ()
    runs_all: bool = True

    @classmethod
    def of(cls, function: object, *arguments: object) -> FreeState:
        """By the function itself, what it is bound to, what a ``partial`` holds, what it closes over or has as
        defaults, what its code names among its globals, and the arguments; functions among these in the same way."""
        if isinstance(function, nn.Module):
            modules = dict.fromkeys(function.modules())
            return cls([*modules, *(m for m in cls._search(arguments).modules if m not in modules)])
        return cls._search((function, *arguments), of_arguments=arguments)

    @classmethod
    def _search(cls, things: Iterable[object], of_arguments: Iterable[object] = ()) -> FreeState:
        modules: dict[nn.Module, None] = {}
        others: list[Any] = []
        given = set(map(id, tree_leaves(list(of_arguments))))
        seen: set[int] = set()
        pending: list[object] = [*things]
        while pending:
            thing = pending.pop()
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            if isinstance(thing, nn.Module):
                modules.update(dict.fromkeys(thing.modules()))
            elif isinstance(thing, Tensor | torch.Generator):
                if id(thing) not in given:  # what torch's checkpoint sees to
                    others.append(thing)
            elif isinstance(thing, functools.partial):
                pending += [thing.func, *thing.args, *thing.keywords.values()]
            elif isinstance(thing, types.MethodType):
                pending += [thing.__self__, thing.__func__]
            elif isinstance(thing, types.FunctionType):
                if not (thing.__module__ or "").startswith("torch."):
                    pending += _held_by_function(thing)
            elif isinstance(thing, list | tuple | dict | set):
                pending += [leaf for leaf in tree_leaves(list(thing) if isinstance(thing, set) else thing)]
            elif hasattr(thing, "__dict__"):
                # Of other objects what they hold themselves, and not what those hold: that may be a whole program.
                pending += [held for held in vars(thing).values() if isinstance(held, nn.Module | list | tuple | dict)]
        generators = [other for other in others if isinstance(other, torch.Generator)]
        tensors = [other for other in others if isinstance(other, Tensor)]
        return cls(list(modules), generators, tensors, runs_all=False)


NO_STATE = FreeState(())


def _held_by_function(function: types.FunctionType) -> list[object]:
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            continue
    names = {name for code in _codes_in(function.__code__) for name in code.co_names}
    named = (function.__globals__[name] for name in names if name in function.__globals__)
    return found + [thing for thing in named if not isinstance(thing, types.ModuleType | type)]


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)
