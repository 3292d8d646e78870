"""In a distributed job all processes follow one: their times differ, and they meet in what they recompute."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def agreed(value: T) -> T:
    """The value of the first process, on all."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]
