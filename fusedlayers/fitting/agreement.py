"""In a distributed job all processes follow one: their times differ, and they meet in what they recompute.

They must call ``fit`` together, with the same model. What a budget is compared with is the most that one of them takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..utils.formatting import first_line

T = TypeVar("T")


def agreed(value: T) -> T:
    """The value of the first process, on all."""
    if not _is_distributed():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def everyone(value: T) -> list[T]:
    """The values of all processes, on all."""
    if not _is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def together(work: Callable[[], T]) -> list[T]:
    """What ``work`` returns in all processes. An error of one is raised in all, so that none waits for it.

    Raises:
        Exception: what ``work`` raises.
        ValueError: it has raised in another process.
    """
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        problem = error
    found = everyone((result, None if problem is None else f"{type(problem).__name__}: {first_line(problem)}"))
    if problem is not None:
        raise problem
    reason = next((reason for _, reason in found if reason is not None), None)
    if reason is not None:
        raise ValueError(f"fit: another process has raised {reason}")
    return [result for result, _ in found]  # type: ignore[misc]  # nobody has raised


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
