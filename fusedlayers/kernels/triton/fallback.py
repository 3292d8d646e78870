"""Where a kernel cannot be compiled for a device, or launched on it, torch operations compute what it would have, and
a line says so.

That happens on GPUs that Triton does not know, without a C compiler for its launcher, and where a kernel asks for more
than a device has. Nothing has been written by then. Other errors, those in a kernel's own code above all, are raised.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from ...activations import Activation

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

#: What the assembler, the launcher and its compiler raise; of RuntimeErrors those with these words.
ERRORS = (OutOfResources, PTXASError, OSError, subprocess.CalledProcessError, RuntimeError)
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
                note(error, function.__name__, args)
            return reference(*args, **kwargs)

        return call  # type: ignore[return-value]  # it takes and returns what the function does

    return decorate


def note(error: BaseException, name: str, args: tuple[Any, ...]) -> None:
    """Say that a kernel cannot be launched, if the error says that, once for each device; else raise it. It is not
    tried again, unless the system was at fault (a full disk, say)."""
    if isinstance(error, RuntimeError) and not any(word in str(error) for word in WORDS):
        raise error
    if not isinstance(error, OSError):
        _failed.add(_key(name, args))
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    text = next(iter(str(error).splitlines()), "")
    _log.log(
        logging.INFO if device in _warned else logging.WARNING,
        "a Triton kernel (%s) cannot run on %s, and torch operations compute in its place: %s: %s",
        *(name, device, type(error).__name__, text),
    )
    _warned.add(device)


def has_failed(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this kernel could not be launched before for such arguments."""
    return bool(_failed) and _key(name, args) in _failed


def _key(name: str, args: tuple[Any, ...]) -> Hashable:
    like = next(arg for arg in args if isinstance(arg, Tensor))
    return name, like.device, like.dtype, *(arg for arg in args if isinstance(arg, Activation))
