"""``python -m bench saved``: the bytes that ``fl.fuse`` spares of whole models, by three counts, and peaks.

Each case is a small model with random weights, in float32, in bfloat16 and under autocast. What its forward pass saves
for the backward pass is counted in three ways, as it is and after ``fuse``: by the objects that are packed (``own``);
by saved-tensor hooks around it, by storage (``hooks``); and by the storages that are alive after the forward pass
(``living``). Peaks are those of six layers of LLaMA and BERT, with and without transformers'
checkpoints. Times of larger models are ``bench models``.
"""

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.recipes.fuse_report import count
from fusedlayers.utils.storages import sizes_of, tensors_in

from . import measure, zoo
from .grid import Benchmark
from .measure import Setting, Variant
from .zoo import of_transformers as hf

BASELINE, OURS = VARIANTS = ("eager", "fusedlayers")
DEFINITIONS = {
    "model": "random weights, training mode, no dropout but where it says so",
    "eager, fusedlayers": "as it is, after fuse(model); without parameters, buffers, inputs",
    "own": "counted by what is packed",
    "hooks": "by saved-tensor hooks around it, each storage once",
    "living": "by the storages that are alive after the forward pass, without the result's",
    "of_weights": "bytes of 16-bit copies of weights among those of hooks",
    "peak_bytes": "at the worst moment of forward+backward, over parameters and their gradients",
    "linear": "of a small linear layer in a fused model, forward+backward on one thread, a chain of 50",
}
DTYPES = ("float32", "bfloat16", "autocast")
SEED = 0
Make = Callable[[], nn.Module]
Input = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """``measure``: the rest of the row."""

    id: str
    measure: Callable[[], dict[str, Any]]


_TOKENS, _IMAGES = partial(torch.randint, 0, 100, (2, 256)), partial(torch.randn, 2, 3, 128, 128)
_EFFICIENTNET = {**zoo.EFFICIENTNET, "image_size": 128, "drop_connect_rate": 0.0}
_SNAKES = partial(zoo.convolutions, act=zoo.Snake)
MODELS: tuple[tuple[str, Make, Input], ...] = (
    ("BERT", hf("Bert", **zoo.SMALL_BERT, **zoo.NO_DROPOUT), _TOKENS),
    ("BERT with dropouts", hf("Bert", **zoo.SMALL_BERT), _TOKENS),
    ("LLaMA", hf("Llama", **zoo.SMALL_LLAMA), _TOKENS),
    ("Mistral, 1024 wide", hf("Mistral", **zoo.MISTRAL), partial(torch.randint, 0, 100, (1, 1024))),
    ("Qwen 3", hf("Qwen3", **zoo.SMALL_LLAMA, num_key_value_heads=2, head_dim=64), _TOKENS),
    ("Gemma 3", hf("Gemma3Text", **zoo.SMALL_LLAMA, num_key_value_heads=2, head_dim=64), _TOKENS),
    ("GPT-2", hf("GPT2", **zoo.SMALL_GPT2), _TOKENS),
    ("T5 1.1", hf("T5Encoder", **zoo.SMALL_T5), _TOKENS),
    ("EfficientNet-B0", hf("EfficientNet", **_EFFICIENTNET), _IMAGES),
    ("MobileNetV2", hf("MobileNetV2"), _IMAGES),
    ("ConvNeXt", hf("ConvNext", depths=[1, 1, 2, 1]), _IMAGES),
    ("ResNet-50", hf("ResNet"), _IMAGES),
    ("diffusion blocks", zoo.Diffusion, partial(torch.randn, 2, 64, 16, 16)),
    ("convolution, batch norm, SiLU", zoo.convolutions, partial(torch.randn, 4, 32, 24, 24)),
    ("convolution, batch norm, trained activation", _SNAKES, partial(torch.randn, 4, 32, 24, 24)),
    ("segmentation UNet", zoo.Segmentation, _IMAGES),
)
PEAKS: tuple[tuple[str, Make], ...] = (
    ("LLaMA", hf("Llama", **{**zoo.SMALL_LLAMA, "num_hidden_layers": 6})),
    ("BERT", hf("Bert", **{**zoo.SMALL_BERT, "num_hidden_layers": 6}, **zoo.NO_DROPOUT)),
)
PEAK_TOKENS = (8, 512)


def cases() -> Iterator[Case]:
    for model, make, made in MODELS:
        for dtype in DTYPES:
            name = re.sub("[^a-z0-9]+", "-", model.lower())
            yield Case(f"{name}/{dtype}", partial(measure_bytes, model, make, made, dtype))
    for model, make in PEAKS:
        for dtype in ("float32", "autocast"):
            for is_checkpointed in (False, True):
                name = f"{model}/{dtype}{'/checkpointed' * is_checkpointed}"
                yield Case(f"peak/{name}", partial(measure_peaks, name, make, dtype, is_checkpointed))
    yield Case("linear", linear_over_eager)


def line(row: dict[str, Any]) -> Iterator[str]:
    if "peak_bytes" in row:
        cells = [f"{variant} {found / 2**20:.1f} MiB" for variant, found in row["peak_bytes"].items()]
    elif "over_eager_us" in row:
        cells = [f"{row['over_eager_us']} us over eager's"]
    else:
        eager, ours = row[BASELINE]["hooks"], row[OURS]
        counts = ", ".join(f"{name} {ours[name] / 2**20:.2f}" for name in ("own", "hooks", "living"))
        cells = [f"eager {eager / 2**20:.2f} MiB", f"{OURS} {counts} MiB, share {ours['hooks'] / eager:.2f}"]
    yield f"{row['id']}: {'; '.join(cells)}"


# --- bytes by three counts --------------------------------------------------------------------------------------------


def measure_bytes(name: str, make: Make, made: Input, dtype: str) -> dict[str, Any]:
    torch.manual_seed(SEED)
    model, x = make().train(), made()
    if dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            y: Any = model(x)
        return getattr(y, "last_hidden_state", y)  # type: ignore[no-any-return]

    own = [*tensors_in(model), x]
    row: dict[str, Any] = {"model": name, "dtype": dtype}
    for variant in VARIANTS:
        if variant == OURS:
            fl.fuse(model)
        hooks, of_weights = by_hooks(run, own)
        row[variant] = {"hooks": hooks, "of_weights": of_weights, "living": _living(run, own)}
    row[OURS]["own"] = count(run(), exclude=own).kept_bytes
    return row


class _Holder:
    """What a node saves, while it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.is_copy = tensor.detach(), _is_copy_of_weight(tensor)


def by_hooks(run: Callable[[], Tensor], own: Sequence[Tensor]) -> tuple[int, int]:
    """The bytes of what hooks around it are handed, and of copies of weights among these."""
    holders: list[weakref.ref[_Holder]] = []

    def pack(tensor: Tensor) -> _Holder:
        holder = _Holder(tensor)
        holders.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        y = run()
    gc.collect()
    alive = [holder for ref in holders if (holder := ref()) is not None]
    excluded = sizes_of(own).keys()
    found = [
        sum(size for key, size in sizes_of(h.tensor for h in some).items() if key not in excluded)
        for some in (alive, [h for h in alive if h.is_copy])
    ]
    del y
    return found[0], found[1]


def _is_copy_of_weight(tensor: Tensor) -> bool:
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return hasattr(node.next_functions[0][0], "variable")


def _living(run: Callable[[], Tensor], own: Sequence[Tensor]) -> int:
    """The bytes that are alive after the forward pass, over those before, without the result's."""
    gc.collect()
    y, total = _tracked(run, own, "current")
    return total - sum(sizes_of(own).values()) - y.untyped_storage().nbytes()


def _tracked(run: Callable[[], Tensor], own: Any, when: str) -> tuple[Tensor, int]:
    """The result, and the bytes of all living storages: now ("current"), or at most ("peak")."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*own)
    with tracker:
        y = run()
        gc.collect()
        (device,) = tracker.get_tracker_snapshot(when).values()
    return y, int(device["Total"])


# --- peaks ------------------------------------------------------------------------------------------------------------


def measure_peaks(name: str, make: Make, dtype: str, is_checkpointed: bool) -> dict[str, Any]:
    found = {variant: _peak(make, dtype, is_checkpointed, variant == OURS) for variant in VARIANTS}
    return {"name": name, "peak_bytes": found}


def _peak(make: Make, dtype: str, is_checkpointed: bool, is_fused: bool) -> int:
    torch.manual_seed(SEED)
    model: Any = make().train()
    ids = torch.randint(0, 100, PEAK_TOKENS)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    if is_fused:
        fl.fuse(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            y = model(input_ids=ids).last_hidden_state
        loss: Tensor = y.float().square().mean()
        loss.backward()
        return loss

    _, total = _tracked(step, [model, ids], "peak")
    own: int = 2 * sum(parameter.nbytes for parameter in model.parameters())
    return total - own


def linear_over_eager(layers: int = 50) -> dict[str, Any]:
    """What the two packs and unpacks of a linear layer cost the host."""
    x = torch.randn(128, 64, requires_grad=True)
    eager = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    fused = zoo.twin(eager)
    fl.fuse(fused)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        makers = {
            name: lambda model=model: Variant({"forward_backward": lambda: model(x).sum().backward()})
            for name, model in (("eager", eager), ("fused", fused))
        }
        rows = measure.compare(makers, Setting(torch.device("cpu"), seconds=4.0, quick=False), min_rounds=7)
    finally:
        torch.set_num_threads(threads)
    return {"over_eager_us": round(rows["fused"]["forward_backward"]["over_eager_us"] / layers, 1)}


BENCHMARKS = {
    "saved": Benchmark(
        "saved",
        DEFINITIONS,
        cases=lambda kind: [*cases()],
        measure=lambda case, setting: {"id": case.id, **case.measure()},
        lines=line,
        budget_seconds=1500.0,
        device="cpu",
        packages=("transformers",),
    )
}
