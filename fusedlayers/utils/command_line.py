"""What the commands share: refusals of wrong usage, checks of output files, objects named on the command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import plotting

if TYPE_CHECKING:
    #: What a command adds its parser to.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|fit|memory_report|fuse|tune): ")


@contextlib.contextmanager
def usage_errors(command: str, *errors: type[Exception], only_ours: bool = False) -> Iterator[None]:
    """On one of these errors, end as argparse does: the reason goes to stderr, and the exit code is 2.

    Args:
        only_ours: only where the message begins with the name of a function of this library. All others come from the
            user's code, which runs in there too, and keep their traceback.
    """
    try:
        yield
    except errors as error:
        if only_ours and not _FUNCTION.match(str(error)):
            raise
        print(f"fusedlayers {command}: {_FUNCTION.sub('', str(error))}", file=sys.stderr)
        raise SystemExit(2) from error


def check_output_files(function: str, plot: Path | None, *others: Path | None) -> None:
    """Raise before a long run what ``function``'s ``plot``, and writing the other files, would raise after it."""
    if plot is not None:
        plotting.check_format(function, plot)
    for path in (plot, *others):
        if path is not None:
            _check_writable(path)


def _check_writable(path: Path) -> None:
    """Raise what the system raises on opening the file for writing. Neither creates nor changes a file."""
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()


def import_object(name: str) -> object:
    """The object that ``module:attribute`` names; modules of the working directory are found.

    Raises:
        ValueError: the module has no such attribute; the message lists what it has.
        ImportError: there is no such module.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            raise ValueError(f"{module_name!r} has no {attribute!r}; it has: {', '.join(public)}")
        found = getattr(found, part)
    return found
