"""What functions that take a model refuse, and how their messages name what was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def check_instance(function: str, model: object) -> None:
    """Refuse a class of modules in the place of a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"{function}: model must be an instance, {model.__name__}(...), and not the class")


def check_flag(function: str, name: str, value: object) -> None:
    """Refuse all but True and False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {value!r}")


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a module or a function has parameters for these arguments. A builtin may not say: then yes."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a message of an unknown word goes on with, if a known one is similar."""
    import difflib  # which takes milliseconds, and only an error needs it

    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(word, known, n=1, cutoff=0.75))
