"""A picture of an activation: the function, its derivative, and how far the one that a layer has is from it."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ..utils.plotting import new_figure

if TYPE_CHECKING:
    from .explanation import Explanation


def draw(found: Explanation, path: str | PathLike[str]) -> None:
    """Draw into a file, whose suffix says the format."""
    figure = new_figure("explain", (8, 6))
    curves = {name: curve.numpy() for name, curve in found.curves.items()}
    if not curves:
        raise ValueError(f"explain: {found.name} or its derivative raises an error, so that there is nothing to draw")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(curves["z"], curves["y"], label="f")
    above.plot(curves["z"], curves["derivative"], label="f'")
    above.plot(curves["z"], curves["float32 derivative"], "--", label="f' as a layer has it (float32)")
    above.set_title(f"{found.name}: {found.kind}")
    above.legend()
    for dtype in ("float32", "bfloat16"):
        below.semilogy(curves["z"], curves[f"{dtype} error"].clip(1e-12), ".", markersize=2, label=dtype)
    below.set_xlabel("z")
    below.set_ylabel("error of the derivative")
    below.legend()
    figure.savefig(path)
