"""What users' functions read besides their arguments: closures, globals, defaults, and what they are bound to."""

import functools
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from .._torch import tree_leaves


@functools.lru_cache(1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that the code and the functions defined in it name."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def read_by(function: types.FunctionType, names: Iterable[str] | None = None) -> tuple[Mapping[Any, Any], ...]:
    """The closure, the globals that the code names (or those with these names), and both kinds of defaults, by name."""
    code, scope, closure = function.__code__, function.__globals__, dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has not been set
            closure[name] = cell.cell_contents
    found = {name: scope[name] for name in sorted(names_in(code) if names is None else names) if name in scope}
    return closure, found, dict(enumerate(function.__defaults__ or ())), function.__kwdefaults__ or {}


def reached_by(things: Iterable[object]) -> tuple[list[nn.Module], list[Tensor]]:
    """The modules, and the tensors outside of modules, that functions among some objects can read: what they are bound
    to, close over, have as defaults, or name among their globals; and the modules that other objects hold."""
    modules, tensors = dict[nn.Module, None](), list[Tensor]()
    pending, seen = [*things], set[int]()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.update(dict.fromkeys(thing.modules()))
        elif isinstance(thing, Tensor):
            tensors.append(thing)
        elif isinstance(thing, functools.partial):
            pending += tree_leaves((thing.func, thing.args, thing.keywords))
        elif isinstance(thing, types.MethodType):
            pending += [thing.__self__, thing.__func__]
        elif isinstance(thing, types.FunctionType):
            if not (thing.__module__ or "").startswith("torch."):
                pending += tree_leaves(read_by(thing))
        elif hasattr(thing, "__dict__") and not isinstance(thing, type | types.ModuleType):
            pending += [held for held in tree_leaves(vars(thing)) if isinstance(held, nn.Module)]
    return list(modules), tensors


def code_reached_by(things: Iterable[object], owner: type) -> tuple[set[str], list[Any]]:
    """The names in the code of functions among some objects, and of all functions that these can call: those that they
    close over, have as defaults, name among their globals, in modules or classes that are, or in a class; and all else
    that these are bound to, close over, have as defaults, or name there."""
    names, values, pending, seen = set[str](), list[Any](), [*things], set[int]()
    while pending:
        thing: Any = pending.pop()
        if isinstance(thing, functools.partial):
            held = thing.func, *thing.args, *thing.keywords.values()
            values += held
            pending += held
        elif isinstance(thing, types.MethodType | staticmethod | classmethod):
            pending.append(thing.__func__)
        elif isinstance(thing, property):
            pending.append(thing.fget)
        elif isinstance(thing, type) and issubclass(thing, Function):
            pending.append(thing.forward)
        elif isinstance(thing, types.FunctionType) and id(thing) not in seen:
            seen.add(id(thing))
            if _is_torchs(thing):
                continue
            own, read = names_in(thing.__code__), [value for found in read_by(thing) for value in found.values()]
            names |= own
            for scope in (*owner.__mro__, *(value for value in read if isinstance(value, types.ModuleType | type))):
                found = [vars(scope)[name] for name in own if name in vars(scope)]
                pending += found
                values += [] if _is_torchs(scope) else found
            values += read
            pending += read
    return names, values


def _is_torchs(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return (name or "").partition(".")[0] == "torch"


def named_modules_of(function: Any) -> list[tuple[str, nn.Module]]:
    """The modules that a callable is, belongs to, or reads by name; those of a partial's arguments by their class."""
    if isinstance(function, functools.partial):
        held = (*function.args, *function.keywords.values())
        return named_modules_of(function.func) + [(type(m).__name__, m) for m in held if isinstance(m, nn.Module)]
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return [("", owner)]
    closure, scope, *_ = read_by(function) if isinstance(function, types.FunctionType) else ({}, {})
    return [(name, value) for name, value in {**scope, **closure}.items() if isinstance(value, nn.Module)]
