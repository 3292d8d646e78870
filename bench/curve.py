"""The picture of memory against speed, for networks that run partly twice."""

from pathlib import Path
from typing import Any

from fusedlayers.utils.plotting import BLUE, GREEN, ORANGE, WINE

#: By the beginning of a variant's name.
_STYLES = {
    "budget": ("o-", BLUE, "fusedlayers, memory_budget_bytes"),
    "same-memory": ("x", BLUE, "fusedlayers, in checkpoint_sequential's memory"),
    "sublinear": ("s", BLUE, "fusedlayers"),
    "cheap": ("^", GREEN, "fusedlayers, cheap"),
    "fused": ("P", WINE, "fusedlayers, fused batch norm"),
    "checkpoint_sequential": ("D--", ORANGE, "torch.utils.checkpoint_sequential"),
    "eager": ("*", "0.15", "eager"),
}


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw ResNet-152's variants; say so and return False where that cannot be."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no plot: matplotlib is missing (pip install matplotlib, or the 'demo' extra); {path.name} not written")
        return False
    found = next((row for row in result["cases"] if row["id"] == "resnet152"), None)
    if found is None:
        print(f"no plot: this run has no case to draw; {path.name} not written")
        return False
    eager = found["variants"]["eager"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for prefix, (style, color, label) in _STYLES.items():
        points = sorted(
            (v["peak_bytes"] / eager["peak_bytes"], 1 / v["forward_backward"]["ratio"])
            for name, v in found["variants"].items()
            if name.startswith(prefix) and "peak_bytes" in v
        )
        if points:
            axis.plot(*zip(*points, strict=True), style, color=color, label=label)
    axis.set_xlim(0, 1.05)
    axis.set_xlabel("peak memory of activations, relative to eager")
    axis.set_ylabel("speed, relative to eager")
    axis.grid(color="0.92")
    axis.legend(frameon=False, loc="lower right")
    shape = " x ".join(map(str, found["input"]))
    axis.set_title(f"ResNet-152, {shape}, {result['device']['name']}, torch {result['versions']['torch']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")
    return True
