"""Modules that spell an activation out save its output in a fused model; others run as they are."""

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes


class TanhGELU(nn.Module):
    """As BERT of Google's has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class Scaled(nn.Module):
    """Not folded: PyTorch keeps nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x + 1.0


class OverRows(nn.Module):
    """Not pointwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


@pytest.mark.parametrize(("act", "node"), [(TanhGELU(), "BiasActBackward"), (Scaled(), None), (OverRows(), None)])
def test_recognised(act: nn.Module, node: str | None) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), act, nn.Linear(256, 8)), torch.randn(32, 64)
    expected = model(x)
    fl.fuse(model, exact=False)
    y = model[1](model[0](x))
    assert (y.grad_fn.name() == "BiasActBackward") == (node is not None)
    torch.testing.assert_close(model(x), expected)
    if node is not None:
        assert saved_bytes(model, x, exclude=[x, *model.parameters()]) == y.nbytes
