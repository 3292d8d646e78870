"""The options of `fusedlayers doctor`."""

import argparse
import json
from dataclasses import asdict

from .doctor import Finding, findings
from .utils import command_parser


def register(commands: "command_parser.Commands") -> None:
    """Add `doctor` to the commands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what works here, and what does not",
        description="Prints versions, the processor, the compiler and whether its loops work, who multiplies matrices, "
        "the GPUs and whether kernels run there, what was tuned, and the settings. The exit code is 1 if something "
        "that should work is broken, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    found = list(findings())
    broken = sum(bool(finding.problems) for finding in found)
    if arguments.json:
        print(json.dumps({"is_ok": not broken, "findings": [asdict(finding) for finding in found]}, indent=1))
    else:
        print("\n".join(_lines(found)))
        print("\nNothing is broken." if not broken else f"\nBroken: {broken}, marked with !!")
    return int(broken > 0)


def _lines(found: list[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in found)
    lines: list[str] = []
    section = None
    for finding in found:
        if finding.section != section:
            section = finding.section
            lines += ["", section] if lines else [section]
        lines.append(f"  {finding.name:<{width}}  {finding.text}")
        lines += [f"  {'!!':>{width}}  {line}" for problem in finding.problems for line in problem.splitlines()]
    return lines
