"""What the commands share: refusals of wrong usage, checks of output files, objects named on the command line."""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from . import plotting
from .formatting import first_line

if TYPE_CHECKING:
    #: What a command adds its parser to.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

T = TypeVar("T")

#: So many names of a module are listed at most.
LISTED = 20
#: The name of a file that stands for stdout.
STDOUT = Path("-")
#: What a shell says of a program that ends because nobody reads its output: 128 and the number of SIGPIPE.
BROKEN_PIPE = 141
#: How the messages of the functions behind the commands begin.
_FUNCTION = re.compile(r"\A(explain|fit|memory_report|fuse|tune): ")
#: How a number below zero begins, which is no option.
_NEGATIVE = re.compile(r"-(\.?\d|inf|nan)")


class Parser(argparse.ArgumentParser):
    """A parser that says which option or command was meant, and refuses what a command does not know with the usage of
    that command. A number below zero behind an option is its value, for the option's own reader to refuse."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        of_commands = [action.choices for action in self._actions if action.nargs == argparse.PARSER]
        commands = [*(of_commands[0] or ())] if of_commands else []
        ends = (i for i, word in enumerate(words) if word == "--" or (commands and not word.startswith("-")))
        end = next(ends, len(words))
        if commands and end < len(words) and words[end] not in commands:
            meant = _meant(words[end], commands)
            self.error(f"there is no command {words[end]!r}{meant}; the commands are {', '.join(commands)}")
        found, unknown = super().parse_known_args([*self._checked(words[:end]), *words[end:]], namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _checked(self, words: Sequence[str]) -> list[str]:
        """The words, each number below zero joined to the option before it."""
        checked: list[str] = []
        for word in words:
            is_option = word.startswith("-") and word != "-" and not _NEGATIVE.match(word)
            before = self._option(checked[-1]) if checked and checked[-1].startswith("--") else None
            if before is not None and before.nargs != 0 and "=" not in checked[-1] and _NEGATIVE.match(word):
                checked[-1] += f"={word}"
            elif is_option and self._option(word) is None:
                name = word.partition("=")[0]
                self.error(f"there is no option {name}{_meant(name, self._option_string_actions)}")
            else:
                checked.append(word)
        return checked

    def _option(self, word: str) -> argparse.Action | None:
        """What an option is, which may be shortened; of several that it may be, the first."""
        name, options = word.partition("=")[0], self._option_string_actions
        shortened = (text for text in options if name.startswith("--") and text.startswith(name))
        return options.get(name) or next((options[text] for text in shortened), None)


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return "".join(f"; did you mean {name}?" for name in close)


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
            raise ValueError(f"{module_name!r} has no {attribute!r}{_meant(part, public)}; it has: {', '.join(listed)}")
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
