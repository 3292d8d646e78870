"""What plots share: matplotlib, which is optional, and checks of the output format."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(function: str, size: tuple[float, float]) -> Figure:
    """An empty figure of this size in inches.

    Raises:
        ImportError: matplotlib is not installed; the message begins with ``function``.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would choose a window system
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{function}: a plot needs matplotlib, which is not installed: pip install 'fusedlayers[demo]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def check_format(function: str, path: str | os.PathLike[str]) -> None:
    """Raise what drawing into a file of that name would raise, by saving an empty figure to memory."""
    suffix = os.path.splitext(path)[1]
    new_figure(function, (1, 1)).savefig(io.BytesIO(), format=suffix[1:] or None)
