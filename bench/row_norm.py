"""``python -m bench row_norm``: eager, torch.compile and this library side by side on layer norms and RMS norms.

How is said in ``layers``. The layer behind a norm, for the bytes, is a Linear. Eager's LLaMA and Gemma are the plain
operations of transformers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl

from . import layers, shapes

TARGET = 1.03
EPS = 1e-6

#: The widths of known models; rows are tokens.
SHAPES = (
    shapes.Shape("BERT-base", 768, 64, {"cpu": 4096, "cuda": 16 * 512}),
    shapes.Shape("ViT-B", 768, 64, {"cpu": 8 * 197, "cuda": 64 * 197}),
    shapes.Shape("GPT-2 large", 1280, 64, {"cpu": 2048, "cuda": 8 * 1024}),
    shapes.Shape("LLaMA-7B", 4096, 64, {"cpu": 512, "cuda": 2 * 2048}),
)


def _llama(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


#: Eager's, and this library's; those with a bias first.
KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "layer": (
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: fl.layer_norm(x, w.shape, w, b, EPS),
    ),
    "rms": (lambda x, w: F.rms_norm(x, w.shape, w, EPS), lambda x, w: fl.rms_norm(x, w.shape, w, EPS)),
    "llama": (_llama, lambda x, w: fl.rms_norm(x, w.shape, w, EPS, rounds_first=True)),
    "gemma": (_gemma, lambda x, w: fl.rms_norm(x, w.shape, w, EPS, weight_offset=1.0)),
}


def cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[shapes.Case]:
    """The grid; what dense layers call an activation is here the kind of norm."""
    for dtype in dtypes or shapes.DTYPES[kind]:
        for shape in SHAPES:
            for norm in KINDS:
                yield shapes.Case("model", shape, norm, dtype)


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which norms take no longer than eager's."""
    lines = []
    for row, variant in layers.rows_of(result):
        ours = variant.get("forward_backward")
        if ours is not None:
            verdict = "met" if ours["ratio"] <= TARGET else "MISSED"
            lines.append(f"{row['id']}: {ours['ratio']:.2f}x eager, target {TARGET}: {verdict}")
    return lines


def _build(case: shapes.Case, device: torch.device, quick: bool) -> layers.Work:
    rows, columns, outside = case.shape.rows(device.type, quick), case.shape.in_features, case.shape.hidden_features
    randn = partial(layers.randn, torch.Generator(device).manual_seed(0), case.dtype)
    x, w2 = randn((rows, columns)), randn((outside, columns), scale=columns**-0.5)
    # As after some training: weights about 1, or 0 where 1 is added, and small biases.
    w = randn((columns,), scale=0.2, grad=False)
    parameters = [(w if case.activation == "gemma" else w + 1).requires_grad_()]
    if case.activation == "layer":
        parameters.append(randn((columns,), scale=0.2))
    eager, ours = KINDS[case.activation]

    def behind(norm: layers.Function) -> layers.Function:
        return lambda x, *parameters: F.linear(norm(x, *parameters[:-1]), parameters[-1])

    layer = x, tuple(parameters), randn((rows, columns), grad=False)
    block = x, (*parameters, w2), randn((rows, outside), grad=False)
    return layers.Work(
        operands=(layer, block),
        eager=(eager, behind(eager)),
        ours=(ours, behind(ours)),
        sizes={"rows": rows, "columns": columns},
        hidden_bytes=layer[2].nbytes,
    )


SUBJECT = layers.Subject(
    name="row_norm",
    behind="a Linear",
    cases=cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=200,
    case_seconds=1.0,
)
run = partial(layers.run, SUBJECT)
