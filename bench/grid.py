"""Benchmarks: cases, measured one after the other until the time is up, and the file of what is known by then."""

import argparse
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fusedlayers.utils import progress

from . import RESULTS, machine
from .measure import Setting

AnyCase = TypeVar("AnyCase")


class Case:
    """One whose id is made of its fields: ``fused/dense/relu/131072``."""

    @property
    def id(self) -> str:
        return "/".join(map(str, vars(self).values()))


def line(row: dict[str, Any]) -> Iterator[str]:
    """A row for people: the time, the saved bytes and the peak of each variant."""
    cells = []
    for name, found in row["variants"].items():
        if "forward_backward" not in found:
            cells.append(f"{name}: {found.get('error') or found.get('skipped')}")
            continue
        times = found["forward_backward"]
        ratio = f"{times['ratio']:.2f}x ({times['ratio_q1']:.2f} to {times['ratio_q3']:.2f})"
        taken = f"{times['median_us'] / 1e3:.3g} ms" if not cells else ratio
        sizes = (f"{key[:-6]} {found[key] / 2**20:.3g} MiB" for key in ("saved_bytes", "peak_bytes") if key in found)
        cells.append(", ".join((f"{name} {taken}", *sizes)))
    yield f"{row['id']:<42} {' | '.join(cells)}"


@dataclass(frozen=True)
class Benchmark:
    """A command that measures cases.

    Attributes:
        name: of its file of results.
        definitions: what the numbers of the file are.
        cases: those for a kind of device. Each has an ``id``, and may have a ``share`` of the time (1, if it has none).
        measure: the JSON row of a case; it has the case's ``id``.
        lines: a row for people.
        missed: what a result does not keep of the library's promises.
        budget_seconds: no case starts after so many.
        case_seconds: of timing, which a case gets at most.
        device, threads: the defaults, where they are not torch's choice.
        packages: whose versions are of interest beside torch's.
        facts: more entries for the head of the file.
    """

    name: str
    definitions: Mapping[str, str]
    cases: Callable[[str], Sequence[Any]]
    measure: Callable[[Any, Setting], dict[str, Any]]
    lines: Callable[[dict[str, Any]], Iterable[str]] = line
    missed: Callable[[dict[str, Any]], Iterable[str]] = lambda result: ()
    budget_seconds: float = 540.0
    case_seconds: float = 10.0
    device: str | None = None
    threads: int | None = None
    packages: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    device = benchmark.device or ("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", default=device, help="(default: %(default)s)")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches")
    parser.add_argument("--threads", type=int, default=benchmark.threads, help="CPU threads (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few rounds, and small shapes: to see that it works")
    parser.add_argument(
        "--budget", type=float, default=benchmark.budget_seconds, metavar="SECONDS",
        help="start no case after this (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"folder for {benchmark.name}.json; a full run has a default")


def main(benchmark: Benchmark, options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    known = benchmark.cases(device.type)
    todo = [case for case in known if re.search(options.only or "", case.id)]
    if not todo:
        ids = [case.id for case in known]
        print(f"bench {benchmark.name}: no case matches --only {options.only!r}; there are {ids}")
        return 2
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    run(benchmark, todo, device, quick=options.quick, budget=options.budget, out=out)
    if out is not None:
        print(f"\nwrote {out / f'{benchmark.name}.json'}")
    return 0


def run(
    benchmark: Benchmark, todo: Sequence[Any], device: torch.device, *, quick: bool, budget: float, out: Path | None
) -> None:
    """Measure the cases in order, within the budget of seconds, and write ``out/<name>.json`` after each."""
    end = time.monotonic() + budget
    not_run = [case.id for case in todo]
    result = begin(benchmark.name, device, benchmark.definitions, quick=quick, not_run=not_run, **benchmark.facts)
    for name in benchmark.packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            result["versions"][name] = importlib.metadata.version(name)
    machine.warn_if_busy(result)
    shares = [getattr(case, "share", 1.0) for case in todo]
    for number, (case, left) in enumerate(until(end, todo)):
        # Half of a case's share: to build, to compare and to count bytes takes time too.
        seconds = min(left * shares[number] / sum(shares[number:]) / 2, benchmark.case_seconds)
        row = benchmark.measure(case, Setting(device, 0.0 if quick else seconds, quick))
        add(result, row, out)
        print("\n".join(benchmark.lines(row)), flush=True)
    print("".join(f"MISSED: {finding}\n" for finding in benchmark.missed(result)), end="")


def begin(subject: str, device: torch.device, definitions: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """A result without cases yet: what it is of, where and when it was measured, and what its numbers are."""
    return {
        "schema": 1,
        "subject": subject,
        **machine.describe(device),
        "definitions": definitions,
        **more,
        "cases": [],
    }


def until(end: float, todo: Sequence[AnyCase]) -> Iterator[tuple[AnyCase, float]]:
    """Each case that can start before ``end``, with the seconds that are left.

    Shows how far the run has come: by its cases, or by its seconds where these are used up first.
    """
    begun = time.monotonic()
    on_stage = progress.shown()
    for number, case in enumerate(todo):
        now = time.monotonic()
        if now >= end:
            return
        on_stage(str(getattr(case, "id", case)), max(number / len(todo), (now - begun) / (end - begun)))
        yield case, end - now


def add(result: dict[str, Any], row: dict[str, Any], out: Path | None) -> None:
    """A case is done: it moves from what was not run to the cases, in ``out/<subject>.json`` too, a case a line. The
    file is replaced as a whole, for the process may be stopped."""
    result["cases"].append(row)
    result["not_run"].remove(row["id"])
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result['subject']}.json"
    partial = path.with_suffix(".json.tmp")
    head = json.dumps({**result, "cases": []}, indent=1)
    cases = ",\n".join(f"  {json.dumps(case)}" for case in result["cases"])
    text = head.replace('"cases": []', f'"cases": [\n{cases}\n ]')
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)
