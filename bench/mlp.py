"""``python -m bench mlp``: MLP blocks, eager, by torch.compile and by this library, beside the bare matmuls.

How is said in ``layers``. The block is whole by itself: nothing comes behind it. The yardstick is ``matmuls``: the six
products of forward and backward, nine of a gated block, without bias or activation.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import fusedlayers as fl

from . import layers, plot, reference, shapes

MATMULS, RECOMPUTE = "matmuls", "recompute"
#: "At most this many times eager", forward+backward, per device kind, variant and dtype.
TARGETS: dict[str, dict[tuple[str, str], float]] = {
    "cpu": {(layers.OURS, "float32"): 1.05, (RECOMPUTE, "float32"): 1.5},
    "cuda": {(layers.OURS, dtype): 1.0 for dtype in shapes.DTYPES["cuda"]},
}
#: Hidden buffers that are kept.
KEPT = {(layers.OURS, False): 1, (layers.OURS, True): 2, (RECOMPUTE, False): 0, (RECOMPUTE, True): 0}


def acceptance(result: dict[str, Any]) -> list[str]:
    """Which of the promised numbers this run meets: bytes, and times against eager."""
    lines = []
    kind = result["device"]["kind"]
    for row in result["cases"]:
        for name in (layers.OURS, RECOMPUTE):
            variant = row["variants"].get(name, {})
            if "error" in variant:
                lines.append(f"{row['id']}: {name}: MISSED: {variant['error']}")
            if "saved_bytes" not in variant:
                continue
            buffers = variant["saved_bytes"] / row["hidden_bytes"]
            if buffers > KEPT[name, row["gated"]] * 1.01:
                lines.append(f"{row['id']}: {name} keeps {buffers:.2f} hidden buffers: MISSED")
            times = variant["forward_backward"]
            target = None if result["quick"] else TARGETS[kind].get((name, row["dtype"]))
            if target is not None:
                verdict = "met" if times["ratio"] <= target else "MISSED"
                lines.append(f"{row['id']}: {name} {times['ratio']:.2f}x eager, target {target}: {verdict}")
    return lines


def _build(case: shapes.BlockCase, device: torch.device, quick: bool) -> layers.Work:
    tokens = case.shape.rows(device.type, quick)
    randn = partial(layers.randn, torch.Generator(device).manual_seed(0), case.dtype)
    width, hidden = case.shape.in_features, case.shape.hidden_features
    x, dy = randn((tokens, width)), randn((tokens, width), grad=False)
    w2 = randn((width, hidden), scale=hidden**-0.5)
    w1, *others = (randn((hidden, width), scale=width**-0.5) for _ in range(1 + case.is_gated))
    activation, function = case.activation, shapes.ACTIVATIONS[case.activation]
    if case.is_gated:
        params: tuple[Tensor, ...] = (w1, *others, w2)
        eager = partial(_eager_gated, function=function)
        ours, recompute = (partial(_gated, activation=activation, save=save) for save in ("auto", "recompute"))
        matmuls = _NineMatmuls.apply
    else:
        b1, b2 = randn((hidden,), scale=0.1), randn((width,), scale=0.1)
        params = (w1, b1, w2, b2)
        eager = partial(reference.mlp, function=function)
        ours, recompute = (partial(fl.mlp, activation=activation, save=save) for save in ("auto", "recompute"))
        matmuls = _SixMatmuls.apply
    operands = x, params, dy
    return layers.Work(
        operands=(operands, operands),
        eager=(eager, eager),
        ours=(ours, ours),
        sizes={"tokens": tokens, "in_features": width, "hidden_features": hidden, "gated": case.is_gated},
        hidden_bytes=tokens * hidden * dy.element_size(),
        others={
            RECOMPUTE: (recompute, recompute),
            MATMULS: (matmuls, matmuls),
        },
        yardsticks=(MATMULS,),
    )


def _eager_gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, function: layers.Function) -> Tensor:
    y: Tensor = reference.gated_mlp(x, w_gate, None, w_up, None, w_down, None, function)
    return y


def _gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, activation: str, save: str) -> Tensor:
    return fl.gated_mlp(x, w_gate, None, w_up, None, w_down, None, activation, save=save)


class _SixMatmuls(Function):
    """What a block multiplies. Gradients of biases are zero, and cost nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h = x @ w1.t()
        ctx.save_for_backward(x, w1, w2, h)
        return h @ w2.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, w1, w2, h = ctx.saved_tensors
        dh = dy @ w2
        return dh @ w1, dh.t() @ x, None, dy.t() @ h, None


class _NineMatmuls(Function):
    """What a gated block multiplies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        gate, up = x @ w_gate.t(), x @ w_up.t()
        ctx.save_for_backward(x, w_gate, w_up, w_down, gate, up)
        return gate @ w_down.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        x, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        dh = dy @ w_down
        dx = dh @ w_gate
        return dx.addmm_(up, w_up), dh.t() @ x, up.t() @ x, dy.t() @ gate


SUBJECT = layers.Subject(
    name="mlp",
    behind=None,
    cases=shapes.block_cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=480,
    case_seconds=12.0,
    variants=(*layers.VARIANTS, RECOMPUTE, MATMULS),
    plot=plot.plot_mlp,
)
run = partial(layers.run, SUBJECT)
