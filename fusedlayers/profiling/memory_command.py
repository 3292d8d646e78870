"""The options of `fusedlayers report`."""

import argparse
from pathlib import Path
from typing import Any

import torch

from ..fusion.fuse import fuse_on
from ..utils import command_line, command_parser, progress
from . import factory
from .memory_results import MemoryReport
from .memory_use import report_of
from .step import Step


def register(commands: "command_parser.Commands") -> None:
    """Add `report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="say what a model keeps for its backward pass, and what its peak of memory consists of",
        description="Runs a model forward and backward, and prints what is saved for the backward pass, by module and "
        "operation, and what is alive when most memory is allocated. With --fuse, the same once more after "
        "fusedlayers.fuse, beside what it was before.",
    )
    factory.add_argument(parser)
    parser.add_argument("--fuse", action="store_true", help="fuse the model too, and compare what it keeps then")
    # Some operators allocate a buffer for each thread: with one, a report is the same on all machines.
    parser.add_argument(
        "--threads",
        type=command_parser.whole_number(maximum=command_parser.MOST_THREADS),
        default=1,
        metavar="N",
        help="CPU threads; operators may allocate buffers for each (default: 1, for figures that can be compared)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what is saved")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON; - is stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report, or why there is none. What the model raises comes with its traceback."""
    with command_line.text_beside(arguments.json == command_line.STDOUT):
        found, values = _reported(arguments)
    with command_line.usage_errors("report", ValueError, ImportError, OSError):
        if arguments.json is not None:
            command_line.write_json(values, arguments.json)
        if arguments.plot is not None:
            found.plot(arguments.plot)
    return 0


def _reported(arguments: argparse.Namespace) -> tuple[MemoryReport, dict[str, Any]]:
    with command_line.usage_errors("report", ValueError, ImportError, OSError):
        command_line.check_output_files("memory_report", arguments.plot, arguments.json)
        step = factory.step_named(arguments.factory)
    with (
        command_line.usage_errors("report", ValueError, TypeError, only_ours=True),
        command_line.threads(arguments.threads),
    ):
        found = _measured(step)
        print(found)
        values = found.to_dict()
        if arguments.fuse:
            before = found
            with progress.shown() as on_stage:
                fused = fuse_on(step.model, step.args, step.kwargs, on_stage=on_stage)  # type: ignore[arg-type]  # it asks
            found = _measured(step)
            print("", fused, "", before.compare(found), sep="\n")
            values = {"before": values, "fuse": fused.to_dict(), "after": found.to_dict()}
        print(f"\nmeasured with {_threads_text()}")
    return found, values | {"threads": arguments.threads}


def _measured(step: Step) -> MemoryReport:
    with progress.shown() as on_stage:
        return report_of(step, on_stage)


def _threads_text() -> str:
    count = torch.get_num_threads()
    return f"{count} CPU thread{'' if count == 1 else 's'}"
