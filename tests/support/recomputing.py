"""How a recomputed sequence is compared with ``nn.Sequential``, to the bit: outputs, gradients, buffers, and random
numbers after it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes
from fusedlayers.recompute.child_costs import measure

MODES = ("all", "cheap", "nothing")
every_mode = pytest.mark.parametrize("recompute", MODES)


def outcome(net: Any, *inputs: Any, seed: int = 7) -> list[Any]:
    """Outputs, gradients of inputs and parameters, buffers, and the generator's state."""
    torch.manual_seed(seed)
    inputs = tuple(x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs)
    outputs = [leaf for leaf in tree_leaves(net(*inputs)) if isinstance(leaf, Tensor)]
    parameters = [p for p in net.parameters() if p.requires_grad] if isinstance(net, nn.Module) else []
    sources = [x for x in inputs if isinstance(x, Tensor)] + parameters
    loss = torch.stack([output.float().square().sum() for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    buffers = [buffer.clone() for buffer in net.buffers()] if isinstance(net, nn.Module) else []
    return [*outputs, *gradients, *buffers, torch.get_rng_state()]


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def twins(parts: Sequence[nn.Module], **options: Any) -> tuple[nn.Sequential, fl.SublinearSequential]:
    return nn.Sequential(*copy.deepcopy(list(parts))), fl.SublinearSequential(*copy.deepcopy(list(parts)), **options)


def block(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())


def blocks(count: int = 6) -> list[nn.Module]:
    return [block() for _ in range(count)]


def rows(width: int = 8) -> Tensor:
    return torch.randn(16, width)


def convolutions(count: int = 8, width: int = 8) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        for _ in range(count)
    ]


@functools.cache
def images() -> Tensor:
    return torch.randn(16, 8, 16, 16, generator=torch.Generator().manual_seed(1))


def saved_inside(net: nn.Sequential, x: Tensor) -> int:
    """Without its input and its output, which others hold."""
    plan = getattr(net, "plan", None)
    runs_once = plan is None or plan.segments[-1].recompute == "nothing"
    keeps_output = runs_once and measure(list(net), (x,))[-1].saves_output
    return saved_bytes(net, x, exclude=x) - (net(x).nbytes if keeps_output else 0)


class Counting(nn.Module):
    """Buffers that it replaces, writes to in place, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.ones((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        self.scale.mul_(0.5)
        return (x * self.scale.sum() * self.step).tanh()


class Checkpointed(nn.Sequential):
    """By torch's own checkpoint."""

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(super().forward, *inputs, use_reentrant=False)
