"""What a compiler made of a kernel: registers, memory, and its instructions.

NVIDIA's is read with the tools of Triton's wheel, AMD's from its assembly, which says all of it. A kernel compiled by
Triton comes with both (``compiled.asm``, ``compiled.metadata``).
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resources:
    """What a kernel occupies.

    Attributes:
        registers: per thread; AMD's are the vector registers.
        spill_bytes: per thread, in local (NVIDIA) or private (AMD) memory; the stack counts.
        scalar_spills: AMD's scalar registers that moved to lanes of vector registers, which costs no memory.
        shared_bytes: of the memory that the threads of a program share.
    """

    registers: int
    spill_bytes: int
    scalar_spills: int
    shared_bytes: int


@dataclass(frozen=True)
class Accesses:
    """Loads from global memory and stores to it: bytes a thread -> how many such instructions."""

    loads: dict[int, int]
    stores: dict[int, int]


def resources(compiled: Any) -> Resources:
    """What the kernel occupies."""
    if "amdgcn" in compiled.asm:
        return _amd_resources(compiled.asm["amdgcn"], compiled.metadata.shared)
    dump = _tool("cuobjdump", compiled.asm["cubin"], "--dump-resource-usage")
    amounts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return Resources(amounts["REG"], amounts["STACK"] + amounts["LOCAL"], 0, compiled.metadata.shared)


def accesses(compiled: Any) -> Accesses:
    """Accesses to global memory as the assembler is given them, without disassembling: that takes longer (0.2 s a
    kernel) than compiling. Asynchronous and bulk copies are left out."""
    if "amdgcn" in compiled.asm:
        return amd_accesses(compiled.asm["amdgcn"])
    found = re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|b\d)\w+)*(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    return _counted((kind == "ld", int(vector or 1) * int(bits) // 8) for kind, vector, bits in found)


def instructions(compiled: Any) -> int:
    """How many there are in the text of a kernel for NVIDIA, loops counted once: it is disassembled."""
    return nvidia_instructions(_tool("nvdisasm", compiled.asm["cubin"], "--print-code", "--no-dataflow"))


def nvidia_instructions(sass: str) -> int:
    """From what ``nvdisasm`` prints: ``/*0010*/  @!P0 LDG.E.128 R4, ...``. NOPs fill up the last 128 bytes."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    return sum(name != "NOP" for name in found)


def amd_accesses(assembly: str) -> Accesses:
    r"""From AMD's assembly: ``\tglobal_load_dwordx4 v[0:3], ...``."""
    found = re.findall(r"^\t((?:global|buffer|flat)_(?:load|store)_\w+)", assembly, re.MULTILINE)
    return _counted(("_load_" in name, _amd_width(name)) for name in found)


def _counted(found: Iterable[tuple[bool, int]]) -> Accesses:
    """From ``(is a load, bytes)``, the widest first."""
    counts = sorted(Counter(found).items(), reverse=True)
    loads, stores = ({size: count for (load, size), count in counts if load == wanted} for wanted in (True, False))
    return Accesses(loads, stores)


def _amd_width(operation: str) -> int:
    for pattern, unit_bits in ((r"dword(?:x(\d+))?", 32), (r"_b(\d+)", 1), (r"()short", 16), (r"()byte", 8)):
        if found := re.search(pattern, operation):
            return int(found[1] or 1) * unit_bits // 8
    return 4


def _amd_resources(assembly: str, shared_bytes: int) -> Resources:
    def amount(name: str) -> int:
        (value,) = re.findall(rf"^\s+{re.escape(name)}:\s+(\d+)$", assembly, re.MULTILINE)
        return int(value)

    spills = amount(".private_segment_fixed_size") + 4 * amount(".vgpr_spill_count")
    return Resources(amount(".vgpr_count"), spills, amount(".sgpr_spill_count"), shared_bytes)


def _tool(name: str, cubin: bytes, *arguments: str) -> str:
    """What a tool of Triton's wheel prints about a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, name).path, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
