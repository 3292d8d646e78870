"""``torch.utils.checkpoint`` in code that ``torch.compile`` reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .._torch import dynamo_is_in_checkpoint


def is_in_checkpoint() -> bool:
    """Whether a checkpoint is around what the compiler reads."""
    return torch.compiler.is_dynamo_compiling() and dynamo_is_in_checkpoint()


def compiled_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a checkpoint. Where another one is around it, that one recomputes the function anyway; and
    of one within it the compiler of torch 2.11 would keep the inputs."""
    return function(*args) if is_in_checkpoint() else checkpoint(function, *args, use_reentrant=False)
