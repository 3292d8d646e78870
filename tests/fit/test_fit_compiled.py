"""``fit_compiled``: budgets hold as measured in compiled code, and nothing of the model changes.

Partitioned graphs run as they were traced, but where a test says that Inductor compiles them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import _torch
from fusedlayers.fit import fit_compiled as subject
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.utils import step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def partitions_alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(step, "ROUNDS", 1)
    if "inductor" not in request.node.name:
        monkeypatch.setattr(subject, "inductor", _not_compiled)
    yield
    torch.compiler.reset()


def _not_compiled(*args: Any, **options: Any) -> Callable[..., Any]:
    return _torch.inductor(*args, **options | {"is_compiled": False})


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _model() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(_Residual(), _Residual()), torch.randn(128, 32)


def _gradients(call: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(x).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def _saved(compiled: Callable[..., Tensor], model: nn.Module, x: Tensor) -> int:
    _gradients(compiled, model, x)
    return saved_bytes(lambda: compiled(x).mean(), exclude=[*model.buffers(), x])


def test_budgets_hold() -> None:
    """Of more parts than the compiler compiles again: beyond its limit it runs what it was given as it is, and says so
    in a log alone."""
    model, x = _model()
    expected = _gradients(model, model, x)
    for fraction in (1.0, 0.5, 0.3):
        report = fl.fit_compiled(model, x, fraction=fraction)
        compiled = torch.compile(model, backend=report.backend)
        saved = _saved(compiled, model, x)
        assert saved == report.measured.bytes <= report.budget_bytes == int(fraction * report.as_it_is.bytes)
        assert saved > 0.7 * report.budget_bytes and (report.activation_memory_budget == 1) == (fraction == 1)
        for ours, theirs in zip(_gradients(compiled, model, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
        sizes = [found for _, found in sorted([*report.tried, (report.activation_memory_budget, saved)])]
        assert sizes == sorted(sizes)


def test_inductor() -> None:
    model, x = _model()
    report = fl.fit_compiled(model, x, memory_budget_bytes=200_000)
    assert _saved(torch.compile(model, backend=report.backend), model, x) == report.measured.bytes <= 200_000
    assert report.measured.time_ms is not None and report.as_it_is.bytes > 200_000


def test_inductor_at_the_peak() -> None:
    model, x = _model()
    report = fl.fit_compiled(model, x, fraction=0.8, of="peak")
    compiled = torch.compile(model, backend=report.backend)
    _gradients(compiled, model, x)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    peak = peak_bytes(lambda: compiled(x).mean().backward(), device="cpu")
    assert peak == pytest.approx(report.measured.bytes, rel=0.02) and report.measured.bytes <= report.budget_bytes


def test_the_options_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*args: Any, **options: Any) -> Callable[..., Any]:
        seen.append((options.get("mode"), options["options"]))
        return _not_compiled(*args, **options)

    monkeypatch.setattr(subject, "inductor", noted)
    model, x = _model()
    options: dict[str, Any] = {"options": {"epilogue_fusion": False}, "dynamic": False, "fullgraph": True}
    report = fl.fit_compiled(model, x, fraction=0.5, **options)
    torch.compile(model, backend=report.backend, **options)(x)
    assert len(seen) > 3 and all(given == (None, {"epilogue_fusion": False}) for given in seen)


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16))
    x = torch.randn(32, 16)
    model(x).sum().backward()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    copies = [grad.clone() for grad in gradients if grad is not None]
    state = torch.get_rng_state()
    stages: list[tuple[str, float]] = []
    fl.fit_compiled(model, {"input": x}, fraction=0.5, progress=lambda *stage: stages.append(stage))
    assert torch.equal(torch.get_rng_state(), state) and [part for _, part in stages] == [0.0, 0.2, 0.8]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for p, grad, values in zip(model.parameters(), gradients, copies, strict=True):
        assert p.grad is grad is not None and torch.equal(values, grad)
    assert "_compiled_call_impl" not in vars(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_hand(x: Tensor) -> Tensor:
    return x.sin()


class _Broken(nn.Module):
    """Its graph breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.last = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_by_hand(self.first(x)))  # type: ignore[no-any-return]


def test_graphs_that_break() -> None:
    model, x = _Broken(), torch.randn(64, 32)
    report = fl.fit_compiled(model, x, fraction=0.6)
    assert _saved(torch.compile(model, backend=report.backend), model, x) == report.measured.bytes
    assert report.measured.bytes <= report.budget_bytes
    kept = x.numel() * x.itemsize  # between the graphs
    with pytest.raises(
        ValueError, match=rf"fit_compiled: memory_budget_bytes=16 \(16 B\) cannot .* \({2 * kept} bytes, "
    ):
        fl.fit_compiled(model, x, memory_budget_bytes=16)


def test_the_report() -> None:
    model, x = _model()
    report = fl.fit_compiled(model, x, fraction=0.5)
    lines = str(report).splitlines()
    assert lines[0].startswith("Sequential, compiled: at most ") and lines[0].endswith(" saved for backward")
    assert sum("(chosen)" in line for line in lines) == 1 and len(lines) == len(report.tried) + 4
    assert json.loads(json.dumps(report.to_dict()))["measured"]["bytes"] == report.measured.bytes
