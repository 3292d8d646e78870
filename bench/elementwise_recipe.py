"""Recipes of the elementwise kernels: as they are launched for large tensors whose sizes are divisible by 16."""

from typing import Any

import torch
import triton.language as tl

from fusedlayers.activations import Activation
from fusedlayers.kernels.triton import elementwise, gates, tiles
from fusedlayers.kernels.triton.codegen import Role, device_function
from fusedlayers.kernels.triton.tiles import Matrix

from .recipe import POINTERS, TARGETS, Recipe

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
    "inverse": ("output", 1),
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
    refused += ["inverse"] if not activation.has_inverse else []
    return tuple(kernel for kernel in KERNELS if kernel not in refused)


def recipe(
    kernel: str, activation: Activation, dtype: torch.dtype, target: str, bias: str = "column", index: Any = tl.int32
) -> Recipe:
    """The kernel with a bias (or without one: "none") that runs along the columns or the rows, where it takes one, and
    with offsets of that type."""
    given, _ = KERNELS[kernel]
    if kernel.startswith("gate"):
        return _gate_recipe(kernel, activation, dtype, target, index)
    if kernel == "inverse":
        bias = "none"  # all that its input had is in the output
    elif activation.output_refusal(dtype) is not None:
        given = "input"
    role: Role = "inverse" if kernel == "inverse" else "forward" if kernel == "forward" else "gradient"
    function = elementwise.gradient_kernel if role == "gradient" else elementwise.bias_act_kernel
    has_sums = role == "gradient" and (bool(activation.operand_dims) or bias != "none")
    rows, columns = tiles.tile_of(MATRICES[bias], sums=has_sums)
    constants = {"AXIS": bias, "FOLDED": False, "ROWS": rows, "COLUMNS": columns, "INDEX": index}
    needs = (True,) * len(activation.operand_dims)
    if role != "gradient":
        constants["HAS_BIAS"] = constants["HAS_RESIDUAL"] = bias != "none"
    else:
        sums = [(0, True)] if bias != "none" else []
        constants["SUMS"] = (*sums, *((1 + i, dim is not None) for i, dim in enumerate(activation.operand_dims)))
    constants["GRADIENT" if role == "gradient" else "FORWARD"] = device_function(
        activation, role, given=given, dtype=dtype, needs=needs
    )
    # As Triton specialises at launch: an argument of 1 is a constant.
    ones = ("channels",) if bias == "none" else ()
    constants |= {name: 1 for name in ones if name in function.arg_names}
    arguments = [name for name in function.arg_names if name not in constants]
    types = {name: POINTERS[dtype] if name.endswith("_ptr") else "i32" for name in arguments}
    types |= {name: "*fp32" for name in ("operand_ptr", "partial_ptr") if name in arguments}
    options = tiles.options(TARGETS[target].warp_size)
    return Recipe(function, types, constants, [name for name in arguments if name not in ("rows", "steps")], options)


def _gate_recipe(kernel: str, activation: Activation, dtype: torch.dtype, target: str, index: Any) -> Recipe:
    """Of rows that may have gaps."""
    rows, columns = tiles.tile_of(MATRICES["column"])
    constants = {"ROWS": rows, "COLUMNS": columns, "INDEX": index}
    constants["FORWARD"] = device_function(activation, "forward", given="input", dtype=dtype)
    function = gates.gate_kernel
    if kernel == "gate_gradient":
        function = gates.gate_gradient_kernel
        constants["GRADIENT"] = device_function(activation, "gradient", given="input", dtype=dtype)
    pointers = [name for name in function.arg_names if name.endswith("_ptr")]
    constants["STEPS"] = (1,) * len(pointers)
    arguments = [name for name in function.arg_names if name not in constants]
    types = {name: POINTERS[dtype] if name in pointers else "i32" for name in arguments}
    options = tiles.options(TARGETS[target].warp_size)
    return Recipe(function, types, constants, [name for name in arguments if name != "rows"], options)
