"""The progress of a long run: a line on stderr now and then, with the time left.

Functions of the library show nothing unless they are asked to, by ``progress=True``; the demo always does.

A line is written when a stage is told of and at no other time: a thread would take the interpreter from what is being
measured. The price is that the estimate stands still within a stage.
"""

import contextlib
import sys
import time
from collections.abc import Callable

from .formatting import duration_text

OnStage = Callable[[str, float], None]
"""Is told what is done next, and which part of all has been done: 0 to 1."""

#: Between two lines. A run that takes less says nothing.
LINE_SECONDS = 10


def asked(function: str, progress: object) -> OnStage:
    """The function that is told of each stage, as a caller has asked for it: True for ``shown()``.

    Raises:
        TypeError: it is neither True, False nor a function.
    """
    if isinstance(progress, bool):
        return shown() if progress else lambda stage, part: None
    if not callable(progress):
        raise TypeError(
            f"{function}: progress must be True, False, or a function of a text and a number such as print, got "
            f"{progress!r}"
        )
    return progress


def within(on_stage: OnStage, start: float, end: float) -> OnStage:
    """A function for a part of a run: told of 0 to 1, it tells of ``start`` to ``end``."""
    return lambda stage, part: on_stage(stage, round(start + (end - start) * part, 2))


def shown() -> OnStage:
    """A function that is told of each stage, and writes lines on stderr."""
    first: tuple[float, float] | None = None
    last = time.monotonic()

    def on_stage(stage: str, part: float) -> None:
        nonlocal first, last
        now = time.monotonic()
        # By what has been done since the first stage was told of: what comes before it compiles, and is done once.
        first = first or (now, part)
        done = part - first[1]
        left = f", {duration_text((now - first[0]) * (1 - part) / done)} left" if done > 0 and part < 1 else ""
        if now - last >= LINE_SECONDS:
            last = now
            with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stderr, or it is closed
                sys.stderr.write(f"{part:4.0%} {stage}{left}\n")
                sys.stderr.flush()

    return on_stage
