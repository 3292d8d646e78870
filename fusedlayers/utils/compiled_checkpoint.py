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


#: Of a checkpoint within another one the compiler of torch 2.11 keeps the inputs.
_KEEPS_INPUTS_WITHIN = torch.__version__ < "2.12"


def compiled_checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``checkpoint(function, *args, use_reentrant=False, **options)``; where it would keep the inputs because another
    one is around it, the function itself, which that one recomputes, unless it is selective."""
    if _KEEPS_INPUTS_WITHIN and is_in_checkpoint():
        options.pop("context_fn", None)
        return function(*args, **options)
    return checkpoint(function, *args, use_reentrant=False, **options)
