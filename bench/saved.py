"""``python -m bench saved``: the bytes that ``fl.fuse`` spares of whole models, by three counts, and peaks.

Each case is a small model with random weights, in float32, in bfloat16 and under autocast. What its forward pass saves
for the backward pass is counted in three ways, as it is and after ``fuse``, in both of its modes: by the objects that
are packed (``own``); by saved-tensor hooks around it, by storage (``hooks``); and by the storages that are alive after
the forward pass (``living``). Peaks are those of six layers of LLaMA and BERT, with and without transformers'
checkpoints. Times of larger models are ``bench models``.
"""

from __future__ import annotations

import argparse
import gc
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.recipes.counting import count
from fusedlayers.utils.storages import sizes_of, tensors_in

from . import RESULTS, grid, machine, measure

EXACT, OURS = MODES = ("exact", "fusedlayers")
DEFINITIONS = {
    "model": "random weights, training mode, no dropout but where it says so",
    "eager, exact, fusedlayers": "as it is, after fuse(model, exact=True), after fuse(model); without parameters, "
    "buffers, inputs",
    "own": "counted by what is packed", "hooks": "by saved-tensor hooks around it, each storage once",
    "living": "by the storages that are alive after the forward pass, without the result's",
    "of_weights": "bytes of 16-bit copies of weights among those of hooks",
    "share": "of eager's bytes, by hooks; at_most: what it is to be at most",
    "peak": "bytes at the worst moment of forward+backward, over parameters and their gradients",
    "linear_over_eager_us": "of a small linear layer in a fused model, forward+backward on one thread, a chain of 50",
}  # fmt: skip
DTYPES = ("float32", "bfloat16", "autocast")
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
    """``make`` takes transformers and makes the model; ``at_most``: of eager's bytes, by dtype, by default and for
    exact=True, where that is another number."""

    model: str
    make: Callable[[Any], nn.Module]
    inputs: str
    at_most: Mapping[str, float]
    at_most_exact: Mapping[str, float]
    dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower())}/{self.dtype}"


def _of(name: str, **sizes: Any) -> Callable[[Any], nn.Module]:
    return lambda hf: getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**sizes))


_EFFICIENTNET = {
    "image_size": 128,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "hidden_dim": 1280,
    "drop_connect_rate": 0.0,
}
_MISTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 100, "use_cache": False,
}  # fmt: skip
_QWEN = {**_LLAMA, "num_key_value_heads": 2, "head_dim": 64}


def _case(
    model: str, make: Callable[[Any], nn.Module], inputs: str, limits: tuple[float, ...], exact: tuple[float, ...] = ()
) -> Case:
    at_most, at_most_exact = (dict(zip(DTYPES, shares, strict=True)) for shares in (limits, exact or limits))
    return Case(model, make, inputs, at_most, at_most_exact)


_MODELS = (
    _case("BERT", _of("Bert", **_BERT, **_NO_DROPOUT), "input_ids", (0.67, 0.67, 0.57)),
    _case("BERT with dropouts", _of("Bert", **_BERT), "input_ids", (0.68, 0.70, 0.70), (0.70, 0.70, 0.70)),
    _case("LLaMA", _of("Llama", **_LLAMA), "input_ids", (0.57, 0.62, 0.47)),
    _case("Mistral, 1024 wide", _of("Mistral", **_MISTRAL), "tokens", (0.54, 0.49, 0.46), (0.57, 0.62, 0.47)),
    _case("Qwen 3", _of("Qwen3", **_QWEN), "input_ids", (0.55, 0.52, 0.49), (0.55, 0.62, 0.49)),
    _case("EfficientNet-B0", _of("EfficientNet", **_EFFICIENTNET), "pixel_values", (0.45, 0.45, 0.41)),
    _case("MobileNetV2", _of("MobileNetV2"), "pixel_values", (0.73, 0.73, 0.68)),
    _case("ConvNeXt", _of("ConvNext", depths=[1, 1, 2, 1]), "pixel_values", (0.58, 0.58, 0.46)),
    _case("ResNet-50", _of("ResNet"), "pixel_values", (0.83, 0.83, 0.48)),
    _case("diffusion blocks", lambda hf: Diffusion(), "features", (0.31, 0.31, 0.31)),
    _case("convolution, batch norm, SiLU", lambda hf: Blocks(), "planes", (0.37, 0.37, 0.40)),
    _case("segmentation UNet", lambda hf: Segmentation(), "pixel_values", (0.60, 0.60, 0.60)),
)
_INPUTS: dict[str, Callable[[], Tensor]] = {
    "input_ids": lambda: torch.randint(0, 100, (2, 256)),
    "tokens": lambda: torch.randint(0, 100, (1, 1024)),
    "pixel_values": lambda: torch.randn(2, 3, 128, 128),
    "features": lambda: torch.randn(2, 64, 16, 16),
    "planes": lambda: torch.randn(4, 32, 24, 24),
}
_SIX = {"num_hidden_layers": 6}
#: Of the peaks: 8 sequences of 512 tokens; by dtype, without and with checkpoints, by default and for exact=True.
_PEAKS = {
    "LLaMA": (
        _of("Llama", **{**_LLAMA, **_SIX}),
        {"float32": ((0.65, 0.82), (0.65, 0.97)), "autocast": ((0.55, 0.90), (0.55, 0.93))},
    ),
    "BERT": (
        _of("Bert", **{**_BERT, **_SIX}, **_NO_DROPOUT),
        {"float32": ((0.72, 1.0), (0.72, 0.98)), "autocast": ((0.70, 1.0), (0.70, 0.98))},
    ),
}
_PEAK_TOKENS = (8, 512)


def cases() -> list[Case]:
    return [replace(case, dtype=dtype) for case in _MODELS for dtype in DTYPES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'bert/autocast'")
    parser.add_argument("--no-peaks", action="store_true", help="saved bytes alone")
    parser.add_argument("--out", type=Path, help="folder for saved.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    device = torch.device("cpu")
    todo = [case for case in cases() if re.search(options.only or "", case.id)]
    out = options.out
    if out is None and not (options.only or options.no_peaks):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    result = grid.begin("saved", device, DEFINITIONS, quick=False, not_run=[case.id for case in todo])
    for case in todo:
        row = measure_case(case, transformers)
        grid.add(result, row, out)
        print(line(row), flush=True)
    if not options.only:
        result["linear_over_eager_us"] = linear_over_eager_us()
        print(f"a linear layer: {result['linear_over_eager_us']} us over eager's")
    result["peaks"] = [] if options.no_peaks or options.only else [*peaks(transformers)]
    for row in result["peaks"]:
        shares = ", ".join(f"{mode} {row['share'][mode]:.2f} (at most {row['at_most'][mode]})" for mode in MODES)
        print(f"peak of {row['id']}, of eager's: {shares}", flush=True)
    if out is not None:
        grid.write(result, out)
        print(f"\nwrote {out / 'saved.json'}")
    return 0


def line(row: dict[str, Any]) -> str:
    cells = []
    for mode in MODES:
        found = row[mode]
        counts = ", ".join(f"{name} {found[name] / 2**20:.2f}" for name in ("own", "hooks", "living"))
        cells.append(f"{mode} {counts} MiB, share {row['share'][mode]:.2f} (at most {row['at_most'][mode]})")
    return f"{row['id']}: {row['eager']['hooks'] / 2**20:.2f} MiB; {'; '.join(cells)}"


def _subject(case: Case, hf: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(SEED)
    model, x = case.make(hf).train(), _INPUTS[case.inputs]()
    if case.dtype == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast"):
            y: Any = model(x)
        return getattr(y, "last_hidden_state", y)  # type: ignore[no-any-return]

    return model, run


def measure_case(case: Case, hf: Any) -> dict[str, Any]:
    """The JSON row of a case."""
    model, run = _subject(case, hf)
    own = [*tensors_in(model), *_cells(run)]
    row: dict[str, Any] = {"id": case.id, "model": case.model, "dtype": case.dtype}
    for mode in ("eager", *MODES):
        if mode in MODES:
            fl.fuse(model, exact=mode == EXACT)
        hooks, of_weights = _by_hooks(run, own)
        row[mode] = {"hooks": hooks, "of_weights": of_weights, "living": _living(run, own)}
        if mode in MODES:
            row[mode]["own"] = count(run(), exclude=own).kept_bytes
    row["share"] = {mode: round(row[mode]["hooks"] / row["eager"]["hooks"], 4) for mode in MODES}
    row["at_most"] = {EXACT: case.at_most_exact[case.dtype], OURS: case.at_most[case.dtype]}
    return row


def _cells(run: Callable[..., Any]) -> list[Tensor]:
    return [*tensors_in([cell.cell_contents for cell in run.__closure__ or ()])]


def linear_over_eager_us(count: int = 50) -> float:
    """What the two packs and unpacks of a linear layer cost the host."""
    x = torch.randn(128, 64, requires_grad=True)
    eager, fused = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))) for _ in range(2))
    fl.fuse(fused)
    runs = {"eager": lambda: eager(x).sum().backward(), "fused": lambda: fused(x).sum().backward()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = measure.interleave(runs, torch.device("cpu"), seconds=4.0, min_rounds=7)
    finally:
        torch.set_num_threads(threads)
    return round(float(measure.summary(times["fused"], times["eager"])["over_eager_us"]) / count, 1)


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
                found = {mode: _peak(make, hf, dtype, is_checkpointed, mode) for mode in ("eager", *MODES)}
                rows.append({
                    "id": f"{model}/{dtype}{'/checkpointed' * is_checkpointed}", "peak_bytes": found,
                    "share": {mode: round(found[mode] / found["eager"], 4) for mode in MODES},
                    "at_most": {OURS: at_most[0][is_checkpointed], EXACT: at_most[1][is_checkpointed]},
                })  # fmt: skip
    return rows


def _peak(make: Callable[[Any], nn.Module], hf: Any, dtype: str, is_checkpointed: bool, mode: str) -> int:
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.manual_seed(SEED)
    model: Any = make(hf).train()
    ids = torch.randint(0, 100, _PEAK_TOKENS)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    if mode in MODES:
        fl.fuse(model, exact=mode == EXACT)
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
