"""The README's picture: what whole models save for backward and what a step takes, before and after ``fuse``.

An SVG written as text is the same on every machine, so that ``bench readme --check`` can compare it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from .tables import committed, measured_on

#: Colours of PyTorch, of this library, and of text.
EAGER, HERE, INK = "#8d97a3", "#2166ac", "#22303c"
_WIDTH, _LABELS, _BARS, _ROW, _TOP = 860, 236, 430, 46, 64


def shown(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The timed models of a run, in the dtype of the last one: autocast, in which people train."""
    rows = [row for row in run["cases"] if "forward_backward" in row["variants"].get("fusedlayers", {})]
    return [row for row in rows if row["dtype"] == rows[-1]["dtype"]]


def picture(results: Path) -> str | None:
    """One row for each of these models of the best committed run; None if there are none."""
    runs = committed(results, "models")
    rows = shown(runs[0]) if runs else []
    if not rows:
        return None
    height = _TOP + _ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LABELS, 24, "saved for the backward pass", size=15),
        _legend(_LABELS, EAGER, "PyTorch"),
        _legend(_LABELS + 100, HERE, "after fl.fuse(model)"),
    ]
    parts.append(_text(_WIDTH - 16, 24, "time of a step", size=15, anchor="end"))
    for number, row in enumerate(rows):
        parts += _row(row, _TOP + _ROW * number)
    parts.append(_text(16, height - 10, measured_on(runs[0]).rstrip(":"), size=11))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(row: dict[str, Any], top: int) -> list[str]:
    eager, here = row["variants"]["eager"], row["variants"]["fusedlayers"]
    inputs = f"{row['dtype']}, {' x '.join(map(str, row['input']))}"
    parts = [_text(16, top + 16, row["model"]), _text(16, top + 31, inputs, size=11)]
    for y, variant, color in ((top + 4, eager, EAGER), (top + 20, here, HERE)):
        length = round(_BARS * variant["saved_bytes"] / eager["saved_bytes"], 1)
        parts.append(f'<rect x="{_LABELS}" y="{y}" width="{length}" height="14" fill="{color}"/>')
        words = f"{variant['saved_bytes'] / 2**20:,.0f} MiB"
        if variant is here:
            words += f"  ({100 * (here['saved_bytes'] / eager['saved_bytes'] - 1):+.0f} %)"
        parts.append(_text(_LABELS + length + 6, y + 12, words, size=12))
    ratio = here["forward_backward"]["ratio"]
    return [*parts, _text(_WIDTH - 16, top + 32, f"{ratio:.2f}x", anchor="end")]


def _legend(x: int, color: str, words: str) -> str:
    return f'<rect x="{x}" y="38" width="12" height="12" fill="{color}"/>' + _text(x + 18, 49, words)


def _text(x: float, y: float, words: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escape(words)}</text>'
