"""What Triton is given to compile the elementwise kernels ahead of time, for GPUs that need not be there: as they are
launched for large tensors whose sizes are divisible by 16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedlayers.activations import Activation
from fusedlayers.kernels.triton import elementwise, gates, tiles
from fusedlayers.kernels.triton.codegen import Role, device_function
from fusedlayers.kernels.triton.tiles import Matrix

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
#: A tensor for each direction that a bias can have.
MATRICES = {
    "none": Matrix(1, 1 << 24, 1, "none"),
    "column": Matrix(8192, 3072, 3072, "column"),
    "row": Matrix(64 * 256, 56 * 56, 256, "row"),
}
#: The kernels by what they compute: from which tensor, and how many tensors of full size they read.
KERNELS = {
    "forward": ("output", 1),
    "derivative_given_output": ("output", 2),
    "derivative_given_input": ("input", 2),
    "gate": ("input", 2),
    "gate_gradient": ("input", 3),
}


def kernels_of(activation: Activation, dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels that an activation can have; the identity gets none, because nothing is saved for it. Gates of
    activations that read tensors have none of their own."""
    if activation.is_identity:
        return ()
    refused = ["derivative_given_output"] if activation.output_refusal(dtype) is not None else []
    refused += ["gate", "gate_gradient"] if activation.operand_dims else []
    return tuple(kernel for kernel in KERNELS if kernel not in refused)


@dataclass(frozen=True)
class Recipe:
    """A kernel as a launch would specialise it, for tensors of a dtype. An integer that is 1 is a constant, too."""

    function: Any
    constants: Mapping[str, Any]
    dtype: torch.dtype

    def compile(self, target: str) -> Any:
        """What Triton compiles it to for one of ``TARGETS``."""
        names = self.function.arg_names
        divisible = [i for i, name in enumerate(names) if name not in (*self.constants, "rows", "steps")]
        source = ASTSource(
            self.function,
            signature={name: self._type(name) for name in names},
            constexprs=dict(self.constants),
            attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
        )
        return triton.compile(source, target=TARGETS[target], options=tiles.options(TARGETS[target].warp_size))

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in ("operand_ptr", "partial_ptr"):
            return "*fp32"
        return POINTERS[self.dtype] if name.endswith("_ptr") else "i32"


def recipe(
    kernel: str, activation: Activation, dtype: torch.dtype, bias: str = "column", index: Any = tl.int32
) -> Recipe:
    """The kernel with a bias (or without one: "none") that runs along the columns or the rows, where it takes one, and
    with offsets of that type."""
    given, _ = KERNELS[kernel]
    if kernel.startswith("gate"):
        return _gate_recipe(kernel, activation, dtype, index)
    if activation.output_refusal(dtype) is not None:
        given = "input"
    role: Role = "forward" if kernel == "forward" else "gradient"
    needs = (True,) * len(activation.operand_dims)
    printed = device_function(activation, role, given=given, dtype=dtype, needs=needs)
    has_bias = bias != "none"
    rows, columns = tiles.tile_of(MATRICES[bias], sums=role == "gradient" and (bool(needs) or has_bias))
    constants = {"AXIS": bias, "FOLDED": False, "ROWS": rows, "COLUMNS": columns, "INDEX": index}
    constants |= {} if has_bias else {"channels": 1}
    if role == "forward":
        constants |= {"FORWARD": printed, "HAS_BIAS": has_bias, "HAS_RESIDUAL": has_bias}
        return Recipe(elementwise.bias_act_kernel, constants, dtype)
    sums = [(0, True)] * has_bias + [(1 + i, dim is not None) for i, dim in enumerate(activation.operand_dims)]
    return Recipe(elementwise.gradient_kernel, {**constants, "GRADIENT": printed, "SUMS": tuple(sums)}, dtype)


def _gate_recipe(kernel: str, activation: Activation, dtype: torch.dtype, index: Any) -> Recipe:
    """The same of gates."""
    constants = {"COLUMNS": tiles.TILE, "INDEX": index}
    constants["FORWARD"] = device_function(activation, "forward", given="input", dtype=dtype)
    function = gates.gate_kernel
    if kernel == "gate_gradient":
        function = gates.gate_gradient_kernel
        constants["GRADIENT"] = device_function(activation, "gradient", given="input", dtype=dtype)
    return Recipe(function, constants, dtype)
