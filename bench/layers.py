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
MAX_AUTOTUNE = "max-autotune"

#: How torch.compile is asked. Without CUDA graphs: these avoid launches only, which large layers hide anyway, and keep
#: memory of their own, which no count of bytes would show.
_MODES = {COMPILE: "default", MAX_AUTOTUNE: "max-autotune-no-cudagraphs"}

# How far a variant may be from eager (norm of the difference over the norm) and still be worth timing. It is no test of
# accuracy; rounding differs between variants by about the dtype's epsilon, and torch sums a layer norm's gradients of
# its weights in bfloat16: there they err by 4e-2 (2048 x 768).
_SAME = {"float32": 1e-2, "bfloat16": 1e-1, "float16": 1e-2}

Operands = tuple[Tensor, tuple[Tensor, ...], Tensor]  # x, parameters, the gradient that comes from above
Function = Callable[..., Tensor]
Layout = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


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
    @property
    def host_time(self) -> bool:
        """Whether to time with the wall clock, because the launches and not the kernels are what takes time."""


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
    #: More variants, by name; None for one that is missing here.
    others: Mapping[str, tuple[Function, Function] | None] = field(default_factory=dict)
    #: Of these, what computes something else, and is a yardstick.
    yardsticks: tuple[str, ...] = ()
    #: Of these, what takes its parameters in another layout: what makes them of the others'. It is not timed, since a
    #: network would keep its parameters so; gradients are compared in that layout.
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def operands_of(self, variant: str) -> tuple[Operands, Operands]:
        """The operands in the variant's own layout."""
        layer, block = self.operands
        layout = self.layouts.get(variant)
        if layout is None:
            return layer, block
        laid_out = _laid_out(layout, layer)
        return laid_out, laid_out if block is layer else _laid_out(layout, block)


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
    #: Of these, what compiles or tunes itself for each case, and a guess at the seconds that it takes for the first.
    prepared: Mapping[str, float] = field(default_factory=lambda: {COMPILE: 5.0})
    #: Of these, what is measured on other devices than GPUs only where it is asked for.
    for_gpus: tuple[str, ...] = ()
    #: Draws a result into a file.
    plot: Callable[[dict[str, Any], Path], Any] | None = None

    def default_variants(self, kind: str, quick: bool) -> list[str]:
        """What is measured on a device of that kind unless something else is asked for."""
        left_out = {*(self.prepared if quick else ()), *(self.for_gpus if kind != "cuda" else ())}
        return [name for name in self.variants if name not in left_out]

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
    without = f"with --quick not {', '.join(subject.prepared)}"
    if subject.for_gpus:
        without += f", on CPUs not {', '.join(subject.for_gpus)}"
    parser.add_argument(
        "--variants",
        help=f"comma-separated, of {','.join(subject.variants)} (default: all, {without}); eager is always measured",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: to see that it works")
    parser.add_argument(
        "--budget", type=float, default=subject.budget_seconds, metavar="SECONDS", help="start no case after this"
    )
    parser.add_argument("--tune", action="store_true", help="first measure which kernels each case takes (GPUs)")
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
    default = subject.default_variants(device.type, options.quick)
    asked = default if options.variants is None else options.variants.split(",")
    variants = [name for name in subject.variants if name == BASELINE or name in asked]
    out = options.out
    # A part of the grid must not replace a committed result of all of it: it is written only where the user says.
    if out is None and not (options.only or options.quick or options.dtype or set(default) - set(variants)):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = run(
        subject, todo, device, variants=variants, quick=options.quick, budget_seconds=options.budget, out=out,
        tune=options.tune,
    )  # fmt: skip
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
    tune: bool = False,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/<subject>.json`` after each."""
    todo = list(todo)
    variants = subject.default_variants(device.type, quick) if variants is None else list(variants)
    end = time.monotonic() + (subject.budget_seconds if budget_seconds is None else budget_seconds)
    result = grid.begin(subject.name, device, subject.definitions, quick=quick, not_run=[case.id for case in todo])
    result["tuned"] = tune
    machine.warn_if_busy(result)
    if _compiles(variants):
        _load_compiler(device)
    # Seconds that cases have taken so far, the first entry a guess.
    preparing, plain = {name: [guess] for name, guess in subject.prepared.items()}, [1.0]
    with _forgotten_by_the_collector():
        for case, left, sharing in grid.until(end, todo):
            began = time.monotonic()
            # Where not all of the grid fits in the budget, the last cases go without what takes long to prepare. What
            # comes may take longer than what came.
            spare = left - 1.25 * sharing * statistics.mean(plain)
            work = subject.build(case, device, quick)
            if tune:
                _tune(work)
            chosen = _affordable(variants, work, {n: statistics.mean(s) for n, s in preparing.items()}, spare)
            share = 0.05 if quick else min(left / sharing, subject.case_seconds)
            row, seconds_of = measure_case(case, work, device, chosen, seconds=share, quick=quick)
            taken = {name: seconds_of[name] for name in preparing if name in seconds_of}
            plain.append(time.monotonic() - began - sum(taken.values()))
            for name, seconds in taken.items():
                preparing[name].append(seconds)
            for name in variants:
                row["variants"].setdefault(name, {"skipped": "time budget"})
            grid.add(result, row, out)
            print(_line(row), flush=True)
    return result


def _tune(work: Work) -> None:
    """As ``fusedlayers tune`` does for a model."""
    from fusedlayers.backends.triton import dispatch, tuning

    found = _functions(OURS, work)
    assert found is not None
    session = tuning.Session()
    with dispatch.asking(session.ask):
        _step(found[0], *work.operands_of(OURS)[0])()
    session.save()


def _compiles(variants: Iterable[str]) -> bool:
    return not _MODES.keys().isdisjoint(variants)


def _affordable(variants: Iterable[str], work: Work, seconds_of: Mapping[str, float], spare: float) -> list[str]:
    """The variants that can be prepared in the time there is; a missing one takes none."""
    chosen = []
    for name in variants:
        seconds = 0.0 if name in work.others and work.others[name] is None else seconds_of.get(name, 0.0)
        if seconds == 0.0 or seconds < spare:
            chosen.append(name)
            spare -= seconds
    return chosen


def measure_case(
    case: Case, work: Work, device: torch.device, variants: Iterable[str], *, seconds: float, quick: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the JSON row of a case, and the seconds that each variant took to be prepared and compared."""
    rows: dict[str, dict[str, Any]] = {}
    operands: dict[str, tuple[Operands, Operands]] = {}
    functions: dict[str, tuple[Function, Function]] = {}
    seconds_of: dict[str, float] = {}
    if _compiles(variants):
        # After eight compilations of one function dynamo would fall back to eager.
        torch._dynamo.reset()
    for name in variants:
        start = time.monotonic()
        found = _functions(name, work)
        if found is None:
            rows[name] = {"skipped": "not available here"}
            continue
        functions[name], operands[name] = found, work.operands_of(name)
        try:
            if name not in work.yardsticks:
                _compare(work, name, found, operands[name], case.dtype)
            rows[name] = {}
        except Exception as error:
            if name == BASELINE:
                raise
            functions.pop(name, None)
            rows[name] = grid.failed(error)
        seconds_of[name] = time.monotonic() - start

    for mode, make in (("forward", _forward), ("forward_backward", _step)):
        times = measure.interleave(
            {name: make(function, *operands[name][0]) for name, (function, _) in functions.items()},
            device,
            seconds=seconds / 2,
            host=case.host_time,
            max_rounds=20 if quick else 200,
        )
        for name, values in times.items():
            rows[name][mode] = measure.summary(values, times[BASELINE])
    for name, (_, function) in functions.items():
        block = operands[name][1]
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
    return row, seconds_of


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


def _functions(variant: str, work: Work) -> tuple[Function, Function] | None:
    if variant in work.others:
        return work.others[variant]
    if variant == OURS:
        return work.ours
    if variant in _MODES:
        compiled = partial(torch.compile, fullgraph=True, dynamic=False, mode=_MODES[variant])
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


def _laid_out(layout: Layout, operands: Operands) -> Operands:
    x, parameters, dy = operands
    return x, tuple(tensor.detach().requires_grad_() for tensor in layout(parameters)), dy


def _compare(
    work: Work, variant: str, found: tuple[Function, Function], own: tuple[Operands, Operands], dtype: str
) -> None:
    """Compare with eager, layer and block. These are the first calls of everything, so that it compiles here."""
    layout = work.layouts.get(variant, tuple)
    for function, mine, eager, theirs in zip(found, own, work.eager, work.operands, strict=True):
        y, dx, *gradients = _results(function, *mine)
        expected_y, expected_dx, *expected_gradients = _results(eager, *theirs)
        got, expected = (y, dx, *gradients), (expected_y, expected_dx, *layout(tuple(expected_gradients)))
        measure.expect_same(got, expected, _SAME[dtype])


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
