"""An icicle plot of what a model saves: from left to right the model, its modules, and the operations that save.

Heights are bytes. Boxes too low for a line of text have none; repeated blocks are one box, as in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..utils.formatting import size_text
from ..utils.plotting import BLUE, DARK, FONT, GREEN, GREY, INK, LEMON, ORANGE, SKY, WIDTH, WINE, new_figure
from .row_groups import entries_in, groups_of
from .saved_rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Colours of operations, the largest first; all others are grey.
COLORS = (BLUE, ORANGE, GREEN, SKY, WINE, LEMON)
MODULES = ("#dfe5ec", "#e7ecf1", "#eef1f5", "#f4f6f9")
HEIGHT = 6
#: Width of an operation, in columns.
OPERATION = 1.7
#: Height of a line of text as a share of the picture, and characters per inch.
LINE, CHARACTERS = 0.025, 14.5


@dataclass
class Box:
    """A module with its children, or, without children, an operation."""

    name: str
    bytes: int = 0
    operation: str = ""
    note: str = ""
    children: dict[str, Box] = field(default_factory=dict)

    def sorted(self) -> list[Box]:
        return sorted(self.children.values(), key=lambda box: -box.bytes)

    @property
    def depth(self) -> int:
        """Columns of modules, this one included."""
        return 1 + max((child.depth for child in self.children.values() if not child.operation), default=0)


def draw(rows: Sequence[Row], model: str, title: str) -> Figure:
    """The saved activations of a model of this name."""
    figure = new_figure("memory_report", HEIGHT, title)
    root = tree(rows, model)
    axes = figure.subplots()
    axes.set(xlim=(0, root.depth + OPERATION), ylim=(1, 0))
    axes.set_axis_off()
    _draw(axes, root, 0, 0.0, root.bytes, root.depth, _colors(root))
    return figure


def tree(rows: Sequence[Row], model: str) -> Box:
    """Modules in modules, and in the innermost ones what they save."""
    root = Box(model)
    for group in groups_of(rows, model):
        own_path = [] if group.path == model else _parts(group.path)
        for entry in entries_in(group, model):
            box = root
            box.bytes += entry.bytes
            for part in own_path:
                box = box.children.setdefault(part, Box(part))
                box.bytes += entry.bytes
            operation = entry.operation.partition(" ")[0]
            key = f"{operation} {entry.tensors}"
            leaf = box.children.setdefault(key, Box(operation, operation=operation, note=entry.tensors))
            leaf.bytes += entry.bytes
    for child in root.children.values():
        _collapse(child)
    return root


def _parts(path: str) -> list[str]:
    """The names in a path, numbers with the name before them: ``encoder.layer.0-3.output`` has three."""
    parts: list[str] = []
    for part in path.split("."):
        if parts and part[0].isdecimal():
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts


def _collapse(box: Box) -> None:
    """Merge a module that contains nothing but one module with that module."""
    while len(box.children) == 1 and not (child := next(iter(box.children.values()))).operation:
        box.name, box.children = f"{box.name}.{child.name}", child.children
    for child in box.children.values():
        _collapse(child)


def _colors(root: Box) -> dict[str, str]:
    sums: dict[str, int] = {}
    for leaf in _leaves(root):
        sums[leaf.operation] = sums.get(leaf.operation, 0) + leaf.bytes
    ranked = sorted(sums, key=lambda operation: -sums[operation])
    return dict(zip(ranked, COLORS, strict=False))


def _leaves(box: Box) -> Iterator[Box]:
    if box.operation:
        yield box
    for child in box.children.values():
        yield from _leaves(child)


def _draw(axes: Any, box: Box, column: int, top: float, whole: int, columns: int, colors: dict[str, str]) -> None:
    height = box.bytes / whole
    right = columns + OPERATION if box.operation else column + 1
    color = colors.get(box.operation, GREY) if box.operation else MODULES[column % len(MODULES)]
    axes.fill_between([column, right], top, top + height, facecolor=color, edgecolor="white", linewidth=1)
    lines = int(height / LINE)
    if lines:
        characters = int((right - column) * WIDTH / (columns + OPERATION) * CHARACTERS)
        share = f"{size_text(box.bytes)}, {100 * height:.0f} %"
        words = [box.name, share, box.note] if box.operation else [box.name, share]
        text = "\n".join(_packed(words, lines, characters))
        ink = "white" if color in DARK else INK
        axes.text(column + 0.03, top + height / 2, text, va="center", fontsize=FONT, color=ink, linespacing=1.15)
    for child in box.sorted():
        _draw(axes, child, column + 1, top, whole, columns, colors)
        top += child.bytes / whole


def _packed(words: list[str], lines: int, characters: int) -> list[str]:
    """Words in as many lines as there are, several in one if need be, and only those that fit. A name that is too long
    for a line keeps its end, which says most."""
    packed = [words[0] if len(words[0]) <= characters else "…" + words[0][1 - characters :]]
    for word in words[1:]:
        if len(packed[-1]) + 2 + len(word) <= characters:
            packed[-1] += f"  {word}"
        elif len(packed) < lines and len(word) <= characters:
            packed.append(word)
    return packed
