"""In a distributed job all processes follow one: their times differ, and they meet in what they recompute.

They must call ``fit`` together, with the same model. What a budget is compared with is the most that one of them takes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

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


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
