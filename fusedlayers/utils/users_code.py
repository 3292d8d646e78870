"""Objects that the command line names, and what goes wrong in the user's code."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .formatting import first_line
from .refusals import did_you_mean

T = TypeVar("T")

#: So many names of a module are listed at most.
LISTED = 20


def import_object(name: str, form: str = "MODULE:ATTRIBUTE") -> object:
    """The object that ``module:attribute`` names; modules of the working directory are found.

    Raises:
        ValueError: it is no such name, the module raises an error, or it has no such attribute; the message lists what
            it has.
        ImportError: there is no such module.
    """
    module_name, colon, attribute = name.partition(":")
    if ".py:" in name or not colon or not all(part.isidentifier() for part in module_name.split(".")):
        path, _, function = name.partition(".py:")
        parts = path.removeprefix("./").split("/")
        is_path = function and all(part.isidentifier() for part in parts)
        example = f"{'.'.join(parts)}:{function}" if is_path else "package.module:function"
        missing = "" if not is_path or Path(f"{path}.py").exists() else f" ({path}.py is not there, though)"
        raise ValueError(f"expected {form}, got {name!r}; write {example}{missing}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    with _raising_plainly(f"importing {module_name}", "a module that can be imported", "correct it"):
        try:
            found: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_asked_for = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
            if not is_asked_for or "is not a package" in str(error):
                raise  # it is one that the module imports, or Python says it better
            file = f"{str(error.name).replace('.', '/')}.py"
            raise ModuleNotFoundError(
                f"there is no module {error.name!r}: {file} is not in this folder, and no such package is installed"
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            listed = public[:LISTED] if len(public) <= LISTED else [*public[:LISTED], "and more"]
            raise ValueError(
                f"{module_name!r} has no {attribute!r}; it has: {', '.join(listed)}{did_you_mean(part, public)}"
            )
        found = getattr(found, part)
    return found


def called(function: Callable[[], T], name: str, advice: str) -> T:
    """What a function of the user's returns.

    Raises:
        ValueError: it needs arguments; or it raises an error, whose traceback is printed.
    """
    needed = _required_parameters(function)
    if needed:
        raise ValueError(f"{name} needs arguments ({', '.join(needed)}), expected none; {advice}")
    with _raising_plainly(name, "no error", "correct it, or name another function"):
        return function()


def _required_parameters(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of functions in C, which may not say
        return []
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


@contextlib.contextmanager
def _raising_plainly(what: str, expected: str, advice: str) -> Iterator[None]:
    """Raise ValueError for what the user's code raises, and print its traceback without our own frames. A module that
    is missing needs none."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        traceback.print_exception(type(error), error, from_users_code(error.__traceback__))
        text = f"{what} raised {type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{text} (traceback above), expected {expected}; {advice}") from error


def from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without our own frames before the first of the user's code; None if there is none."""
    ours = "fusedlayers.", "contextlib", "importlib"
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(ours):
        trace = trace.tb_next
    return trace
