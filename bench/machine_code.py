"""What a compiler made of a kernel: registers, memory, and its instructions by kind.

NVIDIA's is read with the tools of Triton's wheel, AMD's from its assembly, which says all of it. A kernel compiled by
Triton comes with both (``compiled.asm``, ``compiled.metadata``).
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Kinds of instructions: which operations those are, of NVIDIA's machine code without modifiers and of AMD's. The first
#: that matches counts, and what matches none is "other": moves, conversions, selections, branches, waits. Global loads
#: include those that go on to shared memory; bulk copies are the tensor memory accelerator's, of a tile each; local
#: memory is where spills go. HFMA2.MMA has nothing to do with tensor cores, and mostly moves a constant.
KINDS: Mapping[str, tuple[str, str]] = {
    "tensor": (r"(UTC)?[A-Z]G?MMA", r"v_(s?mfmac?|wmma|swmmac)_.*"),
    "fp32": (r"F(FMA|MUL|ADD)(2|32I)?", r"v_(pk_)?(fma\w*|mul|add|sub(rev)?|ma[cd]\w*)_(legacy_)?f32(_.*)?"),
    "special": (r"MUFU", r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(legacy_)?f\d+(_.*)?"),
    "integer": (
        r"U?(I(ADD|MAD|MUL|ABS|MNMX|SETP|DP)\w*|LEA|P?LOP\w*|SH[FLR]|PRMT|SGXT|BMSK|FLO|POPC|BREV)|VI\w+",
        r"[vs]_(?!c?movk?_|cndmask|cselect|cvt|readfirstlane|readlane|writelane|accvgpr|swap)\w*_[iub]\d+(_.*)?",
    ),
    "global_loads": (r"LDG?|LDGSTS", r"(global|buffer|flat)_load_.*"),
    "global_stores": (r"STG?", r"(global|buffer|flat)_store_.*"),
    "bulk_copies": (r"UTMA(LD|ST|RED)G|UBLKCP", r"tensor_(load|store)_.*"),
    "shared_loads": (r"LDSM?", r"ds_(read|load)\w*"),
    "shared_stores": (r"STSM?", r"ds_(write|store)\w*"),
    "local": (r"LDL|STL", r"scratch_(load|store)_.*"),
}
OTHER = "other"


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


@dataclass(frozen=True)
class Instructions:
    """How many there are in the text of a kernel, loops counted once: all, those of each kind, and accesses."""

    count: int
    kinds: dict[str, int]
    accesses: Accesses


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
        return amd_instructions(compiled.asm["amdgcn"]).accesses
    found = re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|b\d)\w+)*(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    return _counted((kind == "ld", int(vector or 1) * int(bits) // 8) for kind, vector, bits in found)


def instructions(compiled: Any) -> Instructions:
    """The kernel's instructions; NVIDIA's are disassembled."""
    if "amdgcn" in compiled.asm:
        return amd_instructions(compiled.asm["amdgcn"])
    return nvidia_instructions(_tool("nvdisasm", compiled.asm["cubin"], "--print-code", "--no-dataflow"))


def nvidia_instructions(sass: str) -> Instructions:
    """From what ``nvdisasm`` prints: ``/*0010*/  @!P0 LDG.E.128 R4, ...``. NOPs fill up the last 128 bytes."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    operations = [name.split(".") for name in found if name != "NOP"]
    kinds = [_kind(operation, of_amd=False) for operation, *_ in operations]
    widths = [_nvidia_width(modifiers) for _, *modifiers in operations]
    return _sorted_out(kinds, widths)


def amd_instructions(assembly: str) -> Instructions:
    r"""From AMD's assembly: ``\tglobal_load_dwordx4 v[0:3], ...``."""
    operations = re.findall(r"^\t([a-z]\w*_\w+)", assembly, re.MULTILINE)
    return _sorted_out([_kind(name, of_amd=True) for name in operations], [_amd_width(name) for name in operations])


def _sorted_out(kinds: list[str], widths: list[int]) -> Instructions:
    counts = Counter(kinds)
    found = _counted((k == "global_loads", w) for k, w in zip(kinds, widths, strict=True) if k.startswith("global"))
    return Instructions(len(kinds), {kind: counts[kind] for kind in (*KINDS, OTHER)}, found)


def _kind(operation: str, of_amd: bool) -> str:
    return next((kind for kind, patterns in KINDS.items() if re.fullmatch(patterns[of_amd], operation)), OTHER)


def _counted(found: Iterable[tuple[bool, int]]) -> Accesses:
    """From ``(is a load, bytes)``, the widest first."""
    counts = sorted(Counter(found).items(), reverse=True)
    loads, stores = ({size: count for (load, size), count in counts if load == wanted} for wanted in (True, False))
    return Accesses(loads, stores)


_NVIDIA_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "96": 12, "128": 16, "256": 32}


def _nvidia_width(modifiers: list[str]) -> int:
    """Of ``E.BYPASS.LTC128B.64``, 8: the number that stands alone, or else a register's."""
    return next((_NVIDIA_WIDTHS[word] for word in modifiers if word in _NVIDIA_WIDTHS), 4)


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
