"""A picture of an activation: the function, its derivative, and how far the one that a layer has is from it."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from torch import Tensor

from ..utils.plotting import new_figure


def draw(curves: Mapping[str, Tensor], title: str, path: str | PathLike[str]) -> None:
    """Draw ``Explanation.curves`` into a file, whose suffix says the format."""
    figure = new_figure("explain", (8, 6))
    values = {name: curve.numpy() for name, curve in curves.items()}
    z = values["z"]
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(z, values["y"], label="f")
    above.plot(z, values["derivative"], label="f'")
    above.plot(z, values["float32 derivative"], "--", label="f' as a layer has it (float32)")
    above.set_title(title)
    above.legend()
    for dtype in ("float32", "bfloat16"):
        below.semilogy(z, values[f"{dtype} error"].clip(1e-12), ".", markersize=2, label=dtype)
    below.set_xlabel("z")
    below.set_ylabel("error of the derivative")
    below.legend()
    figure.savefig(path)
