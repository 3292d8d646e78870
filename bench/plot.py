"""The picture beside a result file: every case as a row of marks, relative to eager."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fusedlayers.utils.plotting import BLUE, ORANGE, SKY

_PANELS = (
    ("forward", "forward time"),
    ("forward_backward", "forward + backward time"),
    ("saved_bytes", "bytes saved for backward"),
    ("peak_bytes", "peak bytes, forward + backward"),
)
_RIGHT_END = 3.0


@dataclass(frozen=True)
class Style:
    """How a variant is drawn."""

    marker: str
    color: str
    label: str
    #: What computes something else has a time to compare with, but no bytes.
    is_yardstick: bool = False


@dataclass(frozen=True)
class Picture:
    """What pictures differ in."""

    title: str
    #: By variant; later ones are drawn over earlier ones.
    styles: Mapping[str, Style]
    #: Inches of a row.
    row_height: float
    name: Callable[[dict[str, Any]], str]
    #: How much of a row's height its variants are spread over, so that none hides another.
    spread: float = 0.0


DENSE = Picture(
    title="Dense layer with activation",
    styles={
        "compile": Style("D", ORANGE, "torch.compile"),
        "fusedlayers": Style("o", BLUE, "fusedlayers"),
    },
    row_height=0.24,
    name=lambda row: f"{row['activation']}, {row['shape']}, {row['tokens']} rows",
)
MLP = Picture(
    title="MLP blocks",
    styles={
        "matmuls": Style("|", "0.15", "bare matmuls", is_yardstick=True),
        "compile": Style("D", ORANGE, "torch.compile"),
        "recompute": Style("s", SKY, "fusedlayers, recomputed"),
        "fusedlayers": Style("o", BLUE, "fusedlayers"),
    },
    row_height=0.34,
    name=lambda row: f"{row['shape']}, {'gated ' * row['gated']}{row['activation']}, {row['tokens']} rows",
    spread=0.45,
)


def draw(picture: Picture, result: dict[str, Any], path: Path) -> bool:
    """Draw a result; say so and return False where matplotlib is missing, which measuring does not need."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no plot: matplotlib is missing (pip install matplotlib, or the 'demo' extra); {path.name} not written")
        return False

    rows = result["cases"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        print(f"no plot: this run has no case to draw; {path.name} not written")
        return False
    by_dtype = {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in dtypes}
    measured = {name for row in rows for name, variant in row["variants"].items() if "saved_bytes" in variant}
    styles = {name: style for name, style in picture.styles.items() if name in measured}
    heights = [len(by_dtype[dtype]) + 3 for dtype in dtypes]
    figure = Figure(figsize=(15, 1.5 + picture.row_height * sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(dtypes), len(_PANELS), squeeze=False, sharey="row", gridspec_kw={"height_ratios": heights}
    )
    for dtype, line in zip(dtypes, axes, strict=True):
        cases = by_dtype[dtype]
        for axis, (key, title) in zip(line, _PANELS, strict=True):
            _panel(axis, cases, key, styles, picture.spread)
            axis.set_title(title, fontsize=10)
        line[0].set_yticks(range(len(cases)), [picture.name(row) for row in cases], fontsize=8)
        line[0].set_ylim(len(cases) - 0.4, -0.6)
        line[0].set_ylabel(dtype, fontsize=12, fontweight="bold", labelpad=12)
        for axis in line:
            axis.set_xlabel("relative to eager (lower is better)", fontsize=8)
    handles = [axes[0][0].plot([], [], linestyle="", label=s.label, **_mark(s))[0] for s in styles.values()]
    figure.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), 4), frameon=False)
    versions = f"torch {result['versions']['torch']}, {result['threads']} threads" + (
        ", --quick" if result["quick"] else ""
    )
    figure.suptitle(f"{picture.title} on {result['device']['name']} ({versions})", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")
    return True


plot_dense = partial(draw, DENSE)
plot_mlp = partial(draw, MLP)


def _mark(style: Style) -> dict[str, Any]:
    size = {"markersize": 16, "markeredgewidth": 2} if style.is_yardstick else {"markersize": 5}
    return {"marker": style.marker, "color": style.color, **size}


def _offsets(styles: Mapping[str, Style], spread: float) -> dict[str, float]:
    """How far above or below the middle of its row each variant is drawn; a yardstick's mark stands in the middle."""
    names = [name for name, style in styles.items() if not style.is_yardstick]
    step = spread / max(len(names) - 1, 1)
    return {name: spread / 2 - step * number for number, name in enumerate(names)}


def _panel(axis: Any, cases: list[dict[str, Any]], key: str, styles: Mapping[str, Style], spread: float) -> None:
    is_bytes = key.endswith("_bytes")
    offsets = _offsets(styles, spread)
    for number, row in enumerate(cases):
        if number and (spread or row["activation"] != cases[number - 1]["activation"]):
            axis.axhline(number - 0.5, color="0.9", linewidth=0.8)
        for name, style in styles.items():
            position = number + offsets.get(name, 0.0)
            variant = row["variants"].get(name, {})
            if key not in variant or (is_bytes and style.is_yardstick):
                continue  # failed or skipped; the result file says why
            if is_bytes:
                ratio = variant[key] / max(row["variants"]["eager"][key], 1)
                low = high = ratio
            else:
                ratio, low, high = (variant[key][field] for field in ("ratio", "ratio_q1", "ratio_q3"))
            if ratio > _RIGHT_END:  # at the edge and with its number, so that one outlier does not squeeze the others
                axis.plot(_RIGHT_END, position, marker=">", color=style.color, markersize=6, clip_on=False)
                axis.annotate(
                    f"{ratio:.1f}x ", (_RIGHT_END, position), ha="right", va="center", fontsize=7, color=style.color
                )
                continue
            axis.plot([low, min(high, _RIGHT_END)], [position, position], color=style.color, linewidth=1.5, alpha=0.6)
            axis.plot(ratio, position, clip_on=False, zorder=3, **_mark(style))
    axis.axvline(1, color="0.4", linewidth=1)
    axis.set_xlim(0, min(max(axis.get_xlim()[1], 1.15), _RIGHT_END))
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
