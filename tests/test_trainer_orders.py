"""Training loops that need no callback, with ``fuse`` where examples/README.md has it among checkpoints, adapters, the
compiler and sharding: losses and parameters are those of the plain model, to the last bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_integrations import Net, assert_same_bits, seeded
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recipes import region

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
STEPS = 20


@pytest.fixture(autouse=True)
def small_values_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)


def losses_of(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], backward: Any = None) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), []
    for _ in range(STEPS):
        loss = loss_of(model)
        (backward or Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) > 10
    return losses


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


# --- accelerate, diffusers --------------------------------------------------------------------------------------------


def unet() -> Any:
    diffusers = pytest.importorskip("diffusers")
    kinds = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {"layers_per_block": 1, "block_out_channels": (8, 16), "cross_attention_dim": 8, "attention_head_dim": 4}
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=3, out_channels=3, norm_num_groups=4, **kinds, **sizes
    )


def denoised(model: nn.Module) -> Tensor:
    noise, words = torch.randn(2, 3, 16, 16), torch.randn(2, 4, 8)
    return F.mse_loss(model(noise, torch.tensor([3, 7]), words).sample, images(16))


def with_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    model.requires_grad_(False)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("when", ["before prepare", "after prepare"])
def test_diffusers_scripts(when: str, has_adapter: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    found, models = [], []
    for is_fused in (False, True):
        model = seeded(unet)
        if has_adapter:
            with_adapter(model)
        model.enable_gradient_checkpointing()
        model.train()
        if is_fused and when == "before prepare":
            fl.fuse(model)
        accelerate.state.AcceleratorState._reset_state(True)
        try:
            accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
            prepared = accelerator.prepare(model)
            if is_fused and when == "after prepare":
                fl.fuse(prepared)
            found.append(losses_of(prepared, denoised, accelerator.backward))
        finally:
            accelerate.state.AcceleratorState._reset_state(True)
        fl.unfuse(prepared)
        models.append(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))
    assert found[0] == found[1]
    ours, theirs = models[1].state_dict(), models[0].state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- timm -------------------------------------------------------------------------------------------------------------


def classified(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(images()), torch.tensor([0, 3]))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 2} if "vit" in name else {}
    found, models, kept = [], [], list[int]()
    for is_fused in (False, True):
        model = seeded(functools.partial(timm.create_model, name, num_classes=4, drop_rate=0.1, **sizes))
        model.set_grad_checkpointing("vit" in name)
        if is_fused:
            fl.fuse(model)  # before timm.utils.ModelEmaV3, which copies it
        average = timm.utils.ModelEmaV3(model, decay=0.9)

        def step(model: nn.Module, average: Any = average) -> Tensor:
            average.update(model)
            return classified(model)

        found.append([*losses_of(model, step), classified(average.module.eval()).item()])
        kept.append(saved_bytes(lambda m=model: classified(m), exclude=[model]))
        fl.unfuse(model)
        models.append(model)
    assert found[0] == found[1] and kept[1] < kept[0]
    assert_same_bits(models[1], models[0])


# --- torchtitan -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_process() -> Iterator[None]:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parallelized(order: str) -> nn.Module:
    """As torchtitan's ``parallelize``: checkpoints, then the compiler block by block, then shards."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    model = seeded(Net)
    for word in order.split():
        if word == "fuse":
            fl.fuse(model)
        elif word == "checkpoint":
            for name, block in model.blocks.named_children():
                model.blocks.register_module(name, checkpoint_wrapper(block, preserve_rng_state=True))
        elif word == "compile":
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        else:
            for part in (*model.blocks, model):
                fully_shard(part)
    return model


def net_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(8, 32), torch.arange(8) % 2)["loss"]
    return loss


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "order",
    [
        *("checkpoint shard fuse", "fuse checkpoint shard", "shard fuse", "fuse shard"),
        *("checkpoint compile shard fuse", "compile fuse shard", "fuse checkpoint compile shard"),
    ],
)
def test_torchtitans_order(order: str) -> None:
    plain, model = parallelized(order.replace("fuse", "")), parallelized(order)
    expected = losses_of(plain, net_loss)
    assert losses_of(model, net_loss) == expected
    fl.unfuse(model)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k].to_local(), theirs[k].to_local()) for k in ours)
