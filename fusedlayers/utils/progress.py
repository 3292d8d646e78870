"""How far a long run has come: a line on stderr that is written over in a terminal, elsewhere a new one now and then.

Functions of the library show nothing unless they are asked to, by ``progress=True``; the demo always does.

Something is written when a stage is told of and at no other time: a thread would take the interpreter from what is
being measured. The price is that the estimate stands still within a stage.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator

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


#: Between two lines, outside of a terminal. A run that takes less says nothing.
LINE_SECONDS = 10
#: Moves to the start of a terminal's line, and erases it.
ERASE = "\r\x1b[K"


@contextlib.contextmanager
def shown() -> Iterator[OnStage]:
    """Yield what is told of each stage. Nothing is written to stdout, and a terminal's line is gone at the end."""
    is_terminal = _is_terminal()
    first: tuple[float, float] | None = None
    last = time.monotonic()

    def on_stage(stage: str, part: float) -> None:
        nonlocal first, last
        now = time.monotonic()
        # By what has been done since the first stage was told of: what comes before it compiles, and is done once.
        first = (now, part) if first is None else first
        done = part - first[1]
        left = f", {duration_text((now - first[0]) * (1 - part) / done)} left" if done > 0 and part < 1 else ""
        line = f"{part:4.0%} {stage}{left}"
        if is_terminal:
            _write(ERASE + line[: shutil.get_terminal_size().columns - 1])
        elif now - last >= LINE_SECONDS:
            last = now
            _write(line + "\n")

    try:
        yield on_stage
    finally:
        if is_terminal:
            _write(ERASE)


def _is_terminal() -> bool:
    """Whether stderr is one that moves its cursor. It is None in programs without a console; a closed one, or one of a
    user's, may not say."""
    try:
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    except (AttributeError, OSError, ValueError):
        return False


def _write(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads it any more, or it is closed
            sys.stderr.write(text)
            sys.stderr.flush()
