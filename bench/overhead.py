"""``python -m bench overhead``: what a call of this library costs beyond the same call of eager PyTorch.

Small tensors in float32, on one thread unless another number is given: here time is Python, dispatch and autograd's
bookkeeping, hardly arithmetic. Groups of calls:

* ``small``: outputs so small that the call should cost what eager PyTorch's costs;
* ``fused``: 16 to 64 Ki outputs and activations that torch differentiates from one buffer too, so that nothing is
  gained but memory;
* ``folded``: the same with activations whose minimum is folded, which pay for the branch bit; without a target;
* ``region``: an activation between two dense layers of a model that ``fuse`` has seen, against the same model;
* ``host``, with ``--fake-gpu`` alone: what the host does for calls on a GPU, on the driver that launches nothing
  (``fake_gpu.py``). Triton's launches cost nothing then but what Python does for them, a few microseconds less than
  real ones; torch's operators, in eager PyTorch too, run on a CPU, on a few numbers each. A large dense layer is
  computed as one with ``sizes.GPU_MEDIUM_BYTES`` of results or more is: a GPU works longer on that than the host.
"""

import argparse
import copy
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import block_call, call, sizes

from . import RESULTS, fake_gpu, grid, machine, measure, reference

BASELINE, OURS = VARIANTS = ("eager", "fusedlayers")
GROUPS = ("small", "fused", "folded", "region", "host", "host_large")
SMALL, FUSED, FOLDED, REGION, HOST, HOST_LARGE = GROUPS
ON_FAKE_GPU = (HOST, HOST_LARGE)
DEFINITIONS = {
    "forward_backward": "microseconds of forward and backward: median and quartiles over interleaved rounds",
    "no_grad": "the same of the forward pass under torch.no_grad",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "over_eager_us": "median over rounds of time - eager's time in the same round",
}

#: Group -> a call meets its target if it takes at most this many times eager's time, or this many microseconds more.
TARGETS = {SMALL: (1.10, 5.0), FUSED: (1.15, 20.0), REGION: (1.0, 25.0), HOST: (1.5, 0.0)}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "silu": F.silu,
}
FOLDED_ACTIVATIONS = ("gelu", "silu")


class Own(nn.Module):
    """An activation of a user's, which is traced."""

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(1.7 * z)


#: What stands between the two layers that ``fuse`` has seen.
BETWEEN_LAYERS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU, "own": Own}
#: Results of 64 KiB, which are left to PyTorch, of 512 KiB, which are not, and of 1 MiB.
SIZES = (16384, 131072, 262144)

#: How far outputs and gradients may be from eager's, by their norms, and be worth timing: no test of accuracy.
_SAME = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'fused/.*/relu'")
    parser.add_argument("--fake-gpu", action="store_true", help="the host's part of calls on a GPU, without one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="start no case after this")
    parser.add_argument("--out", type=Path, help="folder for overhead.json, or host.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    known = cases(on_fake_gpu=options.fake_gpu)
    todo = [case for case in known if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench overhead: no case matches --only {options.only!r}; there are {[case.id for case in known]}")
        return 2
    if options.fake_gpu:
        fake_gpu.install().notes = False
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    name = "host" if options.fake_gpu else "overhead"
    result = run(todo, device, quick=options.quick, budget_seconds=options.budget, out=out, name=name)
    print("\n".join(acceptance(result)))
    if out is not None:
        print(f"\nwrote {out / f'{name}.json'}")
    return 0


@dataclass(frozen=True)
class Case:
    group: str
    operation: str
    activation: str
    #: Elements of the output; of MLPs, of the hidden layer.
    elements: int

    @property
    def id(self) -> str:
        """Group, operation, activation and size: ``fused/dense/relu/16384``."""
        return f"{self.group}/{self.operation}/{self.activation}/{self.elements}"


def cases(*, on_fake_gpu: bool = False) -> list[Case]:
    if not on_fake_gpu:
        return [*_cases()]
    calls = (("dense", "gelu"), ("dense", "relu"), ("bias_act", "gelu"), ("mlp", "gelu"), ("gated_mlp", "silu"))
    by_host = [Case(HOST, operation, activation, 512) for operation, activation in calls]
    return [*by_host, Case(HOST_LARGE, "large dense", "relu", 512)]


def _cases() -> Iterator[Case]:
    for activation in ("relu", "gelu"):
        yield Case(SMALL, "dense", activation, 512)
    for operation, activation, elements in (
        ("conv", "relu", 1024),
        ("mlp", "gelu", 2048),
        ("gated_mlp", "silu", 2048),
        ("bias_act", "relu", 512),
        ("module", "gelu", 512),
    ):
        yield Case(SMALL, operation, activation, elements)
    for activation in ACTIVATIONS:
        for operation in ("dense", "conv", "bias_act"):
            for elements in SIZES:
                yield Case(FOLDED if activation in FOLDED_ACTIVATIONS else FUSED, operation, activation, elements)
    for activation, elements in (("gelu", 512), *((name, 131072) for name in BETWEEN_LAYERS)):
        yield Case(REGION, "fuse", activation, elements)


def run(
    todo: Iterable[Case],
    device: torch.device,
    *,
    quick: bool = False,
    budget_seconds: float = 240,
    out: Path | None = None,
    name: str = "overhead",
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/<name>.json`` after each."""
    todo = list(todo)
    end = time.monotonic() + budget_seconds
    result = grid.begin(name, device, DEFINITIONS, quick=quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for case, left, sharing in grid.until(end, todo):
        row = measure_case(case, device, seconds=0.0 if quick else min(left / sharing, 3.0), quick=quick)
        grid.add(result, row, out)
        print(_line(row), flush=True)
    return result


class Variant(NamedTuple):
    """A call, and the tensors whose gradients are computed."""

    call: Callable[[], Tensor]
    wanted: Sequence[Tensor]

    def forward_backward(self, dy: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(measure.Above.apply(self.call(), dy), self.wanted)


def measure_case(case: Case, device: torch.device, *, seconds: float, quick: bool) -> dict[str, Any]:
    """Return the JSON row of a case."""
    if case.group in ON_FAKE_GPU:  # until the process ends, as the fake driver
        sizes.MEDIUM_BYTES = sizes.GPU_MEDIUM_BYTES if case.group == HOST else 0
        for plans in (call._plans, block_call._plans):  # which were made for other sizes
            plans.clear()
    variants = dict(zip(VARIANTS, _build(case, device), strict=True))
    rows: dict[str, dict[str, Any]] = {name: {} for name in VARIANTS}
    dy = torch.randn_like(variants[BASELINE].call())
    expected = [variants[BASELINE].call().detach(), *variants[BASELINE].forward_backward(dy)]
    try:
        got = [variants[OURS].call().detach(), *variants[OURS].forward_backward(dy)]
        if case.group not in ON_FAKE_GPU:  # where nothing is computed
            measure.expect_same(got, expected, _SAME)
    except Exception as error:
        del variants[OURS]
        rows[OURS] = grid.failed(error)
    del expected
    steps: dict[str, dict[str, Callable[[], Any]]] = {
        "forward_backward": {name: partial(variant.forward_backward, dy) for name, variant in variants.items()},
        "no_grad": {name: variant.call for name, variant in variants.items()},
    }
    for mode, functions in steps.items():
        with torch.set_grad_enabled(mode != "no_grad"):
            times = measure.interleave(
                functions,
                device,
                seconds=seconds / len(steps),
                max_rounds=5 if quick else 2000,
                host=device.type != "cpu",
            )
        for name, values in times.items():
            rows[name][mode] = measure.summary(values, times[BASELINE])
    return {
        "id": case.id,
        "group": case.group,
        "operation": case.operation,
        "activation": case.activation,
        "elements": case.elements,
        "variants": rows,
    }


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which of the promised numbers this run meets."""
    lines = []
    for row in result["cases"]:
        ours = row["variants"][OURS]
        if "error" in ours:
            lines.append(f"{row['id']}: MISSED: {ours['error']}")
        elif row["group"] in TARGETS:
            ratio, over = ours["forward_backward"]["ratio"], ours["forward_backward"]["over_eager_us"]
            most_ratio, most_over = TARGETS[row["group"]]
            verdict = "met" if ratio <= most_ratio or over <= most_over else "MISSED"
            target = f"at most {most_ratio:.2f}x or {most_over:.0f} us"
            lines.append(f"{row['id']}: {ratio:.2f}x eager, {over:+.1f} us, target {target}: {verdict}")
    return lines


def _build(case: Case, device: torch.device) -> tuple[Variant, Variant]:
    """Eager's call and ours, of the same tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).requires_grad_()

    def both(eager: Callable[..., Tensor], ours: Callable[..., Tensor], *tensors: Tensor) -> tuple[Variant, Variant]:
        return Variant(partial(eager, *tensors), tensors), Variant(partial(ours, *tensors), tensors)

    elements = case.elements
    if case.operation == "fuse":
        x = randn(elements // 64, 64)
        model = nn.Sequential(nn.Linear(64, 64), BETWEEN_LAYERS[case.activation](), nn.Linear(64, 64)).to(device)
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        region = copy.deepcopy(model, parameters)
        fl.fuse(region)
        wanted = (x, *model.parameters())
        return Variant(lambda: model(x), wanted), Variant(lambda: region(x), wanted)
    name, function = case.activation, ACTIVATIONS[case.activation]
    if case.operation in ("dense", "large dense"):
        hidden = 64 if case.group in (SMALL, *ON_FAKE_GPU) else 256
        x, w, b = randn(elements // hidden, 64), randn(hidden, 64, scale=0.125), randn(hidden)
        ours = partial(fl.dense_bias_act, activation=name)
        return both(partial(reference.dense_bias_act, function=function), ours, x, w, b)
    if case.operation == "conv":
        channels, size = (8, 8) if case.group == SMALL else (16, 16)
        x = randn(elements // (channels * size * size), 8, size, size)
        w, b = randn(channels, 8, 3, 3, scale=0.1), randn(channels)
        eager = partial(reference.conv_bias_act, function=function, padding=1)
        return both(eager, partial(fl.conv_bias_act, activation=name, padding=1), x, w, b)
    if case.operation in ("mlp", "gated_mlp"):
        parts = 2 if case.operation == "gated_mlp" else 1
        pairs = [(randn(256, 64, scale=0.125), randn(256)) for _ in range(parts)]
        pairs.append((randn(64, 256, scale=0.0625), randn(64)))
        x, params = randn(elements // 256, 64), [tensor for pair in pairs for tensor in pair]
        eager, ours = (getattr(namespace, case.operation) for namespace in (reference, fl))
        return both(partial(eager, function=function), partial(ours, activation=name), x, *params)
    if case.operation == "bias_act":
        width = 64 if case.group in (SMALL, *ON_FAKE_GPU) else 256
        ours = partial(fl.bias_act, activation=name)
        return both(partial(reference.bias_act, function=function), ours, randn(elements // width, width), randn(width))
    assert case.operation == "module"
    return both(nn.GELU(), fl.GELU(), randn(elements // 64, 64))


def _line(row: dict[str, Any]) -> str:
    eager, ours = (row["variants"][name] for name in VARIANTS)
    if "error" in ours:
        return f"{row['id']:<34} {ours['error']}"
    cells = []
    for mode in ("forward_backward", "no_grad"):
        times = ours[mode]
        medians = f"eager {eager[mode]['median_us']:7.1f} us, ours {times['median_us']:7.1f} us"
        spread = f"{times['ratio']:.2f}x ({times['ratio_q1']:.2f}-{times['ratio_q3']:.2f})"
        cells.append(f"{mode} {medians}, {times['over_eager_us']:+6.1f} us, {spread}")
    return f"{row['id']:<34} {' | '.join(cells)}"
