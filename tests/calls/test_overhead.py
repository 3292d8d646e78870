"""What a call costs, counted in what does not depend on the machine: Python functions of the package entered."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from entering import entered
from torch import Tensor

import fusedlayers as fl


def _with(call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    tensors = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    return lambda x: call(x, *tensors)


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    return fl.mlp(x, w1, b1, w2, None, "gelu")


_conv = partial(fl.conv_bias_act, activation="gelu")
#: Name -> the call, the shape of its input, how many functions a forward call may enter, and in how many files.
CALLS: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], tuple[int, ...], int, int]] = {
    "dense_bias_act": (lambda: _with(fl.dense_bias_act, (256, 64), (256,)), (64, 64), 10, 5),
    "conv_bias_act": (lambda: _with(_conv, (16, 8, 3, 3), (16,)), (4, 8, 16, 16), 12, 7),
    "mlp": (lambda: _with(_mlp, (256, 64), (256,), (64, 256)), (64, 64), 16, 9),
    "bias_act": (lambda: _with(fl.bias_act, (256,)), (64, 256), 13, 7),  # two places: those of z and of the bias
    "dense layer": (lambda: fl.FusedDenseAct(64, 256, "gelu"), (64, 64), 11, 6),
    "dense layer, relu": (lambda: fl.FusedDenseAct(64, 256, "relu"), (64, 64), 11, 8),
    "conv layer, relu": (lambda: fl.FusedConvAct2d(8, 16, 3, activation="relu"), (4, 8, 16, 16), 15, 9),
    "GELU": (fl.GELU, (64, 256), 12, 7),
    "block": (lambda: fl.FusedMLP(64, 256, 64, "gelu", chunks=1), (64, 64), 22, 11),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_enters_few_functions(name: str) -> None:
    make, shape, limit, files = CALLS[name]
    layer, x = make(), torch.randn(shape, requires_grad=True)
    for _ in range(3):  # the first calls fill caches
        layer(x).sum().backward()
    names = entered(lambda: layer(x))
    count = len(names)
    assert 0 < count <= limit, f"{count} functions entered, {limit} allowed:\n" + "\n".join(names)
    assert len({entry.split(":")[0] for entry in names}) <= files
