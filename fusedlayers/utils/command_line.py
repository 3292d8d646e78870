"""What the commands share: how they end on errors, their output files, and the number of threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from . import plotting
from .formatting import first_line
from .users_code import from_users_code

#: The name of a file that stands for stdout.
STDOUT = Path("-")
#: What a shell says of a program that ends because nobody reads its output: 128 and the number of SIGPIPE.
BROKEN_PIPE = 141
#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|fit|memory_report|fuse|tune): ")


@contextlib.contextmanager
def usage_errors(command: str, *errors: type[Exception], only_ours: bool = False) -> Iterator[None]:
    """On one of these errors, end as argparse does: the reason goes to stderr, and the exit code is 2.

    Args:
        only_ours: only where the message begins with the name of a function of this library. All others come from the
            user's code, which runs in there too: their traceback is printed first, without our own frames.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        if not (isinstance(error, errors) and (not only_ours or _FUNCTION.match(text))):
            trace = from_users_code(error.__traceback__)
            if not only_ours or isinstance(error, OSError) or trace is None:
                raise
            traceback.print_exception(type(error), error, trace)
            text = f"the model raised {type(error).__name__}: {first_line(error)} (traceback above)"
        print(f"fusedlayers {command}: {_FUNCTION.sub('', text)}", file=sys.stderr)
        raise SystemExit(2) from error


def after_broken_pipe(error: BrokenPipeError) -> int:
    """The exit code where nobody reads stdout any more (``... | head -1``).

    Raises:
        BrokenPipeError: stdout is in order: the pipe is one of the user's code.
    """
    if hasattr(select, "poll"):  # not on Windows
        # Flushing would not tell: what could not be written need not have been kept.
        stdout = select.poll()
        stdout.register(sys.stdout.fileno(), 0)
        if not stdout.poll(0):
            raise error
    # What is still buffered must go somewhere, or Python complains of it when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch computes with so many CPU threads; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_output_files(function: str, plot: Path | None, json_file: Path | None = None) -> None:
    """Raise before a long run what ``function``'s ``plot``, and writing the other file, would raise after it."""
    if plot == STDOUT:
        raise ValueError(f"{function}: a picture cannot be written to stdout; name a file")
    if plot is not None:
        plotting.check_format(function, plot)
        _check_writable(plot)
    if json_file is not None and json_file != STDOUT:
        _check_writable(json_file)


def _check_writable(path: Path) -> None:
    """Raise what the system raises on opening the file for writing. Neither creates nor changes a file."""
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()


@contextlib.contextmanager
def text_beside(is_json: bool) -> Iterator[None]:
    """Whatever is printed meanwhile goes to stderr, if stdout is for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        yield


def write_json(values: object, path: Path) -> None:
    """Write to the file, or to stdout."""
    text = json.dumps(values, indent=1)
    if path == STDOUT:
        print(text)
    else:
        path.write_text(text)
