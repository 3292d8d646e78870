"""What a ``SublinearSequential`` measures and plans is what it saves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from recomputing import block, blocks, convolutions, images, outcome, rows, same, saved_inside, twins
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import peak_bytes

# --- plans and what is measured ---------------------------------------------------------------------------------------


def _peak(net: nn.Module) -> int:
    """Of a forward and a backward pass, beside parameters and their gradients."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = lambda: net(images()).sum().backward()
    step()
    return peak_bytes(step, device="cpu")


@functools.cache
def _eager_excess() -> int:
    """What is allocated beside what is kept: gradients, and what operators take for themselves."""
    plain = nn.Sequential(*convolutions())
    return _peak(plain) - saved_inside(plain, images())


ASKED: list[dict[str, Any]] = [
    {},
    {"segments": 1},
    {"segments": 3},
    {"segments": 8},
    {"segments": 20},
    {"segments": [1, 4, 3]},
    {"segments": (2, 2, 4), "recompute": "cheap"},
    {"recompute": "all"},
    {"recompute": "cheap"},
    {"segments": 2, "recompute": "cheap"},
    {"memory_budget_bytes": 1_800_000, "recompute": "all"},
    {"memory_budget_bytes": 1_800_000, "recompute": "cheap"},
    {"memory_budget_bytes": 1_200_000},
    {"memory_budget_bytes": 1_600_000},
    {"memory_budget_bytes": 10**9},
]


@pytest.mark.parametrize("options", ASKED, ids=str)
def test_plans_keep_what_they_say(options: dict[str, Any]) -> None:
    parts = convolutions()
    plain, net = twins(parts, **options)
    same(outcome(net, images()), outcome(plain, images()))
    plan = net.plan
    assert plan is not None
    assert saved_inside(net, images()) == pytest.approx(plan.saved_bytes, rel=0.01)
    assert saved_inside(plain, images()) == pytest.approx(plan.eager_bytes, rel=0.01)
    # The gradients are there at some moment, which need not be the worst one of what is kept.
    assert plan.peak_bytes <= _peak(net) <= 1.05 * (plan.peak_bytes + _eager_excess())
    assert plan.saved_bytes <= plan.peak_bytes <= options.get("memory_budget_bytes", plan.eager_bytes)
    segments = options.get("segments")
    if isinstance(segments, int):
        assert len(plan.segments) == min(segments, 8)
    elif segments:
        assert [segment.stop - segment.start for segment in plan.segments] == list(segments)
    if options.get("memory_budget_bytes") == 10**9:
        assert plan.recomputed == 0
    mode = options.get("recompute")
    assert mode is None or {segment.recompute for segment in plan.segments} <= {mode, "nothing"}


def test_a_plan_is_made_anew_when_it_must_be() -> None:
    calls = []
    parts = blocks()
    parts[0].register_forward_pre_hook(lambda *_: calls.append(1))
    net: Any = fl.SublinearSequential(*parts)

    def runs(x: Tensor) -> bool:
        """Whether the children were run twice, once to be measured."""
        calls.clear()
        net(x)
        return len(calls) > 1

    assert runs(torch.randn(16, 8))
    assert not runs(torch.randn(16, 8)) and not runs(torch.randn(8, 8))
    assert runs(torch.randn(32, 8)) and not runs(torch.randn(16, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert runs(torch.randn(16, 8))
    net.segments = [3, 3]
    assert runs(torch.randn(16, 8))
    net.segments[0], net.segments[1] = 2, 4
    assert runs(torch.randn(16, 8)) and net.plan.segments[0].stop == 2
    net.recompute = "nothing"
    assert not runs(torch.randn(16, 8))
    net.recompute, net.segments = "cheap", 2
    assert runs(torch.randn(16, 8))
    for _ in range(3):  # another one may come to lie where it lay
        net[5] = block()
        assert runs(torch.randn(16, 8))


def test_a_tensor_that_a_child_has_kept_of_the_measuring_run() -> None:
    kept: list[Tensor] = []
    parts = blocks(3)
    parts[1].register_forward_hook(lambda module, inputs, y: kept.append(y))
    fl.SublinearSequential(*parts)(rows())
    with pytest.raises(RuntimeError, match=r"kept a tensor of the run in which .* once before the first step"):
        torch.stack(kept).sum().backward()


def test_the_measuring_run_leaves_all_as_it_was() -> None:
    parts = blocks()
    plain, net = twins(parts)
    x, leaf = rows(), rows().requires_grad_()
    torch.manual_seed(5)
    expected = plain(x)
    torch.manual_seed(5)
    found = net(x)
    same([found, torch.get_rng_state(), *net.buffers()], [expected, torch.get_rng_state(), *plain.buffers()])
    net(leaf)
    assert leaf.grad is None and all(parameter.grad is None for parameter in net.parameters())
