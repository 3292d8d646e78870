"""The `fusedlayers` command line, which is also `python -m fusedlayers`.

A command is a module with a function `register(commands)`, which adds a parser that names its `run(arguments) -> int`.
Adding a command is adding its module to `COMMANDS`.
"""

import argparse
import sys
from collections.abc import Sequence

from . import __version__, doctor
from .demo import command as demo

COMMANDS = (demo, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if `doctor` finds something broken, 2 for wrong usage (the reason
    goes to stderr), 130 when interrupted.

    Example:
        >>> from fusedlayers.__main__ import main
        >>> main(["demo", "--steps", "0"])
        2
    """
    parser = argparse.ArgumentParser(prog="fusedlayers", description="Train PyTorch models in less memory.")
    parser.add_argument("--version", action="version", version=f"fusedlayers {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    try:
        arguments = parser.parse_args(argv)
        if not hasattr(arguments, "run"):
            parser.print_help(sys.stderr)
            return 2
        return int(arguments.run(arguments))
    except SystemExit as exit:  # argparse leaves this way, after --help and on wrong usage
        return exit.code if isinstance(exit.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
