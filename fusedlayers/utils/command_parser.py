"""What reads the command line: a parser that knows what was meant, and readers of values."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .refusals import did_you_mean

if TYPE_CHECKING:
    #: What a command adds its parser to.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

#: More are a mistake, and end the process.
MOST_THREADS = 1024
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
            meant = did_you_mean(words[end], commands)
            self.error(f"there is no command {words[end]!r}; the commands are {', '.join(commands)}{meant}")
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
                self.error(f"there is no option {name}{did_you_mean(name, self._option_string_actions)}")
            else:
                checked.append(word)
        return checked

    def _option(self, word: str) -> argparse.Action | None:
        """What an option is, which may be shortened; of several that it may be, the first."""
        name, options = word.partition("=")[0], self._option_string_actions
        shortened = (text for text in options if name.startswith("--") and text.startswith(name))
        return options.get(name) or next((options[text] for text in shortened), None)


def whole_number(minimum: int = 1, maximum: int = 2**31 - 1, multiple: int = 1) -> Callable[[str], int]:
    """Make a reader of whole numbers."""
    expected = f"a whole number from {minimum} to {maximum}" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum or int(text) % multiple:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return int(text)

    return read
