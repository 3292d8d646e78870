"""``python -m bench saved``: the bytes that ``fl.fuse`` spares of whole models, by three counts.

Each case is a small model with random weights, in float32, in bfloat16 and under autocast. What its forward pass saves
for the backward pass is counted in three ways, as it is and after ``fuse``: by the objects that are packed (``own``);
by saved-tensor hooks around it, by storage (``hooks``); and by the storages that are alive after the forward pass
(``living``). Peaks and times are those of ``bench models`` and ``bench setups``.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedlayers as fl
from fusedlayers.recipes.fuse_report import count
from fusedlayers.utils.storages import sizes_of, tensors_in

from . import zoo
from .grid import Benchmark
from .measure import Setting
from .models import Case
from .zoo import of_transformers as hf

BASELINE, OURS = VARIANTS = ("eager", "fusedlayers")
DEFINITIONS = {
    "model": "random weights, training mode, no dropout but where it says so",
    "eager, fusedlayers": "as it is, after fuse(model); without parameters, buffers, inputs",
    "own": "counted by what is packed",
    "hooks": "by saved-tensor hooks around it, each storage once",
    "living": "by the storages that are alive after the forward pass, without the result's",
}
DTYPES = ("float32", "bfloat16", "autocast")
_TOKENS, _IMAGES = (2, 256), (2, 3, 128, 128)
_EFFICIENTNET = {**zoo.EFFICIENTNET, "image_size": 128, "drop_connect_rate": 0.0}
_SNAKES = partial(zoo.convolutions, act=zoo.Snake)
CASES = (
    Case("BERT", hf("Bert", **zoo.SMALL_BERT, **zoo.NO_DROPOUT), _TOKENS),
    Case("BERT with dropouts", hf("Bert", **zoo.SMALL_BERT), _TOKENS),
    Case("LLaMA", hf("Llama", **zoo.SMALL_LLAMA), _TOKENS),
    Case("Mistral, 1024 wide", hf("Mistral", **zoo.MISTRAL), (1, 1024)),
    Case("Qwen 3", hf("Qwen3", **zoo.SMALL_LLAMA, num_key_value_heads=2, head_dim=64), _TOKENS),
    Case("Gemma 3", hf("Gemma3Text", **zoo.SMALL_LLAMA, num_key_value_heads=2, head_dim=64), _TOKENS),
    Case("EfficientNet-B0", hf("EfficientNet", **_EFFICIENTNET), _IMAGES),
    Case("MobileNetV2", hf("MobileNetV2"), _IMAGES),
    Case("ConvNeXt", hf("ConvNext", depths=[1, 1, 2, 1]), _IMAGES),
    Case("ResNet-50", hf("ResNet"), _IMAGES),
    Case("diffusion blocks", zoo.Diffusion, (2, 64, 16, 16)),
    Case("convolution, batch norm, SiLU", zoo.convolutions, (4, 32, 24, 24)),
    Case("convolution, batch norm, trained activation", _SNAKES, (4, 32, 24, 24)),
)


def line(row: dict[str, Any]) -> Iterator[str]:
    eager, ours = row[BASELINE]["hooks"], row[OURS]
    counts = ", ".join(f"{name} {ours[name] / 2**20:.2f}" for name in ("own", "hooks", "living"))
    yield f"{row['id']}: eager {eager / 2**20:.2f} MiB; {OURS} {counts} MiB, share {ours['hooks'] / eager:.2f}"


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    dtype = torch.bfloat16 if case.dtype == "bfloat16" else torch.float32
    model, x = zoo.build(case.make, case.input, dtype=dtype)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast"):
            return zoo.first(model(x))

    own = [*tensors_in(model), x]
    row: dict[str, Any] = {"id": case.id, "model": case.model, "dtype": case.dtype}
    for variant in VARIANTS:
        if variant == OURS:
            fl.fuse(model)
        row[variant] = {"hooks": by_hooks(run, own), "living": _living(run, own)}
    row[OURS]["own"] = count(run(), exclude=own).kept_bytes
    return row


class _Holder:
    """What a node saves, while it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def by_hooks(run: Callable[[], Tensor], own: Sequence[Tensor]) -> int:
    """The bytes of what hooks around it are handed."""
    holders: list[weakref.ref[_Holder]] = []

    def pack(tensor: Tensor) -> _Holder:
        holder = _Holder(tensor)
        holders.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        y = run()
    gc.collect()
    sizes = sizes_of(holder.tensor for ref in holders if (holder := ref()) is not None)
    del y  # what it has saved was needed until here
    return sum(sizes[key] for key in sizes.keys() - sizes_of(own).keys())


def _living(run: Callable[[], Tensor], own: Sequence[Tensor]) -> int:
    """The bytes that are alive after the forward pass, over those before, without the result's."""
    from torch.distributed._tools.mem_tracker import MemTracker

    gc.collect()
    tracker = MemTracker()
    tracker.track_external(*own)
    with tracker:
        y = run()
        gc.collect()
        (device,) = tracker.get_tracker_snapshot("current").values()
    return int(device["Total"]) - sum(sizes_of(own).values()) - y.untyped_storage().nbytes()


BENCHMARKS = {
    "saved": Benchmark(
        "saved",
        DEFINITIONS,
        cases=lambda kind: [replace(case, dtype=dtype) for case in CASES for dtype in DTYPES],
        measure=measure_case,
        lines=line,
        budget_seconds=1500.0,
        device="cpu",
        packages=("transformers",),
    )
}
