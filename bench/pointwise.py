"""``python -m bench pointwise``: how close the pointwise kernels come to a copy, which is as fast as memory allows.

Forward reads z and writes y. Backward reads dy and the saved y and writes dz (and sums the bias gradient on the way). A
copy of the same tensor reads and writes it once. Their bandwidths are bytes moved over time, in one interleaved run;
1.0 means that the activation costs no more than moving its operands.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusedlayers as fl

from . import RESULTS, grid, machine, measure, shapes

#: The promise for large inputs on a GPU, where the arithmetic hides behind the memory traffic; none is made for a CPU.
TARGET = 0.9

#: rows, columns: a BERT-base hidden layer, and one too large for any cache. On a CPU the latter would only take longer.
SIZES = {"cpu": ((4096, 3072),), "cuda": ((8192, 3072), (32768, 4096), (32768, 11008))}

DEFINITIONS = {
    "forward": "z -> y: two tensors moved",
    "backward": "dy, y -> dz and the bias gradient: three tensors moved",
    "of_copy": "bandwidth over that of a copy of the same tensor: median and quartiles over interleaved rounds",
}


class Case(NamedTuple):
    size: tuple[int, int]
    dtype: str
    activation: str

    @property
    def id(self) -> str:
        """Size, activation and dtype: ``4096x3072/gelu/float32``."""
        rows, columns = self.size
        return f"{rows}x{columns}/{self.activation}/{self.dtype}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--budget", type=float, default=120, metavar="SECONDS", help="start no case after this")
    parser.add_argument("--out", type=Path, help="folder for pointwise.json (default: the device's results folder)")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    out = options.out or RESULTS / machine.slug(device, torch.get_num_threads())
    run(device, tuple(options.dtype or shapes.DTYPES[device.type]), budget_seconds=options.budget, out=out)
    print(f"wrote {out / 'pointwise.json'}")
    return 0


def run(
    device: torch.device,
    dtypes: tuple[str, ...],
    *,
    sizes: tuple[tuple[int, int], ...] = (),
    budget_seconds: float = 120,
    out: Path | None = None,
) -> dict[str, Any]:
    end = time.monotonic() + budget_seconds
    todo = [
        Case(size, dtype, activation)
        for dtype in dtypes
        for size in reversed(sizes or SIZES[device.type])
        for activation in shapes.ACTIVATIONS
    ]
    result = grid.begin("pointwise", device, DEFINITIONS, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for case, left, sharing in grid.until(end, todo):
        row = measure_case(case, device, min(left / sharing, 2.0))
        grid.add(result, row, out)
        print(
            f"{row['id']:<36} copy {row['copy']['gb_per_s']:.0f} GB/s | forward {row['forward']['of_copy']:.2f} "
            f"| backward {row['backward']['of_copy']:.2f} of it",
            flush=True,
        )
    return result


def measure_case(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    """Return the JSON row of a case."""
    (rows, columns), dtype, activation = case
    z = torch.randn(rows, columns, device=device).to(getattr(torch, dtype)).requires_grad_()
    bias = torch.randn(columns, device=device).to(z.dtype).requires_grad_()
    dy = torch.randn_like(z)
    y = fl.bias_act(z, bias, activation)
    source, target = z.detach(), torch.empty_like(z.detach())
    times = measure.interleave(
        {
            "copy": partial(target.copy_, source),
            "forward": partial(fl.bias_act, z, bias, activation),
            # The graph is kept, so dz gets a buffer of its own; the traffic is the same as when it is written over y.
            "backward": partial(torch.autograd.grad, y, (z, bias), dy, retain_graph=True),
        },
        device,
        seconds=seconds,
    )
    row: dict[str, Any] = {"id": case.id, "rows": rows, "columns": columns}
    row |= {"dtype": dtype, "activation": activation, "tensor_bytes": z.nbytes}
    for name, tensors_moved in (("copy", 2), ("forward", 2), ("backward", 3)):
        time_us = measure.spread(times[name])
        # (tensors moved / own time) over (2 / copy's time)
        of_copy = [
            copy_us / own_us * tensors_moved / 2 for own_us, copy_us in zip(times[name], times["copy"], strict=True)
        ]
        row[name] = {f"{key}_us": round(value, 3) for key, value in time_us.items()}
        row[name]["gb_per_s"] = round(tensors_moved * z.nbytes / time_us["median"] * 1e-3, 1)
        part = measure.spread(of_copy)
        row[name] |= {"of_copy": round(part["median"], 4), "of_copy_q1": round(part["q1"], 4)}
        row[name] |= {"of_copy_q3": round(part["q3"], 4), "rounds": len(of_copy)}
    return row


def acceptance(result: dict[str, Any]) -> list[str]:
    """A line for each direction of each case on a GPU: met or missed."""
    if result["device"]["kind"] != "cuda":
        return []
    return [
        f"{row['id']} {name}: {row[name]['of_copy']:.2f} of a copy's bandwidth, target {TARGET}: "
        + ("met" if row[name]["of_copy"] >= TARGET else "MISSED")
        for row in result["cases"]
        for name in ("forward", "backward")
    ]
