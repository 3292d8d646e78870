"""What the pictures of reports share: matplotlib, which need not be installed, and what it refuses."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(function: str, size: tuple[float, float]) -> Figure:
    """An empty picture, of so many inches.

    Raises:
        ImportError: matplotlib is not installed; ``function`` is who says so.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would choose a window system
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{function}: a plot needs matplotlib, which is not installed: pip install 'fusedlayers[demo]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def check_format(function: str, path: str | os.PathLike[str]) -> None:
    """Raise what drawing into a file of that name would, by drawing nothing into memory."""
    suffix = os.path.splitext(path)[1]
    new_figure(function, (1, 1)).savefig(io.BytesIO(), format=suffix[1:] or None)
