"""How far a long run has come: a bar on stderr in a terminal, elsewhere a line now and then.

Functions of the library show nothing unless they are asked to, by ``progress=True``; the demo always does.

The bar is drawn when it is told something and at no other time: a thread that redraws it would take the interpreter
from what is being measured. The price is that the estimate stands still within a stage.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TextIO

from .formatting import duration_text

OnStage = Callable[[str, float], None]
"""Is told what is done next, and which part of all has been done: 0 to 1."""


def silent(stage: str, part: float) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def asked(function: str, progress: object) -> Iterator[OnStage]:
    """Yield what is told of each stage, as a caller of this function has asked for it: True for ``shown``.

    Raises:
        TypeError: it is neither True, False nor a function.
    """
    if progress is True:
        with shown() as on_stage:
            yield on_stage
    elif progress is False:
        yield silent
    elif callable(progress):
        yield progress
    else:
        raise TypeError(
            f"{function}: progress must be True, False, or a function of a text and a number such as print, got "
            f"{progress!r}"
        )


def within(on_stage: OnStage, start: float, end: float) -> OnStage:
    """For a part of a run: told of 0 to 1, it tells of ``start`` to ``end``."""
    return lambda stage, part: on_stage(stage, round(start + (end - start) * part, 2))


#: Between two lines, where no bar can be drawn. A run that takes less says nothing.
LINE_SECONDS = 10


@contextlib.contextmanager
def shown() -> Iterator[OnStage]:
    """Yield what is told of each stage. Nothing is written to stdout, and the bar is gone at the end."""
    first: tuple[float, float] | None = None

    def left(part: float) -> str:
        """By what has been done since the first stage was told of: what comes before it compiles, and is done once."""
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now, part
        seconds, done = now - first[0], part - first[1]
        return f", {duration_text(seconds * (1 - part) / done)} left" if done > 0 and part < 1 else ""

    with _bar() if _can_draw() else _lines() as write:
        yield lambda stage, part: write(f"{stage}{left(part)}", part)


def _is_terminal(stream: TextIO | None) -> bool:
    """None is a stream of programs without a console. A closed one, or one of a user's, may not say."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):
        return False


def _can_draw() -> bool:
    if not _is_terminal(sys.stderr) or find_spec("rich") is None:
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


@contextlib.contextmanager
def _bar() -> Iterator[OnStage]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    # A narrow terminal cuts the text, not the bar.
    column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    text = TextColumn("{task.description}", markup=False, table_column=column)
    columns = BarColumn(20), TaskProgressColumn(), text
    # Lines that go to the same terminal are moved above the bar; those that go elsewhere are none of its business.
    shares_terminal = _is_terminal(sys.stdout)
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        expand=True,
        auto_refresh=False,
        redirect_stdout=shares_terminal,
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, part: progress.update(task, completed=part, description=text, refresh=True)


@contextlib.contextmanager
def _lines() -> Iterator[OnStage]:
    last = time.monotonic()

    def write(text: str, part: float) -> None:
        nonlocal last
        if sys.stderr is None or time.monotonic() - last < LINE_SECONDS:
            return
        last = time.monotonic()
        with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads it any more, or it is closed
            print(f"{part:4.0%} {text}", file=sys.stderr, flush=True)

    yield write
