"""How a recomputed sequence is compared with ``nn.Sequential``, to the bit: outputs, gradients, buffers, and random
numbers after it; and a naive implementation, which has the faults that tests look for."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.checkpoint.measurement import measure
from fusedlayers.memory import saved_bytes

Make = Callable[..., nn.Module]

MODES = ("all", "cheap", "nothing")
every_mode = pytest.mark.parametrize("recompute", MODES)
# torch's compiler uses deprecated parts of torch itself.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")


def outcome(net: Any, *inputs: Any, seed: int = 7) -> list[Any]:
    """Outputs, gradients of inputs and parameters, buffers, and the generators' states."""
    torch.manual_seed(seed)
    random.seed(seed)
    inputs = tuple(x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs)
    outputs = [leaf for leaf in tree_leaves(net(*inputs)) if isinstance(leaf, Tensor)]
    parameters = [p for p in net.parameters() if p.requires_grad] if isinstance(net, nn.Module) else []
    sources = [x for x in inputs if isinstance(x, Tensor)] + parameters
    loss = torch.stack([output.float().square().sum() for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    buffers = [buffer.clone() for buffer in net.buffers()] if isinstance(net, nn.Module) else []
    states = [torch.get_rng_state(), random.getstate()]
    return [*outputs, *gradients, *buffers, *states]


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
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))


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


# --- what was there before --------------------------------------------------------------------------------------------


class Recomputation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, replays: bool, x: Tensor) -> Tensor:
        ctx.run, ctx.state = run, torch.get_rng_state() if replays else None
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


class Naive(nn.Sequential):
    """Segments that a Function of autograd's runs again; momentums such that two updates of statistics are one."""

    rescales = replays = True

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        length = len(self) // int(math.sqrt(len(self)))
        self.segment_of = {name: k // length for k, name in enumerate(self._modules)}
        for module in self.modules() if self.rescales else ():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 1 - math.sqrt(1 - module.momentum)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        for _, items in groupby(self._modules.items(), key=lambda item: self.segment_of[item[0]]):
            x = Recomputation.apply(nn.Sequential(OrderedDict(items)), self.replays, x)  # type: ignore[arg-type]
        return x


class Unscaled(Naive):
    rescales = False


class Forgetful(Naive):
    replays = False


class Nested(nn.Sequential):
    def __init__(self, *modules: Any) -> None:
        super().__init__(*(nn.Sequential(module) for module in modules))


class Checkpointed(nn.Sequential):
    """By torch's own checkpoint."""

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(super().forward, *inputs, use_reentrant=False)


def regression(naive: Make) -> Callable[[Callable[[Make], None]], Callable[[], None]]:
    """A test that ``SublinearSequential`` passes, and something naive does not."""

    def of(check: Callable[[Make], None]) -> Callable[[], None]:
        def test() -> None:
            check(fl.SublinearSequential)
            torch.manual_seed(0)
            with pytest.raises((AssertionError, RuntimeError, TypeError, KeyError, ZeroDivisionError)):
                check(naive)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return of
