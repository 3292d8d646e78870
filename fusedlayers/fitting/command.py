"""The options of `fusedlayers fit`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from ..profiling.memory_command import FORMS, factory_from, step_from
from ..utils import command_line
from ..utils.formatting import size_from
from .fit import fit_step
from .training import Of


def register(commands: "command_line.Commands") -> None:
    """Add `fit` to the commands."""
    parser = commands.add_parser(
        "fit",
        help="find the fastest way to train a model within a number of bytes",
        description="Measures the blocks of a model, and finds which of them should keep their outputs, and which "
        "should be recomputed in the backward pass, for a step to take as little time as the budget allows.",
    )
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", help=f"a function that returns the model and example inputs: {FORMS}"
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget", metavar="SIZE", help="such as 8GiB or 500MB")
    budget.add_argument("--fraction", type=float, metavar="PART", help="of what the model takes as it is, 0 to 1")
    parser.add_argument("--of", choices=get_args(Of), default="saved", help="what counts; saved is the default")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a step over bytes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or why there is none. What the model or the factory raises comes with its traceback."""
    with command_line.usage_errors("fit", ValueError, ImportError, OSError):
        command_line.check_output_files("fit", arguments.plot, arguments.json)
        budget = None if arguments.budget is None else size_from(arguments.budget)
        factory = factory_from(arguments.factory)
    made = factory()
    with command_line.usage_errors("fit", ValueError, TypeError, only_ours=True):
        step = step_from(made, arguments.factory)
        with _progress() as on_stage:
            found = fit_step(step, budget, arguments.fraction, arguments.of, False, on_stage)
    print(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.to_dict(), indent=1))
    if arguments.plot is not None:
        found.plot(arguments.plot)
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with an estimate on stderr, where that is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda stage, part: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, part: bar.update(task, completed=part, description=stage)
