"""``python -m bench parts``: eager, torch.compile and this library side by side on norms, gates and dropout.

How is said in ``layers``. The layer behind a part, for the bytes, is a Linear, or a convolution of one pixel. Eager's
LLaMA and Gemma are the plain operations of transformers. Both variants with a dropout begin with the same seed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl

from . import layers, shapes

TARGET = 1.03
EPS = 1e-6

#: The widths of known models; rows are tokens.
NORMS = (
    shapes.Shape("BERT-base", 768, 64, {"cpu": 4096, "cuda": 16 * 512}),
    shapes.Shape("ViT-B", 768, 64, {"cpu": 8 * 197, "cuda": 64 * 197}),
    shapes.Shape("LLaMA-7B", 4096, 64, {"cpu": 512, "cuda": 2 * 2048}),
)
#: What is hidden in their blocks.
HIDDEN = (
    shapes.Shape("BERT-base", 3072, 768, {"cpu": 1024, "cuda": 16 * 512}),
    shapes.Shape("LLaMA-7B", 11008, 512, {"cpu": 256, "cuda": 2 * 2048}),
)
#: Channels of images of 32 x 32, as in diffusion models; rows are images.
IMAGES = (shapes.Shape("diffusion", 256, 64, {"cpu": 8, "cuda": 64}),)
#: Eight experts; rows are tokens of each.
EXPERTS = (shapes.Shape("experts", 2816, 512, {"cpu": 64, "cuda": 1024}),)


def _llama(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


def _glu(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, -1)
    return F.silu(gate) * up


def _seeded(function: layers.Function) -> layers.Function:
    def call(*tensors: Tensor) -> Tensor:
        torch.manual_seed(0)
        return function(*tensors)

    return call


class Part(NamedTuple):
    """What is compared: eager's function and this library's, of one or two inputs and parameters."""

    shapes: Sequence[shapes.Shape]
    eager: layers.Function
    ours: layers.Function
    #: How wide the input is, in columns of the result; how many inputs and parameters there are.
    width: int = 1
    inputs: int = 1
    parameters: int = 0
    #: The product behind it, eager's and this library's.
    behind: tuple[layers.Function, layers.Function] = (F.linear, F.linear)
    #: The shape of an input and of the weight behind it, of rows, columns and outputs.
    of_input: Callable[[int, int], tuple[int, ...]] = lambda rows, columns: (rows, columns)
    of_weight: Callable[[int, int], tuple[int, ...]] = lambda columns, outside: (outside, columns)


_PRODUCT = (F.linear, fl.linear)
PARTS: dict[str, Part] = {
    "layer norm": Part(
        NORMS,
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: fl.layer_norm(x, w.shape, w, b, EPS),
        parameters=2,
    ),
    "rms norm": Part(
        NORMS, lambda x, w: F.rms_norm(x, w.shape, w, EPS), lambda x, w: fl.rms_norm(x, w.shape, w, EPS), parameters=1
    ),
    "llama's norm": Part(NORMS, _llama, lambda x, w: fl.rms_norm(x, w.shape, w, EPS, rounds_first=True), parameters=1),
    "gemma's norm": Part(NORMS, _gemma, lambda x, w: fl.rms_norm(x, w.shape, w, EPS, weight_offset=1.0), parameters=1),
    "group norm, silu": Part(
        IMAGES,
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b, EPS)),
        lambda x, w, b: fl.bias_act(fl.group_norm(x, 32, w, b, EPS), None, "silu", save="input"),
        parameters=2,
        behind=(F.conv2d, F.conv2d),
        of_input=lambda rows, columns: (rows, columns, 32, 32),
        of_weight=lambda columns, outside: (outside, columns, 1, 1),
    ),
    "silu gate": Part(
        HIDDEN, lambda gate, up: F.silu(gate) * up, lambda gate, up: fl.gated_act(gate, up), inputs=2, behind=_PRODUCT
    ),
    "packed silu gate": Part(HIDDEN, _glu, lambda packed: fl.gated_act(packed), width=2, behind=_PRODUCT),
    "silu gate, bmm": Part(
        EXPERTS,
        lambda gate, up: F.silu(gate) * up,
        lambda gate, up: fl.gated_act(gate, up),
        inputs=2,
        behind=(torch.bmm, fl.bmm),
        of_input=lambda rows, columns: (8, rows, columns),
        of_weight=lambda columns, outside: (8, columns, outside),
    ),
    "silu gate, dropout": Part(
        HIDDEN,
        _seeded(lambda gate, up: F.dropout(F.silu(gate) * up, 0.1)),
        _seeded(lambda gate, up: fl.dropout(fl.gated_act(gate, up), 0.1)),
        inputs=2,
        behind=_PRODUCT,
    ),
    "gelu, dropout": Part(
        HIDDEN, _seeded(lambda x: F.dropout(F.gelu(x), 0.1)), _seeded(lambda x: fl.dropout(fl.gelu(x), 0.1))
    ),
    "dropout": Part(HIDDEN, _seeded(lambda x: F.dropout(x, 0.1)), _seeded(lambda x: fl.dropout(x, 0.1))),
}


def cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[shapes.Case]:
    """The grid; what dense layers call an activation is here the part."""
    for dtype in dtypes or shapes.DTYPES[kind]:
        for name, part in PARTS.items():
            for shape in part.shapes:
                yield shapes.Case("model", shape, name, dtype)


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which parts take no longer than eager's."""
    lines = []
    for row, variant in layers.rows_of(result):
        ours = variant.get("forward_backward")
        if ours is not None:
            verdict = "met" if ours["ratio"] <= TARGET else "MISSED"
            lines.append(f"{row['id']}: {ours['ratio']:.2f}x eager, target {TARGET}: {verdict}")
    return lines


def _build(case: shapes.Case, device: torch.device, quick: bool) -> layers.Work:
    rows, columns, outside = case.shape.rows(device.type, quick), case.shape.in_features, case.shape.hidden_features
    part = PARTS[case.activation]
    randn = partial(layers.randn, torch.Generator(device).manual_seed(0), case.dtype)
    *leading, last = part.of_input(rows, columns)
    inputs = [randn((*leading, part.width * last)) for _ in range(part.inputs)]
    # As after some training: weights about 1, or 0 where 1 is added, and small biases.
    parameters = [randn((columns,), scale=0.2, grad=False) for _ in range(part.parameters)]
    if parameters and not case.activation.startswith("gemma"):
        parameters[0] = parameters[0] + 1
    parameters = [p.requires_grad_() for p in parameters]
    w2 = randn(part.of_weight(columns, outside), scale=columns**-0.5)

    def behind(function: layers.Function, product: layers.Function) -> layers.Function:
        return lambda *tensors: product(function(*tensors[:-1]), tensors[-1])

    with_product = behind(part.eager, part.behind[0]), behind(part.ours, part.behind[1])
    x, *others = inputs
    made, result = part.eager(*inputs, *parameters), with_product[0](*inputs, *parameters, w2)
    layer = x, (*others, *parameters), randn(tuple(made.shape), grad=False)
    block = x, (*others, *parameters, w2), randn(tuple(result.shape), grad=False)
    return layers.Work(
        operands=(layer, block),
        eager=(part.eager, with_product[0]),
        ours=(part.ours, with_product[1]),
        sizes={"rows": rows, "columns": columns, "input": list(x.shape)},
        hidden_bytes=layer[2].nbytes,
    )


SUBJECT = layers.Subject(
    name="parts",
    behind="a Linear",
    cases=cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=300,
    case_seconds=1.0,
)
run = partial(layers.run, SUBJECT)
