"""The command line: one subcommand per file."""

import argparse
import importlib
import os
import sys
from functools import partial
from types import ModuleType

COMMANDS = {
    "dense": ("dense", "eager, torch.compile and this library on dense layers: time, saved and peak bytes"),
    "mlp": ("mlp", "the same on MLP blocks, with and without a gate, beside the bare matmuls"),
    "conv": ("conv", "the same on convolutions, in both memory formats"),
    "pointwise": ("pointwise", "bandwidth of the forward and backward kernels against a copy"),
    "custom": ("custom", "activations with trainable parameters, in ResNet-18: bytes, time"),
    "models": ("models", "whole models, eager and after fuse: bytes, time"),
    "saved": ("saved", "whole models before and after fuse: bytes by three counts, peaks"),
    "fit": ("fit", "whole models within budgets: fit, checkpoints of blocks, torch.compile's budget"),
    "peers": ("peers", "three blocks, by others who save memory and by this library"),
    "containers": ("containers", "ResNet-152 and reversible networks that run partly twice: memory against speed"),
    "overhead": ("overhead", "what small calls cost beyond eager's, on one thread"),
    "accuracy": ("accuracy", "errors of output and derivative against float64, beside eager's"),
    "readme": ("report", "write the README's tables from bench/results, or check them"),
    "gpu-check": (
        "gpu_check",
        "whether the kernels are right on this GPU, and what they take; two halves of nine minutes",
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measurements of fusedlayers.")
    commands = parser.add_subparsers(dest="command", required=True)
    argv = sys.argv[1:] if argv is None else argv
    for name, (module_name, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if argv[:1] == [name]:  # only the one that runs is imported: `readme` must not wait for torch
            _prepare(command, importlib.import_module(f".{module_name}", __package__))
    options = parser.parse_args(argv)
    if any(name in os.environ for name in ("BENCH_FAKE_GPU", "BENCH_DENIED_KERNELS")):  # gpu-check has started this
        from .gpu_items import prepare

        prepare()
    return int(options.main(options))


def _prepare(command: argparse.ArgumentParser, module: ModuleType) -> None:
    """Grids of layers have a ``SUBJECT``, from which all else follows; the other modules bring their own."""
    if hasattr(module, "SUBJECT"):
        from . import layers

        layers.add_arguments(command, module.SUBJECT)
        command.set_defaults(main=partial(layers.main, module.SUBJECT))
    else:
        module.add_arguments(command)
        command.set_defaults(main=module.main)


if __name__ == "__main__":
    sys.exit(main())
