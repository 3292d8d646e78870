"""``python -m bench models``: whole models, as they are and after ``fl.fuse``, in both of its modes.

Variants share one set of random weights: the model as it is; after ``fl.fuse(model, exact=True)``; after
``fl.fuse(model)``; and, where a case says so, by ``torch.compile``. Models have few layers of their real widths, so
that a step on a CPU takes some tenths of a second. Bytes are the same in each run; ``--bytes-only`` leaves times out.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.metadata
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure

BASELINE, EXACT, OURS, COMPILED = VARIANTS = ("eager", "exact", "fusedlayers", "compile")
DEFINITIONS = {
    "model": "random weights, training mode, PyTorch's attention, batch norms with weights of 1",
    "exact": "after fuse(model, exact=True)",
    "fusedlayers": "after fuse(model)",
    "compile": "torch.compile, as it is",
    "time": "microseconds of forward+backward by the wall clock: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included, over what lived before",
    "at_most": "the ratio that a variant is to have at most",
}
_CASE_SECONDS = {"cpu": 30.0, "cuda": 8.0}
_FEWEST_ROUNDS, _MOST_ROUNDS = 7, 60
BUDGET_SECONDS = {"cpu": 1500.0, "cuda": 280.0}
DTYPES = ("float32", "autocast")
#: By how much a GPU's batch is larger: with less its host has more to do than itself.
_BATCH_ON_GPUS = 32
SEED = 0


class InvertedResidual(nn.Module):
    """A block of MobileNetV3 (Howard et al. 2019): expansion, depthwise convolution, squeeze and excitation."""

    def __init__(self, channels: int, wide: int, kernel: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        depthwise = nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.Hardswish())
        squeezed = nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), *squeezed)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        return x + self.project(h * self.squeeze(h))  # type: ignore[no-any-return]


def mobile_net(hf: Any) -> nn.Module:
    blocks = [InvertedResidual(40, 240, 5), InvertedResidual(40, 120, 5)]
    later = [InvertedResidual(80, 480, 3), InvertedResidual(80, 480, 3), InvertedResidual(80, 480, 3)]
    down = nn.Conv2d(40, 80, 1, 2, bias=False), nn.BatchNorm2d(80)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 4, 1, bias=False), nn.BatchNorm2d(40), nn.Hardswish(), *blocks, *down, *later
    )


def unet(hf: Any) -> nn.Module:
    diffusers: Any = importlib.import_module("diffusers")  # here, because the other benchmarks run without it
    down, up = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=64, block_out_channels=(64, 128, 128), layers_per_block=1, down_block_types=down, up_block_types=up
    )
    return model


def _hf(name: str, **sizes: Any) -> Callable[[Any], nn.Module]:
    def make(hf: Any) -> nn.Module:
        model: nn.Module = getattr(hf, f"{name}Model")(getattr(hf, f"{name}Config")(**sizes))
        return model

    return make


@dataclass(frozen=True)
class Case:
    """``make`` is given transformers; ``input``: the shape of token ids or of an image; ``at_most``: the times of both
    modes beside eager's; ``is_compiled``: whether the compiler is measured too."""

    model: str
    make: Callable[[Any], nn.Module]
    input: tuple[int, ...]
    at_most: tuple[float, float]
    dtype: str = "float32"
    is_compiled: bool = False

    @property
    def id(self) -> str:
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower())}/{self.dtype}"


_TRANSFORMERS, _CONVOLUTIONS = (1.03, 1.06), (1.05, 1.10)
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MISTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 1000, "use_cache": False,
}  # fmt: skip
_EFFICIENTNET = {"image_size": 160, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
_MODELS = (
    Case("BERT-base", _hf("Bert", num_hidden_layers=2, **_NO_DROPOUT), (4, 128), _TRANSFORMERS, is_compiled=True),
    Case("BERT-base with dropouts", _hf("Bert", num_hidden_layers=2), (4, 128), _TRANSFORMERS),
    Case("ViT-B", _hf("ViT", num_hidden_layers=2), (2, 3, 224, 224), _TRANSFORMERS),
    Case("Mistral, 1024 wide", _hf("Mistral", **_MISTRAL), (1, 512), _TRANSFORMERS, is_compiled=True),
    Case("ConvNeXt-T", _hf("ConvNext", depths=[1, 1, 3, 1]), (2, 3, 192, 192), _TRANSFORMERS),
    Case("EfficientNet-B0", _hf("EfficientNet", **_EFFICIENTNET), (8, 3, 160, 160), _CONVOLUTIONS, is_compiled=True),
    Case("ResNet-50", _hf("ResNet"), (4, 3, 160, 160), _CONVOLUTIONS),
    Case("MobileNetV3 blocks", mobile_net, (4, 3, 224, 224), _CONVOLUTIONS),
    Case("diffusion UNet", unet, (2, 3, 64, 64), _CONVOLUTIONS),
)
#: What ``gpu-check`` measures.
ON_GPUS = ("BERT-base", "Mistral, 1024 wide", "ConvNeXt-T", "EfficientNet-B0")


def cases(kind: str) -> list[Case]:
    """Those for a CPU, or for a GPU."""
    found = [
        Case(c.model, c.make, c.input, c.at_most, dtype, c.is_compiled and dtype == "float32")
        for c in _MODELS for dtype in DTYPES
    ]  # fmt: skip
    if kind != "cuda":
        return found
    return [
        Case(c.model, c.make, (_BATCH_ON_GPUS * c.input[0], *c.input[1:]), c.at_most, c.dtype)
        for c in found if c.model in ON_GPUS
    ]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'bert-base/autocast'")
    parser.add_argument("--bytes-only", action="store_true", help="no times, for a machine that others use too")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"start no case after ({BUDGET_SECONDS})")
    parser.add_argument("--out", type=Path, help="folder for models.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    todo = [case for case in cases(device.type) if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench models: no case matches --only {options.only!r}: {[c.id for c in cases(device.type)]}")
        return 2
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.bytes_only):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    run(todo, device, timed=not options.bytes_only, budget_seconds=options.budget, out=out)
    if out is not None:
        print(f"\nwrote {out / 'models.json'}")
    return 0


def run(
    todo: Iterable[Case],
    device: torch.device,
    *,
    timed: bool = True,
    budget_seconds: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/models.json`` after each."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    todo = list(todo)
    end = time.monotonic() + (BUDGET_SECONDS[device.type] if budget_seconds is None else budget_seconds)
    result = grid.begin("models", device, DEFINITIONS, quick=False, not_run=[case.id for case in todo])
    result["versions"]["transformers"] = importlib.metadata.version("transformers")
    if timed:
        machine.warn_if_busy(result)
    for case, _, _ in grid.until(end, todo):
        row = measure_case(case, device, timed=timed)
        grid.add(result, row, out)
        print(line(row), flush=True)
    return result


class Subject:
    """A model, and a step of it."""

    def __init__(self, case: Case, model: nn.Module, x: Tensor) -> None:
        self.model, self._x, self._is_autocast = model, x, case.dtype == "autocast"
        self.call: Callable[..., Any] = model

    def variant(self, name: str, case: Case) -> Subject:
        """Another one that shares the parameters."""
        if name == BASELINE:
            return self
        model = copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        found = Subject(case, model, self._x)
        if name == COMPILED:
            found.call = measure.compiled(model)
        else:
            fl.fuse(model, exact=name == EXACT)
        return found

    def forward(self) -> Tensor:
        more = (torch.ones(len(self._x), device=self._x.device),) if "UNet" in type(self.model).__name__ else ()
        with torch.autocast(self._x.device.type, torch.bfloat16, enabled=self._is_autocast):
            y = self.call(self._x, *more)
        return y if isinstance(y, Tensor) else y[0]

    def step(self) -> None:
        self.forward().float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)


def measure_case(case: Case, device: torch.device, *, timed: bool) -> dict[str, Any]:
    """The JSON row of a case."""
    import transformers as hf  # here, because the other benchmarks run without it

    torch.manual_seed(SEED)
    with device:
        model = case.make(hf).train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()  # to weights of 1, for which EfficientNet of transformers has N(0, .02)
        x = torch.randint(3, 100, case.input) if len(case.input) == 2 else torch.randn(case.input)
    eager = Subject(case, model, x)
    names = [name for name in VARIANTS if name != COMPILED or (case.is_compiled and timed)]
    subjects = {name: eager.variant(name, case) for name in names}
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    if timed:
        times = measure.interleave(
            {name: subject.step for name, subject in subjects.items()},
            device,
            seconds=_CASE_SECONDS[device.type],
            min_rounds=_FEWEST_ROUNDS,
            max_rounds=_MOST_ROUNDS,
            warm_up=2,
            host=device.type == "cuda",  # whose work is not all there is to wait for
        )
        for name, values in times.items():
            rows[name]["forward_backward"] = measure.summary(values, times[BASELINE])
    for name, subject in subjects.items():
        rows[name]["saved_bytes"] = saved_bytes(subject.forward, exclude=[subject.model, x])
        rows[name]["peak_bytes"] = peak_bytes(subject.step, device=device)
    return {
        "id": case.id, "model": case.model, "dtype": case.dtype, "input": list(case.input),
        "at_most": {OURS: case.at_most[0], EXACT: case.at_most[1]}, "variants": rows,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    cells = []
    eager = row["variants"][BASELINE]
    for name, found in row["variants"].items():
        shares = (f"{what} {found[f'{what}_bytes'] / eager[f'{what}_bytes']:.2f}" for what in ("saved", "peak"))
        timed = found.get("forward_backward")
        took = "" if timed is None else f"{timed['ratio']:.3f}x ({timed['ratio_q1']:.2f} to {timed['ratio_q3']:.2f}), "
        if name == BASELINE:
            took = "" if timed is None else f"{timed['median_us'] / 1e3:.0f} ms, "
        at_most = f" (at most {row['at_most'][name]})" if timed is not None and name in row["at_most"] else ""
        cells.append(f"{name} {took}{', '.join(shares)}{at_most}")
    return f"{row['id']:<28} {' | '.join(cells)}"
