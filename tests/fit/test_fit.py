"""``fit``: budgets hold as measured, plans follow their costs, and training is that of the model as it was."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from bench import fit as bench
from bench.__main__ import main as bench_main
from fusedlayers.fit.blocks import Blocks, Cost, FitBlock, FitPlans
from fusedlayers.fit.training import Measurement, Training
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.recipes import patch
from fusedlayers.recipes.patch import patch_of, patches_of
from fusedlayers.recipes.save_once import enter_region
from fusedlayers.utils import step
from fusedlayers.utils.step import Step


@pytest.fixture(autouse=True)
def times_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "ROUNDS", 1)


# --- models -----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def _convolutions() -> nn.Module:
    stages = [nn.Sequential(*(Residual(width) for _ in range(2))) for width in (8, 16)]
    down = nn.Conv2d(8, 16, 3, 2, 1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), stages[0], down, stages[1], nn.Flatten(), nn.LazyLinear(4))


def _transformer(dropout: float = 0.1) -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 3), torch.randn(4, 64, 64)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": _transformer,
    "convolutions": lambda: (_convolutions(), torch.randn(8, 3, 32, 32)),
}


def _made(name: str) -> tuple[Any, Tensor]:
    model, x = MODELS[name]()
    with torch.no_grad():
        model(x[:2])
    return model.train(), x


def _bytes(model: nn.Module, x: Tensor, of: str) -> int:
    step = Step(model, (x,), {})
    if of == "saved":
        return saved_bytes(step.forward, exclude=[*model.buffers(), x])
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    found = peak_bytes(step.run, device="cpu")
    model.zero_grad()
    return found


def _patches(model: nn.Module) -> dict[str, bool]:
    found = {path: patch_of(module) for path, module in model.named_modules()}
    return {path: each.recompute for path, each in found.items() if each is not None}


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "fraction"), [("saved", 0.9), ("saved", 0.45), ("peak", 0.7)])
@pytest.mark.parametrize("name", MODELS)
def test_budgets_hold(name: str, of: Any, fraction: float) -> None:
    fraction += 0.15 * ((name, of) == ("convolutions", "peak"))  # the first block's backward pass takes more
    model, x = _made(name)
    _bytes(model, x, of)
    before, random_state = _bytes(model, x, of), torch.get_rng_state()
    report = fl.fit(model, x, fraction=fraction, of=of)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert report.eager is not None and report.eager.bytes == before
    assert report.measured.bytes <= report.budget_bytes == int(fraction * before)
    assert _bytes(model, x, of) == report.measured.bytes
    # Neighbours that are saved once share values, which is not predicted.
    assert 0.8 * report.predicted.bytes <= report.measured.bytes <= 1.02 * report.predicted.bytes
    assert set(report.recomputed) == {path for path, is_recomputed in _patches(model).items() if is_recomputed}
    fl.unfuse(model)
    assert _patches(model) == {} and _bytes(model, x, of) == before


def test_no_more_is_recomputed_than_the_budget_needs() -> None:
    """Blocks of this model are alike, and it takes more with one recomputed less."""
    model, x = _made("transformer")
    counts = []
    for fraction in (0.02, 0.3, 0.45, 0.9):
        with contextlib.suppress(ValueError):
            report = fl.fit(model, x, fraction=fraction)
            counts.append(len(report.recomputed))
            for layer in model.layers:
                block = patch_of(layer)
                if block.recompute:
                    block.recompute = False
                    _save_once(layer, True)
                    assert _bytes(model, x, "saved") > report.budget_bytes
                    block.recompute = True
                    _save_once(layer, False)
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0 < counts[0]


def _save_once(layer: nn.Module, saves_once: bool) -> None:
    for each in patches_of(layer):
        each.saves_once = saves_once


@pytest.mark.parametrize("of", ["saved", "peak"])
def test_recomputed_blocks_run_as_pytorchs_own_unless_the_peak_counts(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _made("transformer")
    least = fl.fit(model, x, fraction=1.0, of=of, plan_only=True).smallest.bytes
    recomputed = fl.fit(model, x, memory_budget_bytes=least, of=of).recomputed
    assert recomputed
    loss, entered = model(x).square().sum(), []
    monkeypatch.setattr(patch, "enter_region", lambda *given: entered.append(given) or enter_region(*given))
    loss.backward()
    assert len(entered) == (0 if of == "saved" else len(recomputed))


def test_a_budget_that_cannot_be_met_names_the_smallest() -> None:
    model, x = _made("transformer")
    fl.fuse(model)
    before = _patches(model)
    with pytest.raises(
        ValueError, match=r"fit: memory_budget_bytes='1KiB' \(1\.00 KiB\) cannot be met: as it is the model saves \d"
    ) as error:
        fl.fit(model, x, memory_budget_bytes="1KiB")
    assert _patches(model) == before != {}
    smallest, fraction = str(error.value).split("(")[2].split(")")[0].split(", fraction=")
    for budget in ({"memory_budget_bytes": int(smallest.split()[0])}, {"fraction": float(fraction)}):
        report = fl.fit(model, x, **budget)  # type: ignore[arg-type]
        assert report.measured.bytes == report.smallest.bytes
        assert report.saved_once == ()


@pytest.mark.parametrize("is_fused", [True, False])
def test_planning_changes_nothing(is_fused: bool) -> None:
    model, x = _made("convolutions")
    if is_fused:
        fl.fuse(model)
    before = _patches(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = fl.fit(model, x, fraction=0.45, plan_only=True)
    assert report.recomputed and report.measured.bytes <= report.budget_bytes
    assert _patches(model) == before and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_does_not_fit_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _made("transformer")
    sizes: list[int] = []

    def checked(self: Training) -> int:
        sizes.append(_bytes(model, x, "saved"))
        if sizes[-1] > 0.8 * as_it_is:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sizes[-1]

    as_it_is = _bytes(model, x, "saved")
    monkeypatch.setattr(Training, "bytes", checked)
    with pytest.raises(ValueError, match=r"fit: fraction=0\.5 of more memory than there is; pass memory_budget_bytes"):
        fl.fit(model, x, fraction=0.5)
    report = fl.fit(model, x, memory_budget_bytes=as_it_is // 2)
    assert (
        report.eager is None and report.measured.bytes <= as_it_is // 2 and "gradients were not compared" in str(report)
    )
    assert max(sizes) == as_it_is and "eager" not in str(report)
    with pytest.raises(ValueError, match=r"\(1\.00 KiB\) cannot be met: with every block recomputed it saves "):
        fl.fit(model, x, memory_budget_bytes=1024)


# --- plans ------------------------------------------------------------------------------------------------------------


def _plans(costs: list[Cost], of: Any) -> tuple[FitPlans, list[FitBlock]]:
    blocks = [FitBlock(str(i), nn.Identity(), 1, 0) for i in range(len(costs))]
    return FitPlans(dict(zip(blocks, costs, strict=True)), Measurement(1000, 100.0), of), blocks


def test_blocks_that_save_most_time_for_their_bytes_are_saved_once() -> None:
    plans, blocks = _plans([Cost(100, 5.0), Cost(50, 5.0), Cost(400, 30.0), Cost(-5, 0.1)], "saved")
    paths = [[block.path for block in blocks if block in plans.best(budget).saved] for budget in (995, 1095, 1600)]
    assert paths == [["3"], ["1", "3"], ["0", "1", "2", "3"]]
    assert plans.best(1600).found == Measurement(1545, 100 - 40.1)
    plans, blocks = _plans([Cost(100, 6.0), Cost(50, 5.0), Cost(50, 4.0)], "saved")
    assert plans.best(1100).saved == {*blocks[1:]}


@pytest.mark.parametrize("seed", range(20))
def test_predictions_are_corrected_by_measurements(seed: int) -> None:
    draw = random.Random(seed)
    plans, _ = _plans([Cost(draw.randint(50, 150), draw.uniform(1, 9)) for _ in range(8)], "saved")
    share = draw.uniform(0.6, 1.4)

    def bytes_with(saved: Any) -> int:
        (found,) = (plan.found.bytes for plan in (plans._plan(saved),))
        return 1000 + int(share * (found - 1000))

    for budget in range(1000, 2200, 50):
        plan, size = plans.within(budget, bytes_with)
        assert size == bytes_with(plan.saved) <= budget
        rest = [block for block in plans._costs if block not in plan.saved]
        assert budget < 1400 or len(rest) <= 1 or size > budget - 2 * 150 * share


# --- training ---------------------------------------------------------------------------------------------------------


def _losses(model: nn.Module, x: Tensor, autocast: bool, lr: float) -> list[float]:
    torch.manual_seed(7)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "autocast", "lr"),  # a rate at which none diverges, which magnifies rounding
    [("transformer", False, 0.005), ("transformer", True, 0.005), ("convolutions", False, 0.0005)],
)
def test_losses_are_those_of_the_model_as_it_was(name: str, autocast: bool, lr: float) -> None:
    model, x = _made(name)
    fitted = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = fl.fit(fitted, x, fraction=0.44)
    assert report.recomputed and report.measured.bytes <= report.budget_bytes
    again = copy.deepcopy(fitted)
    expected = pytest.approx(_losses(model, x, autocast, lr), rel=0.02 if autocast else 1e-4)
    assert _losses(fitted, x, autocast, lr) == expected == _losses(again, x, autocast, lr)
    assert fitted.state_dict().keys() == model.state_dict().keys()
    for (name, ours), theirs in zip(fitted.named_buffers(), model.buffers(), strict=True):  # each statistic, once
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled() -> None:
    model, x = _transformer(dropout=0.0)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fl.fit(model, x, fraction=0.3)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))
    torch._dynamo.reset()


def _distributed(rank: int, count: int) -> Any:
    step.ROUNDS = 1
    found: dict[str, Any] = {}
    model = nn.Sequential(*(nn.Sequential(*_mlp()) for _ in range(4)))
    x = torch.randn(256 * (1 + rank), 32)
    report = fl.fit(model, x, fraction=0.5)
    found["uneven"] = report.recomputed, report.budget_bytes, report.measured, _bytes(model, x, "saved")
    found["errors"] = []
    for wrong, size in ((nn.Sequential(*(nn.Sequential(*_mlp()) for _ in range(2 + rank))), 32), (model, 32 - rank)):
        try:
            fl.fit(wrong, torch.randn(256, size), fraction=0.5)
        except ValueError as error:
            found["errors"].append(str(error))
    return found


def test_distributed(tmp_path: Path) -> None:
    """All processes choose alike. (``test_second_runs.py`` trains what is fitted in PyTorch's engines.)"""
    results = processes.results(_distributed, 2, tmp_path)
    (choices, budget, measured, first), (*others, second) = (found["uneven"] for found in results)
    assert others[0] == choices and others[1] == budget and max(first, second) == measured.bytes <= budget
    different = "fit: the processes have different models; call it before the model is split"
    assert [found["errors"][0] for found in results] == [different] * 2
    assert results[0]["errors"][1].startswith("fit: another process has raised RuntimeError: ")
    assert results[1]["errors"][1].startswith("fit: the model does not run on these inputs")


# --- blocks -----------------------------------------------------------------------------------------------------------


def _paths(model: nn.Module, x: Tensor) -> list[str]:
    blocks = Blocks(model, "saved")
    blocks.find(Step(model, (x,), {}))
    return [block.path for block in blocks]


class Experts(nn.Module):
    """A block with as many results of its own as of the blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return self.experts[0](x) + self.experts[1](x)  # type: ignore[no-any-return]


def test_inner_blocks_count_where_they_compute_most() -> None:
    x = torch.randn(4, 3, 32, 32)
    assert _paths(_made("convolutions")[0], x) == ["1.0", "1.1", "3.0", "3.1"]
    assert _paths(nn.Sequential(Experts(), Experts()), torch.randn(8, 32)) == ["0", "1"]
    assert _paths(nn.Sequential(nn.Linear(2, 2), nn.GELU()), torch.randn(3, 2)) == []
    assert _paths(nn.Sequential(Experts(), nn.GELU()), torch.randn(8, 32)) == ["0.experts.0", "0.experts.1"]


class Shared(nn.Module):
    """Calls one block several times, and another one in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)  # type: ignore[assignment]
        return self.blocks[2](x)  # type: ignore[no-any-return]


def test_shared_and_checkpointed_blocks() -> None:
    model, x = Shared(), torch.randn(512, 64)
    report = fl.fit(model, x, fraction=0.5)
    assert report.measured.bytes <= report.budget_bytes and report.recomputed


class Cache(list[Tensor]):
    """What a block writes to, as the cache of keys and values."""


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CachingBlock(*_mlp()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class CachingBlock(nn.Sequential):
    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = super().forward(x)
        cache.append(y)
        return y.new_ones(len(cache)).sum() * torch.cat([*cache]).view(len(cache), *y.shape).sum(0)


@pytest.mark.parametrize("fraction", [0.9, 0.1])
def test_blocks_that_are_called_with_a_cache_are_saved_once(fraction: float) -> None:
    """Their recomputation would find what the first run has left in it."""
    model, x = Caching(), torch.randn(256, 32)
    because = "it is called with a Cache, which it may change (use_cache=False calls it without)"
    if fraction == 0.9:
        report = fl.fit(model, x, fraction=fraction)
        assert report.skipped == {because: ("blocks.0", "blocks.1")} and report.recomputed == ()
        assert f"blocks.0-1: {because}" in str(report)
        return
    with pytest.raises(ValueError, match=r"recomputed \(blocks\.0-1: it is called with a Cache, which it may change"):
        fl.fit(model, x, fraction=fraction)


def _mlp() -> list[nn.Module]:
    return [nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)]


class Dropping(nn.Sequential):
    """Draws from a generator that nobody resets."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * torch.from_numpy((np.random.rand(*x.shape) > 0.5).astype(np.float32))


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)  # type: ignore[no-any-return]


class Writing(nn.Module):
    """Writes over the input of its blocks, from which they would be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(32, 32), nn.ModuleList(Doubled(*_mlp()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x.add_(layer(x))
        return x


def test_recomputations_that_change_gradients_are_refused() -> None:
    model, x = nn.Sequential(*(Dropping(*_mlp()) for _ in range(3))), torch.randn(512, 32)
    with pytest.raises(ValueError, match=r"fit: gradients differ where blocks are recomputed, or from run to run"):
        fl.fit(model, x, fraction=0.1)
    assert _patches(model) == {}
    assert fl.fit(model, x, fraction=1.0).recomputed == ()


def test_recomputations_that_fail_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fit: the model does not run with its blocks recomputed: RuntimeError: "):
        fl.fit(Writing(), torch.randn(512, 32), fraction=0.5)


# --- what is refused, and what is said --------------------------------------------------------------------------------


def test_the_report() -> None:
    model, x = _made("transformer")
    stages: list[tuple[str, float]] = []
    report = fl.fit(model, x, fraction=0.3, progress=lambda stage, part: stages.append((stage, part)))
    parts = [part for _, part in stages]
    assert parts == sorted(parts) and parts[0] == 0.0 and parts[-1] == 1.0
    text = str(report)
    for words in ("TransformerEncoder: at most ", "eager PyTorch ", "this plan, measured ", "the smallest plan "):
        assert words in text
    assert json.loads(json.dumps(report.to_dict()))["measured"]["bytes"] == report.measured.bytes
    given = fl.fit(model, x, memory_budget_bytes="200MB", plan_only=True)
    assert str(given).startswith("TransformerEncoder: at most 191 MiB saved for backward\n")
    assert given.recomputed == ()


def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = bench.Case("small/float32", MODELS["transformer"], ("layers",))
    monkeypatch.setattr(bench, "CASES", (small,))
    assert bench_main(["fit", "--quick", "--out", str(tmp_path)]) == 0
    assert ": eager 100.0% 1.00x | checkpoint " in capsys.readouterr().out
    (case,) = json.loads((tmp_path / "fit.json").read_text())["cases"]
    (entry,) = case["budgets"]
    ours, theirs = (entry["variants"][name]["saved_bytes"] for name in ("fit", "checkpoint"))
    assert ours <= theirs <= 0.5 * case["saved_bytes"]
    assert entry["budget"] == pytest.approx(theirs / case["saved_bytes"], abs=1e-4)
    assert bench_main(["fit", "--only", "nothing"]) == 2
