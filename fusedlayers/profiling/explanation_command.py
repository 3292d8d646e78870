"""The options of `fusedlayers explain`."""

import argparse
import inspect
import json
import types
from pathlib import Path

from ..activations import activations, resolve
from ..fusion.fuse import fuse_on
from ..utils import command_line, command_parser, progress, users_code
from . import factory
from .explanation import Explanation, explain
from .model_explanation import ModelExplanation


def register(commands: "command_parser.Commands") -> None:
    """Add `explain` to the commands."""
    parser = commands.add_parser(
        "explain",
        help="say what a layer keeps of an activation, why, and how exact its derivative is",
        description="Prints what a layer keeps of an activation and why, the bytes, and the errors of its derivative; "
        "or, of a model, what each module keeps once it is fused.",
    )
    parser.add_argument(
        "activation",
        metavar="ACTIVATION",
        help="module:attribute, or module:factory, a function that returns a model and inputs; or a name: "
        + ", ".join(activations()),
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the function, its derivative and its error")
    parser.add_argument("--source", action="store_true", help="print the code that is generated for GPUs as well")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print, and draw, what an activation or a layer saves and why."""
    with (
        command_line.text_beside(arguments.json),
        command_line.usage_errors("explain", ValueError, TypeError, ImportError, OSError),
    ):
        command_line.check_output_files("explain", arguments.plot)
        found = explain(activation_named(arguments.activation))
        if not isinstance(found, ModelExplanation) and not found.saved_bytes:
            raise ValueError(
                f"{arguments.activation} does not compute: {found.reason}; expected a function of one tensor that "
                "returns one of its shape, a model, or a function without arguments that returns a model and inputs"
            )
        if isinstance(found, ModelExplanation) and (arguments.plot is not None or arguments.source):
            raise ValueError(f"{arguments.activation} is a model: --plot and --source are for activations")
        if arguments.plot is not None and isinstance(found, Explanation):
            found.plot(arguments.plot)
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else found)
    if arguments.source and isinstance(found, Explanation) and not arguments.json:  # which has it
        print("", found.source.rstrip() or "No code is generated.", sep="\n")
    return 0


def activation_named(name: str) -> object:
    """The activation of that name, or what `module:attribute` names. A class that needs no arguments is called, and so
    is a factory, whose model is fused."""
    if ":" not in name:
        try:
            return resolve(name, "explain")
        except ValueError as error:
            raise ValueError(f"{error}; others are written as module:attribute") from error
    found = users_code.import_object(name)
    if isinstance(found, types.FunctionType) and not inspect.signature(found).parameters:  # as no activation
        step = factory.step_named(name)
        with progress.shown() as on_stage:
            fuse_on(step.model, step.args, step.kwargs, on_stage=on_stage)  # type: ignore[arg-type]  # it asks
        return step.model
    return users_code.called(found, name, "name an instance of it") if isinstance(found, type) else found
