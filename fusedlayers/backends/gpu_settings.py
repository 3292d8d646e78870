"""What may run on a GPU, no kernel of this package, those that a fixed rule chooses, or those that were tuned too; and
how much of it."""

from __future__ import annotations

import functools
import os
from typing import Literal, get_args

Kernels = Literal["off", "rule", "tuned"]

#: Of the environment: what may run; and the file of what was tuned, in the place of the one in the user's cache.
VARIABLE, FILE_VARIABLE = "FUSEDLAYERS_KERNELS", "FUSEDLAYERS_TUNED"
#: How many multiprocessors this package's matmuls leave free. As many of their programs run as a device holds, until
#: the end: a collective that begins beside them waits for the last one.
MARGIN_VARIABLE = "FUSEDLAYERS_SM_MARGIN"


def checked(function: str, value: object) -> Kernels:
    """``value``, if that is one of the choices.

    Raises:
        ValueError: it is none.
    """
    if value not in get_args(Kernels):
        raise ValueError(f"{function}: got {value!r}, expected one of {', '.join(map(repr, get_args(Kernels)))}")
    return value  # type: ignore[return-value]  # which the test has narrowed


class _State:
    """Of the process: backward passes run on threads of their own, and must choose what others choose."""

    kernels: Kernels | None = None


def allowed() -> Kernels:
    """What may run now: by default "tuned", or what the environment says."""
    if _State.kernels is None:
        _State.kernels = checked(VARIABLE, os.environ.get(VARIABLE, "").lower() or "tuned")
    return _State.kernels


def allow(kernels: Kernels) -> None:
    """From now on these kernels may run, in all threads."""
    _State.kernels = kernels


@functools.cache
def margin() -> int:
    """The multiprocessors that are left free.

    Raises:
        ValueError: the environment says something that is no number of them.
    """
    text = os.environ.get(MARGIN_VARIABLE, "") or "0"
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{MARGIN_VARIABLE}: got {text!r}, expected a number of multiprocessors, 0 or more")
    return int(text)
