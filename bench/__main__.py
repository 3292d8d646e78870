"""The command line. A module has its benchmarks in ``BENCHMARKS``, or ``add_arguments`` and ``main``."""

import argparse
import importlib
import os
import sys
from functools import partial

#: Command -> its module, and what it measures.
COMMANDS = {
    "dense": ("layers", "dense layers with an activation, eager and by this library: time, saved and peak bytes"),
    "mlp": ("layers", "the same of MLP blocks, with and without a gate"),
    "conv": ("layers", "the same of convolutions"),
    "models": ("models", "whole models, eager and after fuse: bytes, time"),
    "saved": ("saved", "whole models before and after fuse: bytes by three counts"),
    "architectures": ("architectures", "fuse on each architecture of transformers: bits, saved bytes"),
    "setups": ("setups", "small models as people train them, before and after fuse: bytes, peaks, time"),
    "fit": ("fit", "whole models within budgets: fit, and checkpoints of blocks"),
    "fit-compiled": ("fit", "the same with torch.compile's budget and fit_compiled; minutes a case on a CPU"),
    "peers": ("peers", "two blocks, by others who save memory and by this library"),
    "containers": ("containers", "ResNet-152 and reversible networks that run partly twice: memory against speed"),
    "overhead": ("overhead", "what small calls cost beyond eager's, on one thread"),
    "accuracy": ("accuracy", "errors of output and derivative against float64, beside eager's"),
    "readme": ("report", "write the README's tables from bench/results, or check them"),
    "gpu-check": ("gpu.check", "whether the kernels are right on this GPU, and what they take; two halves"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measurements of fusedlayers.")
    commands = parser.add_subparsers(dest="command", required=True)
    argv = sys.argv[1:] if argv is None else argv
    for name, (module_name, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if argv[:1] == [name]:  # only the one that runs is imported
            module = importlib.import_module(f".{module_name}", __package__)
            if hasattr(module, "BENCHMARKS"):
                from . import grid

                grid.add_arguments(command, module.BENCHMARKS[name])
                command.set_defaults(main=partial(grid.main, module.BENCHMARKS[name]))
            else:
                module.add_arguments(command)
                command.set_defaults(main=module.main)
    options = parser.parse_args(argv)
    if "BENCH_GPU" in os.environ:  # gpu-check has started this
        from .gpu.items import prepare

        prepare()
    return int(options.main(options))


if __name__ == "__main__":
    sys.exit(main())
