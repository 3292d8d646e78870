"""The options of `fusedlayers tune`."""

import argparse

from .profiling import factory
from .tuning import tune_step
from .utils import command_line, command_parser, progress


def register(commands: "command_parser.Commands") -> None:
    """Add `tune` to the commands."""
    parser = commands.add_parser(
        "tune",
        help="measure on this GPU which matmul kernels are the fastest for a model, for all later runs",
        description="Runs a training step of a model on a GPU, measures each matmul that may have an activation in its "
        "epilogue, and writes down which kernel is the fastest. Later runs on such a GPU, with the same versions, "
        "read it; without it nothing is guessed. In a distributed job one process tunes, before the job.",
    )
    factory.add_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was chosen, or why nothing can be. What the model raises comes with its traceback."""
    with command_line.usage_errors("tune", ValueError, ImportError):
        step = factory.step_named(arguments.factory)
    with (
        command_line.usage_errors("tune", ValueError, TypeError, OSError, only_ours=True),
        progress.shown() as on_stage,
    ):
        found = tune_step(step, on_stage)
    print(found)
    return 0
