"""``save_once`` and ``fuse`` in several processes: the same bits as without, under DDP and with sharded parameters, and
the same bytes where parameters are not sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import processes
import pytest
import recipe_cases as cases
import torch
import torch.distributed as dist
from subjects import living_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.recipes import region
from fusedlayers.recipes.fuse_report import count


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


def _first_version(**options: object) -> Callable[[nn.Sequential], nn.Module]:
    """Nothing is gathered before backward needs it."""
    policy, cpu = ModuleWrapPolicy({Block}), torch.device("cpu")
    return partial(FullyShardedDataParallel, auto_wrap_policy=policy, device_id=cpu, backward_prefetch=None, **options)


ENGINES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": _sharded(),
    "fsdp, bfloat16": _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "first version": _first_version(use_orig_params=True),
    "first version, flat": _first_version(),
}


def _fuse_and(wrap: Callable[[nn.Sequential], nn.Module]) -> Callable[[nn.Sequential], nn.Module]:
    """Fused before the engine spreads it."""

    def wrap_fused(model: nn.Sequential) -> nn.Module:
        fl.fuse(model)
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
        ways = {"save_once": (wrap, cases.recipes), "fuse": (wrap, cases.fused)}
        ways["save_once alone"] = wrap, lambda model: fl.save_once()
        ways["fuse first"] = _fuse_and(wrap), cases.eager
        for way, (wrapped, enter) in ways.items():
            ours = _trained(wrapped, enter, autocast)
            is_same = len(ours) == len(theirs) > 4 and all(map(torch.equal, ours, theirs))
            found[f"{engine}, {way}{', autocast' * autocast}"] = is_same
    found["first version, checkpointed"] = _checkpointed()
    return found


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _checkpointed() -> bool:
    """FSDP's first version keeps views of parameters as attributes while a checkpoint recomputes."""
    found = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(*(nn.Sequential(Block(nn.LayerNorm(64)), nn.Linear(64, 64)) for _ in range(3)))
        if is_fused:
            fl.fuse(model)
        whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        whole(torch.randn(16, 64)).square().mean().backward()
        grads = [p.grad for p in whole.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return found[0].numel() > 4000 and torch.equal(*found)


def test_the_same_bits_in_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    for found in processes.results(_compared, 2, tmp_path):
        assert len(found) == 41 and all(found.values()), found


# --- whose parameters are copied --------------------------------------------------------------------------------------


def _kept(wrap: Callable[[nn.Module], nn.Module]) -> tuple[int, int]:
    """As the graph tells, and as storages do: copies of parameters are in both."""
    model, x = nn.Sequential(*(Block(nn.LayerNorm(64)) for _ in range(3))), torch.randn(256, 64)
    fl.fuse(model)
    model = wrap(model)
    own = [*model.parameters(), x]
    return count(model(x), exclude=own).kept_bytes, living_bytes(partial(model, x), own)


def test_ddp_copies_no_parameter(tmp_path: Path) -> None:
    alone = _kept(lambda model: model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert _kept(lambda model: model) == _kept(DistributedDataParallel) == alone
    finally:
        dist.destroy_process_group()


def _as_zero_3(block: nn.Module) -> None:
    """As DeepSpeed does: parameters have a number, and data during the block's forward and backward pass alone."""
    data = {parameter: parameter.data for parameter in block.parameters()}

    def gather(*_: object) -> None:
        for parameter in data:
            parameter.data = data[parameter]

    def release(*_: object) -> None:
        for parameter in data:
            parameter.data = torch.empty(0)

    for number, parameter in enumerate(data):
        parameter.ds_id = number  # type: ignore[attr-defined]
    block.register_forward_pre_hook(gather)
    block.register_forward_hook(release)
    block.register_full_backward_pre_hook(gather)
    block.register_full_backward_hook(release)


@pytest.mark.parametrize("enter", [cases.eager, cases.fused, lambda model: fl.save_once()])
def test_parameters_of_zero_3(enter: cases.Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)

    def wrap(model: nn.Sequential) -> nn.Module:
        for block in model[1:3]:  # the input of the first one needs no gradient
            _as_zero_3(block)
        return model

    theirs = _trained(lambda model: model, cases.eager, False)
    ours = _trained(wrap, enter, False)
    assert len(ours) == len(theirs) > 7 and all(map(torch.equal, ours, theirs))
