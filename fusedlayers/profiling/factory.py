"""What `fusedlayers fit`, `report` and `tune` run: the model and the inputs that a function of the user's returns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..utils import users_code
from .step import Step

#: What a factory may return.
FORMS = (
    "(model, inputs), where the inputs are a tensor, a tuple of positional arguments or a dict of keywords; "
    "or (model, args, kwargs), a tuple and a dict"
)
#: What errors advise.
_ADVICE = "write def example(): return model, inputs"


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Let a command be told the factory."""
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", help=f"a function that returns the model and example inputs: {FORMS}"
    )


def step_named(name: str) -> Step:
    """The training step whose model and inputs are made by what `module:factory` names.

    Raises:
        ValueError: it is no function that can be called without arguments, it raises an error, whose traceback is
            printed, or it returns something else.
        ImportError: there is no such module.
    """
    return _step_from(users_code.called(_factory_named(name), name, _ADVICE), name)


def _factory_named(name: str) -> Callable[[], Any]:
    found = users_code.import_object(name, "MODULE:FACTORY")
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(
            f"{name} is a {type(found).__name__}, expected a function that returns a model and inputs; {_ADVICE}"
        )
    return found


def _step_from(made: Any, name: str) -> Step:
    parts = made if isinstance(made, tuple) else ()
    match parts if parts and callable(parts[0]) else ():
        case model, (tuple() | list()) as args, Mapping() as kwargs:
            return Step(model, tuple(args), dict(kwargs))
        case model, Mapping() as kwargs:
            return Step(model, (), dict(kwargs))
        case model, (tuple() | list()) as args:
            return Step(model, tuple(args), {})
        case model, inputs:
            return Step(model, (inputs,), {})
    kinds = ", ".join(type(part).__name__ for part in parts)
    found = f"({kinds})" if kinds else type(made).__name__
    raise ValueError(f"{name} returned {found}, expected {FORMS}; {_ADVICE}")
