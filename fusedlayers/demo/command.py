"""`fusedlayers demo`: its options, and the table that it prints."""

import argparse
from dataclasses import replace
from statistics import median

import torch

from ..utils import progress
from ..utils.formatting import counted_lines
from .training import Outcome, Settings, compare, standard_library_bytes

#: By device, sizes in which the hidden activations matter. Without a number of steps training ends after 40 seconds: on
#: a busy machine too, the result is there within a minute.
DEFAULTS = {
    "cpu": Settings(torch.device("cpu"), torch.float32, 100, batch=16, context=128, width=128, layers=3, seconds=40),
    "cuda": Settings(torch.device("cuda"), torch.bfloat16, 500, batch=32, context=512, width=512, layers=6, seconds=40),
}
MIB = 2**20
LEGEND = """\
fused: the same model after fl.fuse(model)
saved: kept by the forward pass for the backward pass, parameters left out
peak: most allocated at once in both passes
time: medians, of steps that take turns and of their ratios; they say little where other processes compute"""
Outcomes = dict[str, Outcome]


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `demo` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small transformer as it is and after fuse, and compare",
        description="A small causal transformer learns the bytes of Python's standard library, once as it is and once "
        "after fl.fuse: same weights, same batches. Prints a table of memory, time and loss.",
    )
    parser.add_argument("--device", choices=DEFAULTS, help="(default: cuda if there is one)")
    steps = "training steps of each variant (without it, as many as take 40 seconds)"
    parser.add_argument("--steps", type=positive, metavar="N", help=steps)
    parser.add_argument("--batch", type=positive, metavar="N", help="excerpts a step (default: 16, with cuda 32)")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo as the options say."""
    has_gpu = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_gpu:
        arguments.error("--device cuda: torch finds no GPU; use --device cpu")
    settings = DEFAULTS[arguments.device or ("cuda" if has_gpu else "cpu")]
    settings = replace(settings, batch=arguments.batch or settings.batch)
    if arguments.steps is not None:
        settings = replace(settings, steps=arguments.steps, seconds=float("inf"))
    try:
        corpus = standard_library_bytes()
        print(describe(settings), flush=True)
        outcomes = compare(settings, corpus, progress.shown())
        print(*table(outcomes), LEGEND, sep="\n")
    except torch.OutOfMemoryError:
        arguments.error(f"ran out of memory on {settings.device}; try a smaller --batch than {settings.batch}")
    return 0


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def describe(settings: Settings) -> str:
    """Say in a line what is trained, where and how."""
    is_gpu = settings.device.type == "cuda"
    device = torch.cuda.get_device_name(settings.device) if is_gpu else f"{torch.get_num_threads()} CPU thread(s)"
    return (
        f"{str(settings.dtype).removeprefix('torch.')}, {device}; {settings.layers} layers of width {settings.width}, "
        f"{settings.batch} x {settings.context} bytes a step"
    )


def table(outcomes: Outcomes) -> list[str]:
    """Lay out the figures: a line for each variant, and the ratio of the two."""
    rows: list[tuple[str, ...]] = [("saved MiB", "peak MiB", "ms / step", "first loss", "last loss", "")]
    for name, outcome in outcomes.items():
        numbers = outcome.saved_bytes / MIB, outcome.peak_bytes / MIB, median(outcome.times_ms)
        losses = outcome.losses[0], outcome.losses[-1]
        rows.append((*(f"{number:.2f}" for number in numbers), *(f"{loss:.4f}" for loss in losses), name))
    eager, fused = outcomes["eager"], outcomes["fused"]
    # Of each turn: how fast a machine is changes between turns.
    time = median(own / others for own, others in zip(fused.times_ms, eager.times_ms, strict=True))
    ratios = fused.saved_bytes / eager.saved_bytes, fused.peak_bytes / eager.peak_bytes, time
    rows.append((*(f"{ratio:.2f}" for ratio in ratios), "", "", "fused / eager"))
    return list(counted_lines(rows, numbers=5))
