"""``resolve``: from what a user passes as an activation to its record."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from ..utils.formatting import described
from . import table
from .free_variables import must_call_reason
from .record import Activation
from .table import activations


def resolve(activation: object, function: str = "resolve") -> Activation:
    """The record for a name, an ``nn.Module``, a torch function, a ``functools.partial``, any callable, or None.

    Names are found as they are written, or else by their spelling: "ReLU" and "leaky-relu" are names too.

    Errors name ``function`` as the function that was called.

    Raises:
        ValueError: an unknown name; the message lists the known ones. A spelling that several names share.
        TypeError: an object that cannot be called, or the class of a module.
    """
    if isinstance(activation, str):
        found = table.by_name.get(activation)
        return found if found is not None else table.by_name[_name_spelled_like(activation, function)]
    if activation is None:
        return table.by_name["identity"]
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, nn.Module):
        return _resolve_module(activation)
    if isinstance(activation, type) and issubclass(activation, nn.Module):
        name = activation.__name__
        raise TypeError(f"{function}: activation must be an instance, {name}(...), and not the class {name}")
    if not callable(activation):
        hint = ""
        if "Conv" in function and isinstance(activation, int | tuple):
            hint = "; other arguments, as stride=2, are keywords"
        elif isinstance(activation, bool) and "Dense" in function:  # the place of nn.Linear's bias
            hint = f"; write bias={activation}"
        raise TypeError(
            f"{function}: activation must be a name, a module, a function or None, got {described(activation)}{hint}"
        )
    return _resolve_function(activation)


def _name_spelled_like(name: str, function: str) -> str:
    names = table.by_spelling.get(table.spelled(name), ())
    if len(names) == 1:
        return names[0]
    if names:
        raise ValueError(f"{function}: activation {name!r} may be any of {', '.join(names)}; write it as one of these")
    import difflib  # which takes milliseconds, and only an error needs it

    close = difflib.get_close_matches(table.spelled(name), table.by_spelling, n=1)
    listed = f"did you mean {table.by_spelling[close[0]][0]!r}? The" if close else "the"
    raise ValueError(f"{function}: unknown activation {name!r}; {listed} known ones are: {', '.join(activations())}")


def _resolve_module(module: nn.Module) -> Activation:
    # A subclass may compute something else, and a hook must see the call: neither is replaced by a row.
    reason = must_call_reason(module)
    if reason is not None:
        return _unfused(module, reason)
    found = activation_of_module(module, vars(type(module)).get("stands_in_for", type(module)))
    return found if found is not None else Activation(_name(module), module, needs_tracing=True)


def activation_of_module(module: nn.Module, kind: type[nn.Module]) -> Activation | None:
    """The record for a module that computes what torch's class ``kind`` computes; None if the table has none."""
    # Each call of a drop-in module asks. Loops enter no functions, as comprehensions and generators do.
    for row, arguments, _ in table.stand_ins.get(kind, ()):
        parameters = {}
        for key in row.parameters:
            value = getattr(module, key)
            if not isinstance(value, (int, float)):
                break
            parameters[key] = value
        else:
            for key, expected in arguments.items():
                if getattr(module, key) != expected:
                    break
            else:
                return row.bind(**parameters) if parameters else table.by_name[row.name]
    return None


def _resolve_function(function: Callable[..., Any]) -> Activation:
    keywords: dict[str, Any] = {}
    target = function
    if isinstance(function, functools.partial) and not function.args:
        target, keywords = function.func, dict(function.keywords)
        keywords.pop("inplace", None)  # the layer decides what is overwritten
    for row, arguments, required in table.stand_ins.get(target, ()) if isinstance(target, Hashable) else ():
        parameters = {key: value for key, value in keywords.items() if key not in arguments}
        selected = all(keywords.get(key) == value for key, value in arguments.items())
        are_numbers = all(isinstance(value, (int, float)) for value in parameters.values())
        if selected and are_numbers and required <= set(parameters) <= set(row.parameters):
            return row.bind(**parameters)
    return Activation(_name(function), function, needs_tracing=True)


def _unfused(function: Callable[..., Any], reason: str) -> Activation:
    name = _name(function)
    return Activation(name, function, fallback_reason=f"{name} is left to PyTorch because {reason}")


def _name(function: object) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", type(function).__name__)
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name  # autograd.Function's apply
