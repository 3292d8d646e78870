"""The picture beside a result file: every case as a dot, relative to eager."""

from pathlib import Path
from typing import Any

_STYLES = {"compile": ("D", "#e08214", "torch.compile"), "fusedlayers": ("o", "#2166ac", "fusedlayers")}
_PANELS = (
    ("forward", "forward time"),
    ("forward_backward", "forward + backward time"),
    ("saved_bytes", "bytes saved for backward"),
    ("peak_bytes", "peak bytes, forward + backward"),
)
_RIGHT_END = 3.0


def plot_dense(result: dict[str, Any], path: Path) -> bool:
    """Draw ``dense.json``; say so and return False where matplotlib is missing, which measuring does not need."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no plot: matplotlib is missing (pip install matplotlib, or the 'demo' extra); {path.name} not written")
        return False

    rows = [row for row in result["cases"] if row["group"] in ("acceptance", "model", "small")]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    if not rows:
        print(f"no plot: this run has no case to draw; {path.name} not written")
        return False
    by_dtype = {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in dtypes}
    heights = [len(by_dtype[dtype]) + 3 for dtype in dtypes]
    figure = Figure(figsize=(15, 1.5 + 0.24 * sum(heights)), layout="constrained")
    axes = figure.subplots(
        len(dtypes), len(_PANELS), squeeze=False, sharey="row", gridspec_kw={"height_ratios": heights}
    )
    for dtype, line in zip(dtypes, axes, strict=True):
        cases = by_dtype[dtype]
        for axis, (key, title) in zip(line, _PANELS, strict=True):
            _panel(axis, cases, key)
            axis.set_title(title, fontsize=10)
        labels = [f"{row['activation']}, {row['shape']}, {row['tokens']} rows" for row in cases]
        line[0].set_yticks(range(len(cases)), labels, fontsize=8)
        line[0].set_ylim(len(cases) - 0.4, -0.6)
        line[0].set_ylabel(dtype, fontsize=12, fontweight="bold", labelpad=12)
        for axis in line:
            axis.set_xlabel("relative to eager (lower is better)", fontsize=8)
    handles = [
        axes[0][0].plot([], [], linestyle="", marker=marker, color=color, label=label)[0]
        for marker, color, label in _STYLES.values()
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, frameon=False)
    versions = f"torch {result['versions']['torch']}, {result['threads']} threads" + (
        ", --quick" if result["quick"] else ""
    )
    figure.suptitle(f"Dense layer with activation on {result['device']['name']} ({versions})", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")
    return True


def _panel(axis: Any, cases: list[dict[str, Any]], key: str) -> None:
    for position, row in enumerate(cases):
        if position and row["activation"] != cases[position - 1]["activation"]:
            axis.axhline(position - 0.5, color="0.9", linewidth=0.8)
        for name, (marker, color, _) in _STYLES.items():
            variant = row["variants"].get(name, {})
            if key not in variant:
                continue  # failed or skipped; the result file says why
            if key.endswith("_bytes"):
                ratio = variant[key] / max(row["variants"]["eager"][key], 1)
                low = high = ratio
            else:
                ratio, low, high = (variant[key][field] for field in ("ratio", "ratio_q1", "ratio_q3"))
            if ratio > _RIGHT_END:  # at the edge and with its number, so that one outlier does not squeeze the others
                axis.plot(_RIGHT_END, position, marker=">", color=color, markersize=6, clip_on=False)
                axis.annotate(
                    f"{ratio:.1f}x ", (_RIGHT_END, position), ha="right", va="center", fontsize=7, color=color
                )
                continue
            axis.plot([low, min(high, _RIGHT_END)], [position, position], color=color, linewidth=1.5, alpha=0.6)
            axis.plot(ratio, position, marker=marker, color=color, markersize=5)
    axis.axvline(1, color="0.4", linewidth=1)
    axis.set_xlim(0, min(max(axis.get_xlim()[1], 1.15), _RIGHT_END))
    axis.grid(axis="x", color="0.92")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
