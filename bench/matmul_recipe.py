"""Recipes of the matmuls with epilogues: as they are launched for matrices whose sizes are divisible by 16.

Each GPU has one or two tilings for a dtype; a kernel of the second has a name that ends in ``_2``.
"""

from typing import Any, NamedTuple

import torch

from fusedlayers.activations import Activation
from fusedlayers.backends.triton import gemm
from fusedlayers.backends.triton.codegen import device_function

from .recipe import POINTERS, Family, Recipe


class Kernel(NamedTuple):
    """An epilogue, by what it reads and writes."""

    given: str
    is_gradient: bool = True
    is_gated: bool = False
    hidden: bool = False


KERNELS = {
    "dense": Kernel("output", is_gradient=False),
    "mlp_gradient_given_output": Kernel("output"),
    "mlp_gradient_given_input": Kernel("input", hidden=True),
    "gated_mlp_gradient": Kernel("input", is_gated=True, hidden=True),
}
_SECOND = "_2"
#: As ``gemm.TILINGS`` names GPUs.
_ARCHITECTURES = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), "8"),
    "sm_90": "9",
    **dict.fromkeys(("sm_100", "sm_103"), "10"),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), "cdna"),
}


def kernels_of(activation: Activation, dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels that an activation can have, with each tiling."""
    if activation.is_identity:
        return ()
    refused = ["mlp_gradient_given_output"] if activation.output_refusal(dtype) is not None else []
    names = [name for name in KERNELS if name not in refused]
    return (*names, *(name + _SECOND for name in names if dtype.itemsize == 2))


def recipe(kernel: str, activation: Activation, dtype: torch.dtype, target: str) -> Recipe:
    given, is_gradient, is_gated, hidden = KERNELS[kernel.removesuffix(_SECOND)]
    tiling = gemm.TILINGS[_ARCHITECTURES[target]][dtype.itemsize][kernel.endswith(_SECOND)]
    if activation.output_refusal(dtype) is not None:
        given = "input"
    several = is_gated or hidden
    constants = tiling.constants(tiling.described, dtype, several=several)
    m, n, k, width = tiling.block_m, tiling.block_n, tiling.block_k, tiling.block_n >> constants["CUTS"]
    if is_gradient:
        function = gemm.linear_gradient_kernel
        blocks = {
            "dy": (m, k),
            "w": (n, k) if tiling.transposes else (k, n),
            **dict.fromkeys(("saved", "up", "hidden"), (m, width)),
        }
        constants |= {
            "HAS_UP": is_gated,
            "HAS_HIDDEN": hidden,
            "SUMS": () if is_gated else (0,),
            "TRANSPOSED": tiling.transposes,
            "PREFETCH": target.startswith("sm_") and tiling.prefetches(gated=is_gated),
        }
        constants["GRADIENT"] = device_function(activation, "gradient", given=given, dtype=dtype)
        constants["FORWARD"] = device_function(activation, "forward", given="input", dtype=dtype) if several else None
    else:
        function = gemm.linear_act_kernel
        blocks = {"x": (m, k), "w": (n, k), "y": (m, width)}
        constants |= {"HAS_BIAS": True, "FORWARD": device_function(activation, "forward", given=given, dtype=dtype)}
    pointer = POINTERS[dtype]
    types = dict.fromkeys(("rows", "columns", "inner"), "i32")
    types |= {name: "*fp32" if name in ("operand_ptr", "partial_ptr") else pointer for name in _pointers(function)}
    if tiling.described:
        types |= {name: f"tensordesc<{pointer[1:]}[{rows}, {columns}]>" for name, (rows, columns) in blocks.items()}
    else:
        types |= dict.fromkeys(blocks, pointer)
    aligned = [name for name, type_ in types.items() if name != "rows" and not type_.startswith("tensordesc")]
    return Recipe(function, types, constants, aligned, tiling.options)


def _pointers(function: Any) -> list[str]:
    return [name for name in function.arg_names if name.endswith("_ptr")]


FAMILY = Family([*KERNELS, *(name + _SECOND for name in KERNELS)], kernels_of, recipe)
