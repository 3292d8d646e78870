"""Where a kernel cannot be compiled or launched, torch operations compute what it would have, and one line says so.

That happens on GPUs that Triton does not know, without a C compiler for its launcher, and where a kernel asks for more
than a device has. Nothing has been written by then. Other errors of the driver are raised as they are.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.errors import TritonError

from ...activations import Activation

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

#: What Triton's compiler, the assembler and the launcher's compiler raise; of RuntimeErrors those with these words.
ERRORS = (TritonError, OSError, subprocess.CalledProcessError, RuntimeError)
WORDS = ("no kernel image", "kernel image is invalid", "unsupported", "PassManager", "Failed to find C compiler")

#: What could not be launched, with which activation, dtype and device.
_failed: set[Hashable] = set()
_warned: set[torch.device] = set()


def or_reference(reference: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function that launches one kernel; ``reference`` computes the same, from the same arguments."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if has_failed(function.__name__, args):
                return reference(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except ERRORS as error:
                remember(error, function.__name__, args)
            return reference(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def remember(error: BaseException, name: str, args: tuple[Any, ...]) -> None:
    """Note that a kernel cannot be launched, if that is what the error says, and say so once for each device; else
    raise it."""
    if isinstance(error, RuntimeError) and not any(word in str(error) for word in WORDS):
        raise error
    _failed.add(_key(name, args))
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device not in _warned:
        _warned.add(device)
        text = next(iter(str(error).splitlines()), "")
        _log.warning(
            "a Triton kernel cannot run on %s, and torch operations compute in its place: %s: %s",
            *(device, type(error).__name__, text),
        )


def has_failed(name: str, args: tuple[Any, ...]) -> bool:
    return bool(_failed) and _key(name, args) in _failed


def _key(name: str, args: tuple[Any, ...]) -> Hashable:
    like = next(arg for arg in args if isinstance(arg, Tensor))
    return name, like.device, like.dtype, next((arg for arg in args if isinstance(arg, Activation)), None)
