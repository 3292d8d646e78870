"""``python -m bench peers``: the same three blocks by others who save memory, and by this library.

On CPUs in float32; on GPUs in bfloat16, on 32 times as many rows or images. A variant whose package is not
installed, or does not run on this device, is a row that says so. Liger, inplace_abn and optiacts are no dependencies:
install those that you want to see.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import importlib.metadata
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure

DEFINITIONS = {
    "block": "what stands alone here, in training; parameters are shared by all variants",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included, over what lived before",
    "gradient_error": "of the block's input: norm of the difference from a float64 block's, over that one's norm",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
}
BUDGET_SECONDS = 540.0
_CASE_SECONDS = {"cpu": 30.0, "cuda": 8.0}
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
#: How many times the rows of a CPU's block.
_ROWS = {"cpu": 1, "cuda": 32}
_HALF = 0.5  # of the compiler's budget: its own saved bytes are 1
#: No test of accuracy: what errs by more does not compute the same.
_SAME = 0.05

Forward = Callable[[Tensor], Tensor]
#: From a copy of the block, which shares its parameters, and an example of its input.
Build = Callable[[nn.Module, Tensor], Forward]


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class GatedMLP(nn.Module):
    """A LLaMA's, with its names."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(features, hidden, bias=False)
        self.up_proj = nn.Linear(features, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, features, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return y


class ConvNorm(nn.Module):
    """Two convolutions, with a batch norm and an activation between them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm, self.act = nn.BatchNorm2d(channels), nn.LeakyReLU(0.01)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(self.act(self.norm(self.conv1(x))))
        return y


@dataclass(frozen=True)
class Block:
    """``peers``: the variants that this block has beside those that all have."""

    id: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    peers: Mapping[str, Build]


def _compiled(module: nn.Module, x: Tensor, part: float = 1.0) -> Forward:
    from torch._functorch import config

    compiled = measure.compiled(module)

    def forward(x: Tensor) -> Tensor:
        with config.patch(activation_memory_budget=part):
            y: Tensor = compiled(x)
        return y

    return forward


def _checkpointed(module: nn.Module, x: Tensor) -> Forward:
    return partial(checkpoint, module, use_reentrant=False)


def _fused(module: nn.Module, x: Tensor, **options: Any) -> Forward:
    fl.fuse(module, **options)
    return module


def _fused_mlp(module: nn.Module, x: Tensor, **options: Any) -> Forward:
    assert isinstance(module, MLP)
    return fl.FusedMLP.from_modules(module.up, module.act, module.down, **options)


def _fused_gated_mlp(module: nn.Module, x: Tensor, **options: Any) -> Forward:
    assert isinstance(module, GatedMLP)
    layers = (module.gate_proj, module.act, module.up_proj, module.down_proj)
    return fl.FusedGatedMLP.from_modules(*layers, **options)


def _optiacts(module: nn.Module, x: Tensor) -> Forward:
    name = "GELU" if isinstance(module, MLP) else "SiLU"
    module.act = getattr(importlib.import_module("optiacts"), name)()
    return module


def _liger(module: nn.Module, x: Tensor) -> Forward:
    act = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    assert isinstance(module, GatedMLP)
    return lambda x: module.down_proj(act.apply(module.gate_proj(x), module.up_proj(x)))


def _inplace_abn(module: nn.Module, x: Tensor) -> Forward:
    assert isinstance(module, ConvNorm)
    norm = importlib.import_module("inplace_abn").InPlaceABN(module.norm.num_features, activation="leaky_relu")
    norm.weight, norm.bias = module.norm.weight, module.norm.bias
    return lambda x: module.conv2(norm(module.conv1(x)))


#: The others that these variants need.
PACKAGES = ("optiacts", "liger-kernel", "inplace-abn")


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


OURS = "fusedlayers"
#: What every block is measured with; each has its own beside these.
VARIANTS: dict[str, Build] = {
    "eager": lambda module, x: module,
    "compile": _compiled,
    "compile, budget": partial(_compiled, part=_HALF),
    "checkpoint": _checkpointed,
    OURS: _fused,
}
BLOCKS = (
    Block(
        "MLP, GELU",
        partial(MLP, 768, 3072),
        (1024, 768),
        {"optiacts": _optiacts, "FusedMLP": _fused_mlp, "recompute": partial(_fused_mlp, save="recompute")},
    ),
    Block(
        "gated MLP, SiLU",
        partial(GatedMLP, 1024, 2816),
        (1024, 1024),
        {
            "optiacts": _optiacts,
            "Liger": _liger,
            "FusedMLP": _fused_gated_mlp,
            "recompute": partial(_fused_gated_mlp, save="recompute"),
        },
    ),
    Block("batch norm, leaky ReLU", partial(ConvNorm, 64), (8, 64, 56, 56), {"inplace_abn": _inplace_abn}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="blocks whose id matches, e.g. 'gated'")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: to see that it works")
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=BUDGET_SECONDS, help="start no block after")
    parser.add_argument("--out", type=Path, help="folder for peers.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [block for block in BLOCKS if re.search(options.only or "", block.id)]
    if not todo:
        print(f"bench peers: no block matches --only {options.only!r}; there are {[block.id for block in BLOCKS]}")
        return 2
    out = options.out
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = grid.begin("peers", device, DEFINITIONS, quick=options.quick, not_run=[block.id for block in todo])
    result["versions"] |= _versions()
    machine.warn_if_busy(result)
    for block, _, _ in grid.until(time.monotonic() + options.budget, todo):
        row = measure_block(block, device, quick=options.quick)
        grid.add(result, row, out)
        print("\n".join(_lines(row)), flush=True)
    if out is not None:
        print(f"\nwrote {out / 'peers.json'}")
    return 0


def measure_block(block: Block, device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    """The JSON row of a block."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dtype = _DTYPES[device.type]
        module = block.build().to(device, dtype).train()
        shape = (2 if quick else _ROWS[device.type] * block.shape[0], *block.shape[1:])
        x, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        x.requires_grad_()
    expected = _gradient(copy.deepcopy(module).double(), x.double(), dy.double())
    variants: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, build in {**VARIANTS, **block.peers}.items():
        own = copy.deepcopy(module, {id(p): p for p in module.parameters()})
        try:
            forward = build(own, x)
            error = float((_gradient(forward, x, dy).double() - expected).norm() / expected.norm())
            if not error <= _SAME:
                raise ArithmeticError(f"the gradient errs by {error:.1e} of its norm")
            step = partial(_step, forward, x, dy, [x, *own.parameters()])
            step()
            variants[name] = {
                "saved_bytes": saved_bytes(lambda forward=forward: forward(x), exclude=[own, x]),
                "peak_bytes": peak_bytes(step, device=device),
                "gradient_error": float(f"{error:.3g}"),
            }
            steps[name] = step
        except ImportError as missing:
            variants[name] = {"skipped": f"{missing.name} is not installed"}
        except Exception as error:
            variants[name] = grid.failed(error)
    seconds = 0.0 if quick else _CASE_SECONDS[device.type]
    times = measure.interleave(steps, device, seconds=seconds, min_rounds=2 if quick else 7, max_rounds=100)
    for name, values in times.items():
        variants[name]["forward_backward"] = measure.summary(values, times["eager"])
    name = str(dtype).removeprefix("torch.")
    return {"id": block.id, "input": list(shape), "dtype": name, "variants": variants}


def _step(forward: Forward, x: Tensor, dy: Tensor, leaves: list[Tensor]) -> None:
    measure.Above.apply(forward(x), dy).backward()
    for leaf in leaves:
        leaf.grad = None


def _gradient(forward: Forward, x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(forward(x), x, dy)
    return dx


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['id']} ({' x '.join(map(str, row['input']))})"
    eager = row["variants"]["eager"]["saved_bytes"]
    for name, variant in row["variants"].items():
        if "forward_backward" not in variant:
            yield f"  {name:<16} {variant.get('skipped') or variant.get('error')}"
            continue
        time_ratio, part = variant["forward_backward"]["ratio"], variant["saved_bytes"] / eager
        yield (
            f"  {name:<16} saved {variant['saved_bytes'] / 2**20:6.2f} MiB ({part:4.0%})   "
            f"peak {variant['peak_bytes'] / 2**20:6.1f} MiB   {time_ratio:.2f}x   error {variant['gradient_error']:.1e}"
        )
