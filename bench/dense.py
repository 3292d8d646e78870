"""``python -m bench dense``: eager, torch.compile and this library side by side on a dense layer with activation.

Times are of the layer alone, forward and forward+backward (all three gradients), in training mode. Bytes are of the
layer with a Linear behind it, because what must be kept depends on who reads the output: eager GELU keeps its input,
and the next Linear keeps GELU's output too.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, machine, measure, reference, shapes

BASELINE, COMPILE, OURS = VARIANTS = ("eager", "compile", "fusedlayers")
DEFINITIONS = {
    "time": "microseconds of the layer alone in training mode: median and quartiles over interleaved rounds; as in a "
    "network, nobody but the layer holds its output during the backward pass",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass by the layer and a Linear behind it, without input and parameters",
    "peak_bytes": "allocated at the worst moment of forward+backward of the same two layers, gradients included",
}

#: "At most this many times eager", forward+backward, per device kind: what the project has promised itself.
TARGETS = {
    "cpu": {
        ("gelu", "float32"): 0.9,
        ("relu", "float32"): 0.8,
        ("tanh", "float32"): 1.05,
        ("gelu", "bfloat16"): 1.5,
        ("relu", "bfloat16"): 1.05,
        ("tanh", "bfloat16"): 1.05,
    },
    "cuda": dict.fromkeys([(a, d) for a in ("gelu", "relu", "tanh") for d in shapes.DTYPES["cuda"]], 1.0),
}
OVERHEAD_TARGET_US = 15.0

# How far a variant may be from eager (norm of the difference over the norm) and still be worth timing. It is no test of
# accuracy; rounding differs between variants by about the dtype's epsilon.
_SAME = {"float32": 1e-2, "bfloat16": 3e-2, "float16": 1e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", choices=sorted(_SAME), help="may be given more than once")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'acceptance|bert-base/gelu'")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated; eager is always measured")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="few tokens and rounds: to see that it works")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="start no case after this")
    parser.add_argument("--out", type=Path, help="folder for dense.json and dense.png; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [
        case for case in shapes.cases(device.type, tuple(options.dtype or ())) if re.search(options.only or "", case.id)
    ]
    if not todo:
        print(f"bench dense: no case matches --only {options.only!r}; ids look like 'model/bert-base/gelu/float32'")
        return 2
    variants = [name for name in VARIANTS if name == BASELINE or name in options.variants.split(",")]
    out = options.out
    # A part of the grid must not replace a committed result of all of it: it is written only where the user says.
    if out is None and not (options.only or options.quick or options.dtype or len(variants) < len(VARIANTS)):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(todo, device, variants=variants, quick=options.quick, budget_seconds=options.budget, out=out)
    print_acceptance(result)
    if out is not None:
        from .plot import plot_dense

        print(f"\nwrote {out / 'dense.json'}")
        plot_dense(result, out / "dense.png")
    return 0


def run(
    todo: Iterable[shapes.Case],
    device: torch.device,
    *,
    variants: Iterable[str] = VARIANTS,
    quick: bool = False,
    budget_seconds: float = 540,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/dense.json`` after each."""
    todo, variants = list(todo), list(variants)
    start = time.monotonic()
    result: dict[str, Any] = {
        "schema": 1,
        "subject": "dense",
        **machine.describe(device),
        "definitions": DEFINITIONS,
        "quick": quick,
        "not_run": [case.id for case in todo],
        "cases": [],
    }
    machine.warn_if_busy(result)
    if COMPILE in variants:
        _load_compiler(device)
    compiling, plain = [5.0], [1.0]  # seconds that cases have taken so far, the first entry a guess
    for number, case in enumerate(todo):
        began = time.monotonic()
        left = start + budget_seconds - began
        if left <= 0:
            break
        # Where not all of the grid fits in the budget, the last cases go without torch.compile.
        rest = (len(todo) - number) * statistics.mean(plain)
        chosen = [name for name in variants if name != COMPILE or left > rest + statistics.mean(compiling)]
        share = 0.05 if quick else min(left / (len(todo) - number), 3.0)
        row, compile_seconds = measure_case(case, device, chosen, seconds=share, quick=quick)
        plain.append(time.monotonic() - began - compile_seconds)
        if COMPILE in chosen:
            compiling.append(compile_seconds)
        for name in variants:
            row["variants"].setdefault(name, {"skipped": "time budget"})
        result["cases"].append(row)
        result["not_run"].remove(case.id)
        print(_line(row), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            partial_file = out / "dense.json.tmp"
            partial_file.write_text(json.dumps(result, indent=1) + "\n")
            partial_file.replace(out / "dense.json")
    result["seconds"] = round(time.monotonic() - start)
    return result


def measure_case(
    case: shapes.Case, device: torch.device, variants: Iterable[str], *, seconds: float, quick: bool
) -> tuple[dict[str, Any], float]:
    """Return the JSON row of a case, and the seconds spent on compiling."""
    tokens = case.shape.tokens[device.type]
    tokens = max(4, tokens // 32) if quick else tokens
    layer, block = _tensors(case, device, tokens)
    rows: dict[str, dict[str, Any]] = {}
    functions: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {}
    compile_seconds = 0.0
    for name in variants:
        start = time.monotonic()
        try:
            functions[name] = _functions(name, case)
            _compare(functions[name], functions[BASELINE], layer, block, case.dtype)
            rows[name] = {}
        except Exception as error:
            if name == BASELINE:
                raise
            # A variant that fails is a finding too, and no reason to lose the other two.
            functions.pop(name, None)
            rows[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}
        if name == COMPILE:
            compile_seconds = time.monotonic() - start

    for mode, make in (("forward", _forward), ("forward_backward", _step)):
        times = measure.interleave(
            {name: make(function, *layer) for name, (function, _) in functions.items()},
            device,
            seconds=seconds / 2,
            host=case.host_time,
            max_rounds=20 if quick else 200,
        )
        for name, values in times.items():
            rows[name][mode] = measure.summary(values, times[BASELINE])
    for name, (_, function) in functions.items():
        rows[name]["saved_bytes"] = saved_bytes(function, block[0], *block[1])
        rows[name]["peak_bytes"] = peak_bytes(_step(function, *block), device=device)
    row = {
        "id": case.id,
        "group": case.group,
        "shape": case.shape.name,
        "tokens": tokens,
        "in_features": case.shape.in_features,
        "hidden_features": case.shape.hidden_features,
        "activation": case.activation,
        "dtype": case.dtype,
        "hidden_bytes": tokens * case.shape.hidden_features * getattr(torch, case.dtype).itemsize,
        "variants": rows,
    }
    return row, compile_seconds


def print_acceptance(result: dict[str, Any]) -> None:
    """Say which of the promised numbers this run meets."""
    for line in acceptance(result):
        print(line)


def acceptance(result: dict[str, Any]) -> list[str]:
    lines = []
    for row in result["cases"]:
        ours = row["variants"].get(OURS, {}).get("forward_backward")
        if ours is None:
            continue
        target = TARGETS[result["device"]["kind"]].get((row["activation"], row["dtype"]))
        if row["group"] == "acceptance" and target:
            verdict = "met" if ours["ratio"] <= target else "MISSED"
            lines.append(f"{row['id']}: {ours['ratio']:.2f}x eager, target {target}: {verdict}")
        elif row["group"] == "call_overhead":
            verdict = "met" if ours["over_eager_us"] <= OVERHEAD_TARGET_US else "MISSED"
            lines.append(
                f"{row['id']}: {ours['over_eager_us']:+.1f} us over eager, target {OVERHEAD_TARGET_US}: {verdict}"
            )
    return lines


Operands = tuple[Tensor, tuple[Tensor, ...], Tensor]  # x, parameters, the gradient that comes from above


def _tensors(case: shapes.Case, device: torch.device, tokens: int) -> tuple[Operands, Operands]:
    """The layer's operands, and those of the layer with a Linear behind it."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        tensor = torch.randn(*shape, generator=generator, device=device) * scale
        return tensor.to(getattr(torch, case.dtype)).requires_grad_(grad)

    width, hidden = case.shape.in_features, case.shape.hidden_features
    x = randn(tokens, width)
    w1, b1 = randn(hidden, width, scale=width**-0.5), randn(hidden, scale=0.1)
    w2, b2 = randn(width, hidden, scale=hidden**-0.5), randn(width, scale=0.1)
    layer = x, (w1, b1), randn(tokens, hidden, grad=False)
    return layer, (x, (w1, b1, w2, b2), randn(tokens, width, grad=False))


def _functions(variant: str, case: shapes.Case) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    function = shapes.ACTIVATIONS[case.activation]
    if variant == OURS:
        return partial(fl.dense_bias_act, activation=case.activation), partial(_fused_mlp, activation=case.activation)
    layer = partial(reference.dense_bias_act, function=function)
    block = partial(reference.mlp, function=function)
    if variant == COMPILE:
        # Reset, because after eight compilations of one function dynamo would fall back to eager.
        torch._dynamo.reset()
        return torch.compile(layer, fullgraph=True, dynamic=False), torch.compile(block, fullgraph=True, dynamic=False)
    return layer, block


def _fused_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.linear(fl.dense_bias_act(x, w1, b1, activation), w2, b2)


def _forward(
    function: Callable[..., Tensor], x: Tensor, parameters: tuple[Tensor, ...], dy: Tensor
) -> Callable[[], Any]:
    return partial(function, x, *parameters)


def _step(function: Callable[..., Tensor], x: Tensor, parameters: tuple[Tensor, ...], dy: Tensor) -> Callable[[], Any]:
    def step() -> None:
        measure.Above.apply(function(x, *parameters), dy).backward()
        for tensor in (x, *parameters):
            tensor.grad = None

    return step


def _compare(
    variant: tuple[Callable[..., Tensor], ...],
    baseline: tuple[Callable[..., Tensor], ...],
    layer: Operands,
    block: Operands,
    dtype: str,
) -> None:
    """Refuse to time what does not compute the same; the first call of everything, so that it compiles here."""
    for function, expected_from, (x, parameters, dy) in zip(variant, baseline, (layer, block), strict=True):
        results = []
        for candidate in (function, expected_from):
            y = candidate(x, *parameters)
            results.append((y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)))
        for got, expected in zip(*results, strict=True):
            error = float((got - expected).float().norm() / expected.float().norm().clamp_min(1e-30))
            if not error <= _SAME[dtype]:
                raise ArithmeticError(f"differs from eager by {error:.1e} of the norm, where {_SAME[dtype]} is allowed")


def _load_compiler(device: torch.device) -> None:
    """Compile something small, so that starting the compiler (10 s) is not charged to the first case."""
    try:
        torch.compile(lambda x: (x + 1).exp())(torch.ones(8, device=device, requires_grad=True)).sum().backward()
    except Exception as error:
        print(f"torch.compile does not work here: {error}")


def _line(row: dict[str, Any]) -> str:
    cells = []
    for name, variant in row["variants"].items():
        if "forward_backward" not in variant:
            cells.append(f"{name}: {variant.get('error') or variant.get('skipped')}")
            continue
        forward, both = variant["forward"], variant["forward_backward"]
        time_cell = (
            f"{both['median_us']:.0f} us" if name == BASELINE else f"{both['ratio']:.2f}x (fwd {forward['ratio']:.2f}x)"
        )
        saved, peak = (variant[key] / row["hidden_bytes"] for key in ("saved_bytes", "peak_bytes"))
        cells.append(f"{name} {time_cell} {saved:.2f}/{peak:.2f}")
    return f"{row['id']:<42} {' | '.join(cells)}"
