"""The options of `fusedlayers report`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..fusion.fuse import fuse_on
from ..utils import command_line
from .memory_results import MemoryReport
from .memory_use import STAGES, report_of
from .step import Step

#: What a factory may return.
FORMS = (
    "(model, inputs), where the inputs are a tensor, a tuple of positional arguments or a dict of keywords; "
    "or (model, args, kwargs), a tuple and a dict"
)


def register(commands: "command_line.Commands") -> None:
    """Add `report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="say what a model keeps for its backward pass, and what its peak of memory consists of",
        description="Runs a model forward and backward, and prints what is saved for the backward pass, by module and "
        "operation, and what is alive when most memory is allocated. With --fuse, the same once more after "
        "fusedlayers.fuse, beside what it was before.",
    )
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help=f"a function that returns the model and example inputs: {FORMS}",
    )
    parser.add_argument("--fuse", action="store_true", help="fuse the model too, and compare what it keeps then")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is saved")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or why there is none. What the model or the factory raises comes with its traceback."""
    with command_line.usage_errors("report", ValueError, ImportError, OSError):
        command_line.check_output_files("memory_report", arguments.plot, arguments.json)
        factory = factory_from(arguments.factory)
    made = factory()
    with command_line.usage_errors("report", ValueError, TypeError, only_ours=True):
        step = step_from(made, arguments.factory)
        with progress() as on_stage:
            found = report_of(step, on_stage)
        print(found)
        values = found.to_dict()
        if arguments.fuse:
            before, fused = found, fuse_on(step.model, step.args, step.kwargs)  # type: ignore[arg-type]  # it asks
            with progress() as on_stage:
                found = report_of(step, on_stage)
            print("", fused, "", before.compare(found), sep="\n")
            values = {"before": values, "fuse": fused.to_dict(), "after": found.to_dict()}
    with command_line.usage_errors("report", ValueError, ImportError, OSError):
        write(found, values, arguments)
    return 0


def factory_from(name: str) -> Callable[[], Any]:
    """What `module:factory` names."""
    if ":" not in name:
        raise ValueError(f"expected MODULE:FACTORY, got {name!r}; write package.module:function")
    factory = command_line.import_object(name)
    if not callable(factory):
        raise ValueError(f"{name} is a {type(factory).__name__}, expected a function that returns a model and inputs")
    return factory


def step_from(made: Any, name: str) -> Step:
    """The model and its arguments, as a factory returns them."""
    parts = made if isinstance(made, tuple) else ()
    match parts:
        case model, (tuple() | list()) as args, Mapping() as kwargs:
            return Step(model, tuple(args), dict(kwargs))
        case model, Mapping() as kwargs:
            return Step(model, (), dict(kwargs))
        case model, (tuple() | list()) as args:
            return Step(model, tuple(args), {})
        case model, inputs:
            return Step(model, (inputs,), {})
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(
        f"memory_report: {name} returned {f'({kinds})' if kinds else type(made).__name__}, expected {FORMS}"
    )


def write(found: MemoryReport, values: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The files that were asked for."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(values, indent=1))
    if arguments.plot is not None:
        found.plot(arguments.plot)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield what announces the next run: a bar on stderr where that is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda stage: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(STAGES))
        yield lambda stage: bar.update(task, completed=STAGES.index(stage), description=stage)
