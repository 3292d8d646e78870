"""What the commands share: refusals of wrong usage, checks of output files, objects named on the command line."""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import importlib
import inspect
import json
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch

from . import plotting
from .formatting import first_line

if TYPE_CHECKING:
    #: What a command adds its parser to.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

T = TypeVar("T")

#: The name of a file that stands for stdout.
STDOUT = Path("-")
#: What a shell says of a program that ends because nobody reads its output: 128 and the number of SIGPIPE.
BROKEN_PIPE = 141
#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|fit|memory_report|fuse|tune): ")
#: How a number below zero begins, which is no option.
_NEGATIVE = re.compile(r"-\.?\d")


class Parser(argparse.ArgumentParser):
    """A parser that says which option was meant. The parser of a command refuses an unknown option with the usage of
    that command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, words = self._option_string_actions, list[str]()
        commands = [
            name for action in self._actions if action.nargs == argparse.PARSER for name in action.choices or ()
        ]
        waiting = collections.deque(sys.argv[1:] if args is None else args)
        while waiting and waiting[0] != "--" and (not commands or waiting[0].startswith("-")):
            word = waiting.popleft()
            name, equals, _ = word.partition("=")
            found = options.get(name) or next((options[o] for o in options if o.startswith(name)), None)
            if found is None and name.startswith("-") and not _NEGATIVE.match(name):
                self.error(f"there is no option {name}" + _meant(name, options.keys() - {"-h", "--help"}))
            is_value = waiting and not equals and found is not None and found.nargs != 0
            if name.startswith("--") and is_value and _NEGATIVE.match(waiting[0]):
                word = f"{word}={waiting.popleft()}"  # for its own reader to refuse
            words.append(word)
        if commands and waiting and waiting[0] not in (*commands, "--"):
            meant = _meant(waiting[0], commands) or ";"
            self.error(f"there is no command {waiting[0]}{meant} the commands are {', '.join(commands)}")
        return super().parse_known_args([*words, *waiting], namespace)


def _meant(word: str, known: Iterable[str]) -> str:
    return "".join(f"; did you mean {name}?" for name in difflib.get_close_matches(word, known, n=1))


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
            trace = _from_users_code(error.__traceback__)
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


def whole_number(minimum: int = 1, maximum: int = 2**31 - 1, multiple: int = 1) -> Callable[[str], int]:
    """Make a reader of whole numbers."""
    expected = f"a whole number from {minimum} to {maximum}" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum or int(text) % multiple:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return int(text)

    return read


def check_output_files(function: str, plot: Path | None, *others: Path | None) -> None:
    """Raise before a long run what ``function``'s ``plot``, and writing the other files, would raise after it."""
    if plot is not None:
        plotting.check_format(function, plot)
    for path in (plot, *others):
        if path is not None and path != STDOUT:
            _check_writable(path)


def _check_writable(path: Path) -> None:
    """Raise what the system raises on opening the file for writing. Neither creates nor changes a file."""
    is_new = not os.path.lexists(path)
    path.open("ab").close()
    if is_new:
        path.unlink()


def text_stream(json_file: Path | None) -> TextIO:
    """Where the report for people goes: to stderr, if stdout is for JSON."""
    return sys.stderr if json_file == STDOUT else sys.stdout


def write_json(values: object, path: Path) -> None:
    """Write to the file, or to stdout."""
    text = json.dumps(values, indent=1)
    if path == STDOUT:
        print(text)
    else:
        path.write_text(text)


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
        raise ValueError(f"expected {form}, got {name!r}; write {example}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    with _users_code(f"importing {module_name}", "a module that can be imported", "correct it"):
        try:
            found: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # one that the module imports
            file = f"{error.name.replace('.', '/')}.py"
            raise ModuleNotFoundError(
                f"there is no module {error.name!r}: {file} is not in this folder, and no such package is installed"
            ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [key for key in dir(found) if not key.startswith("_") and callable(getattr(found, key, None))]
            raise ValueError(f"{module_name!r} has no {attribute!r}; it has: {', '.join(public)}")
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
    with _users_code(name, "no error", "correct it, or name another function"):
        return function()


def _required_parameters(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of functions in C, which may not say
        return []
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


@contextlib.contextmanager
def _users_code(what: str, expected: str, advice: str) -> Iterator[None]:
    """Raise ValueError for what the user's code raises, and print its traceback without our own frames. A module that
    is missing needs none."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        traceback.print_exception(type(error), error, _from_users_code(error.__traceback__))
        text = f"{what} raised {type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{text} (traceback above), expected {expected}; {advice}") from error


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    ours = "fusedlayers.", "contextlib", "importlib"
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(ours):
        trace = trace.tb_next
    return trace
