"""``python -m bench models``: whole models, as they are and after ``fl.fuse``.

Variants share one set of random weights: the model as it is; after ``fl.fuse(model)``; and, where a case says so, by
``torch.compile``. Models have few layers of their real widths, so that a step on a CPU takes some tenths of a second.
Bytes are the same in each run, a quick one too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl

from . import measure, zoo
from .grid import Benchmark
from .measure import Setting, Variant
from .zoo import of_transformers as hf

BASELINE, OURS, COMPILED = VARIANTS = ("eager", "fusedlayers", "compile")
DEFINITIONS = {
    "model": "random weights, training mode, PyTorch's attention, batch norms with weights of 1",
    "fusedlayers": "after fuse(model)",
    "compile": "torch.compile, as it is",
    "time": "microseconds of forward+backward by the wall clock: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included, over what lived before",
}
DTYPES = ("float32", "autocast")
#: By how much a GPU's batch is larger: with less its host has more to do than itself.
BATCH_ON_GPUS = 32


@dataclass(frozen=True)
class Case:
    """``input``: the shape of token ids or of an image; ``is_compiled``: whether the compiler is measured too."""

    model: str
    make: Callable[[], nn.Module]
    input: tuple[int, ...]
    is_compiled: bool = False
    dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower())}/{self.dtype}"


CASES = (
    Case("BERT-base", hf("Bert", num_hidden_layers=2, **zoo.NO_DROPOUT), (4, 128), is_compiled=True),
    Case("BERT-base with dropouts", hf("Bert", num_hidden_layers=2), (4, 128)),
    Case("ViT-B", hf("ViT", num_hidden_layers=2), (2, 3, 224, 224)),
    Case("GPT-2", hf("GPT2", n_layer=2, **zoo.GPT2), (4, 128)),
    Case("T5 encoder, base", hf("T5Encoder", **zoo.T5), (4, 128)),
    Case("Gemma 3, 1152 wide", hf("Gemma3Text", **zoo.GEMMA), (1, 512)),
    Case("Mistral, 1024 wide", hf("Mistral", **zoo.MISTRAL), (1, 512), is_compiled=True),
    Case("ConvNeXt-T", hf("ConvNext", depths=[1, 1, 3, 1]), (2, 3, 192, 192)),
    Case("EfficientNet-B0", hf("EfficientNet", image_size=160, **zoo.EFFICIENTNET), (8, 3, 160, 160), is_compiled=True),
    Case("ResNet-50", hf("ResNet"), (4, 3, 160, 160)),
    Case("MobileNetV3 blocks", zoo.mobile_net, (4, 3, 224, 224)),
    Case("diffusion UNet", zoo.UNet, (2, 3, 64, 64)),
)


def cases(kind: str) -> list[Case]:
    """The cases in both dtypes; on GPUs with larger batches, and without the compiler."""
    found = [replace(c, dtype=d, is_compiled=c.is_compiled and d == "float32") for c in CASES for d in DTYPES]
    if kind == "cpu":
        return found
    return [replace(c, input=(BATCH_ON_GPUS * c.input[0], *c.input[1:]), is_compiled=False) for c in found]


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    model, x = zoo.build(case.make, case.input, device=setting.device)
    makers = {
        name: partial(variant, name, model, x, is_autocast=case.dtype == "autocast")
        for name in VARIANTS
        if name != COMPILED or (case.is_compiled and not setting.quick)
    }
    # On GPUs by the wall clock: their own work is not all there is to wait for.
    is_cuda = setting.device.type == "cuda"
    found = measure.compare(makers, setting, min_rounds=7, max_rounds=60, warm_up=2, host=is_cuda)
    return {"id": case.id, "model": case.model, "dtype": case.dtype, "input": list(case.input), "variants": found}


def variant(name: str, model: nn.Module, x: Tensor, *, is_autocast: bool) -> Variant:
    """The model, or a twin, as a variant has it."""
    own = model if name == BASELINE else zoo.twin(model)
    if name == OURS:
        fl.fuse(own)
    call = measure.compiled(own) if name == COMPILED else own

    def forward() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=is_autocast):
            return zoo.first(call(x))

    def step() -> None:
        forward().float().square().mean().backward()
        own.zero_grad(set_to_none=True)

    return Variant({"forward_backward": step}, forward=forward, own=[own, x], step=step)


BENCHMARKS = {
    "models": Benchmark(
        "models",
        DEFINITIONS,
        cases,
        measure_case,
        budget_seconds=1500.0,
        case_seconds=30.0,
        packages=("transformers", "diffusers"),
    )
}
