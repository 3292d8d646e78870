"""The options of `fusedlayers demo`."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..activations import resolve
from ..utils import command_line, command_parser, progress
from ..utils.command_parser import MOST_THREADS, whole_number
from .corpus import standard_library_bytes
from .model import ACTIVATIONS
from .report import LEGEND, describe, losses_to, plot, table
from .training import Settings, compare

EXTRAS = ("rich", "matplotlib")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Training ends after so many seconds, if nobody says how many steps there are: on a busy machine too, the result is
#: there within a minute.
SECONDS = 40
# By device, sizes that run for about a minute or less and in which the hidden activations matter.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "steps": 100, "batch": 16, "context": 128, "width": 128, "layers": 3},
    "cuda": {"dtype": "bfloat16", "steps": 500, "batch": 32, "context": 512, "width": 512, "layers": 6},
}


def register(commands: "command_parser.Commands") -> None:
    """Add `demo` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small transformer as it is and after fuse, and compare",
        description="A small causal transformer learns the bytes of Python's standard library, once as it is and once "
        "after fl.fuse: same weights, same batches. Prints a table of memory, time and loss, and draws it.",
        epilog="Defaults that depend on the device: "
        + "; ".join(f"{device}: " + ", ".join(f"{k} {v}" for k, v in row.items()) for device, row in DEFAULTS.items()),
    )
    known = ", ".join(ACTIVATIONS)
    parser.add_argument(
        "--activation", type=activation, default="gelu", metavar="NAME", help=f"{known} (default: gelu)"
    )
    parser.add_argument(
        "--device", type=device, default=None, help="cpu, cuda or cuda:N (default: cuda if there is one)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="16-bit ones run as autocast over float32 parameters; float16 on cuda"
    )
    parser.add_argument("--steps", type=whole_number(), metavar="N", help="training steps of each variant")
    parser.add_argument(
        "--seconds",
        type=whole_number(),
        metavar="N",
        help=f"train for so long at most (default: {SECONDS}, without --steps)",
    )
    parser.add_argument("--batch", type=whole_number(), metavar="N", help="excerpts a step")
    parser.add_argument("--context", type=whole_number(maximum=8192), metavar="N", help="bytes in an excerpt")
    parser.add_argument(
        "--width",
        type=whole_number(32, 65536, multiple=32),
        metavar="N",
        help="of the residual stream; a multiple of 32",
    )
    parser.add_argument("--layers", type=whole_number(), metavar="N", help="transformer blocks")
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="of weights and batches (default: 0)"
    )
    parser.add_argument(
        "--threads", type=whole_number(maximum=MOST_THREADS), metavar="N", help="CPU threads (default: torch's choice)"
    )
    parser.add_argument("--out", type=png, default="fusedlayers-demo.png", metavar="PNG", help="(default: %(default)s)")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo as the options say."""
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        arguments.error(f"{' and '.join(missing)} not installed; install with: pip install 'fusedlayers[demo]'")
    from rich.console import Console

    settings = settings_from(arguments)
    console = Console(highlight=False)
    try:
        with command_line.threads(arguments.threads):
            corpus = standard_library_bytes()
            console.print(describe(settings), soft_wrap=True)
            with progress.shown() as on_stage:
                outcomes = compare(settings, corpus, losses_to(on_stage, settings))
            console.print(table(outcomes), LEGEND, sep="\n")
            plot(outcomes, describe(settings), arguments.out)
            console.print(f"picture: {arguments.out}", soft_wrap=True)
    except BrokenPipeError:
        raise
    except torch.OutOfMemoryError:
        arguments.error(f"ran out of memory on {settings.device}; try a smaller --batch than {settings.batch}")
    except OSError as error:  # no corpus to read, or no picture to write
        arguments.error(str(error))
    return 0


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Fill in the defaults that depend on the device."""
    where = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = {name: getattr(arguments, name) or value for name, value in DEFAULTS[where.type].items()}
    options["dtype"] = DTYPES[options["dtype"]]
    if arguments.seconds is not None or arguments.steps is None:
        options["seconds"] = arguments.seconds or SECONDS
    if where.type == "cpu" and options["dtype"] == torch.float16:
        arguments.error("--dtype float16 trains on cuda only; use float32 or bfloat16 with --device cpu")
    return Settings(device=where, activation=arguments.activation, seed=arguments.seed, **options)


def activation(text: str) -> str:
    """Read `--activation`."""
    try:
        name = resolve(text, "--activation").name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--activation: ")) from error
    if name not in ACTIVATIONS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(ACTIVATIONS)}, got {text!r}")
    return name


def device(text: str) -> torch.device:
    """Read `--device`."""
    try:
        where = torch.device(text)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in DEFAULTS:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"{text!r} asked for, but torch sees {found} CUDA devices; try --device cpu")
    return where


def png(text: str) -> Path:
    """Read `--out`, and refuse now what could not be written after a minute's work."""
    path = Path(text)
    if path.suffix.lower() != ".png" or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a .png file in a directory that exists, got {text!r}")
    return path
