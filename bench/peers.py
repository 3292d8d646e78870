"""``python -m bench peers``: the same two blocks by others who save memory, and by this library.

On CPUs in float32; on GPUs in bfloat16, on 32 times as many rows. A variant whose package is not installed, or does
not run on this device, is a row that says so. Liger and optiacts are no dependencies: install those that you want to
see.
"""

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl

from . import measure, zoo
from .grid import Benchmark
from .measure import Setting, Variant
from .zoo import MLP, GatedMLP

DEFINITIONS = {
    "block": "what stands alone here, in training; parameters are shared by all variants",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included, over what lived before",
    "gradient_error": "of the block's input: norm of the difference from a float64 block's, over that one's norm",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
#: How many times the rows of a CPU's block.
ROWS = {"cpu": 1, "cuda": 32}
HALF = 0.5  # of the compiler's budget: its own saved bytes are 1
#: No test of accuracy: what errs by more does not compute the same.
SAME = 0.05

Forward = Callable[[Tensor], Tensor]
#: From a copy of the block, which shares its parameters.
Build = Callable[[Any], Forward]


@dataclass(frozen=True)
class Block:
    """``peers``: the variants that this block has beside those that all have."""

    id: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    peers: Mapping[str, Build]


def _fused_mlp(module: MLP, **options: Any) -> Forward:
    return fl.FusedMLP.from_modules(module.up, module.act, module.down, **options)


def _fused_gated_mlp(module: GatedMLP, **options: Any) -> Forward:
    layers = (module.gate_proj, module.act, module.up_proj, module.down_proj)
    return fl.FusedGatedMLP.from_modules(*layers, **options)


def _optiacts(module: nn.Module) -> Forward:
    name = "GELU" if isinstance(module, MLP) else "SiLU"
    module.act = getattr(importlib.import_module("optiacts"), name)()
    return module


def _liger(module: GatedMLP) -> Forward:
    act = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return lambda x: module.down_proj(act.apply(module.gate_proj(x), module.up_proj(x)))


#: What every block is measured with; each has its own beside these.
VARIANTS: dict[str, Build] = {
    "eager": lambda module: module,
    "compile": measure.compiled,
    "compile, budget": partial(measure.compiled, part=HALF),
    "checkpoint": lambda module: partial(checkpoint, module, use_reentrant=False),
}
_OF_MLP: dict[str, Build] = {
    "optiacts": _optiacts,
    "FusedMLP": _fused_mlp,
    "recompute": partial(_fused_mlp, save="recompute"),
}
_OF_GATED: dict[str, Build] = {
    "optiacts": _optiacts,
    "Liger": _liger,
    "FusedMLP": _fused_gated_mlp,
    "recompute": partial(_fused_gated_mlp, save="recompute"),
}
BLOCKS = (
    Block("MLP, GELU", partial(MLP, 768, 3072), (1024, 768), _OF_MLP),
    Block("gated MLP, SiLU", partial(GatedMLP, 1024, 2816), (1024, 1024), _OF_GATED),
)


def measure_block(block: Block, setting: Setting) -> dict[str, Any]:
    """The JSON row of a block."""
    kind = setting.device.type
    dtype = DTYPES[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = block.build().to(setting.device, dtype).train()
        shape = (2 if setting.quick else ROWS[kind] * block.shape[0], *block.shape[1:])
        x, dy = (torch.randn(shape, device=setting.device, dtype=dtype) for _ in range(2))
        x.requires_grad_()
    exact = _gradient(copy.deepcopy(module).double(), x.double(), dy.double())
    errors: dict[str, float] = {}

    def make(name: str, build: Build) -> Variant:
        own = zoo.twin(module)
        forward = build(own)
        errors[name] = float((_gradient(forward, x, dy).double() - exact).norm() / exact.norm())
        if not errors[name] <= SAME:
            raise ArithmeticError(f"the gradient errs by {errors[name]:.1e} of its norm")
        run = partial(forward, x)
        step = partial(measure.step, run, dy, [x, *own.parameters()])
        return Variant({"forward_backward": step}, forward=run, own=[own, x], step=step)

    makers = {name: partial(make, name, build) for name, build in {**VARIANTS, **block.peers}.items()}
    found = measure.compare(makers, setting, min_rounds=7, max_rounds=100)
    for name, row in found.items():
        if "forward_backward" in row:
            row["gradient_error"] = float(f"{errors[name]:.3g}")
    return {"id": block.id, "input": list(shape), "dtype": str(dtype).removeprefix("torch."), "variants": found}


def _gradient(forward: Forward, x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(forward(x), x, dy)
    return dx


BENCHMARKS = {
    "peers": Benchmark(
        "peers",
        DEFINITIONS,
        cases=lambda kind: BLOCKS,
        measure=measure_block,
        case_seconds=30.0,
        packages=("optiacts", "liger-kernel"),
    )
}
