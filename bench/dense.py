"""``python -m bench dense``: eager, torch.compile and this library side by side on a dense layer with activation.

How is said in ``layers``. The layer behind it, for the bytes, is a Linear.
"""

from functools import partial

import torch
from torch import Tensor

import fusedlayers as fl

from . import conv, layers, plot, reference, shapes
from .layers import OURS as OURS
from .layers import VARIANTS as VARIANTS

#: The two promises are those of convolutions.
acceptance = conv.acceptance


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
