"""Users' modules without children, which backward runs again: ``fuse`` of one, and how often it runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipe_cases import NewGELU, Noisy, OwnFunction, Trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.recipes import region

WIDTH = 64


@pytest.fixture(autouse=True)
def small_values_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 6)


class Counted(NewGELU):
    """It notes each run; ``between`` is called in it."""

    def __init__(self, between: Callable[[Counted, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), 1.0
        self.runs: list[int] = []
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(threading.get_ident())
        if self.between is not None:
            x = self.between(self, x)
        return super().forward(x * self.scale) * torch.sigmoid(x + self.shift)


def between_layers(leaf: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), leaf, nn.Linear(WIDTH, WIDTH))


def gradients(model: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> list[Any]:
    torch.manual_seed(0)
    model.zero_grad()
    run(model, x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def same(model: nn.Module, x: Tensor, **options: Any) -> bool:
    """Whether the fused model's gradients are those of a copy of what it was."""
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    return all(map(torch.equal, gradients(model, x, **options), gradients(eager, x, **options)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, WIDTH)


def kept(model: nn.Module, x: Tensor) -> int:
    return saved_bytes(model, x, exclude=[model, x])


# --- how often, and on what -------------------------------------------------------------------------------------------


def test_a_backward_pass_runs_it_once_and_the_result_is_made_by_that_run(x: Tensor) -> None:
    leaf = Counted()
    model = between_layers(leaf)
    fl.fuse(model)
    assert kept(model, x) == x.nbytes  # what the first layer has made
    leaf.runs.clear()
    loss = model(x).square().mean()
    assert len(leaf.runs) == 1
    loss.backward(retain_graph=True)
    assert len(leaf.runs) == 2
    loss.backward()
    assert len(leaf.runs) == 3
    assert same(model, x)


def test_a_run_ends_behind_the_last_value_that_is_read(x: Tensor) -> None:
    ends: list[str] = []

    class Long(Counted):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            ends.append("reached")
            return y + 1  # saves nothing, and nobody reads it

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Long())
    fl.fuse(model)
    model(x).sum().backward()
    assert ends == ["reached"] and len(model[1].runs) == 2  # type: ignore[arg-type]


def test_the_peak_of_a_step_is_not_above_eagers(x: Tensor) -> None:
    x = torch.randn(512, WIDTH)
    model = nn.Sequential(*[between_layers(Trained()) for _ in range(4)])
    peaks = []
    for run in (lambda m: None, fl.fuse):
        run(model)
        gradients(model, x)
        peaks.append(peak_bytes(lambda: gradients(model, x)))
    assert peaks[1] <= 1.01 * peaks[0]


def test_the_result_of_a_function_of_a_users_is_not_saved(x: Tensor) -> None:
    model = between_layers(OwnFunction())
    before = kept(model, x)
    fl.fuse(model)
    assert kept(model, x) == before - x.nbytes and same(model, x)


def test_the_result_is_not_saved_where_the_leaf_saves_a_view_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (8,), eps=1e-3)

    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 10)  # more than the statistics take
    x = torch.randn(4, 8, 16)
    model = nn.Sequential(nn.Conv1d(8, 8, 1), Transpose(), Norm(), nn.Linear(8, 8))
    before = kept(model, x)
    fl.fuse(model)
    assert kept(model, x) == before - x.nbytes and same(model, x)


# --- what the second run finds ----------------------------------------------------------------------------------------


def test_attributes_are_as_they_were(x: Tensor) -> None:
    """Also those that the module, or others, have changed since."""

    def count(leaf: Counted, x: Tensor) -> Tensor:
        leaf.shift += 1
        return x * leaf.shift

    leaf = Counted(count)
    model = between_layers(leaf)
    eager = copy.deepcopy(model)
    fl.fuse(model)
    found = []
    for each in (model, eager):
        y = each(x) + each(2 * x)
        each[1].shift = -7.0
        each.eval()
        y.square().mean().backward()
        found.append([p.grad for p in each.parameters()])
        assert each[1].shift == -7.0 and not each.training
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("leaf", [Noisy(), Counted(lambda leaf, x: x + torch.rand_like(x))], ids=["buffer", "random"])
def test_modules_that_write_to_buffers_or_draw_numbers_run_once(leaf: nn.Module, x: Tensor) -> None:
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)
    if isinstance(leaf, Counted):
        leaf.runs.clear()
        gradients(model, x)
        assert len(leaf.runs) == 1


def test_modules_that_multiply_matrices_run_once(x: Tensor) -> None:
    class Attention(Counted):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.softmax(x @ x.mT, -1) @ x)

    leaf = Attention()
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)
    leaf.runs.clear()
    gradients(model, x)
    assert len(leaf.runs) == 1


def test_arguments_that_are_written_to_are_left_alone(x: Tensor) -> None:
    leaf = Counted(lambda leaf, x: x.mul_(2))
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m, x.requires_grad_(), use_reentrant=True),
    "twice": lambda m, x: m(m(x)),
    "views": lambda m, x: m(x.view(2, 16, WIDTH)[:, ::2]),
}


@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, x: Tensor) -> None:
    model = between_layers(Counted())
    fl.fuse(model)
    assert same(model, x, run=RUNS[run])


# --- what cannot be the same ------------------------------------------------------------------------------------------


def test_a_module_that_computes_something_else_is_named(x: Tensor) -> None:
    times = iter([1, 2])
    model = between_layers(Counted(lambda leaf, x: torch.cat([x] * next(times))))
    fl.fuse(model)
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match=r"Counted: backward ran this module again.*fl\.unfuse\(module\) leaves it"):
        loss.backward()


def test_a_parameter_that_is_written_to_is_an_error(x: Tensor) -> None:
    model = between_layers(Counted(lambda leaf, x: x + leaf.offset))
    leaf: Any = model[1]
    leaf.offset = nn.Parameter(torch.zeros(WIDTH))
    fl.fuse(model)
    loss = model(x).sum()
    with torch.no_grad():
        leaf.offset.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it belongs to a Counted"):
        loss.backward()


# --- layers by hand ---------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Layers by hand that read a norm's result, with a module of a user's as the activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), act
        self.last = fl.FusedConvAct2d(8, 8, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 8, -1, 16)
        return self.last(fl.bias_act(self.norm(self.conv(x)), None, self.act)).reshape(-1, WIDTH)  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: fl.FusedDenseAct(WIDTH, WIDTH, "gelu"),
    "block": lambda: fl.FusedMLP(WIDTH, 2 * WIDTH, activation="silu"),
    "gate": lambda: fl.FusedGatedMLP(WIDTH, 2 * WIDTH),
    "drop-in": fl.GELU,
    "spelled out": NewGELU,
    "trained": Trained,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "by hand, trained": lambda: ByHand(Trained()),
    "by hand": lambda: ByHand(NewGELU()),
    "container": lambda: fl.SublinearSequential(nn.Linear(WIDTH, WIDTH), NewGELU(), nn.Linear(WIDTH, WIDTH)),
    "inverted": lambda: fl.InvertibleSequential(fl.InvertibleLinear(WIDTH, WIDTH), fl.InvertibleLinear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("second", PARTS)
@pytest.mark.parametrize("first", PARTS)
def test_no_pair_of_parts_saves_more_after_fuse(first: str, second: str) -> None:
    x = torch.randn(64, WIDTH)
    model = nn.Sequential(PARTS[first](), PARTS[second](), nn.Linear(WIDTH, WIDTH))
    eager, before = copy.deepcopy(model), kept(model, x)
    fl.fuse(model)
    assert kept(model, x) <= before
    for ours, theirs in zip(gradients(model, x), gradients(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs)
