"""The style that plots share, and matplotlib, which is optional.

Pictures are as wide as a README's column shows them. Nothing here touches matplotlib's global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Apart for every colour vision: the two nearest are 14 units of CIELAB apart, of simulated ones too (Machado 2009).
BLUE, ORANGE, WINE, GREY = "#2166ac", "#e08214", "#882255", "#8d97a3"
INK = "#22303c"
#: What PyTorch does and what this library does, in every picture.
EAGER, HERE = GREY, BLUE

#: Inches, dots per inch, and points.
WIDTH, DPI, FONT, TITLE_FONT = 9, 150, 8, 10


def new_figure(function: str, height: float, title: str = "") -> Figure:
    """An empty figure of this height in inches.

    Raises:
        ImportError: matplotlib is not installed; the message begins with ``function``.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot, which would choose a window system
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{function}: a plot needs matplotlib, which is not installed: pip install 'fusedlayers[demo]'"
        ) from error
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=TITLE_FONT)
    return figure


def style(axes: Axes, *, title: str = "", xlabel: str = "", ylabel: str = "") -> None:
    """Title, labels and frame of a diagram."""
    axes.set_title(title, loc="left", color=INK, fontsize=FONT + 1)
    axes.set_xlabel(xlabel, color=INK, fontsize=FONT)
    axes.set_ylabel(ylabel, color=INK, fontsize=FONT)
    axes.tick_params(labelsize=FONT, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)


def legend(axes: Axes, title: str = "", **options: Any) -> None:
    """A legend without a frame."""
    text = {"fontsize": FONT, "title_fontsize": FONT, "labelcolor": INK, "alignment": "left"}
    axes.legend(title=title, frameon=False, **{**text, **options}).get_title().set_color(INK)
