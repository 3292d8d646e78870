"""`fusedlayers demo`: its options, and the table and the picture that it shows."""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..utils import progress
from ..utils.formatting import counted_lines
from ..utils.report import EAGER, FONT, HERE, INK, legend, new_figure, style
from .model import ACTIVATIONS, standard_library_bytes
from .training import Outcome, Settings, compare, seconds_spent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Training ends after so many seconds, if nobody says how many steps there are: on a busy machine too, the result is
#: there within a minute.
SECONDS = 40
# By device, sizes that run for about a minute or less and in which the hidden activations matter.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "steps": 100, "batch": 16, "context": 128, "width": 128, "layers": 3},
    "cuda": {"dtype": "bfloat16", "steps": 500, "batch": 32, "context": 512, "width": 512, "layers": 6},
}

MIB = 2**20
COLORS = {"eager": EAGER, "fused": HERE}
LEGEND = """\
fused: the same model after fl.fuse(model)
saved: kept by the forward pass for the backward pass, parameters left out
peak: most allocated at once in both passes
time: medians, of steps that take turns and of their ratios; they say little where other processes compute"""
Outcomes = dict[str, Outcome]
Quantity = Callable[[Outcome], float]


# --- the options ------------------------------------------------------------------------------------------------------


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
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 is autocast over float32 parameters")
    for name, text in (
        ("steps", f"training steps of each variant (without it, at most {SECONDS} seconds)"),
        ("batch", "excerpts a step"),
        ("context", "bytes in an excerpt"),
        ("width", "of the residual stream; a multiple of 4"),
        ("layers", "transformer blocks"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("fusedlayers-demo.png"), help="(default: %(default)s)")
    parser.set_defaults(run=run, error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo as the options say."""
    if find_spec("matplotlib") is None:
        arguments.error("matplotlib not installed; install with: pip install 'fusedlayers[demo]'")
    settings = settings_from(arguments)
    try:
        corpus = standard_library_bytes()
        print(describe(settings), flush=True)
        outcomes = compare(settings, corpus, losses_to(progress.shown(), settings))
        print(*table(outcomes), LEGEND, sep="\n")
        plot(outcomes, describe(settings), arguments.out)
        print(f"picture: {arguments.out}")
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
    if arguments.steps is None:
        options["seconds"] = SECONDS
    if where.type == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: torch finds no GPU; use --device cpu")
    if options["width"] % 4:
        arguments.error(f"--width {options['width']}: expected a multiple of 4, for four heads")
    if arguments.out.suffix != ".png" or not arguments.out.parent.is_dir():
        arguments.error(f"--out {arguments.out}: expected a name that ends in .png, in a folder that exists")
    return Settings(device=where, activation=arguments.activation, seed=arguments.seed, **options)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


# --- the table and the picture ----------------------------------------------------------------------------------------


def describe(settings: Settings) -> str:
    """Say in a line what is trained, where and how."""
    threads = torch.get_num_threads()
    cpu = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    device = torch.cuda.get_device_name(settings.device) if settings.device.type == "cuda" else cpu
    return (
        f"{settings.activation}, {str(settings.dtype).removeprefix('torch.')}, {device}; "
        f"{settings.layers} layers of width {settings.width}, {settings.batch} x {settings.context} bytes a step"
    )


def losses_to(on_stage: progress.OnStage, settings: Settings) -> Callable[[Outcomes], None]:
    """An `on_step` for `compare`, which says the losses and how far it has come."""

    def on_step(outcomes: Outcomes) -> None:
        done = len(outcomes["fused"].losses)
        fused, eager = (outcomes[name].losses[-1] for name in ("fused", "eager"))
        part = max(done / settings.steps, min(1.0, seconds_spent(outcomes) / settings.seconds))
        on_stage(f"step {done}: loss {fused:.3f} (eager {eager:.3f})", part)

    return on_step


def table(outcomes: Outcomes) -> list[str]:
    """Lay out the figures: a line for each variant, and the ratio of the two."""
    rows = [("saved MiB", "peak MiB", "ms / step", "first loss", "last loss", "")]
    for name, outcome in outcomes.items():
        sizes = f"{outcome.saved_bytes / MIB:.2f}", f"{outcome.peak_bytes / MIB:.2f}"
        rows.append((*sizes, f"{outcome.step_ms:.1f}", f"{outcome.losses[0]:.4f}", f"{outcome.losses[-1]:.4f}", name))
    eager, fused = outcomes["eager"], outcomes["fused"]
    ratios = fused.saved_bytes / eager.saved_bytes, fused.peak_bytes / eager.peak_bytes, fused.step_ratio(eager)
    rows.append((f"{ratios[0]:.2f}", f"{ratios[1]:.2f}", f"{ratios[2]:.2f}", "", "", "fused / eager"))
    return list(counted_lines(rows, numbers=5))


def plot(outcomes: Outcomes, title: str, path: Path) -> None:
    """Draw loss curves, memory and time to a PNG file; matplotlib's global state stays as it is."""
    figure = new_figure("demo", 4, title)
    losses, memory, duration = figure.subplots(1, 3, width_ratios=[5, 4, 2])

    for (name, outcome), width in zip(outcomes.items(), (5, 1.2), strict=True):
        steps = range(1, len(outcome.losses) + 1)  # the curves coincide, so the first is drawn wide, below the other
        losses.plot(steps, outcome.losses, color=COLORS[name], linewidth=width, label=name)
    differences = [abs(a - b) for a, b in zip(*(outcome.losses for outcome in outcomes.values()), strict=True)]
    difference = f"Loss (they differ by at most {max(differences):.1g})"
    style(losses, title=difference, xlabel="training step", ylabel="nats per byte")
    legend(losses)
    quantities = {"saved for backward": lambda o: o.saved_bytes / MIB, "peak": lambda o: o.peak_bytes / MIB}
    draw_bars(memory, outcomes, quantities, "Memory, MiB")
    draw_bars(duration, outcomes, {"median step": lambda o: o.step_ms}, "Time, ms")
    figure.savefig(path)


def draw_bars(axes: "Axes", outcomes: Outcomes, quantities: dict[str, Quantity], title: str) -> None:
    """Draw a bar of each variant for each quantity, labelled with its value and its change from eager."""
    eager = [quantity(outcomes["eager"]) for quantity in quantities.values()]
    for offset, (name, outcome) in zip((-0.2, 0.2), outcomes.items(), strict=True):
        values = [quantity(outcome) for quantity in quantities.values()]
        labels = [f"{value:.1f}" for value in values]
        if name != "eager":
            labels = [f"{new:.1f}\n({new / old - 1:+.0%})" for new, old in zip(values, eager, strict=True)]
        bars = axes.bar([group + offset for group in range(len(values))], values, width=0.38, color=COLORS[name])
        axes.bar_label(bars, labels, padding=2, fontsize=FONT, color=INK)
    style(axes, title=title)
    axes.set_xticks(range(len(quantities)), list(quantities))
    axes.grid(False)
    axes.set_yticks([])  # each bar states its value
    axes.margins(y=0.12)
