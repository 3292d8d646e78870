"""``python -m bench custom``: activations with trainable parameters, in ResNet-18 and by themselves.

Each is written as ordinary PyTorch (``examples/custom_activation.py``) and measured in two variants: called as it is,
and handed to ``fl.FusedBatchNormAct2d`` or, alone, to ``fl.bias_act``. Beside them runs ReLU, which is what a custom
activation should cost.
"""

import argparse
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
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
RESNET, ALONE = GROUPS = ("resnet18", "alone")
DTYPE = "float32"
DEFINITIONS = {
    "resnet18": "ResNet-18 for images of CIFAR's size, an activation after each batch norm, in training mode",
    "alone": "the activation of one tensor, which an earlier operation made; its gradient is wanted too",
    "time": "microseconds of forward+backward (and of forward): median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "ratio_to_relu": "the same over eager ReLU's time in the same round",
    "saved_bytes": "kept for the backward pass, without images and parameters",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included",
    "output_error": "against float64: norm of the difference over the norm; at most 32 images, and no TF32",
    "gradient_error": "the same of the activations' parameters, all in one vector; in the network the fractional "
    "activations, which jump at zero, make of a rounding an error as large as the gradient, whoever applies them",
}

#: (N, C, H, W). Batch 128 is what people train with; a CPU is given what it does in less than a second.
IMAGES = {"cpu": (16, 3, 32, 32), "cuda": (128, 3, 32, 32)}
TENSOR = {"cpu": (32, 64, 32, 32), "cuda": (128, 64, 32, 32)}
WIDTHS, CLASSES = (64, 128, 256, 512), 10
QUICK_IMAGES, QUICK_TENSOR, QUICK_WIDTHS = (2, 3, 16, 16), (2, 8, 16, 16), (8, 8, 16, 16)
GRADIENT_IMAGES = 32  # float64 takes twice the memory, of all that eager keeps

# Seconds of timing; on a CPU of two threads that is twelve rounds of the networks with cheap activations.
_SECONDS = {RESNET: 10.0, ALONE: 2.0}

# How far an output may be from float64, beyond twice eager's distance, and still be worth timing: no test of accuracy.
# Eighteen layers with an activation that jumps at zero carry a difference in the last bit far, eager's too.
_SAME = 1e-2

# Beside the input of the batch norm before it, no activation keeps more than the output, which ReLU keeps.
_MOST_TO_RELU = 1.1

# A gradient may err twice as much as eager's, and by a few of float32's roundings.
_ERROR_FLOOR = 1e-6


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
    group: str
    activation: str

    @property
    def id(self) -> str:
        """Group and activation: ``resnet18/snake``."""
        return f"{self.group}/{self.activation}"


def cases() -> list[Case]:
    return [Case(group, activation) for group in GROUPS for activation in CUSTOM_ACTIVATIONS]


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
        seconds = 0.0 if quick else min(left / sharing / 2, _SECONDS[case.group])
        row = measure_case(case, device, seconds=seconds, quick=quick)
        grid.add(result, row, out)
        print(_line(row), flush=True)
    return result


def measure_case(case: Case, device: torch.device, *, seconds: float, quick: bool) -> dict[str, Any]:
    """Return the JSON row of a case."""
    subjects: dict[str, Subject] = {}
    rows: dict[str, dict[str, Any]] = {}
    exact = _Results(_subject(case, BASELINE, device, quick).double())
    for name in VARIANTS:
        subjects[name] = _subject(case, name, device, quick)
        try:
            results = _Results(subjects[name])
            output_error = _distance([results.output], [exact.output])
            allowed = _SAME + 2 * rows[BASELINE]["output_error"] if name == OURS else math.inf
            if not output_error <= allowed:
                raise ArithmeticError(
                    f"differs from float64 by {output_error:.1e} of the norm; {allowed:.1e} is allowed"
                )
            gradient_error = _distance(results.gradients, exact.gradients) if exact.gradients else None
            rows[name] = {"output_error": output_error, "gradient_error": gradient_error}
        except Exception as error:
            if name == BASELINE:
                raise
            subjects.pop(name)
            rows[name] = grid.failed(error)
    del exact

    relu = subjects[BASELINE]
    if case.activation != REFERENCE:
        relu = _subject(Case(case.group, REFERENCE), BASELINE, device, quick)
    modes = ("forward_backward",) if case.group == RESNET else ("forward", "forward_backward")
    for mode in modes:
        functions = {name: partial(getattr(subject, mode)) for name, subject in subjects.items()}
        # A key of its own, although of ReLU itself it is eager a second time.
        functions[REFERENCE] = partial(getattr(relu, mode))
        times = measure.interleave(functions, device, seconds=seconds / len(modes), max_rounds=5 if quick else 200)
        for name in subjects:
            rows[name][mode] = measure.summary(times[name], times[BASELINE])
            to_relu = measure.spread(measure.ratios(times[name], times[REFERENCE]))
            rows[name][mode]["ratio_to_relu"] = round(to_relu["median"], 4)
    for name, subject in subjects.items():
        rows[name]["saved_bytes"] = subject.saved_bytes()
        rows[name]["peak_bytes"] = peak_bytes(subject.forward_backward, device=device)
    return {
        "id": case.id,
        "group": case.group,
        "activation": case.activation,
        "dtype": DTYPE,
        "input": list(relu.x.shape),
        "variants": rows,
    }


def acceptance(result: dict[str, Any]) -> list[str]:
    """A line for each case: never more bytes than eager, at most 1.1 times ReLU's, never slower, gradients as exact."""
    lines = []
    of_relu = {row["group"]: row["variants"][BASELINE] for row in result["cases"] if row["activation"] == REFERENCE}
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
        if row["group"] == RESNET and RESNET in of_relu:
            to_relu = ours["saved_bytes"] / of_relu[RESNET]["saved_bytes"]
            verdicts[f"{to_relu:.2f}x ReLU's bytes"] = to_relu <= _MOST_TO_RELU
        # In the network both err by what the layers make of their rounding; alone the errors are the activation's own.
        if row["group"] == ALONE and eager["gradient_error"] is not None:
            allowed = 2 * eager["gradient_error"] + _ERROR_FLOOR
            verdicts[f"gradient error {ours['gradient_error']:.1e}"] = ours["gradient_error"] <= allowed
        lines.append(
            f"{row['id']}: " + ", ".join(f"{what}: {'met' if met else 'MISSED'}" for what, met in verdicts.items())
        )
    return lines


class Applied(nn.Module):
    """An activation as this library applies it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, z: Tensor) -> Tensor:
        return fl.bias_act(z, None, self.activation, dim=1)


@dataclass(frozen=True)
class Subject:
    """What is run: a module with its activations, an input, and the gradient that comes from above."""

    module: nn.Module
    activations: list[nn.Module]
    x: Tensor
    dy: Tensor

    def forward(self) -> Tensor:
        y: Tensor = self.module(self.x)
        return y

    def forward_backward(self) -> None:
        wanted = [*self.module.parameters(), *([self.x] if self.x.requires_grad else [])]
        torch.autograd.grad(measure.Above.apply(self.forward(), self.dy), wanted)

    def saved_bytes(self) -> int:
        # Images are not kept for the sake of a layer; what an earlier operation made is.
        return saved_bytes(self.module, self.x, exclude=[self.module, *([] if self.x.requires_grad else [self.x])])

    def parameters(self) -> list[nn.Parameter]:
        """The activations' own."""
        return [parameter for activation in self.activations for parameter in activation.parameters()]

    def double(self) -> "Subject":
        return Subject(self.module.double(), self.activations, self.x.double(), self.dy.double())


class _Results:
    """Output and gradients of the activations' parameters, for the first images."""

    def __init__(self, subject: Subject) -> None:
        x, dy = subject.x[:GRADIENT_IMAGES], subject.dy[:GRADIENT_IMAGES]
        # TF32, which cuDNN uses unless told not to, would hide what the activation does to the gradient.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            y = subject.module(x)
            parameters = subject.parameters()
            self.gradients = torch.autograd.grad(y, parameters, dy) if parameters else ()
        self.output = y.detach()


def _subject(case: Case, variant: str, device: torch.device, quick: bool) -> Subject:
    """The same parameters and numbers for both variants."""
    activations: list[nn.Module] = []

    def make(channels: int) -> nn.Module:
        activation: nn.Module = CUSTOM_ACTIVATIONS[case.activation](channels)
        activations.append(activation)
        return activation

    def make_norm_act(channels: int) -> nn.Module:
        return (BatchNormAct if variant == BASELINE else fl.FusedBatchNormAct2d)(channels, make(channels))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if case.group == RESNET:
            widths = QUICK_WIDTHS if quick else WIDTHS
            module: nn.Module = nn.Sequential(*resnet(18, make_norm_act, widths=widths, classes=CLASSES, is_small=True))
            x = torch.randn(QUICK_IMAGES if quick else IMAGES[device.type])
            dy = torch.randn(len(x), CLASSES) / len(x)
            return Subject(module.to(device), activations, x.to(device), dy.to(device))
        shape = QUICK_TENSOR if quick else TENSOR[device.type]
        activation, dy = make(shape[1]), torch.randn(shape)
        module = activation if variant == BASELINE else Applied(activation)
        # Not a leaf, as in a network: the saved leaf of a graph is a parameter, whose bytes do not count.
        x = torch.randn(shape).to(device).requires_grad_().clone()
        return Subject(module.to(device), activations, x, dy.to(device))


def _distance(got: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The norm of the difference over the norm, all tensors in one vector."""
    ours, exact = (torch.cat([tensor.double().flatten() for tensor in tensors]) for tensors in (got, expected))
    return float((ours - exact).norm() / exact.norm().clamp_min(1e-30))


def _line(row: dict[str, Any]) -> str:
    cells = []
    for name, variant in row["variants"].items():
        if "error" in variant:
            cells.append(f"{name}: {variant['error']}")
            continue
        time_of = variant["forward_backward"]
        shown = f"{time_of['median_us'] / 1e3:.1f} ms" if name == BASELINE else f"{time_of['ratio']:.2f}x"
        error = "" if variant["gradient_error"] is None else f", gradient error {variant['gradient_error']:.1e}"
        saved, peak = (variant[key] / 2**20 for key in ("saved_bytes", "peak_bytes"))
        cells.append(
            f"{name} {shown} ({time_of['ratio_to_relu']:.2f}x relu), saved {saved:.1f} peak {peak:.1f} MiB{error}"
        )
    return f"{row['id']:<32} {' | '.join(cells)}"
