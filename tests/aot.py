"""What the compiler makes of the elementwise kernels, for GPUs that need not be there.

    python tests/aot.py sm_90 gelu tanh/float32 snake/bfloat16/row

prints a JSON list with an object per kernel. Registers, spills and the width of memory accesses are read from what the
compiler made: with cuobjdump from Triton's wheel for NVIDIA, from the assembly for AMD.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlayers.activations import Activation, activations, resolve, told
from fusedlayers.backends.triton import elementwise
from fusedlayers.backends.triton.codegen import Role, device_function
from fusedlayers.backends.triton.elementwise import Matrix
from fusedlayers.routes import specialised

sys.path.append(str(Path(__file__).parents[1]))
from literature import PUBLISHED

from examples.custom_activation import ACTIVATIONS as MODULES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: A tensor for each direction that a bias can have: large, its sizes divisible by 16.
MATRICES = {
    "none": Matrix(1, 1 << 24, 1, "none"),
    "column": Matrix(8192, 3072, 3072, "column"),
    "row": Matrix(64 * 256, 56 * 56, 256, "row"),
}
#: What users bring, for tensors of these shapes: with a parameter for each channel, with one to ten for all, and with
#: none, where the derivative is fitted to the output.
SHAPES = {"none": ((4096,), ()), "column": ((64, 96), (96,)), "row": ((4, 96, 14, 14), (96, 1, 1))}
BY_CHANNEL = ("snake", "prelu")
FITTED = ("isru", "tanhexp", "log_cosh_stable")
CUSTOM = (*BY_CHANNEL, "swish_beta", "acon_c", "pau_5_4", "fractional", "fractional-splitting", *FITTED)
#: The kernels by what they compute: from which tensor, and how many tensors of full size they read.
KERNELS = {
    "forward": ("output", 1),
    "derivative_given_output": ("output", 2),
    "derivative_given_input": ("input", 2),
    "inverse": ("output", 1),
    "gate": ("input", 2),
    "gate_gradient": ("input", 3),
}
_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Report:
    """One compiled kernel.

    Attributes:
        spill_bytes: per thread, in local (NVIDIA) or private (AMD) memory; the stack counts.
        scalar_spills: AMD's scalar registers that moved to lanes of vector registers, which costs no memory.
        wide_loads, wide_stores: accesses to global memory of 16 bytes a thread; narrow: of fewer.
        least_wide_loads: how many it takes to read the tensors once.
        custom: whether the activation is none of the table's.
        operands: how many other tensors the activation reads, whose loads are narrow.
    """

    target: str
    activation: str
    kernel: str
    dtype: str
    bias: str
    index: str
    registers: int
    spill_bytes: int
    scalar_spills: int
    instructions: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    least_wide_loads: int
    least_wide_stores: int
    custom: bool
    operands: int


def find(name: str, bias: str) -> Activation:
    """The activation of that name, for a tensor whose channels run as ``bias`` says."""
    if name not in CUSTOM:
        return resolve(name)
    shape, channels = SHAPES[bias]
    published = next((p for p in PUBLISHED if p.name == name), None)
    function: Any = MODULES[name](96) if published is None else published.with_tensors(*channels * (name in BY_CHANNEL))
    found = specialised(resolve(function), shape, torch.float32).activation
    assert found.is_fusible, found.unfused_because
    return replace(found, name=name.replace("-", "_"))


def compile_kernel(
    target: str, activation: Activation, kernel: str, dtype: torch.dtype, bias: str = "column", index: Any = tl.int32
) -> Report:
    given, operands = KERNELS[kernel]
    is_gate = kernel.startswith("gate")
    if kernel == "inverse" or (is_gate and not activation.operand_dims):
        bias = "none"  # all that its input had is in the output; a gate has none
    elif activation.output_refused_because(dtype) is not None:
        given = "input"
    matrix = MATRICES[bias]
    rows, columns = elementwise._tile(matrix)
    role: Role = "inverse" if kernel == "inverse" else "forward" if kernel in ("forward", "gate") else "gradient"
    function = elementwise.gradient_kernel if role == "gradient" else elementwise.bias_act_kernel
    constants = {"AXIS": bias, "ROWS": rows, "COLUMNS": columns, "INDEX": index, "HAS_UP": is_gate}
    needs = (True,) * len(activation.operand_dims)
    if role != "gradient":
        constants["HAS_BIAS"] = constants["HAS_RESIDUAL"] = bias != "none" and not is_gate
    else:
        sums = [(0, True)] if bias != "none" and not is_gate else []
        constants["FORWARD"] = device_function(activation, "forward", given="input", dtype=dtype) if is_gate else None
        constants["SUMS"] = (*sums, *((1 + i, dim is not None) for i, dim in enumerate(activation.operand_dims)))
    constants["GRADIENT" if role == "gradient" else "FORWARD"] = device_function(
        activation, role, given=given, dtype=dtype, needs=needs
    )
    # As Triton specialises at launch: an argument of 1 is a constant, the other sizes here are divisible by 16.
    ones = ("rows", "channels", "steps") if bias == "none" else ()
    constants |= {name: 1 for name in ones if name in function.arg_names}

    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = "*fp32" if name in ("operand_ptr", "partial_ptr") else _POINTERS[dtype]
        signature[name] = pointer if name.endswith("_ptr") else "i32"
        if name != "steps":
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=elementwise.options(TARGETS[target].warp_size))

    asm = compiled.asm
    read = _read_amd(asm["amdgcn"]) if "amdgcn" in asm else _read_nvidia(asm["cubin"], asm["ptx"])
    wide = rows * columns * dtype.itemsize // (16 * elementwise.THREADS)
    return Report(
        target,
        repr(activation),
        kernel,
        str(dtype).removeprefix("torch."),
        bias,
        str(index),
        **read,
        least_wide_loads=operands * wide,
        least_wide_stores=wide * (2 if kernel == "gate_gradient" else 1),
        custom=activation.is_traced,
        operands=len(activation.operand_dims),
    )


def _read_nvidia(cubin: bytes, ptx: str) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", "--dump-elf", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    amounts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    (text_bytes,) = re.findall(r"^ +\w+ +\w+ +(\w+) .*PROGBITS.* \.text\.\w+$", dump, re.MULTILINE)
    # From PTX, which states the widths as the assembler takes them; disassembling takes longer than compiling.
    accesses = re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|b\d)\w+)*(?:\.v(\d))?\.b(\d+)", ptx)
    return {
        "registers": amounts["REG"],
        "spill_bytes": amounts["STACK"] + amounts["LOCAL"],
        "scalar_spills": 0,
        "instructions": int(text_bytes, 16) // 16,
        **_widths((kind == "ld", int(vector or 1) * int(bits) // 8) for kind, vector, bits in accesses),
    }


_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _read_amd(assembly: str) -> dict[str, int]:
    def amount(name: str) -> int:
        (value,) = re.findall(rf"^\s+{re.escape(name)}:\s+(\d+)$", assembly, re.MULTILINE)
        return int(value)

    accesses = re.findall(r"^\t(?:global|buffer|flat)_(load|store)_(?:dwordx(\d)|\w+)", assembly, re.MULTILINE)
    return {
        "registers": amount(".vgpr_count"),
        "spill_bytes": amount(".private_segment_fixed_size") + 4 * amount(".vgpr_spill_count"),
        "scalar_spills": amount(".sgpr_spill_count"),
        "instructions": len(re.findall(r"^\t[a-z]\w*_\w+", assembly, re.MULTILINE)),
        **_widths((kind == "load", 4 * int(words or 1)) for kind, words in accesses),
    }


def _widths(accesses: Iterable[tuple[bool, int]]) -> dict[str, int]:
    """From ``(is a load, bytes)``."""
    counts = dict.fromkeys(("wide_loads", "narrow_loads", "wide_stores", "narrow_stores"), 0)
    for is_load, size_bytes in accesses:
        counts[f"{'wide' if size_bytes >= 16 else 'narrow'}_{'loads' if is_load else 'stores'}"] += 1
    return counts


def kernels_of(activation: Activation, dtype: torch.dtype, bias: str) -> tuple[str, ...]:
    """The kernels that an activation can have; the identity gets none, because nothing is saved for it."""
    if activation.is_identity:
        return ()
    refused = ["derivative_given_output"] if activation.output_refused_because(dtype) is not None else []
    refused += ["inverse"] if told(activation, dtype) is None else []
    refused += ["gate", "gate_gradient"] if bias != "none" else []
    return tuple(kernel for kernel in KERNELS if kernel not in refused)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the elementwise kernels ahead of time.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("case", nargs="*", help="activation/dtype/bias/index (default: */bfloat16/column/int32)")
    options = parser.parse_args()
    reports = []
    for case in options.case or activations():
        name, dtype, bias, index, *_ = [*case.split("/"), *("bfloat16", "column", "int32")[case.count("/") :]]
        activation = find(name, bias)
        for kernel in kernels_of(activation, getattr(torch, dtype), bias):
            reports.append(
                compile_kernel(options.target, activation, kernel, getattr(torch, dtype), bias, getattr(tl, index))
            )
    print(json.dumps([asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    main()
