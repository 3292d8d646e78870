"""``python -m bench aot``: the Triton kernels compiled ahead of time, for GPUs that need not be there.

A line for each kernel and target: registers, shared memory and spills, and the instructions in its text by kind (which
are those is said in ``machine_code``). Loops are counted once, and an instruction of packed pairs once, too: this tells
what the compiler made of a kernel, not how fast it is.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedlayers.activations import Activation, activations, resolve
from fusedlayers.utils import progress

from . import machine_code

if TYPE_CHECKING:  # it needs Triton, which may be missing
    from .recipe import Family

#: Modules with a ``FAMILY`` of kernels each, which need Triton.
FAMILIES = ("elementwise_recipe", "matmul_recipe")
DTYPES = ("bfloat16", "float16", "float32")
#: What is printed of the instructions, by their kinds; of accesses to global memory, the widths.
_COLUMNS = {
    "tensor": "tensor",
    "fp32": "fp32",
    "special": "special",
    "integer": "integer",
    "bulk_copies": "bulk",
    "shared_loads": "sh.ld",
    "shared_stores": "sh.st",
    "local": "local",
    machine_code.OTHER: "other",
}
_RESOURCES = {"registers": "regs", "shared_bytes": "shared", "spill_bytes": "spills", "instructions": "instr"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # What there is of kernels and targets is known to modules that need Triton.
    parser.add_argument("--target", nargs="+", metavar="GPU", help="sm_90, gfx942, ... (default: all that are known)")
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="forward, gate, ... (default: all)")
    parser.add_argument("--activation", nargs="+", metavar="NAME", default=["gelu"], help="or 'all' (default: gelu)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, too")


def main(options: argparse.Namespace) -> int:
    refused = _refused_because()
    if refused is not None:
        print(f"bench aot: {refused}", file=sys.stderr)
        return 2
    try:
        todo = list(_todo(options))
    except ValueError as error:
        print(f"bench aot: {error}", file=sys.stderr)
        return 2
    import triton

    print(f"Triton {triton.__version__}; global accesses are instructions x bytes a thread\n\n{_header()}", flush=True)
    rows = []
    with progress.shown() as on_stage:
        for number, (family, kernel, activation, dtype, target) in enumerate(todo):
            on_stage(f"{kernel} {activation.name} {dtype} {target}", number / len(todo))
            rows.append(compile_kernel(family, kernel, activation, dtype, target))
            print(_line(rows[-1]), flush=True)
    if options.json is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        result = {"schema": 1, "subject": "aot", "versions": versions, "kernels": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.json}")
    return 0


def compile_kernel(family: "Family", kernel: str, activation: Activation, dtype: str, target: str) -> dict[str, Any]:
    """What a kernel compiles to, as it stands in the JSON file."""
    compiled = family.recipe(kernel, activation, getattr(torch, dtype), target).compile(target)
    found = machine_code.instructions(compiled)
    return {
        "kernel": kernel,
        "activation": repr(activation),
        "dtype": dtype,
        "target": target,
        **asdict(machine_code.resources(compiled)),
        "instructions": found.count,
        "kinds": found.kinds,
        **{f"global_{name}": widths for name, widths in asdict(found.accesses).items()},
    }


def families() -> list["Family"]:
    """All there are."""
    return [importlib.import_module(f".{name}", __package__).FAMILY for name in FAMILIES]


def _refused_because() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing, whose compiler this runs (pip install triton; it needs no GPU, but Linux)"
    from triton import knobs

    if knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, and what is interpreted is not compiled; unset it"
    return None


def _todo(options: argparse.Namespace) -> Iterator[tuple["Family", str, Activation, str, str]]:
    """What is asked for, the targets of a kernel one after the other."""
    from .recipe import TARGETS

    known = families()
    targets = _known("target", options.target, list(TARGETS))
    kernels = _known("kernel", options.kernel, [kernel for family in known for kernel in family.kernels])
    names = activations() if options.activation == ["all"] else options.activation
    wanted = [
        (family, kernel, activation, dtype)
        for activation in (resolve(name, function="--activation") for name in names)
        for dtype in options.dtype
        for family in known
        for kernel in family.kernels_of(activation, getattr(torch, dtype))
        if kernel in kernels
    ]
    if not wanted:
        raise ValueError(f"no kernel of {kernels} exists for {list(names)} in {options.dtype}")
    return ((*case, target) for case in wanted for target in targets)


def _known(what: str, asked: list[str] | None, known: list[str]) -> list[str]:
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise ValueError(f"no {what} is called {unknown[0]!r}; there are {known}")
    return known if asked is None else asked


def _header() -> str:
    numbers = [*_RESOURCES.values(), "|", *_COLUMNS.values(), "|"]
    return _aligned("kernel", "target", numbers, "global loads", "global stores")


def _line(row: dict[str, Any]) -> str:
    label = f"{row['kernel']} {row['activation']} {row['dtype']}"
    numbers = [*(row[key] for key in _RESOURCES), "|", *(row["kinds"][key] for key in _COLUMNS), "|"]
    return _aligned(label, row["target"], numbers, _widths(row["global_loads"]), _widths(row["global_stores"]))


def _aligned(label: str, target: str, numbers: list[Any], loads: str, stores: str) -> str:
    cells = [f" {cell}" if cell == "|" else f"{cell:>8}" for cell in numbers]
    return f"{label:<43} {target:<6}{''.join(cells)} {loads:<14} {stores}".rstrip()


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{size}" for size, count in counts.items()) or "-"
