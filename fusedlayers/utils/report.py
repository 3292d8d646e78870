"""The base of all reports: their form in notebooks and files, and the style of their pictures.

matplotlib is optional. Pictures are as wide as a README's column shows them, and leave its global state as it is.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: To who writes ``model = fuse(model, x)``.
_NO_MODEL = "it is a report, and no model. fuse and fit change the model itself; do not assign to it what they return"


class Report:
    """A dataclass whose ``str()`` is a table. A notebook shows the table, because it asks for ``_repr_html_``."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON: its fields, but for those that only pictures need."""
        report: Any = self
        shown = {field.name for field in dataclasses.fields(report) if field.repr}
        return {name: value for name, value in dataclasses.asdict(report).items() if name in shown}

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: a report is not the model."""
        raise TypeError(f"a {type(self).__name__} cannot be called: {_NO_MODEL}")

    if not TYPE_CHECKING:  # to which every attribute would be one that it has

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_NO_MODEL}" if name in dir(nn.Module) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


class NothingToDrawError(ValueError):
    """A report has no picture, for the reason that the message gives."""


class DrawnReport(Report):
    """A report that has a picture too. A notebook shows both; without matplotlib, the table."""

    def figure(self) -> Figure:
        """The picture, as a matplotlib figure that belongs to no window.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there is nothing to draw.
        """
        raise NotImplementedError

    def plot(self, path: str | PathLike[str]) -> None:
        """Write ``figure()`` into a file, whose suffix says the format. Raises what ``figure`` raises."""
        self.figure().savefig(path)

    def _repr_html_(self) -> str:
        table, image = super()._repr_html_(), io.BytesIO()
        try:
            self.figure().savefig(image, format="png")
        except (ImportError, NothingToDrawError):
            return table
        source = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
        return f'{table}<img src="{source}" style="max-width: 100%; width: 900px">'


# --- the style of pictures --------------------------------------------------------------------------------------------

#: Apart for every colour vision: the two nearest are 14 units of CIELAB apart, of simulated ones too (Machado 2009).
BLUE, ORANGE, WINE, GREY = "#2166ac", "#e08214", "#882255", "#8d97a3"
INK = "#22303c"
#: PyTorch, and this library, in every picture.
EAGER, HERE = GREY, BLUE

#: Inches, dots per inch, and points.
WIDTH, DPI, FONT, TITLE_FONT = 9, 150, 8, 10


def new_figure(function: str, height: float, title: str) -> Figure:
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


def legend(axes: Axes) -> None:
    """A legend without a frame."""
    axes.legend(frameon=False, fontsize=FONT, labelcolor=INK)
