"""``python -m bench custom``: activations with trainable parameters, in ResNet-18.

Each is written as ordinary PyTorch (``examples/custom_activation.py``) and measured in two variants: called as it is,
and handed to ``fl.bias_act``. Among them is ReLU, whose bytes a custom activation should cost.
"""

import argparse
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure
from .reference import CUSTOM_ACTIVATIONS, BatchNormAct, resnet

BASELINE, OURS = VARIANTS = ("eager", "fusedlayers")
REFERENCE = "relu"
RESNET = "resnet18"
DTYPE = "float32"
DEFINITIONS = {
    "resnet18": "ResNet-18 for images of CIFAR's size, an activation after each batch norm, in training mode",
    "time": "microseconds of forward+backward: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass, without images and parameters",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included",
    "output_error": "against float64: norm of the difference over the norm; at most 32 images, and no TF32",
}

#: (N, C, H, W). Batch 128 is what people train with; a CPU is given what it does in less than a second.
IMAGES = {"cpu": (16, 3, 32, 32), "cuda": (128, 3, 32, 32)}
WIDTHS, CLASSES = (64, 128, 256, 512), 10
QUICK_IMAGES, QUICK_WIDTHS = (2, 3, 16, 16), (8, 8, 16, 16)
COMPARED_IMAGES = 32  # float64 takes twice the memory, of all that eager keeps

# Seconds of timing; on a CPU of two threads that is twelve rounds of the networks with cheap activations.
_SECONDS = 10.0

# How far an output may be from float64, beyond twice eager's distance, and still be worth timing: no test of accuracy.
# Eighteen layers with an activation that jumps at zero carry a difference in the last bit far, eager's too.
_SAME = 1e-2

# Beside the input of the batch norm before it, no activation keeps more than the output, which ReLU keeps.
_MOST_TO_RELU = 1.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'resnet18/(relu|snake)'")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="a narrow network and few rounds: to see that it works")
    parser.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="start no case after this")
    parser.add_argument("--out", type=Path, help="folder for custom.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [case for case in cases() if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench custom: no case matches --only {options.only!r}; there are {[case.id for case in cases()]}")
        return 2
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(todo, device, quick=options.quick, budget_seconds=options.budget, out=out)
    print("\n".join(acceptance(result)))
    if out is not None:
        print(f"\nwrote {out / 'custom.json'}")
    return 0


@dataclass(frozen=True)
class Case:
    activation: str

    @property
    def id(self) -> str:
        """Network and activation: ``resnet18/snake``."""
        return f"{RESNET}/{self.activation}"


def cases() -> list[Case]:
    return [Case(activation) for activation in CUSTOM_ACTIVATIONS]


def run(
    todo: Iterable[Case],
    device: torch.device,
    *,
    quick: bool = False,
    budget_seconds: float = 300,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/custom.json`` after each."""
    todo = list(todo)
    end = time.monotonic() + budget_seconds
    result = grid.begin("custom", device, DEFINITIONS, quick=quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for case, left, sharing in grid.until(end, todo):
        # Half of a case's share: building, comparing with float64 and counting bytes take time too.
        seconds = 0.0 if quick else min(left / sharing / 2, _SECONDS)
        row = measure_case(case, device, seconds=seconds, quick=quick)
        grid.add(result, row, out)
        print(_line(row), flush=True)
    return result


def measure_case(case: Case, device: torch.device, *, seconds: float, quick: bool) -> dict[str, Any]:
    """Return the JSON row of a case."""
    subjects: dict[str, Subject] = {}
    rows: dict[str, dict[str, Any]] = {}
    exact = _output(_subject(case, BASELINE, device, quick).double())
    for name in VARIANTS:
        subjects[name] = _subject(case, name, device, quick)
        try:
            output_error = float((_output(subjects[name]).double() - exact).norm() / exact.norm())
            allowed = _SAME + 2 * rows[BASELINE]["output_error"] if name == OURS else math.inf
            if not output_error <= allowed:
                raise ArithmeticError(
                    f"differs from float64 by {output_error:.1e} of the norm; {allowed:.1e} is allowed"
                )
            rows[name] = {"output_error": output_error}
        except Exception as error:
            if name == BASELINE:
                raise
            subjects.pop(name)
            rows[name] = grid.failed(error)
    del exact

    functions = {name: subject.forward_backward for name, subject in subjects.items()}
    times = measure.interleave(functions, device, seconds=seconds, max_rounds=5 if quick else 200)
    for name in subjects:
        rows[name]["forward_backward"] = measure.summary(times[name], times[BASELINE])
    for name, subject in subjects.items():
        rows[name]["saved_bytes"] = subject.saved_bytes()
        rows[name]["peak_bytes"] = peak_bytes(subject.forward_backward, device=device)
    return {
        "id": case.id,
        "group": RESNET,
        "activation": case.activation,
        "dtype": DTYPE,
        "input": list(subjects[BASELINE].x.shape),
        "variants": rows,
    }


def acceptance(result: dict[str, Any]) -> list[str]:
    """A line for each case: never more bytes than eager, at most 1.1 times ReLU's, never slower."""
    lines = []
    of_relu = next((row["variants"][BASELINE] for row in result["cases"] if row["activation"] == REFERENCE), None)
    for row in result["cases"]:
        eager, ours = (row["variants"][name] for name in VARIANTS)
        if "error" in ours:
            lines.append(f"{row['id']}: MISSED: {ours['error']}")
            continue
        verdicts = {
            f"{ours['saved_bytes'] / eager['saved_bytes']:.2f}x eager's bytes": (
                ours["saved_bytes"] <= eager["saved_bytes"]
            ),
            # A lower quartile above 1 is what noise does not explain.
            f"{ours['forward_backward']['ratio']:.2f}x its time": ours["forward_backward"]["ratio_q1"] <= 1,
        }
        if of_relu is not None:
            to_relu = ours["saved_bytes"] / of_relu["saved_bytes"]
            verdicts[f"{to_relu:.2f}x ReLU's bytes"] = to_relu <= _MOST_TO_RELU
        lines.append(
            f"{row['id']}: " + ", ".join(f"{what}: {'met' if met else 'MISSED'}" for what, met in verdicts.items())
        )
    return lines


@dataclass(frozen=True)
class Subject:
    """What is run: a module, an input, and the gradient that comes from above."""

    module: nn.Module
    x: Tensor
    dy: Tensor

    def forward(self) -> Tensor:
        y: Tensor = self.module(self.x)
        return y

    def forward_backward(self) -> None:
        torch.autograd.grad(measure.Above.apply(self.forward(), self.dy), [*self.module.parameters()])

    def saved_bytes(self) -> int:
        return saved_bytes(self.module, self.x, exclude=[self.module, self.x])

    def double(self) -> "Subject":
        return Subject(self.module.double(), self.x.double(), self.dy.double())


def _output(subject: Subject) -> Tensor:
    """For the first images."""
    # TF32, which cuDNN uses unless told not to, would hide what the activation does.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        y: Tensor = subject.module(subject.x[:COMPARED_IMAGES])
    return y.detach()


class _Fused(nn.Module):
    """The activation by this library."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        return fl.bias_act(z, None, self.activation, dim=1)


def _subject(case: Case, variant: str, device: torch.device, quick: bool) -> Subject:
    """The same parameters and numbers for both variants."""

    def make_norm_act(channels: int) -> nn.Module:
        activation: nn.Module = CUSTOM_ACTIVATIONS[case.activation](channels)
        made: nn.Module = BatchNormAct(channels, activation if variant == BASELINE else _Fused(activation))
        return made

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths = QUICK_WIDTHS if quick else WIDTHS
        module = nn.Sequential(*resnet(18, make_norm_act, widths=widths, classes=CLASSES, is_small=True))
        x = torch.randn(QUICK_IMAGES if quick else IMAGES[device.type])
        dy = torch.randn(len(x), CLASSES) / len(x)
        return Subject(module.to(device), x.to(device), dy.to(device))


def _line(row: dict[str, Any]) -> str:
    cells = []
    for name, variant in row["variants"].items():
        if "error" in variant:
            cells.append(f"{name}: {variant['error']}")
            continue
        time_of = variant["forward_backward"]
        shown = f"{time_of['median_us'] / 1e3:.1f} ms" if name == BASELINE else f"{time_of['ratio']:.2f}x"
        saved, peak = (variant[key] / 2**20 for key in ("saved_bytes", "peak_bytes"))
        cells.append(f"{name} {shown}, saved {saved:.1f} peak {peak:.1f} MiB")
    return f"{row['id']:<32} {' | '.join(cells)}"
