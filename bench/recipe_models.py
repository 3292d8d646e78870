"""``python -m bench recipes``: what ``fl.save_once`` spares of whole models, by three counts, and what it takes.

Each case is a model with random weights, in float32, in bfloat16 and under autocast. What its forward pass saves for
the backward pass is counted in three ways, as it is and within ``save_once``: by the objects that ``save_once`` packs
(``own``); by saved-tensor hooks around it, by storage (``hooks``); and by the storages that are alive after the forward
pass (``living``). Peaks are those of six layers of LLaMA and BERT, with and without transformers' checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import logging
import re
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.recipes.counting import count
from fusedlayers.utils.storages import sizes_of, tensors_in

from . import RESULTS, grid, machine, measure

DEFINITIONS = {
    "model": "random weights, training mode, no dropout but where it says so",
    "eager, recipes": "saved bytes of the model as it is, and within save_once: without parameters, buffers, inputs",
    "own": "counted by save_once", "hooks": "by saved-tensor hooks around it, each storage once",
    "living": "by the storages that are alive after the forward pass, without the result's",
    "of_weights": "bytes of 16-bit copies of weights among those of hooks",
    "share": "recipes / eager, by hooks; at_most: what it is to be at most",
    "peak": "bytes at the worst moment of forward+backward, over parameters and their gradients",
    "ratio": "median over rounds of the step's time / eager's in the same round, with quartiles",
    "linear_over_eager_us": "of a small linear layer within save_once, forward+backward on one thread, a chain of 50",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "autocast")
BUDGET_SECONDS = 1500.0
SEED = 0

_TEXT = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
_BERT = {**_TEXT, "intermediate_size": 1024}
_LLAMA = {**_TEXT, "intermediate_size": 704, "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Blocks(nn.Module):
    """A convolution, a batch norm and SiLU, three times."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU()) for _ in range(3)]
        self.layers = nn.Sequential(*(layer for block in layers for layer in block), nn.Conv2d(32, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Diffusion(nn.Module):
    """Two residual blocks of a diffusion model's UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(16, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            h = self.convolutions[i](F.silu(self.norms[i](x)))
            x = x + self.convolutions[i + 1](F.silu(self.norms[i + 1](h)))
        return x


class Segmentation(nn.Module):
    """A UNet of two levels with instance norms, leaky ReLU and skips."""

    def __init__(self) -> None:
        super().__init__()

        def block(channels: int, out: int) -> nn.Module:
            layers = [(nn.Conv2d(channels if i == 0 else out, out, 3, padding=1), out) for i in range(2)]
            return nn.Sequential(
                *(m for c, n in layers for m in (c, nn.InstanceNorm2d(n, affine=True), nn.LeakyReLU(0.01)))
            )

        self.down, self.bottom, self.up = block(3, 32), block(32, 64), block(96, 32)
        self.last = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        below = self.bottom(F.max_pool2d(skip, 2))
        y: Tensor = self.last(self.up(torch.cat([skip, F.interpolate(below, scale_factor=2.0)], 1)))
        return y


@dataclass(frozen=True)
class Case:
    """``make`` takes transformers and makes the model; ``at_most``: of eager's bytes, by dtype."""

    model: str
    make: Callable[[Any], nn.Module]
    inputs: str
    at_most: Mapping[str, float] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower())}/{self.dtype}"


def _of(name: str, **sizes: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**sizes))


def _limits(*shares: float) -> dict[str, float]:
    return dict(zip(DTYPES, shares, strict=True))


_EFFICIENTNET = {"image_size": 128, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
_MODELS = (
    Case("BERT", _of("Bert", **_BERT, **_NO_DROPOUT), "input_ids", _limits(0.67, 0.67, 0.57)),
    Case("BERT with dropouts", _of("Bert", **_BERT), "input_ids", _limits(0.70, 0.70, 0.70)),
    Case("LLaMA", _of("Llama", **_LLAMA), "input_ids", _limits(0.57, 0.62, 0.47)),
    Case("Qwen 3", _of("Qwen3", **_LLAMA, num_key_value_heads=2, head_dim=64), "input_ids", _limits(0.55, 0.62, 0.49)),
    Case(
        "EfficientNet-B0", _of("EfficientNet", **_EFFICIENTNET, drop_connect_rate=0.0), "pixel_values",
        _limits(0.45, 0.45, 0.41),
    ),
    Case("MobileNetV2", _of("MobileNetV2"), "pixel_values", _limits(0.73, 0.73, 0.68)),
    Case("ConvNeXt", _of("ConvNext", depths=[1, 1, 2, 1]), "pixel_values", _limits(0.58, 0.58, 0.46)),
    Case("ResNet-50", _of("ResNet"), "pixel_values", _limits(0.83, 0.83, 0.48)),
    Case("diffusion blocks", lambda hf: Diffusion(), "features", _limits(0.31, 0.31, 0.31)),
    Case("convolution, batch norm, SiLU", lambda hf: Blocks(), "planes", _limits(0.37, 0.37, 0.40)),
    Case("segmentation UNet", lambda hf: Segmentation(), "pixel_values", _limits(0.60, 0.60, 0.60)),
)  # fmt: skip
_INPUTS: dict[str, Callable[[], Tensor]] = {
    "input_ids": lambda: torch.randint(0, 100, (2, 256)),
    "pixel_values": lambda: torch.randn(2, 3, 128, 128),
    "features": lambda: torch.randn(2, 64, 16, 16),
    "planes": lambda: torch.randn(4, 32, 24, 24),
}
_SIX = {"num_hidden_layers": 6}
#: Of the peaks: 8 sequences of 512 tokens; by dtype, without and with checkpoints.
_PEAKS = {
    "LLaMA": (_of("Llama", **{**_LLAMA, **_SIX}), {"float32": (0.65, 0.97), "autocast": (0.55, 0.93)}),
    "BERT": (_of("Bert", **{**_BERT, **_SIX}, **_NO_DROPOUT), {"float32": (0.72, 0.98), "autocast": (0.70, 0.98)}),
}
_PEAK_TOKENS = (8, 512)


def cases() -> list[Case]:
    return [
        Case(case.model, case.make, case.inputs, case.at_most, dtype)
        for case in _MODELS for dtype in DTYPES if dtype in case.at_most
    ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'bert/autocast'")
    parser.add_argument("--bytes-only", action="store_true", help="no times, for a machine that others use too")
    parser.add_argument("--no-peaks", action="store_true", help="saved bytes and times alone")
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=BUDGET_SECONDS, help="start no case after")
    parser.add_argument("--out", type=Path, help="folder for recipes.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    todo = [case for case in cases() if re.search(options.only or "", case.id)]
    out = options.out
    if out is None and not (options.only or options.bytes_only or options.no_peaks):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = grid.begin("recipes", device, DEFINITIONS, quick=False, not_run=[case.id for case in todo])
    for case, _, _ in grid.until(time.monotonic() + options.budget, todo):
        row = measure_case(case, transformers, timed=not options.bytes_only)
        grid.add(result, row, out)
        print(line(row), flush=True)
    if not (options.bytes_only or options.only):
        result["linear_over_eager_us"] = linear_over_eager_us()
        print(f"a linear layer: {result['linear_over_eager_us']} us over eager's")
    result["peaks"] = [] if options.no_peaks or options.only else [*peaks(transformers)]
    for row in result["peaks"]:
        print(f"peak of {row['id']}: {row['share']:.2f} of eager's (at most {row['at_most']})", flush=True)
    if out is not None:
        grid.write(result, out)
        print(f"\nwrote {out / 'recipes.json'}")
    return 0


def line(row: dict[str, Any]) -> str:
    eager, ours = row["eager"], row["recipes"]
    counts = ", ".join(f"{name} {ours[name] / 2**20:.2f}" for name in ("own", "hooks", "living"))
    copies = [subject["hooks"] - subject["of_weights"] for subject in (eager, ours)]
    took = f", {row['ratio']:.2f}x the time" if "ratio" in row else ""
    return (
        f"{row['id']}: {eager['hooks'] / 2**20:.2f} -> {counts} MiB, share {row['share']:.2f} (at most "
        f"{row['at_most']}), without copies of weights {copies[1] / copies[0]:.2f}{took}"
    )


def _subject(case: Case, hf: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(SEED)
    model, x = case.make(hf).train(), _INPUTS[case.inputs]()
    if case.dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast"):
            y: Any = model(**{case.inputs: x}) if hasattr(model, "config") else model(x)
        return getattr(y, "last_hidden_state", y)  # type: ignore[no-any-return]

    return model, run


def measure_case(case: Case, hf: Any, *, timed: bool) -> dict[str, Any]:
    """The JSON row of a case."""
    model, eager = _subject(case, hf)
    own = [*tensors_in(model), *_cells(eager)]

    def recipes() -> Tensor:
        with fl.save_once(model):
            return eager()

    row: dict[str, Any] = {"id": case.id, "model": case.model, "dtype": case.dtype}
    for name, run in (("eager", eager), ("recipes", recipes)):
        hooks, of_weights = _by_hooks(run, own)
        row[name] = {"hooks": hooks, "of_weights": of_weights, "living": _living(run, own)}
    row["recipes"]["own"] = count(recipes(), exclude=own).kept_bytes
    row |= {"share": round(row["recipes"]["hooks"] / row["eager"]["hooks"], 4), "at_most": case.at_most[case.dtype]}
    if timed:
        runs = {name: _step(model, run) for name, run in (("eager", eager), ("recipes", recipes))}
        times = measure.interleave(runs, torch.device("cpu"), seconds=3.0, min_rounds=7)
        row |= {name: {**row[name], **measure.summary(times[name], times["eager"])} for name in ("eager", "recipes")}
        row["ratio"] = row["recipes"]["ratio"]
    return row


def _cells(run: Callable[..., Any]) -> list[Tensor]:
    return [*tensors_in([cell.cell_contents for cell in run.__closure__ or ()])]


def _step(model: nn.Module, run: Callable[[], Tensor]) -> Callable[[], None]:
    def step() -> None:
        run().float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step


def linear_over_eager_us(count: int = 50) -> float:
    """What the two packs and unpacks of a linear layer cost the host."""
    linear, x = nn.Linear(64, 64), torch.randn(128, 64, requires_grad=True)

    def forward() -> Tensor:
        h = x
        for _ in range(count):
            h = linear(h)
        return h.sum()

    within = fl.save_once(linear)(forward)
    runs = {"eager": lambda: forward().backward(), "recipes": lambda: within().backward()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure.interleave(runs, torch.device("cpu"), seconds=4.0, min_rounds=7)
    finally:
        torch.set_num_threads(threads)
    return round(float(measure.summary(times["recipes"], times["eager"])["over_eager_us"]) / count, 1)


class _Holder:
    """What a node saves, while it does."""

    def __init__(self, tensor: Tensor, is_copy: bool) -> None:
        self.tensor, self.is_copy = tensor.detach(), is_copy


def _by_hooks(run: Callable[[], Tensor], own: list[Tensor]) -> tuple[int, int]:
    """The bytes of what hooks around it are handed, and of copies of weights among these."""
    holders: list[weakref.ref[_Holder]] = []

    def pack(tensor: Tensor) -> _Holder:
        holder = _Holder(tensor, _is_copy_of_weight(tensor))
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


def _living(run: Callable[[], Tensor], own: list[Tensor]) -> int:
    """The bytes that are alive after the forward pass, over those before, without the result's."""
    gc.collect()
    found, y = _tracked(run, own)
    return found - y.untyped_storage().nbytes()


def _tracked(run: Callable[[], Tensor], own: list[Tensor]) -> tuple[int, Tensor]:
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*own)
    with tracker:
        y = run()
        gc.collect()
        (device,) = tracker.get_tracker_snapshot("current").values()
    return int(device["Total"]) - sum(sizes_of(own).values()), y


def peaks(hf: Any) -> list[dict[str, Any]]:
    """The rows of the peaks."""
    rows = []
    for model, (make, limits) in _PEAKS.items():
        for dtype, at_most in limits.items():
            for is_checkpointed in (False, True):
                found = [_peak(make, hf, dtype, is_checkpointed, is_ours) for is_ours in (False, True)]
                rows.append({
                    "id": f"{model}/{dtype}{'/checkpointed' * is_checkpointed}", "eager_peak_bytes": found[0],
                    "recipes_peak_bytes": found[1], "share": round(found[1] / found[0], 4),
                    "at_most": at_most[is_checkpointed],
                })  # fmt: skip
    return rows


def _peak(make: Callable[[Any], nn.Module], hf: Any, dtype: str, is_checkpointed: bool, is_ours: bool) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.manual_seed(SEED)
    model: Any = make(hf).train()
    ids = torch.randint(0, 100, _PEAK_TOKENS)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    if is_ours:
        for module in model.modules():  # what a checkpoint recomputes enters a region again
            module.forward = fl.save_once(module)(module.forward)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker = MemTracker()
    tracker.track_external(model, ids)
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            y = model(input_ids=ids).last_hidden_state
        y.float().square().mean().backward()
    (device,) = tracker.get_tracker_snapshot("peak").values()
    own: int = 2 * sum(parameter.nbytes for parameter in model.parameters())
    peak: int = device["Total"]
    return peak - own
