"""What a compiler made of a kernel: registers, memory, and accesses to memory.

NVIDIA's is read with a tool of Triton's wheel and from PTX, AMD's from its assembly. A kernel compiled by Triton comes
with all of these (``compiled.asm``, ``compiled.metadata``).
"""

import re
import subprocess
import tempfile
from collections import Counter
from typing import Any


def resources(compiled: Any) -> dict[str, int]:
    """What a kernel occupies: ``registers`` per thread (AMD's vector registers); ``spill_bytes`` per thread, in local
    (NVIDIA) or private (AMD) memory, with the stack; ``scalar_spills``, AMD's scalar registers that moved to lanes of
    vector registers, which costs no memory."""
    if "amdgcn" in compiled.asm:
        amounts = {
            name: int(n) for name, n in re.findall(r"^\s+\.(\w+):\s+(\d+)$", compiled.asm["amdgcn"], re.MULTILINE)
        }
        spills = amounts["private_segment_fixed_size"] + 4 * amounts["vgpr_spill_count"]
        return {"registers": amounts["vgpr_count"], "spill_bytes": spills, "scalar_spills": amounts["sgpr_spill_count"]}
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    amounts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dump)}
    return {"registers": amounts["REG"], "spill_bytes": amounts["STACK"] + amounts["LOCAL"], "scalar_spills": 0}


def accesses(ptx: str) -> tuple[Counter[int], Counter[int]]:
    """Loads from global memory and stores to it in PTX: bytes a thread -> how many such instructions. Asynchronous and
    bulk copies are left out."""
    found = re.findall(r"\b(ld|st)\.global(?:\.(?!v\d|b\d)\w+)*(?:\.v(\d))?\.b(\d+)", ptx)
    sizes = [(kind, int(vector or 1) * int(bits) // 8) for kind, vector, bits in found]
    loads, stores = (Counter(size for kind, size in sizes if kind == wanted) for wanted in ("ld", "st"))
    return loads, stores
