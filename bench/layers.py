"""A layer with an activation behind it, eager, by torch.compile and by this library: what the grids of layers share.

Times are of the layer alone, forward and forward+backward (all three gradients), in training mode. Bytes are of the
layer with a second one behind it, because what must be kept depends on who reads the output: eager GELU keeps its
input, and the next layer keeps GELU's output too.
"""

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure

BASELINE, COMPILE, OURS = VARIANTS = ("eager", "compile", "fusedlayers")
#: A guess at the seconds that compiling takes for the first case.
_COMPILE_SECONDS = 5.0

# How far a variant may be from eager (norm of the difference over the norm) and still be worth timing. It is no test of
# accuracy; rounding differs between variants by about the dtype's epsilon, and torch sums a layer norm's gradients of
# its weights in bfloat16: there they err by 4e-2 (2048 x 768).
_SAME = {"float32": 1e-2, "bfloat16": 1e-1, "float16": 1e-2}

Operands = tuple[Tensor, tuple[Tensor, ...], Tensor]  # x, parameters, the gradient that comes from above
Function = Callable[..., Tensor]


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Case(Protocol):
    """A row of a grid."""

    @property
    def id(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def shape(self) -> Named: ...
    @property
    def activation(self) -> str: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Work:
    """A case's operands and functions; each pair is the layer, and the layer with a second one behind it."""

    operands: tuple[Operands, Operands]
    eager: tuple[Function, Function]
    ours: tuple[Function, Function]
    #: What the result file says of the shape.
    sizes: dict[str, Any]
    #: Of the layer's output, or of what is hidden in a block.
    hidden_bytes: int
    #: More variants, by name.
    others: Mapping[str, tuple[Function, Function]] = field(default_factory=dict)
    #: Of these, what computes something else, and is a yardstick.
    yardsticks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """What the grids differ in."""

    name: str
    #: The second layer, in words; of blocks, which are whole by themselves, None.
    behind: str | None
    #: From the device's kind and the dtypes, if not all.
    cases: Callable[[str, tuple[str, ...]], Iterable[Case]]
    #: From a case, the device, and whether it has to be quick.
    build: Callable[[Any, torch.device, bool], Work]
    acceptance: Callable[[dict[str, Any]], list[str]]
    budget_seconds: float
    #: Seconds of timing that a case gets at most.
    case_seconds: float
    #: Whether the case is part of a quick run of everything.
    in_quick: Callable[[Any], bool] = lambda case: True
    variants: tuple[str, ...] = VARIANTS
    #: Draws a result into a file.
    plot: Callable[[dict[str, Any], Path], Any] | None = None

    def default_variants(self, quick: bool) -> list[str]:
        """What is measured unless something else is asked for."""
        return [name for name in self.variants if not (quick and name == COMPILE)]

    @property
    def definitions(self) -> dict[str, str]:
        """What the numbers of a result file are, for its head."""
        return {
            "time": "microseconds of the layer alone in training mode: median and quartiles over interleaved rounds; "
            "as in a network, nobody but the layer holds its output during the backward pass",
            "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
            "saved_bytes": f"kept for the backward pass by {self._kept_by}, without input and parameters",
            "peak_bytes": f"allocated at the worst moment of forward+backward of {self._kept_by}, gradients included",
        }

    @property
    def _kept_by(self) -> str:
        return "the block" if self.behind is None else f"the layer and {self.behind} behind it"


def add_arguments(parser: argparse.ArgumentParser, subject: Subject) -> None:
    name = subject.name
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", action="append", choices=sorted(_SAME), help="may be given more than once")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'model/.*/gelu/float32'")
    parser.add_argument(
        "--variants",
        help=f"comma-separated, of {','.join(subject.variants)} (default: all, with --quick not {COMPILE}); eager is "
        "always measured",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: to see that it works")
    parser.add_argument(
        "--budget", type=float, default=subject.budget_seconds, metavar="SECONDS", help="start no case after this"
    )
    files = f"{name}.json and {name}.png" if subject.plot else f"{name}.json"
    parser.add_argument("--out", type=Path, help=f"folder for {files}; a full run has a default")


def main(subject: Subject, options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    known = list(subject.cases(device.type, tuple(options.dtype or ())))
    todo = [case for case in known if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench {subject.name}: no case matches --only {options.only!r}; ids look like {known[-1].id!r}")
        return 2
    if options.quick and not options.only:
        todo = [case for case in todo if subject.in_quick(case)]
    default = subject.default_variants(options.quick)
    asked = default if options.variants is None else options.variants.split(",")
    variants = [name for name in subject.variants if name == BASELINE or name in asked]
    out = options.out
    # A part of the grid must not replace a committed result of all of it: it is written only where the user says.
    if out is None and not (options.only or options.quick or options.dtype or set(default) - set(variants)):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(subject, todo, device, variants=variants, quick=options.quick, budget_seconds=options.budget, out=out)
    print("\n".join(subject.acceptance(result)))
    if out is not None:
        print(f"\nwrote {out / f'{subject.name}.json'}")
        if subject.plot is not None:
            subject.plot(result, out / f"{subject.name}.png")
    return 0


def run(
    subject: Subject,
    todo: Iterable[Case],
    device: torch.device,
    *,
    variants: Iterable[str] | None = None,
    quick: bool = False,
    budget_seconds: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/<subject>.json`` after each."""
    todo = list(todo)
    variants = subject.default_variants(quick) if variants is None else list(variants)
    end = time.monotonic() + (subject.budget_seconds if budget_seconds is None else budget_seconds)
    result = grid.begin(subject.name, device, subject.definitions, quick=quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    if COMPILE in variants:
        _load_compiler(device)
    # Seconds that cases have taken so far, the first entry a guess.
    compiling, plain = [_COMPILE_SECONDS], [1.0]
    with _forgotten_by_the_collector():
        for case, left, sharing in grid.until(end, todo):
            began = time.monotonic()
            # Where not all of the grid fits in the budget, the last cases go without the compiler. What comes may take
            # longer than what came.
            spare = left - 1.25 * sharing * statistics.mean(plain)
            work = subject.build(case, device, quick)
            chosen = [name for name in variants if name != COMPILE or statistics.mean(compiling) < spare]
            share = 0.05 if quick else min(left / sharing, subject.case_seconds)
            row, taken = measure_case(case, work, device, chosen, seconds=share, quick=quick)
            plain.append(time.monotonic() - began - taken)
            if COMPILE in chosen:
                compiling.append(taken)
            for name in variants:
                row["variants"].setdefault(name, {"skipped": "time budget"})
            grid.add(result, row, out)
            print(_line(row), flush=True)
    return result


def measure_case(
    case: Case, work: Work, device: torch.device, variants: Iterable[str], *, seconds: float, quick: bool
) -> tuple[dict[str, Any], float]:
    """Return the JSON row of a case, and the seconds that compiling took."""
    rows: dict[str, dict[str, Any]] = {}
    functions: dict[str, tuple[Function, Function]] = {}
    compile_seconds = 0.0
    if COMPILE in variants:
        # After eight compilations of one function dynamo would fall back to eager.
        torch._dynamo.reset()
    for name in variants:
        start = time.monotonic()
        functions[name] = _functions(name, work)
        try:
            if name not in work.yardsticks:
                _compare(work, functions[name], case.dtype)
            rows[name] = {}
        except Exception as error:
            if name == BASELINE:
                raise
            functions.pop(name, None)
            rows[name] = grid.failed(error)
        if name == COMPILE:
            compile_seconds = time.monotonic() - start

    layer, block = work.operands
    for mode, make in (("forward", _forward), ("forward_backward", _step)):
        times = measure.interleave(
            {name: make(function, *layer) for name, (function, _) in functions.items()},
            device,
            seconds=seconds / 2,
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
        **work.sizes,
        "activation": case.activation,
        "dtype": case.dtype,
        "hidden_bytes": work.hidden_bytes,
        "variants": rows,
    }
    return row, compile_seconds


def randn(
    generator: torch.Generator, dtype: str, shape: Sequence[int], *, scale: float = 1.0, grad: bool = True
) -> Tensor:
    """Random numbers on the generator's device, of a standard deviation that the dtype does not change."""
    tensor = torch.randn(*shape, generator=generator, device=generator.device) * scale
    return tensor.to(getattr(torch, dtype)).requires_grad_(grad)


def rows_of(result: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each case with what this library's variant came to, where that was measured or failed."""
    for row in result["cases"]:
        if OURS in row["variants"]:
            yield row, row["variants"][OURS]


def _functions(variant: str, work: Work) -> tuple[Function, Function]:
    if variant in work.others:
        return work.others[variant]
    if variant == OURS:
        return work.ours
    if variant == COMPILE:
        compiled = partial(torch.compile, fullgraph=True, dynamic=False)
        layer, block = (compiled(function) for function in work.eager)
        return layer, block
    return work.eager


def _forward(function: Function, x: Tensor, parameters: tuple[Tensor, ...], dy: Tensor) -> Callable[[], Any]:
    return partial(function, x, *parameters)


def _step(function: Function, x: Tensor, parameters: tuple[Tensor, ...], dy: Tensor) -> Callable[[], Any]:
    def step() -> None:
        measure.Above.apply(function(x, *parameters), dy).backward()
        for tensor in (x, *parameters):
            tensor.grad = None

    return step


def _compare(work: Work, found: tuple[Function, Function], dtype: str) -> None:
    """Compare with eager, layer and block. These are the first calls of everything, so that it compiles here."""
    for function, eager, operands in zip(found, work.eager, work.operands, strict=True):
        measure.expect_same(_results(function, *operands), _results(eager, *operands), _SAME[dtype])


def _results(function: Function, x: Tensor, parameters: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """The output and all gradients."""
    y = function(x, *parameters)
    return y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)


def _load_compiler(device: torch.device) -> None:
    """Compile something small, so that starting the compiler (10 s) is not charged to the first case."""
    try:
        torch.compile(lambda x: (x + 1).exp())(torch.ones(8, device=device, requires_grad=True)).sum().backward()
    except Exception as error:
        print(f"torch.compile does not work here: {error}")


@contextmanager
def _forgotten_by_the_collector() -> Iterator[None]:
    """Leave out what exists already: of torch's compiler that is half a million objects, and 0.3 s for each of the two
    collections of a case."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
