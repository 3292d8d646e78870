"""What the compiler makes of the elementwise kernels, and what it should at least, for ``test_aot.py``.

    python tests/support/aot.py sm_90 gelu tanh/float32 snake/bfloat16/row 'silu/bfloat16/none/int32/gate*'

prints a JSON list with an object per kernel, by default of all that an activation has.

    python tests/support/aot.py --serve

does so for each line of input, a JSON list of such arguments, and answers with a line each: most of what a process with
a case or two does is to start (5 s).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton.language as tl

from fusedlayers.activations import Activation, activations, resolve
from fusedlayers.calls.tracers import with_operands
from fusedlayers.kernels.triton import tiles

sys.path.append(str(Path(__file__).parents[2]))
import machine_code
from literature import PUBLISHED

from bench import elementwise_recipe
from bench.elementwise_recipe import TARGETS
from bench.reference import CUSTOM_ACTIVATIONS

#: What users bring, for tensors of these shapes: with a parameter for each channel, with one to ten for all, and with
#: none, where the derivative is fitted to the output.
SHAPES = {"none": ((4096,), ()), "column": ((64, 96), (96,)), "row": ((4, 96, 14, 14), (96, 1, 1))}
BY_CHANNEL = ("snake", "prelu")
FITTED = ("isru", "tanhexp")
CUSTOM = (*BY_CHANNEL, "swish_beta", "acon_c", "pau_5_4", "fractional", "fractional-splitting", *FITTED)


def find(name: str, bias: str) -> Activation:
    """The activation of that name, for a tensor whose channels run as ``bias`` says."""
    if name not in CUSTOM:
        return resolve(name)
    shape, channels = SHAPES[bias]
    published = next((p for p in PUBLISHED if p.name == name), None)
    function: Any = (
        CUSTOM_ACTIVATIONS[name](96) if published is None else published.with_tensors(*channels * (name in BY_CHANNEL))
    )
    found = with_operands(resolve(function), shape, torch.float32).activation
    assert found.is_fusible, found.fallback_reason
    return replace(found, name=name.replace("-", "_"))


def kernels_of(activation: Activation, dtype: torch.dtype, bias: str) -> list[str]:
    """The kernels that an activation can have, the gates' without a bias."""
    kernels = elementwise_recipe.kernels_of(activation, dtype)
    return [kernel for kernel in kernels if bias == "none" or not kernel.startswith("gate")]


def compile_kernel(
    target: str, activation: Activation, kernel: str, dtype: torch.dtype, bias: str = "column", index: Any = tl.int32
) -> dict[str, Any]:
    """What a kernel occupies, and how many accesses to global memory there are: wide ones of 16 bytes a thread, narrow
    ones of fewer (NVIDIA's alone), and the wide ones that it takes to read and write the tensors once.

    ``custom`` says whether the activation is none of the table's, ``operands`` how many other tensors it reads, whose
    loads are narrow.
    """
    recipe = elementwise_recipe.recipe(kernel, activation, dtype, bias, index)
    compiled = recipe.compile(target)
    _, tensors_read = elementwise_recipe.KERNELS[kernel]
    tile_bytes = recipe.constants.get("ROWS", 1) * recipe.constants["COLUMNS"] * dtype.itemsize
    wide = tile_bytes // (16 * tiles.THREADS)
    return {
        "target": target,
        "activation": repr(activation),
        "kernel": kernel,
        "dtype": str(dtype).removeprefix("torch."),
        "bias": recipe.constants.get("AXIS", "none"),
        "index": str(index),
        **machine_code.resources(compiled),
        **_accesses(compiled),
        "least_wide_loads": tensors_read * wide,
        "least_wide_stores": wide * (2 if kernel == "gate_gradient" else 1),
        "custom": activation.is_traced,
        "operands": len(activation.operand_dims),
    }


def _accesses(compiled: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "ptx" in compiled.asm:
        for what, counts in zip(("loads", "stores"), machine_code.accesses(compiled.asm["ptx"]), strict=True):
            wide = sum(count for size_bytes, count in counts.items() if size_bytes >= 16)
            found |= {f"global_{what}": counts, f"wide_{what}": wide, f"narrow_{what}": sum(counts.values()) - wide}
    return found


def reports_of(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """An object per kernel."""
    parser = argparse.ArgumentParser(description="Compile the elementwise kernels ahead of time.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("case", nargs="*", help="name/dtype/bias/index/kernels (default: */bfloat16/column/int32/*)")
    options = parser.parse_args(arguments)
    reports = []
    for case in options.case or activations():
        name, dtype, bias, index, kernels = [
            *case.split("/"), *("bfloat16", "column", "int32", "*")[case.count("/") :]
        ]  # fmt: skip
        activation = find(name, bias)
        for kernel in fnmatch.filter(kernels_of(activation, getattr(torch, dtype), bias), kernels):
            reports.append(
                compile_kernel(options.target, activation, kernel, getattr(torch, dtype), bias, getattr(tl, index))
            )
    return reports


def serve() -> None:
    """Answers each line of input with ``{"reports": ...}`` or ``{"error": ...}``."""
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # answers alone go there
                answer: dict[str, Any] = {"reports": reports_of(json.loads(line))}
        except (Exception, SystemExit):
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        print(json.dumps(reports_of(sys.argv[1:]), indent=1))


if __name__ == "__main__":
    main()
