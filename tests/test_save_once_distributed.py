"""``save_once`` and ``fuse`` in several processes: the same bits as without, under DDP and with sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import processes
import pytest
import recipe_cases as cases
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.recipes import region


class Spelled(nn.Module):
    """An RMS norm in plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A norm at the end, as BERT's: the next block reads it when this one's parameters are freed."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.linear(x))  # type: ignore[no-any-return]


def _sharded(**options: object) -> Callable[[nn.Sequential], nn.Module]:
    def wrap(model: nn.Sequential) -> nn.Module:
        for block in model[:3]:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


ENGINES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": _sharded(),
    "fsdp, bfloat16": _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def _fuse_and(wrap: Callable[[nn.Sequential], nn.Module]) -> Callable[[nn.Sequential], nn.Module]:
    """Fused before the engine spreads it."""

    def wrap_fused(model: nn.Sequential) -> nn.Module:
        fl.fuse(model, exact=True)
        return wrap(model)

    return wrap_fused


def _trained(wrap: Callable[[nn.Sequential], nn.Module], enter: cases.Enter, autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [Block(norm) for norm in (nn.LayerNorm(64), Spelled(), nn.LayerNorm(64))]
    model = wrap(nn.Sequential(*blocks, nn.GELU(), nn.Linear(64, 8)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), enter(model):
        y = model(torch.randn(16, 64))
    y.float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [y.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients if g is not None)]


def _compared(rank: int, processes: int) -> dict[str, bool]:
    region.LEAST_BYTES = 1 << 6
    found = {}
    for (engine, wrap), autocast in product(ENGINES.items(), (False, True)):
        theirs = _trained(wrap, cases.eager, autocast)
        ways = {"save_once": (wrap, cases.recipes), "fuse": (wrap, cases.fused(exact=True))}
        ways["fuse first"] = _fuse_and(wrap), cases.eager
        for way, (wrapped, enter) in ways.items():
            ours = _trained(wrapped, enter, autocast)
            is_same = len(ours) == len(theirs) > 7 and all(map(torch.equal, ours, theirs))
            found[f"{engine}, {way}{', autocast' * autocast}"] = is_same
    return found


def test_the_same_bits_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    for found in processes.results(_compared, 2, tmp_path):
        assert len(found) == 18 and all(found.values()), found


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _first_version(rank: int, processes: int) -> list[Tensor]:
    """FSDP's first version keeps views of parameters as attributes while a checkpoint recomputes."""
    region.LEAST_BYTES, found = 1 << 6, []
    for exact in (None, True):
        torch.manual_seed(0)
        model = Checkpointed(*(nn.Sequential(Block(nn.LayerNorm(64)), nn.Linear(64, 64)) for _ in range(3)))
        if exact is not None:
            fl.fuse(model, exact=exact)
        whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        whole(torch.randn(16, 64)).square().mean().backward()
        grads = [p.grad for p in whole.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return found


def test_checkpoints_under_the_first_version_of_fsdp(tmp_path: Path) -> None:
    for theirs, ours in processes.results(_first_version, 2, tmp_path):
        assert theirs.numel() > 4000 and torch.equal(theirs, ours)
