"""``python -m bench dense``: eager, torch.compile and this library side by side on a dense layer with activation.

How is said in ``layers``. The layer behind it, for the bytes, is a Linear.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedlayers as fl

from . import layers, plot, reference, shapes
from .layers import OURS as OURS
from .layers import VARIANTS as VARIANTS

#: "At most this many times eager", forward+backward, per device kind: what the project has promised itself.
TARGETS = {
    "cpu": {
        ("gelu", "float32"): 0.9,
        ("relu", "float32"): 0.8,
        ("tanh", "float32"): 1.05,
        ("gelu", "bfloat16"): 1.5,
        ("relu", "bfloat16"): 1.05,
        ("tanh", "bfloat16"): 1.05,
    },
    "cuda": dict.fromkeys([(a, d) for a in ("gelu", "relu", "tanh") for d in shapes.DTYPES["cuda"]], 1.0),
}
OVERHEAD_TARGET_US = 15.0


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which of the promised numbers this run meets."""
    lines = []
    for row, variant in layers.rows_of(result):
        ours = variant.get("forward_backward")
        if ours is None:
            continue
        target = TARGETS[result["device"]["kind"]].get((row["activation"], row["dtype"]))
        if row["group"] == "acceptance" and target:
            verdict = "met" if ours["ratio"] <= target else "MISSED"
            lines.append(f"{row['id']}: {ours['ratio']:.2f}x eager, target {target}: {verdict}")
        elif row["group"] == "call_overhead":
            verdict = "met" if ours["over_eager_us"] <= OVERHEAD_TARGET_US else "MISSED"
            lines.append(
                f"{row['id']}: {ours['over_eager_us']:+.1f} us over eager, target {OVERHEAD_TARGET_US}: {verdict}"
            )
    return lines


def _build(case: shapes.Case, device: torch.device, quick: bool) -> layers.Work:
    tokens = case.shape.rows(device.type, quick)
    randn = partial(layers.randn, torch.Generator(device).manual_seed(0), case.dtype)
    width, hidden = case.shape.in_features, case.shape.hidden_features
    x = randn((tokens, width))
    w1, b1 = randn((hidden, width), scale=width**-0.5), randn((hidden,), scale=0.1)
    w2, b2 = randn((width, hidden), scale=hidden**-0.5), randn((width,), scale=0.1)
    layer = x, (w1, b1), randn((tokens, hidden), grad=False)
    block = x, (w1, b1, w2, b2), randn((tokens, width), grad=False)
    function = shapes.ACTIVATIONS[case.activation]
    return layers.Work(
        operands=(layer, block),
        eager=(partial(reference.dense_bias_act, function=function), partial(reference.mlp, function=function)),
        ours=(
            partial(fl.dense_bias_act, activation=case.activation),
            partial(_fused_mlp, activation=case.activation),
        ),
        sizes={"tokens": tokens, "in_features": width, "hidden_features": hidden},
        hidden_bytes=layer[2].nbytes,
    )


def _fused_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.linear(fl.dense_bias_act(x, w1, b1, activation), w2, b2)


SUBJECT = layers.Subject(
    name="dense",
    behind="a Linear",
    cases=shapes.cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=540,
    case_seconds=3.0,
    plot=plot.plot_dense,
)
run = partial(layers.run, SUBJECT)
