"""Texts of reports and errors: sizes, durations, paths of similar modules, and tables."""

import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def unit_for(size: int) -> tuple[str, int]:
    """The unit for sizes up to this one, and its bytes."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return UNITS[power], 1024**power


def size_text(size: int) -> str:
    """Bytes, with a unit and three digits."""
    unit, scale = unit_for(size)
    return f"{size / scale:.{0 if size >= 100 * scale or scale == 1 else 1 if size >= 10 * scale else 2}f} {unit}"


def size_from(text: str) -> int:
    """The bytes that "8GiB", "1.5 MB" or "4096" say.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT]?)(i?)B)?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        short = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?\s*", text, re.IGNORECASE)
        hint = "" if short is None else "; did you mean {0}{1}iB, or {0}{1}B?".format(short[1], short[2].upper())
        raise ValueError(f"expected bytes, such as 8GiB or 500MB, got {text!r}{hint}")
    number, prefix, binary = match.groups()
    if prefix is None and ("." in number or int(number) < 1024):
        raise ValueError(f"expected bytes with a unit, such as 8GiB or 500MB, got {text!r}")
    power = "KMGT".find((prefix or " ").upper()) + 1
    whole, _, part = number.partition(".")
    unit: int = (1024 if binary else 1000) ** power
    return int(whole + part) * unit // int(10 ** len(part))


def described(value: object) -> str:
    """The type of a wrong argument, and the argument where it is short: a tensor's numbers say nothing."""
    name = type(value).__name__
    text = "" if getattr(value, "shape", ()) else repr(value)
    return f"{name}: {text}" if 0 < len(text) <= 60 and "\n" not in text else name


def duration_text(seconds: float) -> str:
    """Seconds, in whole ones, minutes, or hours and minutes."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def pattern_of(module: str) -> tuple[str, ...]:
    """A path with its numbers replaced by ``*``: the same for all repeated blocks."""
    return tuple("*" if part.isdecimal() else part for part in module.split("."))


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class if there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def callable_name(function: object) -> str:
    """The name of a function, or of the class of a module; of a class's method, as autograd.Function's apply, both."""
    while isinstance(function, functools.partial):
        function = function.func
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", type(function).__name__)
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name


def with_place(name: str, function: object) -> str:
    """A function's name; of a lambda, which has none, the file and the line too."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if name != "<lambda>" or code is None:
        return name
    return f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def path_text(modules: Iterable[str], model: str = "the model") -> str:
    """One path for the modules of repeated blocks: ``layer.0`` and ``layer.1`` are ``layer.0-1``, and ``0.0``, ``0.1``
    and ``1.1`` are ``0.0-1, 1.1``. Several where they differ in more than numbers; the model's own is ``model``."""
    alike: dict[object, list[tuple[str, ...]]] = {}
    for path in modules:
        alike.setdefault(pattern_of(path), []).append(tuple(path.split(".")))
    return ", ".join(".".join(path) or model for paths in alike.values() for path in _merged(paths))


def _merged(paths: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The fewest paths that name these and no others."""
    rests: dict[str, dict[tuple[str, ...], None]] = {}
    for path in paths:
        if not path:
            return [()]
        rests.setdefault(path[0], {})[path[1:]] = None
    alike: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for first, found in rests.items():
        alike.setdefault(frozenset(found), []).append(first)
    return [(_span(firsts), *rest) for firsts in alike.values() for rest in _merged(rests[firsts[0]])]


def _span(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


# --- tables -----------------------------------------------------------------------------------------------------------

#: Characters of a table's line, and of a column that is cut to keep to them.
COLUMNS, LEAST = 100, 18


def shortened(text: str, width: int) -> str:
    """The text without its middle, where it is longer than ``width``: paths differ at their ends."""
    end = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - end]}…{text[-end:]}"


def counted_lines(rows: Sequence[Sequence[str]], numbers: int = 1) -> Iterator[str]:
    """The lines of a table below a header, whose first columns, so many, are numbers. The columns between these and the
    last one are cut where lines would be too long."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = range(numbers, len(widths) - 1)
    while sum(widths) + 2 * len(widths) - 2 > COLUMNS and max((widths[i] for i in texts), default=0) > LEAST:
        widths[max(texts, key=widths.__getitem__)] -= 1
    for row in rows:
        padded = (
            f"{text:>{width}}" if column < numbers else f"{shortened(text, width):<{width}}"
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(padded).rstrip()
