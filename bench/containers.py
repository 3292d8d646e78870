"""``python -m bench containers``: deeper networks in the same memory.

ResNet-152 as a sequence, run again as far as each variant says: all of it in ``torch.utils.checkpoint_sequential``'s
segments, and in ours; what lies between convolutions; and with batch norm and ReLU in one layer. For each of torch's
variants one of ours is given the same memory.

And a reversible network (RevNet) of several depths: plain and invertible.
"""

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import fusedlayers as fl
from fusedlayers.checkpoint import measurement, planner
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure
from .reference import resnet

BASELINE = "eager"
TORCH_SEGMENTS = (4, 8, 16)
#: Of what eager keeps, for the variant that runs cheap operations again.
CHEAP = 0.6
DEFINITIONS = {
    "resnet152": "ResNet-152 in training mode, float32, its parts in one sequence",
    "revnet": "additive couplings of two 3x3 convolutions with batch norm and ReLU for each stream, float32",
    "checkpoint_sequential-N": "torch.utils.checkpoint_sequential in N segments, not reentrant",
    "same-memory-N": "fl.SublinearSequential with what that keeps as its memory_budget_bytes",
    "sublinear": "fl.SublinearSequential as it is",
    "cheap": "the same with recompute='cheap', which keeps the results of convolutions, and 0.6 of what eager keeps as "
    "its memory_budget_bytes",
    "invertible": "fl.InvertibleSequential",
    "time": "microseconds of forward+backward: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles; speed is its inverse",
    "to_torch": "the same over the time of checkpoint_sequential in the same memory",
    "saved_bytes": "kept from the forward pass, without images, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward over what lived before, weights and their "
    "gradients among it: so it is activations, their gradients, and temporaries",
    "planned_bytes": "what the plan says is kept at the worst moment",
}

#: (N, 3, H, W). 224 x 224 takes a CPU of four threads ten seconds a step, eager, and twelve variants share the time.
IMAGES = {"cpu": (16, 3, 128, 128), "cuda": (16, 3, 224, 224)}
STREAMS = {"cpu": (16, 32, 32, 32), "cuda": (64, 64, 32, 32)}
QUICK_IMAGES, QUICK_STREAMS, QUICK_WIDTHS = (2, 3, 32, 32), (2, 4, 8, 8), (8, 8, 16, 16)
DEPTHS, QUICK_DEPTHS = (8, 32, 128), (2, 4)

# How far a variant may be from eager (norm of the difference over the norm) and still be worth timing: no test of
# accuracy. Fused layers round differently, and 152 layers carry that far.
_SAME = 5e-2
_MOST_ROUNDS, _FEWEST_ROUNDS = 30, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'revnet/8'")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="narrow networks and few rounds: to see that it works")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="for all cases together")
    parser.add_argument("--out", type=Path, help="folder for containers.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [case for case in cases(options.quick) if re.search(options.only or "", case.id)]
    if not todo:
        known = [case.id for case in cases(options.quick)]
        print(f"bench containers: no case matches --only {options.only!r}; there are {known}")
        return 2
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(todo, device, quick=options.quick, budget_seconds=options.budget, out=out)
    print("\n".join(acceptance(result)))
    if out is not None:
        print(f"\nwrote {out / 'containers.json'}")
    return 0


@dataclass(frozen=True)
class Case:
    """A network and how it is varied. ``share``: of the seconds, in relation to the others'."""

    id: str
    share: float
    build: Callable[[torch.device, bool], "Subject"]


def cases(quick: bool = False) -> list[Case]:
    revnets = [
        Case(f"revnet/{depth}", depth / 40, partial(_revnet, depth)) for depth in (QUICK_DEPTHS if quick else DEPTHS)
    ]
    return [*revnets, Case("resnet152", 16.0, _resnet152)]


def run(
    todo: Iterable[Case],
    device: torch.device,
    *,
    quick: bool = False,
    budget_seconds: float = 540,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/containers.json`` after each."""
    todo = list(todo)
    end = time.monotonic() + budget_seconds
    result = grid.begin("containers", device, DEFINITIONS, quick=quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for number, (case, left, _) in enumerate(grid.until(end, todo)):
        # A part of a case's share: building, comparing and counting bytes take time too.
        seconds = 0.0 if quick else 0.75 * left * case.share / sum(c.share for c in todo[number:])
        row = measure_case(case, device, seconds=seconds, quick=quick)
        grid.add(result, row, out)
        print("\n".join(_lines(row)), flush=True)
    return result


@dataclass
class Variant:
    """A network as one variant has it, and what is called."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]

    def forward_backward(self, x: Tensor, dy: Tensor) -> None:
        measure.Above.apply(self.call(x), dy).backward()


@dataclass(frozen=True)
class Subject:
    x: Tensor
    dy: Tensor
    #: By name, what makes the variant; the first one is eager.
    variants: dict[str, Callable[[], Variant]]
    layers: int


def measure_case(case: Case, device: torch.device, *, seconds: float, quick: bool) -> dict[str, Any]:
    """Return the JSON row of a case."""
    subject = case.build(device, quick)
    x, dy = subject.x, subject.dy
    rows: dict[str, dict[str, Any]] = {}
    variants: dict[str, Variant] = {}
    expected: list[Tensor] = []
    for name, make in subject.variants.items():
        try:
            variant = make()
            got = _results(variant, x, dy)
            expected = expected or got
            measure.expect_same(got, expected, _SAME)
            variants[name], rows[name] = variant, {}
        except Exception as error:
            if name == BASELINE:
                raise
            rows[name] = grid.failed(error)
    del expected
    times = measure.interleave(
        {name: partial(variant.forward_backward, x, dy) for name, variant in variants.items()},
        device,
        seconds=seconds,
        min_rounds=2 if quick else _FEWEST_ROUNDS,
        max_rounds=2 if quick else _MOST_ROUNDS,
        warm_up=1,
    )
    for name, variant in variants.items():
        rows[name]["forward_backward"] = measure.summary(times[name], times[BASELINE])
        rival = name.replace("same-memory", "checkpoint_sequential")
        if rival != name and rival in times:
            rows[name]["forward_backward"]["to_torch"] = measure.spread(measure.ratios(times[name], times[rival]))
        rows[name]["saved_bytes"] = saved_bytes(variant.call, x, exclude=[variant.module, x])
        # The gradients are there by now, and are added to.
        rows[name]["peak_bytes"] = peak_bytes(variant.forward_backward, x, dy, device=device)
        planned = getattr(variant.module, "plan", None)
        if planned is not None:
            rows[name]["planned_bytes"], rows[name]["plan"] = planned.peak_bytes, str(planned)
        gc.collect()
    return {"id": case.id, "dtype": "float32", "input": list(x.shape), "layers": subject.layers, "variants": rows}


def _results(variant: Variant, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, the norms of all gradients, and the gradients of all vectors among the parameters in one; gradients
    are zero afterwards."""
    y = variant.call(x)
    measure.Above.apply(y, dy).backward()
    norms = torch.stack([p.grad.norm() for p in variant.module.parameters() if p.grad is not None])
    vectors = [p.grad.flatten().clone() for p in variant.module.parameters() if p.dim() == 1 and p.grad is not None]
    for parameter in variant.module.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    return [y.detach(), norms, torch.cat(vectors)]


# --- ResNet-152 -------------------------------------------------------------------------------------------------------


def _resnet152(device: torch.device, quick: bool) -> Subject:
    widths = QUICK_WIDTHS if quick else (64, 128, 256, 512)
    depth = 18 if quick else 152

    def parts() -> list[nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [part.to(device).train() for part in resnet(depth, widths=widths)]

    def eager() -> Variant:
        net = nn.Sequential(*parts())
        return Variant(net, net)

    def by_torch(segments: int) -> Variant:
        net = nn.Sequential(*parts())
        return Variant(net, lambda x: checkpoint_sequential(net, segments, x, use_reentrant=False))

    def ours(**options: Any) -> Variant:
        net = fl.SublinearSequential(*parts(), **options)
        return Variant(net, net)

    x = torch.randn(QUICK_IMAGES if quick else IMAGES[device.type]).to(device)
    dy = torch.randn(len(x), 1000).to(device) / len(x)
    children = measurement.measure(parts(), (x,))
    kept = planner.plan_of_lengths(children, [1] * len(children), "all").eager_bytes
    variants: dict[str, Callable[[], Variant]] = {BASELINE: eager}
    for segments in TORCH_SEGMENTS:
        size = len(children) // segments
        lengths = [size] * (segments - 1)
        at_once = planner.plan_of_lengths(children, [*lengths, len(children) - sum(lengths)], "all").peak_bytes
        variants[f"checkpoint_sequential-{segments}"] = partial(by_torch, segments)
        variants[f"same-memory-{segments}"] = partial(ours, memory_budget_bytes=at_once)
    variants["sublinear"] = ours
    variants["cheap"] = partial(ours, recompute="cheap", memory_budget_bytes=int(CHEAP * kept))
    return Subject(x, dy, variants, depth)


# --- reversible networks ----------------------------------------------------------------------------------------------


def _revnet(depth: int, device: torch.device, quick: bool) -> Subject:
    shape = QUICK_STREAMS if quick else STREAMS[device.type]
    streams = torch.randn(shape[0], 2 * shape[1], *shape[2:])
    x, dy = streams.to(device).requires_grad_(), torch.randn_like(streams).to(device)

    def network() -> nn.Module:
        channels = shape[1]
        convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        return nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), convs[0], nn.BatchNorm2d(channels), nn.ReLU(), convs[1]
        )

    def networks() -> list[tuple[nn.Module, nn.Module]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return [(network().to(device), network().to(device)) for _ in range(depth)]

    def ours(**flags: bool) -> Variant:
        net = fl.InvertibleSequential(*(fl.AdditiveCoupling(f, g) for f, g in networks()))
        for name, value in flags.items():
            setattr(net, name, value)
        return Variant(net, lambda x: torch.cat(net(*x.chunk(2, 1)), 1))

    variants: dict[str, Callable[[], Variant]] = {BASELINE: partial(ours, checkpoint=False), "invertible": ours}
    return Subject(x, dy, variants, depth)


# --- what came of it --------------------------------------------------------------------------------------------------


def acceptance(result: dict[str, Any]) -> list[str]:
    """What is asked for: of memory at what speed, never slower than torch at the same memory, and no growth with
    depth."""
    by_id = {row["id"]: row["variants"] for row in result["cases"]}
    lines = []
    found = by_id.get("resnet152")
    if found is not None:
        for name, memory, speed in (("sublinear", 0.40, 0.72), ("cheap", 0.62, 0.90)):
            lines.append(f"resnet152, {name}: {_verdict(found, name, memory, speed)}")
        for segments in TORCH_SEGMENTS:
            theirs, ours = (found.get(f"{who}-{segments}", {}) for who in ("checkpoint_sequential", "same-memory"))
            if "peak_bytes" in theirs and "peak_bytes" in ours:
                to_torch = ours["forward_backward"]["to_torch"]
                # A lower quartile above 1 is what noise does not explain.
                met = ours["peak_bytes"] <= 1.02 * theirs["peak_bytes"] and to_torch["q1"] <= 1
                lines.append(
                    f"resnet152, {segments} segments: in {_of(found, ours):.2f}x eager's memory, where "
                    f"checkpoint_sequential takes {_of(found, theirs):.2f}x, {to_torch['median']:.2f}x its time: "
                    f"{'met' if met else 'MISSED'}"
                )
    saved = {
        key: row["invertible"]["saved_bytes"]
        for key, row in by_id.items()
        if "saved_bytes" in row.get("invertible", {})
    }
    if len(saved) > 1:
        growth = max(saved.values()) / min(saved.values()) - 1
        lines.append(f"revnet: saved bytes grow by {growth:.1%} over depths: {'met' if growth <= 0.02 else 'MISSED'}")
    return lines


def _verdict(found: dict[str, Any], name: str, memory: float, speed: float | None) -> str:
    variant = found.get(name, {})
    if "peak_bytes" not in variant:
        return f"MISSED: {variant.get('error', 'not measured')}"
    takes, runs = _of(found, variant), 1 / variant["forward_backward"]["ratio"]
    met = takes <= memory and (speed is None or runs >= speed)
    asked = f"{memory:.2f}x" + ("" if speed is None else f" at {speed:.2f}x")
    return f"{takes:.2f}x eager's memory at {runs:.2f}x its speed (asked: {asked}): {'met' if met else 'MISSED'}"


def _of(found: dict[str, Any], variant: dict[str, Any]) -> float:
    return float(variant["peak_bytes"] / found[BASELINE]["peak_bytes"])


def _lines(row: dict[str, Any]) -> list[str]:
    lines = [f"{row['id']}, {' x '.join(map(str, row['input']))}"]
    for name, variant in row["variants"].items():
        if "error" in variant:
            lines.append(f"  {name:<24} {variant['error']}")
            continue
        time_of = variant["forward_backward"]
        shown = f"{time_of['median_us'] / 1e6:.3g} s" if name == BASELINE else f"{time_of['ratio']:.2f}x"
        saved, peak = (variant[key] / 2**20 for key in ("saved_bytes", "peak_bytes"))
        lines.append(f"  {name:<24} {shown:>8}, saved {saved:8.1f} MiB, peak {peak:8.1f} MiB")
    return lines
