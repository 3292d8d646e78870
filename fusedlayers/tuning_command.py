"""The options of `fusedlayers tune`."""

import argparse
import sys

from .profiling.memory_command import FORMS, factory_from, step_from
from .tuning import tune
from .utils import command_line


def register(commands: "command_line.Commands") -> None:
    """Add `tune` to the commands."""
    parser = commands.add_parser(
        "tune",
        help="measure on this GPU which matmul kernels are the fastest for a model, for all later runs",
        description="Runs a training step of a model on a GPU, measures each matmul that may have an activation in its "
        "epilogue, and writes down which kernel is the fastest. Later runs on such a GPU, with the same versions, "
        "read it; without it nothing is guessed. In a distributed job one process tunes, before the job.",
    )
    parser.add_argument(
        "factory", metavar="MODULE:FACTORY", help=f"a function that returns the model and example inputs: {FORMS}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was chosen, or why nothing can be. What the model or the factory raises comes with its traceback."""
    with command_line.usage_errors("tune", ValueError, ImportError):
        factory = factory_from(arguments.factory)
    made = factory()
    with command_line.usage_errors("tune", ValueError, TypeError, OSError, only_ours=True):
        step = step_from(made, arguments.factory)
        print(tune(step.model, step.args or step.kwargs, on_question=_say))  # type: ignore[arg-type]  # it asks
    return 0


def _say(question: str) -> None:
    print(f"measuring {question}", file=sys.stderr, flush=True)
