"""What may run on a GPU: no kernel of this package, those that a fixed rule chooses, or those that were tuned too."""

from __future__ import annotations

import os
from typing import Literal, get_args

Kernels = Literal["off", "rule", "tuned"]

#: Of the environment: what may run; and the file of what was tuned, in the place of the one in the user's cache.
VARIABLE, FILE_VARIABLE = "FUSEDLAYERS_KERNELS", "FUSEDLAYERS_TUNED"


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
