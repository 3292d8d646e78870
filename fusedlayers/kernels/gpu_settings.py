"""Whether kernels of this package may run on GPUs."""

from __future__ import annotations

import functools
import os

#: Of the environment: "off" leaves to PyTorch what needs kernels.
VARIABLE = "FUSEDLAYERS_KERNELS"


@functools.cache
def kernels_are_off() -> bool:
    """Whether the environment switches the kernels off.

    Raises:
        ValueError: it says neither "on" nor "off".
    """
    value = os.environ.get(VARIABLE, "").lower() or "on"
    if value not in ("on", "off"):
        raise ValueError(f"{VARIABLE}: got {value!r}, expected 'on' or 'off'")
    return value == "off"
