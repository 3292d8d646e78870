"""``python -m bench setups``: models as people train them, before and after ``fl.fuse``.

Each case is a small model with random weights in one setup: a precision, LoRA, checkpoints, offloading, a wrapper of a
distributed trainer. Measured are what a forward pass saves, the peak of a step beside parameters and gradients, and its
time. Gradients of both are compared to the last bit first.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import fusedlayers as fl

from . import grid, measure, zoo
from .grid import Benchmark
from .measure import Setting, Variant
from .zoo import of_transformers as hf

BASELINE, OURS = VARIANTS = ("eager", "fusedlayers")
DEFINITIONS = {
    "model": "random weights, training mode, no dropout",
    "setup": "how it is trained; fuse is called last, but for DDP, which takes the fused model",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "at the worst moment of forward+backward, beside parameters and gradients",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
}


@dataclass(frozen=True)
class Model:
    """``blocks``: the path of its list of blocks; ``projections``: the names of what LoRA adapts, q and v first."""

    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    blocks: str = ""
    projections: tuple[str, ...] = ()


_TOKENS, _IMAGES = (4, 256), (4, 3, 128, 128)
_SIZES = {"num_hidden_layers": 4}
MODELS = {
    "BERT": Model(
        hf("Bert", **{**zoo.SMALL_BERT, **_SIZES}, **zoo.NO_DROPOUT), _TOKENS,
        "encoder.layer", ("query", "value", "key", "dense"),
    ),
    "LLaMA": Model(
        hf("Llama", **{**zoo.SMALL_LLAMA, **_SIZES}), _TOKENS, "layers",
        ("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "ViT": Model(
        hf("ViT", **{**zoo.SMALL_BERT, **_SIZES}, image_size=128, patch_size=8, **zoo.NO_DROPOUT), _IMAGES,
        "layers", ("q_proj", "v_proj", "k_proj", "o_proj", "fc1", "fc2"),
    ),
    "UNet": Model(zoo.UNet, (4, 3, 64, 64)),
}  # fmt: skip


# --- setups -----------------------------------------------------------------------------------------------------------


class Unsuited(Exception):  # noqa: N818  # no error: the cell of the table says so
    """The setup is none for this model."""


def _bfloat16(model: Any, of: Model) -> Any:
    return model.bfloat16()


def _lora(model: Any, of: Model, most: int | None = None) -> Any:
    from peft import LoraConfig, get_peft_model

    if not of.projections:
        raise Unsuited("no projections")
    return get_peft_model(model, LoraConfig(r=8, lora_dropout=0.0, target_modules=[*of.projections[:most]]))


def _frozen(model: Any, of: Model) -> Any:
    """But for the last block."""
    if not of.blocks:
        raise Unsuited("no list of blocks")
    model.requires_grad_(False)
    model.get_submodule(of.blocks)[-1].requires_grad_(True)
    return model


def _checkpointed(model: Any, of: Model, every: int = 1, **options: Any) -> Any:
    inner = getattr(model, "inner", model)
    if hasattr(inner, "enable_gradient_checkpointing"):  # diffusers
        if options or every > 1:
            raise Unsuited("its library has no such switch")
        inner.enable_gradient_checkpointing()
        return model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})
    for number, block in enumerate(model.get_submodule(of.blocks)):
        block.gradient_checkpointing = number % every == 0
    return model


def _selective(model: Any, of: Model) -> Any:
    """Matmuls are kept."""
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    return _checkpointed(model, of, context_fn=partial(create_selective_checkpoint_contexts, kept))


@functools.cache
def _process() -> None:
    store: Any = vars(dist)["HashStore"]
    dist.init_process_group("gloo", store=store(), rank=0, world_size=1)


def _ddp(model: Any, of: Model) -> Any:
    _process()
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # poolers are not used


def _fsdp(model: Any, of: Model) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _process()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.get_submodule(of.blocks) if of.blocks else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _averaged(model: Any, of: Model) -> Any:
    model.average = [torch.optim.swa_utils.AveragedModel(model)]  # not a module of it
    return model


@dataclass(frozen=True)
class Setup:
    """``prepare``: of a model; ``is_before``: whether fuse is called before it; ``around``: what a pass runs in."""

    prepare: Callable[[Any, Model], Any] = lambda model, of: model
    is_before: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


_AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)
SETUPS = {
    "float32": Setup(),
    "autocast": Setup(around=_AUTOCAST),
    "autocast, bfloat16 weights": Setup(_bfloat16, around=_AUTOCAST),
    "bfloat16": Setup(_bfloat16),
    "LoRA on q and v, autocast": Setup(partial(_lora, most=2), around=_AUTOCAST),
    "LoRA on all, autocast": Setup(_lora, around=_AUTOCAST),
    "LoRA on q and v, checkpoints, autocast": Setup(lambda m, of: _lora(_checkpointed(m, of), of, 2), around=_AUTOCAST),
    "last block trained, autocast": Setup(_frozen, around=_AUTOCAST),
    "checkpoints of all blocks": Setup(_checkpointed),
    "checkpoints of all blocks, autocast": Setup(_checkpointed, around=_AUTOCAST),
    "checkpoints of every second block": Setup(partial(_checkpointed, every=2)),
    "selective checkpoints": Setup(_selective),
    "save_on_cpu": Setup(around=torch.autograd.graph.save_on_cpu),
    "DDP, autocast": Setup(_ddp, is_before=True, around=_AUTOCAST),
    "FSDP2": Setup(_fsdp),
    "EMA copy": Setup(_averaged),
}


@dataclass(frozen=True)
class Case(grid.Case):
    model: str
    setup: str


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    row: dict[str, Any] = {"id": case.id, **vars(case)}
    makers = {name: partial(_variant, name, MODELS[case.model], SETUPS[case.setup]) for name in VARIANTS}
    try:
        return {**row, "variants": measure.compare(makers, setting, min_rounds=5, max_rounds=60, warm_up=2)}
    except Unsuited as reason:
        return {**row, "variants": {}, "unsuited": str(reason)}


def _variant(name: str, of: Model, setup: Setup) -> Variant:
    model: Any
    model, x = zoo.build(of.make, of.input)
    if name == OURS and setup.is_before:
        fl.fuse(model)
    model = setup.prepare(model, of)
    if name == OURS and not setup.is_before:
        fl.fuse(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weight = next(model.parameters()).dtype
    x = x.to(weight) if x.is_floating_point() else x

    def forward() -> Tensor:
        with setup.around():
            return zoo.first(model(x))

    def step() -> None:
        with setup.around():
            y = model(x)  # held while backward runs, as a training loop does
            loss = zoo.first(y).float().square().mean()
        loss.backward()

    def results() -> list[Tensor]:
        for parameter in trained:
            parameter.grad = None
        step()
        found = [parameter.grad for parameter in trained if parameter.grad is not None]
        return [getattr(grad, "to_local", grad.clone)().clone() for grad in found]

    return Variant({"forward_backward": step}, results, forward, [model, x], step)


def missed(result: dict[str, Any]) -> Iterator[str]:
    """Cells in which the fused model takes more bytes, or another gradient."""
    for row in result["cases"]:
        eager, ours = (row["variants"].get(name, {}) for name in VARIANTS)
        if "error" in ours:
            yield f"{row['id']}: {ours['error']}"
        for key in ("saved_bytes", "peak_bytes"):
            if key in ours and ours[key] > 1.01 * eager[key]:
                yield f"{row['id']}: {key} {ours[key]}, eager {eager[key]}"


BENCHMARKS = {
    "setups": Benchmark(
        "setups",
        DEFINITIONS,
        cases=lambda kind: [Case(model, setup) for setup in SETUPS for model in MODELS],
        measure=measure_case,
        missed=missed,
        budget_seconds=1500.0,
        case_seconds=6.0,
        device="cpu",
        packages=("transformers", "diffusers", "peft"),
    )
}
