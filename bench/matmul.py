"""``python -m bench matmul``: matmuls whose epilogue is the activation, beside the vendor's bare ones.

A layer of a model's MLP block, forward and back, in each of the ways that a layer chooses from: the library's matmul
and a kernel behind it, and each tiling of the Triton matmuls. The yardstick is the library's matmul alone. All run
interleaved, on the same numbers; on a GPU, for on a CPU there is nothing to choose from.
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedlayers.activations import resolve
from fusedlayers.backends import GradientRequest

from . import RESULTS, grid, machine, measure, shapes

#: "At least this part of the bare matmul's speed, where it is chosen."
TARGET = 0.9
ROLES = {
    "layer": "f(x w^T + b)",
    "gradient": "(dy w) f', written over f(x w^T + b)",
    "gradient-hidden": "(dy w) f', written over x w^T + b, of which f is computed again",
    "gate": "the same of f(gate) up",
}
DEFINITIONS = {
    **ROLES,
    "of_matmul": "the bare matmul's time over this one's: median and quartiles over interleaved rounds",
}


class Case(NamedTuple):
    shape: shapes.Shape
    role: str
    activation: str
    dtype: str

    @property
    def id(self) -> str:
        return "/".join((self.shape.name.lower().replace(" ", "-"), self.role, self.activation, self.dtype))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--budget", type=float, default=120, metavar="SECONDS", help="start no case after this")
    parser.add_argument("--quick", action="store_true", help="few rows, for a look at whether it runs")
    parser.add_argument("--out", type=Path, help="folder for matmul.json (default: the device's results folder)")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    out = options.out or RESULTS / machine.slug(device, torch.get_num_threads())
    run(device, tuple(options.dtype or ("bfloat16",)), budget_seconds=options.budget, quick=options.quick, out=out)
    print(f"wrote {out / 'matmul.json'}")
    return 0


def cases(dtypes: tuple[str, ...]) -> Iterator[Case]:
    """What a model has, with its own activation: a kernel is compiled once for all sizes."""
    for dtype in dtypes:
        for role in ("layer", "gradient", "gradient-hidden"):
            for shape in shapes.MLP_SHAPES:
                yield Case(shape, role, "gelu", dtype)
        for shape in shapes.GATED_SHAPES:
            yield Case(shape, "gate", "silu", dtype)


def run(
    device: torch.device, dtypes: tuple[str, ...], *, budget_seconds: float, quick: bool, out: Path | None = None
) -> dict[str, Any]:
    end = time.monotonic() + budget_seconds
    todo = list(cases(dtypes))
    result = grid.begin("matmul", device, DEFINITIONS, quick=quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for case, left, sharing in grid.until(end, todo):
        row = measure_case(case, device, quick, min(left / sharing, 2.0))
        grid.add(result, row, out)
        ways = ", ".join(f"{name} {way['of_matmul']:.2f}" for name, way in row["ways"].items())
        print(f"{case.id:<44} {row['tflop_per_s']:.0f} TFLOP/s alone | {ways} of it", flush=True)
    return result


def measure_case(case: Case, device: torch.device, quick: bool, seconds: float) -> dict[str, Any]:
    job, sizes = _job(case, device, quick)
    a, b = (job.x, job.w.t()) if case.role == "layer" else (job.dy, job.w)
    functions = {name: partial(job.run, name) for name in job.candidates}
    times = measure.interleave({"matmul": partial(torch.matmul, a, b), **functions}, device, seconds=seconds)
    alone = measure.spread(times["matmul"])
    rows, columns, inner = sizes
    ways = {}
    for name in functions:
        part = measure.spread([bare / own for bare, own in zip(times["matmul"], times[name], strict=True)])
        ways[name] = {f"{key}_us": round(value, 3) for key, value in measure.spread(times[name]).items()}
        ways[name] |= {"of_matmul": round(part["median"], 4)}
        ways[name] |= {"of_matmul_q1": round(part["q1"], 4), "of_matmul_q3": round(part["q3"], 4)}
    return {
        "id": case.id,
        "role": case.role,
        "activation": case.activation,
        "dtype": case.dtype,
        "rows": rows,
        "columns": columns,
        "inner": inner,
        "matmul": {f"{key}_us": round(value, 3) for key, value in alone.items()},
        "tflop_per_s": round(2e-6 * rows * columns * inner / alone["median"], 3),
        "ways": ways,
    }


def _job(case: Case, device: torch.device, quick: bool) -> tuple[Any, tuple[int, int, int]]:
    # Here, because it needs Triton.
    from fusedlayers.backends.triton.operations import Backwards, Layer

    rows, hidden, width = case.shape.rows(device.type, quick), case.shape.hidden_features, case.shape.in_features
    activation = resolve(case.activation)
    empty = partial(torch.empty, dtype=getattr(torch, case.dtype), device=device)
    if case.role == "layer":
        layer = Layer(empty(rows, width), empty(hidden, width), empty(hidden), activation, (), True)
        return layer.other(rows), (rows, hidden, width)
    is_gated, given = case.role == "gate", "output" if case.role == "gradient" else "input"
    wanted = GradientRequest(given, overwrite=True, needs_bias=not is_gated)  # type: ignore[arg-type]  # a str that is one of both
    parts = [empty(rows, hidden) for _ in range(1 + is_gated)]
    back = Backwards(empty(rows, width), empty(width, hidden), parts, activation, (), wanted, given == "input")
    return back.other(rows), (rows, hidden, width)


def acceptance(result: dict[str, Any]) -> list[str]:
    """A line for each case on a GPU: which way is the fastest, and if that is a tiling, whether it meets the target."""
    if result["device"]["kind"] != "cuda":
        return []
    lines = []
    for row in result["cases"]:
        best = max(row["ways"], key=lambda name: row["ways"][name]["of_matmul"])
        part = row["ways"][best]["of_matmul"]
        line = f"{row['id']}: {best} at {part:.2f} of the bare matmul's speed"
        if best != "library":
            line += f", target {TARGET}: {'met' if part >= TARGET else 'MISSED'}"
        lines.append(line)
    return lines
