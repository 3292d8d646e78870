"""What functions that take a model refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
