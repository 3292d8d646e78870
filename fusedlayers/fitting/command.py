"""The options of `fusedlayers fit`."""

import argparse
import dataclasses
from pathlib import Path
from typing import get_args

from ..profiling import factory
from ..utils import command_line, command_parser, progress
from ..utils.formatting import percent_from, size_from
from .compiled import CompiledFit, fit_compiled_step
from .fit import fit_step
from .report import FitReport
from .training import Of


def register(commands: "command_parser.Commands") -> None:
    """Add `fit` to the commands."""
    parser = commands.add_parser(
        "fit",
        help="find the fastest way to train a model within a number of bytes",
        description="Measures the blocks of a model, and finds which of them should keep their outputs, and which "
        "should be recomputed in the backward pass, for a step to take as little time as the budget allows.",
    )
    factory.add_argument(parser)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget", metavar="SIZE", help="such as 8GiB or 500MB")
    budget.add_argument(
        "--fraction", type=_fraction, metavar="PART", help="of what the model takes, such as 0.3 or 30%%"
    )
    parser.add_argument("--of", choices=get_args(Of), default="saved", help="what counts; saved is the default")
    parser.add_argument("--compile", action="store_true", help="for torch.compile: find its activation_memory_budget")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a step over bytes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; - is stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or why there is none. What the model raises comes with its traceback."""
    with command_line.text_beside(arguments.json == command_line.STDOUT):
        found = _reported(arguments)
    with command_line.usage_errors("fit", OSError):
        if arguments.json is not None:
            command_line.write_json(found.to_dict(), arguments.json)
        if isinstance(found, FitReport) and arguments.plot is not None:
            found.plot(arguments.plot)
    return 0


def _reported(arguments: argparse.Namespace) -> FitReport | CompiledFit:
    with command_line.usage_errors("fit", ValueError, ImportError, OSError):
        if arguments.compile and arguments.plot is not None:
            raise ValueError("there is no picture of what is compiled; leave out --plot or --compile")
        command_line.check_output_files("fit", arguments.plot, arguments.json)
        budget = None if arguments.budget is None else _budget(arguments.budget)
        function = "fit_compiled" if arguments.compile else "fit"
        step = dataclasses.replace(factory.step_named(arguments.factory), function=function)
    with command_line.usage_errors("fit", ValueError, TypeError, only_ours=True), progress.shown() as on_stage:
        asked = step, budget, arguments.fraction, arguments.of
        found: FitReport | CompiledFit
        found = fit_compiled_step(*asked, on_stage) if arguments.compile else fit_step(*asked, False, on_stage)
    print(found)
    given = f"memory_budget_bytes={arguments.budget!r}" if budget is not None else f"fraction={arguments.fraction}"
    given += "" if arguments.of == "saved" else f", of={arguments.of!r}"
    print(f"\nTo train a model so, let your program call fusedlayers.{function}(model, inputs, {given}).")
    return found


def _fraction(text: str) -> float:
    percent = percent_from(text)
    try:
        return float(text) if percent is None else percent / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a part, such as 0.3 or 30%, got {text!r}") from None


def _budget(text: str) -> int:
    percent = percent_from(text)
    if percent is not None and 0 < percent <= 100:
        raise ValueError(f"expected bytes, such as 8GiB or 500MB, got {text!r}; write --fraction {percent / 100:g}")
    return size_from(text)
