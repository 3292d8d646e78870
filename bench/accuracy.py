"""``python -m bench accuracy``: errors of output and derivative against float64, beside eager torch's.

Inputs are normal with unit variance. The derivative is what backward makes of an incoming gradient of ones, so that its
last rounding is in it, for both. Where only the output is kept, the largest error sits at the activation's minimum:
there the output, being rounded, says least about its input.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import definitions, resolve

from . import grid
from .grid import Benchmark
from .measure import Setting

COUNT = 1_000_000
DTYPES = ("float32", "float16", "bfloat16")
DEFINITIONS = {
    "output_rms": "root mean square error of the output",
    "derivative_rms": "the same of the derivative, over the derivative's own root mean square",
    "derivative_max": "largest absolute error of the derivative",
}


@dataclass(frozen=True)
class Case(grid.Case):
    activation: str
    dtype: str


def cases(kind: str) -> list[Case]:
    return [Case(row.name, dtype) for row in definitions() if row.name != "identity" for dtype in DTYPES]


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    activation, count = resolve(case.activation), COUNT // 1000 if setting.quick else COUNT
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, generator=generator, dtype=torch.float64).to(getattr(torch, case.dtype))
    exact_y, exact_slope = _forward_backward(activation.function, z.double())
    # A zero input has an infinite slope under cbrt, for everyone alike.
    finite = exact_slope.isfinite()
    row: dict[str, Any] = {"id": case.id, **vars(case), "folded": activation.is_folded}
    for name, function in (
        ("eager", activation.plain),
        ("fusedlayers", lambda z: fl.bias_act(z, None, activation, save="auto")),
    ):
        y, slope = (result.cpu() for result in _forward_backward(function, z.to(setting.device)))
        slope_error = (slope.double() - exact_slope)[finite]
        row[name] = {
            "output_rms": _rms(y.double() - exact_y),
            "derivative_rms": _rms(slope_error) / _rms(exact_slope[finite]),
            "derivative_max": float(slope_error.abs().max()),
        }
    return row


def line(row: dict[str, Any]) -> Iterator[str]:
    ours, eager = row["fusedlayers"], row["eager"]
    both = (f"{name} {ours[name]:.1e} (eager {eager[name]:.1e})" for name in DEFINITIONS)
    yield f"{row['id']:<24} {', '.join(both)}"


def _forward_backward(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    z = z.detach().requires_grad_()
    y = function(z)
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return y.detach(), slope


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


BENCHMARKS = {"accuracy": Benchmark("accuracy", DEFINITIONS, cases, measure_case, line, facts={"count": COUNT})}
