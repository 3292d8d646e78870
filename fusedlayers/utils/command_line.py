"""Wrong usage of a command that prints a report: a line on stderr, and before anything takes long."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from . import plotting

#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|memory_report|fuse): ")


@contextlib.contextmanager
def usage_errors(command: str, *errors: type[Exception], only_ours: bool = False) -> Iterator[None]:
    """On one of these errors, end as argparse does: the reason goes to stderr, and the exit code is 2.

    ``only_ours``: only where the message begins with the name of a function of this library. All others come from the
    user's code, which runs there too, and keep their traceback.
    """
    try:
        yield
    except errors as error:
        if only_ours and not _FUNCTION.match(str(error)):
            raise
        print(f"fusedlayers {command}: {_FUNCTION.sub('', str(error))}", file=sys.stderr)
        raise SystemExit(2) from error


def check_output_files(function: str, plot: Path | None, *others: Path | None) -> None:
    """Raise now what ``function``'s ``plot``, and writing the others, would raise in the end."""
    if plot is not None:
        plotting.check_format(function, plot)
    for path in (plot, *others):
        if path is not None:
            _check_writable(path)


def _check_writable(path: Path) -> None:
    """Ask the system, in whose words the refusal is. What is there stays, and nothing new does."""
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()
