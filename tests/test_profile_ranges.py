"""What ``torch.profiler`` shows of fused computations: ranges with the activation's name, linked to backward."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fusedlayers as fl
from fusedlayers.utils import profile_ranges
from fusedlayers.utils.profile_ranges import profile_range


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


X, W, B, DOWN = _leaf(64, 32), _leaf(48, 32), _leaf(48), _leaf(32, 48)
IMAGE, KERNEL = _leaf(2, 4, 16, 16), _leaf(4, 4, 3, 3)


def _bent(z: Tensor) -> Tensor:
    return 2 * torch.tanh(z)


@functools.cache
def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 8))
    fl.fuse(model)
    return model


#: Name of a range -> a call that has it, and the node in it (None: PyTorch's, which has the activation's name itself).
CALLS: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "dense_gelu": (lambda: fl.dense_bias_act(X, W, B, "gelu"), "BiasAct"),
    "dense__bent": (lambda: fl.dense_bias_act(X, W, B, _bent, save="input"), "BiasAct"),
    "conv_silu": (lambda: fl.conv_bias_act(IMAGE, KERNEL, None, "silu"), "BiasAct"),
    "mish": (lambda: fl.bias_act(X, None, "mish"), "BiasAct"),
    "softsign": (lambda: fl.softsign(X), "BiasAct"),
    "gelu": (lambda: _model()(X), "BiasAct"),
    "elu": (lambda: fl.bias_act(X * 1, None, "elu", inplace=True), "BiasAct"),
    "silu_dropout": (lambda: fl.dense_bias_act(X, W, B, "silu", dropout=0.5), "ActDropout"),
    "mlp_gelu": (lambda: fl.mlp(X, W, B, DOWN, None, "gelu"), "MLP"),
    "gated_mlp_silu": (lambda: fl.gated_mlp(X, W, B, W, B, DOWN, None, "silu"), "MLP"),
}


def _events(call: Callable[[], object]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call()
    return list(found.events())


def _ranges(call: Callable[[], object]) -> set[str]:
    return {e.name.removeprefix("fusedlayers::") for e in _events(call) if e.name.startswith("fusedlayers::")}


@pytest.mark.parametrize("name", CALLS)
def test_ranges_have_the_activations_name_and_lead_to_the_backward_pass(name: str) -> None:
    call, node = CALLS[name]
    call().sum().backward()  # what is only done once has ranges of its own
    events = _events(lambda: call().sum().backward())
    within = [e for e in events if e.cpu_parent is not None and e.cpu_parent.name == f"fusedlayers::{name}"]
    (forward,) = (e for e in within if e.name == node)
    (backward,) = (e for e in events if e.name == f"{node}Backward" and e.sequence_nr == forward.sequence_nr)
    assert backward.time_range.start >= forward.time_range.end


@pytest.mark.parametrize("name", ["dense_gelu", "conv_silu", "mish", "mlp_gelu"])
def test_inference_has_ranges(name: str) -> None:
    with torch.no_grad():  # in which a block is its layers
        assert _ranges(CALLS[name][0]) == {name.replace("mlp", "dense")}


def test_what_is_left_to_pytorch_has_none() -> None:
    """Its operations have names."""
    calls: list[Callable[[], Tensor]] = [
        lambda: fl.dense_bias_act(X[:1], W, B, "gelu"),
        lambda: fl.dense_bias_act(X, W, B, nn.Softmax(-1)),
        lambda: fl.mlp(X[:1], W, B, DOWN, None),
        torch.compile(lambda: fl.dense_bias_act(X, W, B, "gelu"), backend="eager", fullgraph=True),
    ]
    for call in calls:
        call()
        assert _ranges(call) == set()


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_ranges, "RecordFunction", None)
    named = profile_range(None)(lambda x, y: x + y)  # type: ignore[arg-type]
    assert torch.equal(named(torch.ones(2), 1.0), torch.full((2,), 2.0))
    for call, _ in CALLS.values():
        call()


def test_a_range_ends_with_an_error() -> None:
    @profile_range(lambda x: "fails")
    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    def call() -> None:
        with pytest.raises(ArithmeticError):
            fails(X)
        torch.ones(2).exp()

    events = _events(call)
    assert "fusedlayers::fails" in {e.name for e in events}
    assert all(e.cpu_parent is None for e in events if e.name == "aten::exp")
