"""What Triton is given to compile a kernel ahead of time, for a GPU that need not be there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    # Like one of those: Turing (without bfloat16's instructions), Ampere and Blackwell for consumers, Blackwell Ultra,
    # and AMD's CDNA 2 and 4 and RDNA 3.
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
#: As a signature names pointers.
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Recipe:
    """A kernel as a launch would specialise it.

    Attributes:
        function: what ``triton.jit`` made; its arguments are each in ``types`` or in ``constants``.
        types: Triton's names of the arguments' types, such as ``"*bf16"`` and ``"i32"``.
        constants: the other arguments' values. An integer that is 1 is a constant at launch, too.
        divisible_by_16: arguments that are, which lets accesses be wide.
        options: the compiler's, such as ``num_warps``.
    """

    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible_by_16: Collection[str]
    options: Mapping[str, Any]

    def compile(self, target: str) -> Any:
        """What Triton compiles it to for one of ``TARGETS``."""
        names = self.function.arg_names
        signature = {name: "constexpr" if name in self.constants else self.types[name] for name in names}
        attributes = {
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(names)
            if name in self.divisible_by_16 and name not in self.constants
        }
        source = ASTSource(self.function, signature=signature, constexprs=dict(self.constants), attrs=attributes)
        return triton.compile(source, target=TARGETS[target], options=dict(self.options))
