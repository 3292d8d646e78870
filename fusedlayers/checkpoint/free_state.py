"""The free state of a function: the modules, tensors and generators that it can use besides its arguments.

The search follows what the function is bound to, what a ``partial`` holds, closures, defaults, the globals that its
code names, the arguments, and functions among these. It costs one walk over these objects for each call.

Not found is what Python modules hold, and what objects hold that are themselves attributes of objects: that may be a
whole program.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin

from .._torch import tree_leaves
from ..utils.module_state import modules_in

_ATOMS = frozenset({types.NoneType, bool, int, float, str})


def holds_nothing(argument: object) -> bool:
    """Whether an argument is a tensor, or surely holds no other objects, as one of a derived type may."""
    return type(argument) in _ATOMS or isinstance(argument, Tensor)


class FreeState(NamedTuple):
    """What a recomputed function depends on besides its arguments.

    Attributes:
        modules: the modules that it runs; if not ``runs_all``, those that it can reach.
        generators, tensors: those that it closes over or names. Arguments are not among them.
        runs_all: whether it surely runs all modules.
        replays_rng: whether a recomputation must draw the random numbers of the first run.
    """

    modules: Sequence[nn.Module]
    generators: Sequence[torch.Generator] = ()
    tensors: Sequence[Tensor] = ()
    runs_all: bool = True
    replays_rng: bool = True

    @property
    def runs_differently_first(self) -> bool:
        """Whether a first run may save other tensors than a second: lazy modules initialize their parameters, and
        TorchScript compiles once more, with the saved tensors in another order."""
        return any(
            isinstance(module, ScriptModule)
            or (isinstance(module, LazyModuleMixin) and module.has_uninitialized_params())
            for module in self.modules
        )

    @classmethod
    def of(cls, function: object, leaves: Sequence[object]) -> FreeState:
        """Of a function, or of a list of functions, called with arguments that have these leaves."""
        others = [leaf for leaf in leaves if not holds_nothing(leaf)]
        if isinstance(function, nn.Module):
            modules = modules_in(function)
            if others:
                modules = [*dict.fromkeys([*modules, *_search(others, leaves).modules])]
            return cls(modules)
        return _search([function, *others], leaves)


NO_STATE = FreeState(())


def _search(roots: Sequence[object], leaves: Sequence[object]) -> FreeState:
    modules: dict[nn.Module, None] = {}
    generators: list[torch.Generator] = []
    tensors: list[Tensor] = []
    # Torch's checkpoint takes care of tensors that are arguments.
    seen = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    pending = [*roots]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.update(dict.fromkeys(thing.modules()))
        elif isinstance(thing, Tensor):
            tensors.append(thing)
        elif isinstance(thing, torch.Generator):
            generators.append(thing)
        elif isinstance(thing, functools.partial):
            pending += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            pending += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            if not (thing.__module__ or "").startswith("torch."):
                pending += _held_by_function(thing)
        elif isinstance(thing, list | tuple | dict | set):
            pending += tree_leaves(list(thing) if isinstance(thing, set) else thing)
        elif hasattr(thing, "__dict__"):
            pending += [held for held in vars(thing).values() if isinstance(held, nn.Module | list | tuple | dict)]
    return FreeState(list(modules), generators, tensors, runs_all=False)


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
    """The code of a function, and of the functions that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)
