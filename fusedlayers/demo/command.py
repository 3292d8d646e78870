"""The options of `fusedlayers demo`."""

import argparse
import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..utils import progress
from .corpus import standard_library_bytes
from .model import ACTIVATIONS
from .tables import LEGEND, describe, losses_to, plot, table
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


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small transformer as it is and after fuse, and compare",
        description="A small causal transformer learns the bytes of Python's standard library, once as it is and once "
        "after fl.fuse: same weights, same batches. Prints a table of memory, time and loss, and draws it.",
        epilog="Defaults that depend on the device: "
        + "; ".join(f"{device}: " + ", ".join(f"{k} {v}" for k, v in row.items()) for device, row in DEFAULTS.items()),
    )
    known = f"{', '.join(ACTIVATIONS)} (default: gelu)"
    parser.add_argument("--activation", choices=ACTIVATIONS, default="gelu", metavar="NAME", help=known)
    parser.add_argument("--device", choices=DEFAULTS, help="(default: cuda if there is one)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="16-bit ones run as autocast over float32 parameters; float16 on cuda"
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="training steps of each variant")
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help=f"train for so long at most (default: {SECONDS}, without --steps)",
    )
    parser.add_argument("--batch", type=positive, metavar="N", help="excerpts a step")
    parser.add_argument("--context", type=positive, metavar="N", help="bytes in an excerpt")
    parser.add_argument("--width", type=positive, metavar="N", help="of the residual stream; a multiple of 4")
    parser.add_argument("--layers", type=positive, metavar="N", help="transformer blocks")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=Path("fusedlayers-demo.png"), help="(default: %(default)s)")
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
        with threads(arguments.threads):
            corpus = standard_library_bytes()
            console.print(describe(settings), soft_wrap=True)
            outcomes = compare(settings, corpus, losses_to(progress.shown(), settings))
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
    where = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {name: getattr(arguments, name) or value for name, value in DEFAULTS[where.type].items()}
    options["dtype"] = DTYPES[options["dtype"]]
    if arguments.seconds is not None or arguments.steps is None:
        options["seconds"] = arguments.seconds or SECONDS
    if where.type == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: torch finds no GPU; use --device cpu")
    if options["width"] % 4:
        arguments.error(f"--width {options['width']}: expected a multiple of 4, for four heads")
    if arguments.out.suffix != ".png" or not arguments.out.parent.is_dir():
        arguments.error(f"--out {arguments.out}: expected a name that ends in .png, in a folder that exists")
    if where.type == "cpu" and options["dtype"] == torch.float16:
        arguments.error("--dtype float16 trains on cuda only; use float32 or bfloat16 with --device cpu")
    return Settings(device=where, activation=arguments.activation, seed=arguments.seed, **options)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch computes with so many CPU threads; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
