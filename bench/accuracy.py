"""``python -m bench accuracy``: errors of output and derivative against float64, beside eager torch's.

Inputs are normal with unit variance. The derivative is what backward makes of an incoming gradient of ones, so that its
last rounding is in it, for both. Where only the output is kept, the largest error sits at the activation's minimum:
there the output, being rounded, says least about its input.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.utils import progress

from . import RESULTS, grid, machine

COUNT = 1_000_000
DTYPES = ("float32", "float16", "bfloat16")
DEFINITIONS = {
    "output_rms": "root mean square error of the output",
    "derivative_rms": "the same of the derivative, over the derivative's own root mean square",
    "derivative_max": "largest absolute error of the derivative",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for accuracy.json (default: the device's results folder)")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    out = options.out or RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(device)
    grid.write(result, out)
    print(f"wrote {out / 'accuracy.json'}")
    return 0


def run(device: torch.device, count: int = COUNT) -> dict[str, Any]:
    result = grid.begin("accuracy", device, DEFINITIONS, count=count)
    todo = [(row.name, dtype) for row in rows() if row.name != "identity" for dtype in DTYPES]
    with progress.shown() as on_stage:
        for number, (name, dtype) in enumerate(todo):
            on_stage(f"{name} {dtype}", number / len(todo))
            case = measure_case(resolve(name), getattr(torch, dtype), device, count)
            result["cases"].append({"activation": name, "dtype": dtype, **case})
            ours, eager = case["fusedlayers"], case["eager"]
            print(
                f"{name:<14}{dtype:<10}derivative rms {ours['derivative_rms']:.1e} (eager "
                f"{eager['derivative_rms']:.1e}), largest {ours['derivative_max']:.1e} ({eager['derivative_max']:.1e})"
            )
    return result


def measure_case(activation: Activation, dtype: torch.dtype, device: torch.device, count: int) -> dict[str, Any]:
    z = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    exact_y, exact_slope = _forward_backward(activation.function, z.double())
    # A zero input has an infinite slope under cbrt, for everyone alike.
    finite = exact_slope.isfinite()
    errors = {}
    for name, function in (
        ("eager", activation.plain),
        ("fusedlayers", lambda z: fl.bias_act(z, None, activation, save="auto")),
    ):
        y, slope = (result.cpu() for result in _forward_backward(function, z.to(device)))
        slope_error = (slope.double() - exact_slope)[finite]
        errors[name] = {
            "output_rms": _rms(y.double() - exact_y),
            "derivative_rms": _rms(slope_error) / _rms(exact_slope[finite]),
            "derivative_max": float(slope_error.abs().max()),
        }
    return {"folded": activation.is_folded, **errors}


def _forward_backward(function: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    z = z.detach().requires_grad_()
    y = function(z)
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return y.detach(), slope


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
