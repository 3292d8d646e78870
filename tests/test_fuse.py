"""``fuse``: what it finds, what that frees, and that a model computes and trains as it did, whatever its code does."""

import copy
import dataclasses
import functools
import inspect
import io
import itertools
import pickle
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.backends import cpu
from fusedlayers.fusion import operations, region, timing
from fusedlayers.fusion.fuse import Fusing
from fusedlayers.fusion.one_call import ONE_CALLS
from fusedlayers.fusion.operations import activation_of
from fusedlayers.fusion.region import Region, region_of
from fusedlayers.fusion.report import FuseReport, Replaced, path_text
from fusedlayers.memory import saved_bytes
from fusedlayers.profiling import model_explanation
from fusedlayers.utils import progress
from fusedlayers.utils.formatting import merged_path

ROWS, IN, HIDDEN = 64, 32, 128
EPS = torch.finfo(torch.float32).eps
HIDDEN_BYTES = 4 * ROWS * HIDDEN


@pytest.fixture(autouse=True)
def small_norms_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sizes, "LAYER_NORM_BYTES", 1 << 10)
    monkeypatch.setattr(sizes, "GROUP_NORM_BYTES", 1 << 10)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


class MLP(nn.Module):
    def __init__(self, act: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(IN, HIDDEN), nn.GELU() if act is None else act
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(x))))


class Functional(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), self.drop.p, self.training))


class Gated(nn.Module):
    """With a gate whose halves are layers of their own, or one layer that makes both."""

    def __init__(self, act: Any = F.silu, *, packed: bool = False, up_first: bool = False) -> None:
        super().__init__()
        self.act, self.packed, self.up_first = act, packed, up_first
        self.gate = nn.Linear(IN, 2 * HIDDEN if packed else HIDDEN)
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, -1) if self.packed else (self.gate(x), self.up(x))
        if self.up_first:
            gate, up = up, gate
        return self.down(self.act(gate) * up)


class ByName(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(input=self.up(x)))


class GatedByName(Gated):
    def forward(self, x: Tensor) -> Tensor:
        product = torch.mul(F.silu(self.gate(x)), other=self.up(x))
        return F.linear(bias=self.down.bias, weight=self.down.weight, input=product)


class MatmulByName(Gated):
    def forward(self, x: Tensor) -> Tensor:
        product = torch.mul(other=self.up(x), input=F.silu(self.gate(x)))
        return torch.matmul(input=product, other=self.down.weight.t())


class HalvedByGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, 2 * HIDDEN), nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.glu(self.up(x), dim=-1))


class RMSNorm(nn.Module):
    """As transformers spells it out for LLaMA, and with ``gemma`` for Gemma."""

    def __init__(self, width: int, *, gemma: bool = False) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.gemma = nn.Parameter(torch.rand(width)), 1e-5, gemma

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).to(dtype) if self.gemma else self.weight * x.to(dtype)


class QuickGELU(nn.Module):
    scale = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


def _in_front(act: nn.Module) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(8), act)


_ROW_BYTES, _IMAGE_BYTES = 4 * ROWS * IN, 4 * 8 * 8 * 16 * 16


class Snake(nn.Module):
    """As audio models write it, with a trainable number for each channel: of rows, or of images by ``dims`` of 2."""

    def __init__(self, channels: int, dims: int = 0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1, channels, *dims * (1,)) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        flat = x.reshape(shape[0], shape[1], *shape[2:])
        return (flat + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * flat).pow(2)).reshape(shape)


class DynamicTanh(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha, self.weight = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.rand(channels) + 0.5)
        self.bias = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias


#: A module, what is found in it, and how many bytes that frees at least.
FOUND: dict[str, tuple[Callable[[], nn.Module], dict[str, set[str]], int]] = {
    "module": (MLP, {"1.act": {"gelu"}}, HIDDEN_BYTES),
    "function": (Functional, {"1": {"gelu"}}, HIDDEN_BYTES),
    "dropout": (lambda: MLP(dropout=0.1), {"1.act": {"gelu"}, "1.drop": {"dropout"}}, 2 * HIDDEN_BYTES),
    "relu and dropout": (lambda: MLP(nn.ReLU(), 0.1), {"1.act": {"relu"}, "1.drop": {"dropout"}}, 2 * HIDDEN_BYTES),
    "functional dropout": (lambda: Functional(dropout=0.1), {"1": {"gelu", "dropout"}}, 2 * HIDDEN_BYTES),
    "gate": (Gated, {"1": {"gate"}, "1.down": {"product"}}, 2 * HIDDEN_BYTES),
    "gate of gelu": (lambda: Gated(F.gelu), {"1": {"gate"}, "1.down": {"product"}}, 2 * HIDDEN_BYTES),
    "by name": (ByName, {"1": {"gelu"}}, HIDDEN_BYTES),
    "gate by name": (GatedByName, {"1": {"gate", "product"}}, 2 * HIDDEN_BYTES),
    "matmul by name": (MatmulByName, {"1": {"gate", "product"}}, 2 * HIDDEN_BYTES),
    "packed gate": (lambda: Gated(packed=True), {"1": {"gate"}, "1.down": {"product"}}, 2 * HIDDEN_BYTES),
    "packed, up first": (
        lambda: Gated(packed=True, up_first=True),
        {"1": {"gate"}, "1.down": {"product"}},
        2 * HIDDEN_BYTES,
    ),
    "GLU": (HalvedByGLU, {"1.down": {"product"}}, HIDDEN_BYTES),
    "spelled activation": (lambda: MLP(QuickGELU()), {"1.act": set()}, 2 * HIDDEN_BYTES),
    "Snake of rows": (lambda: Snake(IN), {"1": set()}, 3 * _ROW_BYTES - 1024),
    "Snake of images": (lambda: Snake(8, 2), {"1": set()}, 3 * _IMAGE_BYTES - 1024),
    "dynamic tanh": (lambda: DynamicTanh(IN), {"1": set()}, _ROW_BYTES - 1024),
    "layer norm": (lambda: nn.LayerNorm(IN), {"1": {"layer_norm"}}, _ROW_BYTES),
    "RMS norm": (lambda: nn.RMSNorm(IN), {"1": {"rms_norm"}}, _ROW_BYTES),
    "LLaMA's norm": (lambda: RMSNorm(IN), {"1": set()}, 2 * _ROW_BYTES - 1024),
    "Gemma's norm": (lambda: RMSNorm(IN, gemma=True), {"1": set()}, 2 * _ROW_BYTES - 1024),
    "group norm": (lambda: nn.GroupNorm(4, 8), {"1": {"group_norm"}}, _IMAGE_BYTES - 1024),
    "batch norm": (
        lambda: _in_front(nn.SiLU()),
        {"1.0": {"batch_norm"}, "1.1": {"silu"}},
        2 * _IMAGE_BYTES - 1024,
    ),
    "batch norm, in place": (
        lambda: _in_front(nn.SiLU(inplace=True)),
        {"1.0": {"batch_norm"}, "1.1": {"silu"}},
        2 * _IMAGE_BYTES - 1024,
    ),
    "batch norm alone": (lambda: _in_front(nn.ReLU()), {}, 0),
    "convolution": (nn.SiLU, {"1": {"silu"}}, _IMAGE_BYTES),
}
_OF_IMAGES = {"Snake of images", "group norm", "batch norm", "batch norm, in place", "batch norm alone", "convolution"}
found = pytest.mark.parametrize(
    ("make", "is_image", "kinds", "freed"),
    [(make, name in _OF_IMAGES, kinds, freed) for name, (make, kinds, freed) in FOUND.items()],
    ids=FOUND,
)


def _model(make: Callable[[], nn.Module], is_image: bool) -> tuple[nn.Module, Tensor]:
    """The module, and layers before and after it that save what they are given; and an input."""
    if is_image:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), make(), nn.Conv2d(8, 2, 1)), torch.randn(8, 3, 16, 16)
    return nn.Sequential(nn.Linear(IN, IN), make(), nn.Linear(IN, 2)), torch.randn(ROWS, IN)


def _step(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(2)
    dy = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    leaves = [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)


def _same(model: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """Each result errs at most twice as much as eager's, or a few units, or what the branch bit costs."""
    exact = copy.deepcopy(eager).double()
    exact_x = x.detach().double().requires_grad_(x.requires_grad)
    for ours, theirs, wanted in zip(_step(model, x), _step(eager, x), _step(exact, exact_x), strict=True):
        scale = wanted.norm()
        error, eager_error = (ours.double() - wanted).norm(), (theirs.double() - wanted).norm()
        assert error <= 2 * eager_error + 4e-6 * scale + 1e-7


def _kinds(model: nn.Module) -> dict[str, set[str]]:
    regions = {path: region_of(module) for path, module in model.named_modules()}
    return {path: region.kinds for path, region in regions.items() if region is not None}


@found
def test_found(make: Any, is_image: bool, kinds: dict[str, set[str]], freed: int) -> None:
    """What is found, what it frees in all and place by place, and that results stay."""
    model, x = _model(make, is_image)
    eager = copy.deepcopy(model)
    before = _bytes(eager, x)
    report = fl.fuse(model, x)
    assert _kinds(model) == kinds
    assert report.saved_bytes == (before, _bytes(model, x))
    assert _bytes(model, x) <= before - freed
    assert all(place.saved_bytes is not None and place.saved_bytes > 0 for place in report.replaced)
    _same(model, eager, x)
    eager.load_state_dict(model.state_dict())
    _same(model.eval(), eager.eval(), x)


def _bytes(model: nn.Module, x: Tensor) -> int:
    return saved_bytes(lambda: model(x), exclude=[*model.buffers(), x])


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.37)


def test_what_a_first_call_makes_stays(x: Tensor) -> None:
    class MadeAtFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.first is None:
                self.first = nn.Linear(IN, HIDDEN)
            return F.gelu(self.first(x))

    model = nn.Sequential(MadeAtFirst(), nn.Linear(HIDDEN, 2))
    assert fl.fuse(model, x).replaced
    made = [*model.parameters()]
    model(x)
    assert len(made) == 4 and all(a is b for a, b in zip(model.parameters(), made, strict=True))


def test_code_that_is_tried_out_draws_no_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Noisy())
    state = torch.get_rng_state()
    fl.fuse(model)
    assert torch.equal(torch.get_rng_state(), state)


@found
def test_nothing_of_the_model_changes(make: Any, is_image: bool, kinds: Any, freed: int) -> None:
    model, x = _model(make, is_image)
    classes = {name: type(module) for name, module in model.named_modules()}
    keys, contents = [*model.state_dict()], {name: {*vars(module)} for name, module in model.named_modules()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    fl.fuse(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert [*model.state_dict()] == keys
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    fl.unfuse(model)
    assert {name: {*vars(module)} for name, module in model.named_modules()} == contents


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@found
def test_copies(make: Any, is_image: bool, kinds: Any, freed: int, how: str) -> None:
    """A copy has regions of its own, over its own parameters."""
    model, x = _model(make, is_image)
    fl.fuse(model, x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert _kinds(other) == kinds
    assert all(region_of(module) is None or region_of(module).module is module for module in other.modules())  # type: ignore[union-attr]
    assert _bytes(other, x) == _bytes(model, x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(x).any() and model(x).any()


def test_shallow_copies_are_their_own(x: Tensor) -> None:
    """``copy.copy`` and ``nn.DataParallel`` let copies share the attributes of a module."""
    model = Functional()
    fl.fuse(nn.Sequential(model), x)
    other = copy.copy(model)
    other.__dict__["_modules"] = {**model._modules, "up": nn.Linear(IN, HIDDEN)}
    expected = other.down(F.gelu(other.up(x)))
    assert torch.allclose(other(x), expected, atol=1e-6) and not torch.allclose(model(x), expected, atol=1e-6)
    replica = model._replicate_for_data_parallel()  # type: ignore[operator]
    replica._modules["up"], replica._modules["down"] = other.up, other.down
    assert torch.allclose(replica(x), expected, atol=1e-6)


def test_signatures_stay(x: Tensor) -> None:
    model = nn.Sequential(Functional())
    expected = inspect.signature(model[0].forward)
    fl.fuse(model, x)
    assert region_of(model[0]) is not None and inspect.signature(model[0].forward) == expected


def test_fused_places_are_marked(x: Tensor) -> None:
    model = nn.Sequential(MLP(dropout=0.1), MLP(QuickGELU()), nn.Linear(IN, 2))
    before = str(model)
    fl.fuse(model, x)
    assert "GELU(approximate='none', fused: gelu)" in str(model)
    assert "Dropout(p=0.1, inplace=False, fused: dropout)" in str(model)
    small = nn.Sequential(MLP(), nn.LayerNorm(IN), nn.Linear(IN, 2))
    fl.fuse(small, x[:2])
    assert f"LayerNorm({nn.LayerNorm(IN).extra_repr()}, fused for larger inputs: layer_norm)" in str(small)
    assert "QuickGELU(fused: quick_gelu)" in str(model)
    fl.unfuse(model)
    assert str(model) == before


class SmallAttention(nn.Module):
    """Several operations whose result is like their input, and no activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (nn.GELU(), "saves the output, whose zeros show what was dropped"),
        (nn.ReLU(), "saves the output, whose zeros show what was dropped"),
        (nn.ReLU6(), "saves one bit for each element"),  # an output of 6 does not show a factor
        (SmallAttention(), "saves one bit for each element"),
        (QuickGELU(), "saves one bit for each element, and none behind an activation"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_a_dropout_keeps_is_said(before: nn.Module, said: str, x: Tensor) -> None:
    report = fl.fuse(nn.Sequential(nn.Linear(IN, HIDDEN), before, nn.Dropout(0.1), nn.Linear(HIDDEN, IN)), x)
    assert {place.pattern: place.saves for place in report.replaced}["dropout"] == said


def test_a_recomputed_mlp_is_explained_once(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.Linear(IN, 2))
    fl.fuse(model, x, save="recompute")
    assert str(fl.explain(model)).count("recomputes the rest") == 1


def test_a_fused_model_can_be_asked(x: Tensor) -> None:
    model = nn.Sequential(MLP(dropout=0.1), MLP(dropout=0.1), fl.FusedDenseAct(IN, IN), RMSNorm(IN), nn.Linear(IN, 2))
    fl.fuse(model, x)
    explanation = fl.explain(model)
    assert str(explanation).splitlines() == [
        "Sequential:",
        "  0-1.act   gelu saves the output (last bit = side of minimum)",
        "  0-1.drop  dropout saves the output, whose zeros show what was dropped",
        "  2         FusedDenseAct: " + model[2].extra_repr(),  # type: ignore[operator]
        "  3         rms_norm saves the output, which determines the input",
        model_explanation.NORMS,
    ]
    assert explanation.to_dict()["name"] == "Sequential"
    assert str(fl.explain(model[0].act)).startswith("GELU:\n  the model  gelu saves the output")
    assert "nothing is fused. fusedlayers.fuse(model, inputs)" in str(fl.explain(nn.Sequential(nn.Linear(2, 2))))


# --- the report -------------------------------------------------------------------------------------------------------


def test_who_takes_the_report_for_the_model_is_told(x: Tensor) -> None:
    report = fl.fuse(nn.Sequential(nn.Linear(32, 64), nn.GELU()), x)
    with pytest.raises(TypeError, match="a FuseReport cannot be called: it is a report, and no model"):
        report(x)
    with pytest.raises(AttributeError, match="'FuseReport' object has no attribute 'parameters': it is a report"):
        report.parameters()
    with pytest.raises(AttributeError, match=r"no attribute 'place'$"):
        report.place  # noqa: B018


def test_report_as_values(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.ReLU(), nn.Linear(IN, 2))
    report = fl.fuse(model, x)
    (place,), (skipped,) = report.replaced, report.skipped
    assert (place.modules, place.pattern, place.activation) == (("0.act",), "activation", "gelu")
    assert place.saved_bytes == HIDDEN_BYTES
    assert (skipped.modules, skipped.activation, skipped.reason) == (
        ("1",),
        "relu",
        "PyTorch saves no more than the output",
    )
    before, after = report.saved_bytes or (0, 0)
    assert report.to_dict() == {
        "name": "Sequential",
        "replaced": [
            {
                "modules": ["0.act"],
                "pattern": "activation",
                "activation": "gelu",
                "saves": "saves the output (last bit = side of minimum)",
                "saved_bytes": HIDDEN_BYTES,
                "time_ms": None,
                "calls": 1,
            }
        ],
        "skipped": [
            {
                "modules": ["1"],
                "pattern": "activation",
                "activation": "relu",
                "reason": "PyTorch saves no more than the output",
            }
        ],
        "too_small": [],
        "idle": [],
        "saved_bytes": {"before": before, "after": after},
        "notes": [],
        "dry_run": False,
        "step_ms": {"before": None, "after": None},
    }
    assert before - after == HIDDEN_BYTES
    table = str(report)
    assert "1  gelu       0.act   32.0 KiB  saves the output (last bit = side of minimum)" in table
    assert "  relu: PyTorch saves no more than the output (module 1)" in table
    assert table.endswith("%); details: memory_report")


def test_calls_are_counted(x: Tensor) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x))
            return x

    report = fl.fuse(nn.Sequential(Loop(), Loop(), MLP()), x)
    assert [(place.modules, place.calls) for place in report.replaced] == [(("0", "1"), 8), (("2.act",), 1)]
    table = str(report)
    assert table.startswith("Sequential: 9 operations fused") and "\n    8  gelu       0-1 " in table


def test_what_would_not_be_fused_if_it_were_larger_does_not_wait_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SMALL_BYTES", 1 << 20)
    model = nn.Sequential(nn.Linear(IN, IN), nn.GELU(), nn.Linear(IN, 2)).double()
    report = fl.fuse(model, torch.randn(ROWS, IN, dtype=torch.float64))
    (skipped,) = report.skipped
    assert not report.too_small and skipped.reason == "float64 is computed by PyTorch"


def test_an_activation_in_a_gate_has_no_line_beside_the_gates(x: Tensor) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(IN, 64), nn.Linear(IN, 64), nn.Linear(64, IN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    report = fl.fuse(nn.Sequential(Gated()), x)
    assert [place.pattern for place in report.replaced] == ["gate", "product"] and not report.skipped


def test_repeated_blocks_are_one_line(x: Tensor) -> None:
    report = fl.fuse(nn.Sequential(MLP(), MLP(), nn.Linear(IN, 2)), x)
    (place,) = report.replaced
    assert place.modules == ("0.act", "1.act") and place.saved_bytes == 2 * HIDDEN_BYTES
    assert "2  gelu       0-1.act" in str(report)


def test_what_a_plan_leaves_to_pytorch_is_not_said_to_free_nothing(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "slow_because", lambda *_, **__: "there is no compiler")
    (skipped,) = fl.fuse(MLP(), x).skipped
    assert (skipped.activation, skipped.reason) == ("gelu", "there is no compiler")
    (skipped,) = fl.fuse(MLP().double(), x.double()).skipped
    assert skipped.reason == "float64 is computed by PyTorch"


def test_operations_on_data_are_listed() -> None:
    """Nothing is saved of them, unless another call needs a gradient. They do not keep an outer region out."""
    model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(512, 64)
    report = fl.fuse(model, x)
    (skipped,) = report.skipped
    assert (skipped.modules, skipped.pattern, skipped.reason) == (
        ("0",),
        "layer_norm",
        "its input needs no gradient; once it does, call fuse again",
    )
    assert region_of(model[0]) is None and len(report.replaced) == 1
    (skipped,) = fl.fuse(model, x.clone().requires_grad_()).skipped
    assert skipped.reason == "it would free 2.00 KiB, and PyTorch's takes less time on CPUs"
    assert not fl.fuse(model.requires_grad_(False), x).skipped  # a note says why nothing is saved


def test_modules_at_several_paths_are_listed_with_all() -> None:
    gelu = nn.GELU()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), gelu, nn.Linear(64, 64)) for _ in range(3)))
    report = fl.fuse(model, torch.randn(512, 64))
    (place,) = report.replaced
    assert place.modules == ("0.1", "1.1", "2.1") and place.saved_bytes == 3 * 512 * 64 * 4
    assert "3  gelu       0-2.1" in str(report) and "  0-2.1  gelu saves the output" in str(fl.explain(model))


class Aliased(nn.Module):
    """Its activation has three names, and is called by two. It holds itself, and exchanges a module that has run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)
        self.block, self.last = nn.Sequential(self.up, self.act), nn.Linear(64, 8)
        self.alias, self.once = self.act, nn.ReLU()
        self.down.parent = self

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.once(self.down(self.act(self.block(x)))))
        self.once = nn.ReLU()
        return y


def test_modules_by_several_names_in_a_model_that_holds_itself() -> None:
    report = fl.fuse(Aliased(), torch.randn(512, 64))
    (place,) = report.replaced
    assert place.modules == ("block.1", "act") and "block.1, act" in str(report)
    assert str(fl.fit(Aliased(), torch.randn(512, 64), fraction=1.0))


def test_an_activation_of_an_mlp_that_is_recomputed_is_fused_elsewhere(x: Tensor) -> None:
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(IN, IN), MLP(gelu), nn.Linear(IN, HIDDEN), gelu, nn.Linear(HIDDEN, 2))
    eager = copy.deepcopy(model)
    places = fl.fuse(model, x, save="recompute").replaced
    assert [(place.pattern, place.modules) for place in places] == [("mlp", ("1",)), ("activation", ("1.act", "3"))]
    _same(model, eager, x)


def test_a_model_that_is_an_mlp_is_recomputed(x: Tensor) -> None:
    model = MLP()
    eager = copy.deepcopy(model)
    (place,) = fl.fuse(model, x, save="recompute").replaced
    assert place.modules == ("",) and _bytes(model, x) == 0
    assert path_text(("", "me", "a.0", "a.1")) == "the model, me, a.0-1"
    _same(model, eager, x)


def test_rows_that_do_not_add_up_are_explained() -> None:
    def report(*freed: int) -> str:
        rows = tuple(Replaced((str(i),), "group_norm", None, "saves the output", n) for i, n in enumerate(freed))
        return str(FuseReport("Net", rows, (), saved_bytes=(300, 200)))

    assert "(frees: how much more" in report(1, 1)
    assert "(frees: how much more" in report(60, 60)
    assert "(frees" not in report(51, 51) + report(1)


def test_a_row_is_what_its_operation_frees_beside_those_that_stay_fused() -> None:
    """A group norm and an activation that keep one buffer: the activation frees nothing beside the norm, and is left;
    the norm would free next to nothing beside the activation."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 2, 1))
    report = fl.fuse(model, torch.randn(8, 3, 16, 16))
    (place,), (skipped,) = report.replaced, report.skipped
    before, after = report.saved_bytes or (0, 0)
    assert (place.pattern, skipped.activation) == ("group_norm", "silu")
    assert skipped.reason == "it frees nothing: its input is the output that the group_norm before it saves"
    assert place.saved_bytes == before - after > _IMAGE_BYTES / 2


def test_dry_run_changes_nothing(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.Linear(IN, 2))
    before = {name: {**vars(module)} for name, module in model.named_modules()}
    report = fl.fuse(model, x, dry_run=True)
    assert {name: {**vars(module)} for name, module in model.named_modules()} == before
    assert "1 operation would be fused" in str(report) and report.dry_run
    fused = fl.fuse(model, x)
    untimed = tuple(dataclasses.replace(place, time_ms=None) for place in report.replaced)
    assert fused.replaced == untimed and fused.saved_bytes == report.saved_bytes
    fl.fuse(model, x, dry_run=True)
    assert _kinds(model) == {"0.act": {"gelu"}}
    with pytest.raises(TypeError, match="fuse: dry_run must be True or False, got 'no'"):
        fl.fuse(model, x, dry_run="no")  # type: ignore[arg-type]


def test_dry_run_times_a_step(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that takes 50 ms where it is fused, by a clock that nothing else moves much."""
    model = nn.Sequential(MLP(), nn.Dropout(0.5), MLP(), nn.Linear(IN, 2))
    clock = itertools.count(0.0, 0.001)
    waited = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) + waited[0])

    def wait_if_fused(module: nn.Module, *_: Any) -> None:
        region = region_of(module)
        waited[0] += 0.05 if region is not None and region.kinds else 0

    model[0].act.register_forward_hook(wait_if_fused)
    random, gradients = torch.get_rng_state(), [p.grad for p in model.parameters()]
    report = fl.fuse(model, x, dry_run=True)
    assert torch.equal(torch.get_rng_state(), random) and gradients == [p.grad for p in model.parameters()]
    (place,) = [place for place in report.replaced if place.activation == "gelu"]
    assert report.step_ms is not None and place.time_ms is not None
    before, after = report.step_ms
    assert after - before > 25 and place.time_ms > 25
    assert f"+{place.time_ms:.2g} ms" in str(report) and f"{before:.3g} ms before, {after:.3g} ms then" in str(report)
    assert report.to_dict()["step_ms"] == {"before": before, "after": after}
    assert fl.fuse(model, x).step_ms is None and fl.fuse(model, dry_run=True).step_ms is None


def test_a_dry_run_of_what_cannot_be_timed(x: Tensor) -> None:
    class Raising(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            def refuse(gradient: Tensor) -> None:
                raise RuntimeError("no gradients here")

            x = x.clone()
            x.register_hook(refuse)
            return x

    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, IN), Raising())
    report = fl.fuse(model, x, dry_run=True)
    assert report.replaced and report.step_ms is None
    assert any("No step could be timed" in note for note in report.notes)


def test_fusing_twice_decides_anew(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.Linear(IN, 2))
    first, second = fl.fuse(model, x), fl.fuse(model, x)
    assert first.replaced == second.replaced and first.saved_bytes == second.saved_bytes
    assert not first.notes and "fused before" in second.notes[0]


def test_without_inputs(x: Tensor) -> None:
    """Modules are found whose class says what they compute; the report says that others are not."""
    model = nn.Sequential(MLP(dropout=0.1), Functional(), MLP(QuickGELU()), RMSNorm(IN), nn.ReLU6(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    report = fl.fuse(model)
    assert "Pass example inputs" in str(report) and report.saved_bytes is None
    assert re.search(r"\ncalls  operation  +module  +for the backward pass it\n", str(report))
    kinds = _kinds(model)
    assert kinds["0.act"] == {"gelu"} and kinds["0.drop"] == {"dropout"} and kinds["4"] == {"hardtanh"}
    assert "2.act" in kinds and "3" in kinds and "1" not in kinds and "5" not in kinds
    _same(model, eager, x.requires_grad_())


def test_small_examples_are_fused_for_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are left to PyTorch for their size are no reason to leave the place."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", HIDDEN_BYTES)
    model = nn.Sequential(MLP(dropout=0.1), Gated(), nn.Linear(IN, 2))
    report = fl.fuse(model, torch.randn(ROWS // 4, IN))
    assert not report.replaced and len(report.too_small) == 4
    assert all(place.reason.endswith("are left to PyTorch") for place in report.too_small)
    assert "\nfused for larger inputs:\n  " in str(report)
    x = torch.randn(ROWS, IN)
    fused = _bytes(model, x)
    fl.unfuse(model)
    assert fused <= _bytes(model, x) - 4 * HIDDEN_BYTES


def test_batch_norms_of_small_examples_are_fused_for_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", _IMAGE_BYTES)
    model, x = _model(lambda: _in_front(nn.SiLU()), True)
    report = fl.fuse(model, x[:4])
    (place,), (waiting,) = report.replaced, report.too_small
    assert (place.activation, waiting.pattern) == ("silu", "batch_norm")
    assert waiting.reason == "results of less than 64 KiB are left to PyTorch"
    assert "fused for larger inputs: batch_norm)" in str(model)
    fused = _bytes(model, x)
    assert fl.fuse(model, x).saved_bytes == (fused + 2 * _IMAGE_BYTES, fused)
    images = x.to(memory_format=torch.channels_last)
    assert fl.fuse(model, images).too_small[0].reason.startswith("results of less than 256 KiB")
    # Of larger inputs they would free nothing either: no output tells the input in 16 bits, or PyTorch activates.
    report = fl.fuse(copy.deepcopy(model).bfloat16(), x[:4].bfloat16())
    assert not report.too_small and "batch_norm: outputs of bfloat16 do not determine the input of silu" in str(report)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fl.fuse(model, x[:4]).too_small
    monkeypatch.setattr(cpu, "slow_because", lambda *_, **__: "there is no compiler")
    assert not fl.fuse(model, x[:4]).too_small


class SpelledOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.parametrize("is_module", [False, True])
def test_small_calls_beside_others_are_counted_apart(
    is_module: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the activations of embeddings in a U-Net are."""

    class Conditioned(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(act(self.up(x[:1]))) + self.down(act(self.up(x)))

    act = SpelledOut() if is_module else F.gelu
    monkeypatch.setattr(sizes, "SMALL_BYTES", HIDDEN_BYTES)
    model = Conditioned()
    model.act = act if is_module else None
    report = fl.fuse(model, x)
    ((fused,), (small,)) = report.replaced, report.too_small
    assert (fused.activation, fused.calls, small.activation) == (small.activation, 1, "silu" if is_module else "gelu")
    assert re.fullmatch(r"1 of 2 calls: results of less than \d+ KiB are left to PyTorch", small.reason)
    assert "1 operation fused on these inputs" in str(report)


def test_batch_norms_behind_which_is_dropped_are_said_to_free_nothing() -> None:
    model = nn.Sequential(
        nn.Linear(IN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.SiLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, IN)
    )
    report = fl.fuse(model, torch.randn(ROWS, IN))
    assert [(place.activation or place.pattern) for place in report.replaced] == ["silu", "dropout"]
    (norm,) = report.skipped
    assert norm.reason.endswith("or a dropout behind its activation drops some of what would tell it")


def test_small_inputs_meet_no_mode_if_the_example_was_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take time at each of torch's functions, for nothing."""

    class OfLists(Functional):
        def forward(self, inputs: Any, scale: Tensor) -> Tensor:
            return super().forward(inputs[0])

    monkeypatch.setattr(sizes, "SMALL_BYTES", HIDDEN_BYTES)
    begun: list[Any] = []
    begin = region.Interception
    monkeypatch.setattr(region, "Interception", lambda *args: begun.append(args) or begin(*args))
    x = torch.randn(ROWS, IN)

    def is_met(model: nn.Module, *args: Any) -> bool:
        begun.clear()
        model(*args)
        return len(begun) > 0

    model = nn.Sequential(Functional(), nn.Linear(IN, 2))
    fl.fuse(model, x[: ROWS // 4])
    for count, expected in ((ROWS // 8, False), (ROWS // 4, False), (ROWS // 2, True), (ROWS, True)):
        assert is_met(model, x[:count]) is expected, count
    # Of another shape, or dtype, as few bytes may make large results.
    assert is_met(model, x[: ROWS // 4].view(1, -1, IN)) and is_met(model.double(), x[: ROWS // 8].double())
    model = OfLists()
    fl.fuse(model, ([x[: ROWS // 4]], torch.ones(())))
    assert is_met(model, [x[: ROWS // 4]], torch.ones(()))  # of tensors in a list the sizes are not known


def test_what_frees_nothing_is_left(x: Tensor) -> None:
    """No region where PyTorch keeps as little: relu; an activation whose input is kept anyway; a model that needs no
    gradients."""

    class Residual(MLP):
        def forward(self, x: Tensor) -> Tensor:
            z = self.up(x)
            return self.down(F.silu(z)) + self.down(z)

    for model in (
        nn.Sequential(MLP(nn.ReLU()), nn.Linear(IN, 2)),
        nn.Sequential(Residual(), nn.Linear(IN, 2)),
        nn.Sequential(MLP(), nn.Linear(IN, 2)).requires_grad_(False),
    ):
        contents = {name: {*vars(module)} for name, module in model.named_modules()}
        report = fl.fuse(model, x)
        assert not report.replaced and {name: {*vars(m)} for name, m in model.named_modules()} == contents


# --- the user's code runs ---------------------------------------------------------------------------------------------


STATE = {"double": False}


def _helped(x: Tensor) -> Tensor:
    return x * 2 if STATE["double"] else x


class Decides(MLP):
    """What its code asks for decides what it computes."""

    clamp = False

    def __init__(self, act: Any = None) -> None:
        super().__init__(act)
        self.options, self.calls = {"k": 0}, 0

    @property
    def scale(self) -> int:
        return 1 + self.options["k"]

    def count(self) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        x = _helped(x) * self.scale
        if self.clamp or self.drop.p > 0.5 or not self.up.weight.requires_grad or torch.is_autocast_enabled("cpu"):
            x = x.clamp(-0.1, 0.1)
        return super().forward(x)


CHANGES: dict[str, Callable[[Decides, pytest.MonkeyPatch], object]] = {
    "global": lambda m, patch: patch.setitem(STATE, "double", True),
    "attribute of an attribute": lambda m, patch: m.options.__setitem__("k", 1),
    "class attribute": lambda m, patch: patch.setattr(Decides, "clamp", True),
    "part": lambda m, patch: setattr(m.drop, "p", 0.9) or m.drop.eval(),
    "frozen": lambda m, patch: m.up.weight.requires_grad_(False),
    "method of the class": lambda m, patch: patch.setattr(Decides, "forward", lambda self, x: MLP.forward(self, x) * 2),
    "forward of a layer's class": lambda m, patch: patch.setattr(
        nn.Linear, "forward", lambda self, x: 2 * F.linear(x, self.weight, self.bias)
    ),
    "forward of the activation's class": lambda m, patch: patch.setattr(nn.GELU, "forward", lambda self, x: x * 2),
    "torch's function": lambda m, patch: patch.setattr(F, "gelu", lambda x, **_: torch.sin(x)),
    "activation": lambda m, patch: setattr(m, "act", nn.Tanh()),
    "forward of the instance": lambda m, patch: setattr(m, "forward", lambda x: x + 1),
    "hook": lambda m, patch: m.act.register_forward_hook(lambda *a: a[-1] + 1),
    "nothing": lambda m, patch: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_after_fuse_counts(x: Tensor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = nn.Sequential(Decides(), nn.Linear(IN, 2)), nn.Sequential(Decides(), nn.Linear(IN, 2))
    eager.load_state_dict(model.state_dict())
    fl.fuse(model, x)
    for changed in (model, eager):
        CHANGES[name](changed[0], monkeypatch)  # type: ignore[arg-type]
    calls = model[0].calls
    _same(model, eager, x)
    assert model[0].calls == calls + (name not in ("forward of the instance", "method of the class"))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), eager(x), rtol=0.02, atol=0.02)


def test_patches_stay_when_unfused(x: Tensor) -> None:
    model = nn.Sequential(Functional(), nn.Linear(IN, 2))
    own = lambda x: model[0].down(F.gelu(model[0].up(x))) + 1
    model[0].forward = own
    expected = model(x)
    fl.fuse(model, x)
    torch.testing.assert_close(model(x), expected)
    assert region_of(model[0]) is not None
    fl.unfuse(model)
    assert model[0].forward is own


@pytest.mark.parametrize("limits", [(0.0, 0.37), (-1.0, 6.0)])
def test_attributes_of_relu6(x: Tensor, limits: tuple[float, float]) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), nn.ReLU6(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, 4 * x)
    model.insert(2, fl.ReLU6())
    eager.insert(2, nn.ReLU6())
    for module in (model[1], model[2], eager[1], eager[2]):
        module.min_val, module.max_val = limits
    other = fl.FusedDenseAct.from_modules(model[0], model[2])  # type: ignore[arg-type]
    torch.testing.assert_close(model(4 * x), eager(4 * x))
    torch.testing.assert_close(other(4 * x), eager[1](eager[0](4 * x)))


class Spelled(MLP):
    def __init__(self, act: nn.Module, norm: nn.Module) -> None:
        super().__init__(act)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


SPELLED: dict[str, Callable[[Spelled, pytest.MonkeyPatch], object]] = {
    "eps": lambda m, patch: setattr(m.norm, "variance_epsilon", 0.5),
    "code": lambda m, patch: patch.setattr(RMSNorm, "forward", lambda self, x: self.weight * x),
    "weight": lambda m, patch: setattr(m.norm, "weight", nn.Parameter(torch.linspace(1.0, 2.0, IN))),
    "class attribute": lambda m, patch: patch.setattr(QuickGELU, "scale", 0.5),
    "shadowed": lambda m, patch: setattr(m.act, "scale", 0.5),
    "activation": lambda m, patch: patch.setattr(QuickGELU, "forward", lambda self, x: x.sin()),
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_a_spelled_module_reads_may_change(x: Tensor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Spelled(QuickGELU(), RMSNorm(IN)), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert set(_kinds(model)) == {"0.norm", "0.act"}
    for changed in (model, eager):
        torch.manual_seed(0)
        SPELLED[name](changed[0], monkeypatch)  # type: ignore[arg-type]
    _same(model, eager, x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gemma", [True, False])
def test_spelled_norms_in_16_bits(dtype: torch.dtype, gemma: bool) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), RMSNorm(IN, gemma=gemma), nn.Linear(IN, 2)).to(dtype)
    eager, x = copy.deepcopy(model), torch.randn(ROWS, IN, dtype=dtype)
    fl.fuse(model, x)
    assert set(_kinds(model)) == {"1"}
    assert torch.equal(model(x), eager(x))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


def _norm(x: Tensor, of: Tensor | None = None, dim: int = -1) -> Tensor:
    return x * torch.rsqrt((x if of is None else of).pow(2).mean(dim, keepdim=True) + 1e-5)


def _counted(self: Any, x: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return self.weight * _norm(x)


def _hooked(self: Any, x: Tensor) -> Tensor:
    y = self.weight * _norm(x)
    y.register_hook(lambda g: 0.5 * g)
    return y


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return self.weight * x * scale


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.weight * _norm(x, dim=0),
        lambda self, x: self.weight * _norm(x, dim=1),
        lambda self, x: self.weight * _norm(x, of=x.detach()),
        lambda self, x: self.weight * _norm(x, of=x.data),
        lambda self, x: self.weight.detach() * _norm(x),
        lambda self, x: self.weight * _norm(x.clamp(-1e3, 1e3)),
        lambda self, x: self.weight * _norm(x) * (2.0 if x.shape[0] > 16 else 1.0),
        lambda self, x: self.weight * _norm(x) * (2.0 if x.dim() == 2 else 1.0),
        lambda self, x: _Reversed.apply(self.weight * _norm(x)),
        _counted,
        _hooked,
        _without_gradients,
    ],
    ids=[
        *(
            "columns",
            "second dimension",
            "detached",
            "data",
            "weight detached",
            "clamped",
            "by shape",
            "by dimensions",
            "reversed",
        ),
        *("counted", "hooked", "without gradients"),
    ],
)
@pytest.mark.parametrize("with_inputs", [True, False])
def test_modules_that_only_look_like_norms_are_left(x: Tensor, forward: Any, with_inputs: bool) -> None:
    kind = type("Other", (RMSNorm,), {"forward": forward})
    model = nn.Sequential(nn.Linear(IN, IN), kind(IN), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x if with_inputs else None)
    assert not _kinds(model)
    for each in (model, eager):
        each[1].count = 0
    _same(model, eager, x)
    assert model[1].count == eager[1].count


def test_a_norm_without_weight_for_one_width_is_left(x: Tensor) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 64 + 1e-5)

    model = nn.Sequential(nn.Linear(IN, 64), Norm(), nn.Linear(64, 2))
    fl.fuse(model, x)
    assert region_of(model[1]) is None


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_a_region_is_exported(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), RMSNorm(IN), nn.Linear(IN, 2))
    fl.fuse(model, x)
    assert region_of(model[1]) is not None
    for strict in (False, True):
        exported = torch.export.export(model[1], (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), model[1](x))


def _seen(self: Any, y: Tensor) -> None:
    if y.requires_grad:  # which no trace is
        y.register_hook(lambda g: self.seen.append(g.shape))


def _kept(self: Any, y: Tensor) -> None:
    if torch.is_grad_enabled():
        self.seen.append(y.shape)


def _on_streams(self: Any, y: Tensor) -> None:
    print(file=self)


def _on_nodes(self: Any, y: Tensor) -> None:
    if not y.is_leaf:
        torch.autograd.graph.register_multi_grad_hook((y,), lambda grads: self.seen.append(y.shape))


@pytest.mark.parametrize("also", [_seen, _kept, _on_streams, _on_nodes])
def test_activations_that_do_more_are_left(x: Tensor, also: Callable[[Any, Tensor], None]) -> None:
    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Size] = []

        def forward(self, x: Tensor) -> Tensor:
            y = x * torch.sigmoid(x)
            also(self, y)
            return y

        def write(self, text: str) -> None:
            self.seen.append(torch.Size())

    model = nn.Sequential(nn.Linear(IN, HIDDEN), Act(), nn.Linear(HIDDEN, 2))
    fl.fuse(model, x)
    model[1].seen.clear()
    model(x).sum().backward()
    assert len(model[1].seen) == 1


def test_modules_that_work_in_place_are_left(x: Tensor) -> None:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(torch.sigmoid(x.clone()))

    model = nn.Sequential(nn.Linear(IN, HIDDEN), Act(), nn.Linear(HIDDEN, 2))
    fl.fuse(model)
    assert not _kinds(model)


@pytest.mark.parametrize(
    ("norm", "left"), [(nn.LayerNorm, "layer_norm"), (functools.partial(nn.GroupNorm, 4), "group_norm")], ids=str
)
def test_a_norm_gives_way_to_the_activation_before_it(x: Tensor, norm: Any, left: str) -> None:
    """Of the norm nobody keeps the output, and with PyTorch's own norm the activation frees a buffer."""
    blocks = [(nn.Linear(IN, IN), nn.GELU(), norm(IN), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(IN, 2))
    report = fl.fuse(model, x)
    assert [place.activation or place.pattern for place in report.replaced] == ["gelu", "dropout"]
    (skipped,) = report.skipped
    assert skipped.pattern == left and "more: nobody else keeps its output" in skipped.reason
    assert report.saved_bytes is not None
    assert report.saved_bytes[0] - report.saved_bytes[1] == 3 * (2 * _ROW_BYTES - _ROW_BYTES // 32)  # dropout's bits


_PARTS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU, "layer norm": lambda: nn.LayerNorm(IN),
    "group norm": lambda: nn.GroupNorm(4, IN), "batch norm": lambda: nn.BatchNorm1d(IN),
    "RMS norm": lambda: nn.RMSNorm(IN), "dropout": lambda: nn.Dropout(0.1),
}  # fmt: skip


@pytest.mark.parametrize("parts", [*permutations(_PARTS, 2), *list(permutations(_PARTS, 3))[::5]], ids="-".join)
def test_no_other_choice_frees_more(x: Tensor, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    least: list[int] = []

    def best_of_all(
        chosen: list[Any], total: int, measured: Callable[[], int | None]
    ) -> tuple[int, list[Any], list[Any]]:
        for switched_on in product((True, False), repeat=len(chosen)):
            for group, on in zip(chosen, switched_on, strict=True):
                group.switch(on)
            least.append(measured() or 0)
        return total, chosen, []

    def model() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(IN, IN), *(_PARTS[part]() for part in parts)) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(IN, IN))

    report = fl.fuse(model(), x)
    assert report.saved_bytes is not None
    monkeypatch.setattr(sys.modules[Fusing.__module__], "without_the_useless", best_of_all)
    fl.fuse(model(), x)
    # Of norms that only free their statistics PyTorch's are the faster ones.
    statistics = sum("norm" in part for part in parts) * 2 * x.nbytes // 16
    assert 0 <= report.saved_bytes[1] - min(least, default=report.saved_bytes[0]) <= statistics


def test_norms_that_free_their_statistics_alone_are_left_to_pytorch(x: Tensor) -> None:
    """Nobody else keeps their output. On CPUs PyTorch's take less time."""
    blocks = [nn.Sequential(nn.Linear(IN, IN), norm, nn.ReLU()) for norm in (nn.LayerNorm(IN), nn.GroupNorm(2, IN))]
    report = fl.fuse(nn.Sequential(*blocks, nn.Linear(IN, IN)), x)
    assert not report.replaced and [place.pattern for place in report.skipped[-2:]] == ["layer_norm", "group_norm"]
    assert all("PyTorch's takes less time on CPUs" in place.reason for place in report.skipped[-2:])


def test_of_a_row_only_what_is_large_is_called_fused(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusedlayers.sizes.SMALL_BYTES", 2 * _ROW_BYTES)
    blocks = [nn.Sequential(nn.Linear(IN, width), nn.GELU(), nn.Linear(width, IN)) for width in (HIDDEN, IN)]
    report = fl.fuse(nn.Sequential(*blocks), x)
    assert [place.modules for place in report.replaced] == [("0.1",)]
    assert [place.modules for place in report.too_small] == [("1.1",)]


class _Changes(nn.Module):
    """An activation that does more in training, for more rows, or by a flag."""

    def __init__(self, also: str) -> None:
        super().__init__()
        self.also, self.calls, self.is_on = also, 0, False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) + torch.sigmoid(x)
        if self.also == "counts" and self.training:
            self.calls += 1
        if (self.also == "writes" and self.is_on) or (self.also == "writes more rows" and len(x) > ROWS):
            x.mul_(0.5)
        return y.neg() if self.also == "asks for strides" and x.stride(-1) != 1 else y


@pytest.mark.parametrize("also", ["counts", "writes", "writes more rows", "asks for strides"])
def test_what_a_module_does_besides_in_other_states(x: Tensor, also: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = _Changes(also)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return self.act(x) + x

    model = Net().eval()
    report = fl.fuse(model, x.clone().requires_grad_())
    assert bool(report.replaced) == (also != "asks for strides")
    model.train()
    model.act.calls, model.act.is_on = 0, True
    eager = Net().train()
    eager.act.is_on = True
    for rows in (x, torch.cat([x, x]), torch.cat([x, x]).t().contiguous().t()):
        leaves = [rows.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
        found, expected = (net(z) for net, z in zip((model, eager), leaves, strict=True))
        torch.testing.assert_close(found, expected)
        ours, theirs = (torch.autograd.grad(y.sum(), z)[0] for y, z in zip((found, expected), leaves, strict=True))
        torch.testing.assert_close(ours, theirs)
    assert model.act.calls == eager.act.calls


def test_modules_whose_tensors_need_the_shape_of_their_argument_are_left(x: Tensor) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(IN))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * torch.softmax(self.weight.expand_as(x).flip(1), 1)

    model = nn.Sequential(nn.Linear(IN, IN), Weighted(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    _same(model, eager, x.requires_grad_())


def test_a_row_says_what_each_of_its_places_saves(x: Tensor) -> None:
    class Bend(nn.Module):
        def __init__(self, bump: float) -> None:
            super().__init__()
            self.bump = bump

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * 0.7 + 0.3 * x + self.bump * torch.exp(-x * x)

    model = nn.Sequential(nn.Linear(IN, IN), Bend(0.0), nn.Linear(IN, IN), Bend(2.0), nn.Linear(IN, IN), Bend(2.0))
    (row,) = fl.fuse(model, x).replaced
    assert row.modules == ("1", "3", "5")
    assert row.saves.startswith("1: saves the output; 2: saves the input: the function turns 2 times")


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_merged_paths_name_no_others(count: int) -> None:
    paths = [f"block.{i}.part.{j}.{k}" for i in (0, 1, 2, 10) for j in (0, 1, 3) for k in (1, 2)]
    chosen = random.Random(count).sample(paths, count)

    def numbers(part: str) -> list[str]:
        runs = [run.split("-") for run in part.split(",")] if part[0].isdecimal() else [[part]]
        return [str(n) for run in runs for n in (range(int(run[0]), int(run[-1]) + 1) if run[0].isdecimal() else run)]

    named = [path for text in merged_path(chosen).split(", ") for path in product(*map(numbers, text.split(".")))]
    assert sorted(map(".".join, named)) == sorted(chosen)
    assert merged_path(paths) == "block.0-2,10.part.0-1,3.1-2"


def test_nothing_is_left_on_the_tensors_of_the_model(x: Tensor) -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(IN, IN)
            self.register_buffer("scale", torch.rand(IN))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                torch.relu_(self.scale)
                F.silu(self.layer.weight, inplace=True)
            return F.gelu(self.layer(x)) * self.scale

    model = Edits()
    fl.fuse(model, x)
    for tensor in (x, *model.parameters(), *model.buffers()):
        assert not vars(tensor)


def test_gradients_that_are_asked_for_between_a_batch_norm_and_its_activation() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()), torch.randn(8, 3, 32, 32)
    fl.fuse(model, x)
    seen: list[Tensor] = []

    def retain(module: nn.Module, args: Any, z: Tensor) -> None:
        z.retain_grad()
        seen.append(z)

    model[1].register_forward_hook(retain)
    model(x).square().sum().backward()
    assert seen[0].grad is not None and seen[0].grad.abs().sum() > 0


def test_hooks_see_what_they_saw(x: Tensor) -> None:
    model = nn.Sequential(MLP(dropout=0.1), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    seen: list[list[Tensor]] = [[], []]
    for each, values in zip((model, eager), seen, strict=True):
        for module in each.modules():
            module.register_forward_hook(lambda m, args, y, values=values: values.append(y.detach()))
            module.register_full_backward_hook(lambda m, dx, dy, values=values: values.append(dy[0]))
        torch.manual_seed(0)
        each(x.requires_grad_()).sum().backward()
    assert len(seen[0]) == len(seen[1]) == 2 * 7
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda y: y.add_(0.1),
    "view": lambda y: y[..., :2].zero_(),
    "detached": lambda y: y.detach().mul_(2.0),
    "out": lambda y: torch.add(y.detach(), 0.1, out=y.detach()),
}


def test_who_writes_over_a_norms_result_is_named() -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.LayerNorm(HIDDEN), nn.SiLU(inplace=True), nn.Linear(HIDDEN, 2))
    (skipped,) = fl.fuse(model, torch.randn(ROWS, IN)).skipped
    assert skipped.reason == "its result is written over in place (by silu, which would not with inplace=False)"


@pytest.mark.parametrize("how", WRITES)
def test_outputs_that_are_written_over(x: Tensor, how: str) -> None:
    """In the example: the place is left. Later: a clear error in backward, and no wrong gradient."""

    class Writes(Functional):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.how = how

        def forward(self, x: Tensor, write: bool = True) -> Tensor:
            y = F.gelu(self.up(x))
            if write:
                WRITES[self.how](y)
            return self.down(y)

    model = nn.Sequential(Writes(how), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert not report.replaced and report.skipped[0].reason.startswith("its result is written over in place; ")
    _same(model, eager, x)
    fl.fuse(model[0], (x, False))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model[0](x).sum().backward()


def test_a_shared_activation(x: Tensor) -> None:
    """Behind a layer, and elsewhere, where its output is written over."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.act = nn.Linear(IN, IN), nn.LayerNorm(IN), nn.ELU()

        def forward(self, x: Tensor) -> Tensor:
            h, y = self.act(self.norm(x)), self.act(self.layer(x))
            h.add_(0.1)
            return h + y

    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    _same(model, eager, x)


@pytest.mark.parametrize("make", [lambda: nn.SiLU(inplace=True), lambda: nn.LeakyReLU(0.1, inplace=True)])
def test_activations_in_place(make: Callable[[], nn.Module]) -> None:
    """Behind a batch norm the input that is written over is the output from then on, for whoever holds it."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), make()
            self.last = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor, read: bool = True) -> Tensor:
            y = self.norm(self.conv(x))
            early = y * 2 if read else torch.zeros(())
            self.act(y)
            return self.last(y) + early.mean()

    model, x = Writes(), torch.randn(8, 3, 16, 16)
    eager = copy.deepcopy(model)
    fl.fuse(model, (x, False))
    assert _kinds(model).keys() == {"norm", "act"}
    eager.load_state_dict(model.state_dict())
    _same(model, eager, x)


#: With options that are not the defaults.
ONE_CALL: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.LeakyReLU: lambda: nn.LeakyReLU(0.3),
    nn.Hardtanh: lambda: nn.Hardtanh(-0.5, 0.7),
    nn.Threshold: lambda: nn.Threshold(0.1, -0.2),
    nn.Softshrink: lambda: nn.Softshrink(0.3),
    nn.ELU: lambda: nn.ELU(1.5),
    nn.CELU: lambda: nn.CELU(1.5),
    nn.Softplus: lambda: nn.Softplus(2.0, 3.0),
    nn.GELU: lambda: nn.GELU("tanh"),
    nn.Dropout: lambda: nn.Dropout(0.3),
    nn.LayerNorm: lambda: nn.LayerNorm((8, 8), eps=0.1),
    nn.RMSNorm: lambda: nn.RMSNorm((8, 8), eps=0.1),
    nn.GroupNorm: lambda: nn.GroupNorm(2, 4, eps=0.1),
    nn.Linear: lambda: nn.Linear(8, 5),
    nn.Conv1d: lambda: nn.Conv1d(4, 6, 3, 2, 1, bias=False),
    nn.Conv2d: lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2, groups=2),
    nn.Conv3d: lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="circular"),
    nn.BatchNorm1d: lambda: nn.BatchNorm1d(4, eps=0.1, momentum=0.3),
    nn.BatchNorm2d: lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.3),
    nn.BatchNorm3d: lambda: nn.BatchNorm3d(4, eps=0.1, momentum=0.3, track_running_stats=False),
}


def _of_one_call(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module, Tensor]:
    """A module with a region, eager's, and an input."""
    eager = ONE_CALL.get(kind, kind)()
    for parameter in eager.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    model = copy.deepcopy(eager)
    Region.of(model).kinds.add(ONE_CALLS[kind].operation.kind)
    dims = {nn.BatchNorm1d: 1, nn.BatchNorm3d: 3, nn.Conv1d: 1, nn.Conv3d: 3}.get(kind, 2)
    return model, eager, torch.randn(16, 4, *(8,) * dims, requires_grad=True)


@pytest.mark.parametrize("kind", ONE_CALLS)
def test_a_module_of_one_call_needs_no_mode(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager, x = _of_one_call(kind)
    monkeypatch.setattr(region, "Interception", None)
    _same(model, eager, x)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


@pytest.mark.parametrize("kind", ONE_CALLS)
def test_a_module_of_one_call_may_be_called_in_another_way(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, eager, x = _of_one_call(kind)
    by_name = {next(iter(inspect.signature(eager.forward).parameters)): x}
    results = []
    for module in (model, eager):
        torch.manual_seed(0)
        results.append(module(**by_name))
    torch.testing.assert_close(*results)
    monkeypatch.setattr(F, ONE_CALLS[kind].name, lambda x, *args, **kwargs: x.sin())
    assert torch.equal(model(x), eager(x))
    monkeypatch.setattr(kind, "forward", lambda self, x: x.cos())
    assert torch.equal(model(x), x.cos())


def test_a_convolution_whose_instance_was_patched() -> None:
    """As it is for seamless tiles."""
    model, eager, x = _of_one_call(nn.Conv2d)
    for module in (model, eager):
        vars(module)["_conv_forward"] = lambda x, w, b: F.conv2d(x, w * 3, b, groups=2)
    assert torch.equal(model(x), eager(x))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_batch_norm_refuses_what_pytorchs_refuses(kind: type[nn.Module]) -> None:
    model, eager, x = _of_one_call(kind)
    for wrong in (x[:, :3], x.flatten(), x.detach().double(), x.detach().long(), x.expand(2, *x.shape), None):
        with pytest.raises(Exception) as refused:  # noqa: PT011
            eager(wrong)
        with pytest.raises(refused.type, match=re.escape(str(refused.value))):
            model(wrong)


RMS_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.flatten(2).transpose(1, 2),
    "heads": lambda x: x.transpose(1, 2),
    "every other": lambda x: x[..., ::2],
    "channels_last": lambda x: x.permute(0, 3, 1, 2),
    "every other, channels_last": lambda x: x.permute(0, 3, 1, 2)[:, :, ::2],
}


@pytest.mark.parametrize("name", RMS_LAYOUTS)
def test_rms_norms_of_any_layout(name: str) -> None:
    """PyTorch's results are contiguous, or channels-last."""
    layout = RMS_LAYOUTS[name]
    x = torch.randn(16, 32, 64, 32)
    norm = nn.RMSNorm(layout(x).shape[-1])

    class Laid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.norm = nn.Parameter(torch.tensor(2.0)), norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(layout(x * self.scale)) * 1.0

    model = Laid()
    eager = model(x)
    report = fl.fuse(model, x)
    is_fused = "channels_last" not in name
    assert [place.pattern for place in report.replaced] == ["rms_norm"] * is_fused
    assert model(x).stride() == eager.stride() and eager.is_contiguous() is is_fused
    torch.testing.assert_close(model(x), eager)


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_batch_norms_by_passes(momentum: float | None, layout: str) -> None:
    """Whose activation is not joined with them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, momentum=momentum), nn.SiLU(), nn.Conv2d(8, 2, 1))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    x = torch.randn(8, 3, 16, 16)
    x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    eager.load_state_dict(model.state_dict())
    assert type(model[:2](x).grad_fn).__name__ == "NormOfInputBackward"
    _same(model[:2], eager[:2], x)
    model[1].load_state_dict(eager[1].state_dict())
    _same(model, eager, x)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    second = []
    for net, given in ((model, x), (eager, x), (copy.deepcopy(eager).double(), x.double())):
        (dw,) = torch.autograd.grad(net[:2](given).sin().square().sum(), net[1].weight, create_graph=True)
        second.append(torch.autograd.grad(dw.square().sum(), [net[0].weight, net[1].weight]))
    for ours, theirs, exact in zip(*second, strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-6 * exact.norm()


BATCH_NORMS_LEFT_TO_PYTORCH: dict[str, Callable[[nn.BatchNorm2d, Tensor], Any]] = {
    "eps of 0": lambda norm, x: setattr(norm, "eps", 0.0),
    "eps of None": lambda norm, x: setattr(norm, "eps", None),
    "momentum of True": lambda norm, x: setattr(norm, "momentum", True),
    "momentum of text": lambda norm, x: setattr(norm, "momentum", "a"),
    "statistics that need gradients": lambda norm, x: norm.running_mean.requires_grad_(),  # type: ignore[union-attr]
    "statistics without memory": lambda norm, x: setattr(norm, "running_mean", torch.zeros(1).expand(8)),
    "statistics of another size": lambda norm, x: setattr(norm, "running_var", torch.ones(7)),
    "one statistic alone": lambda norm, x: setattr(norm, "running_var", None),
    "weights of another size": lambda norm, x: setattr(norm, "weight", nn.Parameter(torch.ones(9))),
    "weights in float64": lambda norm, x: norm.double(),
    "negated": lambda norm, x: torch._neg_view(x),
    "one value": lambda norm, x: x[:1, :, :1, :1].expand(1, 8, 1, 1),
    "inference": lambda norm, x: torch.ones_like(x, requires_grad=False),
}


@pytest.mark.parametrize("name", BATCH_NORMS_LEFT_TO_PYTORCH)
def test_batch_norms_that_pytorch_refuses_or_reads_in_another_way(name: str) -> None:
    """The same error, or results and statistics; after an error too."""
    model = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())
    fl.fuse(nn.Sequential(nn.Conv2d(3, 8, 1), model), torch.randn(8, 3, 16, 16))
    results: list[Any] = []
    for net in (model, nn.Sequential(nn.BatchNorm2d(8), nn.SiLU())):
        torch.manual_seed(0)
        x = torch.randn(8, 8, 16, 16, requires_grad=True)
        changed = BATCH_NORMS_LEFT_TO_PYTORCH[name](net[0], x)  # type: ignore[arg-type]
        with torch.inference_mode(name == "inference"):
            x = changed.mul(1) if name in ("negated", "inference") else changed if name == "one value" else x
        try:
            results.append(net(x))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        results.append([None if s is None else s.detach() for s in (net[0].running_mean, net[0].running_var)])
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs)


def test_batch_norms_by_passes_leave_versions_and_undefined_gradients_as_pytorch_does() -> None:
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None

    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU())
    fl.fuse(model, torch.randn(8, 3, 16, 16))
    small, large = torch.randn(1, 3, 2, 2), torch.randn(8, 3, 16, 16)
    (model(small).sum() + model(large).sum()).backward()  # the first is PyTorch's
    evaluated = model.eval()(large)
    (evaluated.sum() + model.train()(large).sum()).backward()
    model.zero_grad()
    Drops.apply(model[:2](large)).sum().backward()
    assert model[1].weight.grad is None


@pytest.mark.parametrize("far", [1e19, 1e37, torch.inf])
def test_batch_norms_by_passes_of_values_that_lie_far_out(far: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.SiLU())
    eager = copy.deepcopy(model)
    fl.fuse(model, torch.randn(8, 3, 16, 16))
    eager.load_state_dict(model.state_dict())
    x = torch.randn(8, 8, 16, 16, requires_grad=True)
    with torch.no_grad():
        x[0, 5, 0, 0] = far
    torch.testing.assert_close(model[1](x), eager[1](x), equal_nan=True)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, equal_nan=True)


def test_what_was_patched_before_the_import_runs() -> None:
    script = """
import copy, torch, torch.nn.functional as F
from torch import nn
layer_norm, silu = nn.LayerNorm.forward, F.silu
nn.LayerNorm.forward = lambda self, x: 3 * layer_norm(self, x)
F.silu = lambda x, inplace=False: 3 * silu(x)
import fusedlayers as fl
model = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 8))
eager, x = copy.deepcopy(model), torch.randn(1024, 64)
fl.fuse(model, x)
torch.testing.assert_close(model(x), eager(x))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_report_without_places_says_why(x: Tensor) -> None:
    plain, own = (
        nn.Sequential(nn.Linear(IN, 8), nn.Linear(8, 2)),
        nn.Sequential(fl.FusedDenseAct(IN, HIDDEN), nn.Linear(HIDDEN, 2)),
    )
    traced = torch.jit.trace(MLP(), x)
    for model, words in (
        (
            plain,
            "Nothing was found that would keep less; memory_report lists what the model keeps. (Act",
        ),
        (torch.export.export(plain, (x,)).module(), "Fuse the model before you export it"),
        (own, "the layers of fusedlayers keep their outputs already"),
        (traced, "Fuse the model before you trace or script it"),
    ):
        report = fl.fuse(model, x)
        assert not report.replaced and not report.skipped and words in str(report)
    with pytest.raises(ValueError, match=r"if a tensor of this shape is meant, pass torch.randn\(4, 32\)"):
        fl.fuse(MLP(), (4, IN))


def test_options_that_only_pytorch_knows() -> None:
    """A result that goes into a given tensor, which no cache may hold; and ``inplace`` by position."""
    x, out = torch.randn(ROWS, IN), torch.empty(ROWS, IN)
    assert activation_of(torch.tanh, (x,), {"out": out}) is None
    assert not any(out is option for key in operations._records for _, option in key[-1])  # type: ignore[index]
    assert activation_of(F.leaky_relu, (x, 0.1, True), {}) is None
    assert activation_of(F.leaky_relu, (x, 0.1), {"inplace": True}) is not None


# --- contexts ---------------------------------------------------------------------------------------------------------


class Checkpointed(MLP):
    """A checkpoint within its code, or around parts."""

    def __init__(self, which: str, use_reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.which, self.use_reentrant = which, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[..., Any] = lambda f, h: checkpoint(f, h, use_reentrant=self.use_reentrant)
        if self.which == "activation":
            return self.down(run(self.act, self.up(x)))
        if self.which == "function":
            return self.down(run(F.gelu, self.up(x)))
        if self.which == "all":
            return run(super().forward, x)
        h = run(lambda x: F.gelu(self.up(x)), x)
        return run(self.down, h)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("which", ["activation", "function", "all", "parts"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_checkpoints_inside(x: Tensor, which: str, use_reentrant: bool, dropout: float, with_inputs: bool) -> None:
    """Gradients are right, and a checkpoint keeps as little as in eager."""
    model = nn.Sequential(nn.Linear(IN, IN), Checkpointed(which, use_reentrant, dropout), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, *((x,) if with_inputs else ()))
    _same(model, eager, x)
    assert _bytes(model, x) <= _bytes(eager, x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("make", [MLP, Functional, Gated, lambda: MLP(dropout=0.1), lambda: RMSNorm(IN)])
def test_checkpoints_outside(x: Tensor, make: Callable[[], nn.Module], use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), make(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    _same(Outer(model), Outer(eager), x.requires_grad_())
    assert _bytes(Outer(model), x) == _bytes(Outer(eager), x)
    outer = Outer(model)
    report = fl.fuse(outer, x)
    assert not report.replaced and report.idle and _kinds(outer)
    assert "Outer: 0 operations fused on these inputs\n" in str(report)
    explained = str(fl.explain(outer))
    assert ", when it runs again with gradients\n" in f"{explained}\n" and "saves nothing" not in explained
    assert "\nfused, where nothing is saved here:\n  " in str(report)
    assert ": it runs without gradients, or under a checkpoint, where less is saved while" in str(report)


def test_a_checkpoint_within_a_region_is_left_alone(x: Tensor) -> None:
    """A module whose code puts a function under a checkpoint computes it again outside the region; the example does
    not pass there."""

    class Sometimes(Functional):
        how = "plain"

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "plain":
                return super().forward(x)
            return self.down(checkpoint(lambda z: F.gelu(z), self.up(x), use_reentrant=False))  # type: ignore[arg-type]

    model = nn.Sequential(Sometimes(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert _kinds(model) == {"0": {"gelu"}}
    for each in (model, eager):
        each[0].how = "checkpoint"  # type: ignore[assignment]
    _same(model, eager, x)


def test_saved_tensor_hooks(x: Tensor) -> None:
    model = nn.Sequential(MLP(dropout=0.1), Gated(), RMSNorm(IN), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    with torch.autograd.graph.save_on_cpu():
        _same(model, eager, x)


def test_without_gradients_regions_step_aside(x: Tensor) -> None:
    model = nn.Sequential(MLP(), Gated(), RMSNorm(IN), nn.Linear(IN, 2)).eval()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), eager(x))
    with torch.inference_mode():
        assert torch.equal(model(x), eager(x))


def test_the_inference_path_of_transformer_layers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.TransformerEncoderLayer(IN, 4, HIDDEN, batch_first=True)
    x = torch.randn(2, 16, IN)
    fl.fuse(model, x)
    assert region_of(model) is not None
    model.eval()
    fast, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fast(*args))
    with torch.no_grad():
        model(x)
    assert calls == [1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_layers_draw_the_same_numbers(dropout: float) -> None:
    model = nn.TransformerEncoderLayer(IN, 4, HIDDEN, dropout, batch_first=True, activation="gelu")
    eager, x = copy.deepcopy(model), torch.randn(2, 16, IN)
    report = fl.fuse(model, x)
    assert report.saved_bytes is not None and report.saved_bytes[1] < 0.8 * report.saved_bytes[0]
    _same(model, eager, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(x: Tensor, dtype: torch.dtype) -> None:
    model = nn.Sequential(MLP(dropout=0.1), Gated(), nn.LayerNorm(IN), RMSNorm(IN), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    with torch.autocast("cpu", dtype):
        ours, theirs = _step(model, x), _step(eager, x)
        assert _bytes(model, x) < _bytes(eager, x)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= 16 * torch.finfo(dtype).eps * b.float().norm()


def test_spelled_norms_of_float32_under_autocast(x: Tensor) -> None:
    """As in a residual stream: what they compute is not cast."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.down = nn.Linear(IN, IN), RMSNorm(IN), nn.Linear(IN, IN)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).float()
            return h + self.down(self.norm(h))

    model = Block()
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        report = fl.fuse(model, x)
        assert [place.pattern for place in report.replaced] == ["rms_norm"]
        ours, theirs = _step(model, x), _step(eager, x)
        assert _bytes(model, x) < _bytes(eager, x)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= 4 * torch.finfo(torch.bfloat16).eps * b.float().norm()


def test_transforms(x: Tensor) -> None:
    model = nn.Sequential(MLP(), Gated(), nn.LayerNorm(IN), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    parameters = dict(eager.named_parameters())

    def loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, x).pow(2).sum()

    per_sample = [
        torch.func.vmap(torch.func.grad(lambda p, x, m=m: loss(m, p, x)), (None, 0))(parameters, x)
        for m in (model, eager)
    ]
    for name in parameters:
        torch.testing.assert_close(per_sample[0][name], per_sample[1][name], rtol=1e-4, atol=1e-5)


def test_a_product_with_a_place_for_its_result(x: Tensor) -> None:
    class Net(Gated):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                torch.mul(x, x, out=torch.empty_like(x))
            return super().forward(x)

    model = Net(packed=False, up_first=False)
    eager = copy.deepcopy(model)
    assert fl.fuse(model, x).replaced
    _same(model, eager, x)


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU()])
def test_create_graph_keeps_no_more(x: Tensor, act: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), act, nn.Linear(HIDDEN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    x.requires_grad_()

    def both_passes(each: nn.Module) -> tuple[Tensor, ...]:
        y = each(x).sin().sum()
        return y, *torch.autograd.grad(y, x, create_graph=True)

    kept = [saved_bytes(both_passes, each, exclude=[x, *each.parameters()]) for each in (model, eager)]
    assert kept[0] <= kept[1]


@pytest.mark.parametrize("make", [nn.GELU, nn.SiLU, nn.Mish])
def test_equations_with_second_derivatives_are_learnt_as_exactly(make: Callable[[], nn.Module]) -> None:
    """A physics-informed network: its loss has second derivatives, the gradients of that third ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), make(), nn.Linear(128, 128), make(), nn.Linear(128, 1))
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = 2 * torch.rand(1024, 2) - 1
    (row,) = fl.fuse(model, x).replaced
    assert row.modules == ("1", "3")

    def gradients(each: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        curvatures = [torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        loss = (curvatures[0] + curvatures[1] - torch.sin(x).sum(1)).square().mean()
        used = [p for name, p in each.named_parameters() if name != "4.bias"]  # which no derivative depends on
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, used)])

    truth = gradients(exact, x.double())
    ours, theirs = (float((gradients(each, x) - truth).norm() / truth.norm()) for each in (model, eager))
    assert ours <= 2 * theirs + 1e-6


def test_vmap_of_gradients_that_are_differentiated_again(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(HIDDEN))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    found = []
    for each in (model, eager):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(0)
        y = each(leaf)
        given = torch.ones(3, *y.shape) * torch.arange(1.0, 4.0).view(3, 1, 1)
        rows = torch.vmap(lambda v, y=y, leaf=leaf: torch.autograd.grad(y, leaf, v, create_graph=True)[0])(given)
        found.append(torch.autograd.grad(rows.sin().sum(), leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_second_derivatives(x: Tensor) -> None:
    model = nn.Sequential(MLP(), Gated(), RMSNorm(IN), nn.Linear(IN, 2))
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert {place.activation or place.pattern for place in fl.fuse(model, x).replaced} >= {"gelu", "gate", "rms_norm"}
    found = []
    for each in (model, eager, exact):
        leaf = x.detach().to(next(each.parameters()).dtype).requires_grad_()
        (g,) = torch.autograd.grad(each(leaf).pow(2).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(g.pow(2).sum(), [*each.parameters()]))
    for ours, theirs, truth in zip(*found, strict=True):
        error, torchs = (float((t.double() - truth).norm()) for t in (ours, theirs))
        assert error <= 2 * torchs + 1e-4 * float(truth.norm())  # what the branch bit of GELU leaves


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [MLP, Functional, Gated])
def test_compiled(x: Tensor, make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    for ours, theirs in zip(_step(compiled, x), _step(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert _bytes(compiled, x) < _bytes(eager, x)


class Around(nn.Sequential):
    """A checkpoint around the second of three modules."""

    def forward(self, x: Tensor) -> Tensor:
        first, inner, last = self
        return last(checkpoint(inner, first(x), use_reentrant=False))


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@pytest.mark.parametrize("save", ["auto", "recompute"])
@pytest.mark.parametrize("make", [MLP, Functional, Gated])
def test_compiled_within_a_checkpoint(x: Tensor, make: Callable[[], nn.Module], save: Any) -> None:
    model = Around(nn.Linear(IN, IN), make(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    assert fl.fuse(nn.Sequential(*model), x, save=save).replaced
    results, kept = [], []
    for each in (model, eager):
        torch.compiler.reset()
        compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
        results.append(_step(compiled, x))
        kept.append(_bytes(compiled, x))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert kept[0] <= kept[1]


def test_where_nothing_needs_a_gradient_the_report_says_so(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, 512), nn.GELU(), nn.Linear(512, IN))
    with torch.no_grad():  # which is who calls, and not how the model is trained
        without = fl.fuse(model, x)
    assert without.replaced == fl.fuse(model, x).replaced and without.replaced
    model.requires_grad_(False)
    assert "Nothing is saved for a backward pass: all of its 4 parameters are frozen" in str(fl.fuse(model, x))
    assert fl.fuse(nn.Linear(IN, 2), x).notes == ("Only inputs and parameters are kept for the backward pass.",)


@pytest.mark.parametrize("returned", [lambda y: y.detach(), lambda y: None, lambda y: {"text": "done"}])
def test_where_no_result_needs_a_gradient_the_report_says_so(x: Tensor, returned: Callable[[Tensor], Any]) -> None:
    class Net(MLP):
        def forward(self, x: Tensor) -> Any:
            return returned(super().forward(x))

    assert fl.fuse(Net(), x).notes == (
        "Nothing is saved for a backward pass: let a parameter or an input require grad, and return what is computed "
        "from it.",
    )


def test_what_a_model_raises_is_not_said_to_be_the_fused_operations_alone(x: Tensor) -> None:
    class Counts(MLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise KeyError("third run")
            return super().forward(x)

    (skipped,) = fl.fuse(Counts(), x).skipped
    assert skipped.reason == (
        "a run with it fused raised KeyError: 'third run'; the model's own code may raise that too"
    )


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
def test_a_batch_norm_and_its_activation_compile_in_one_graph() -> None:
    x = torch.randn(8, 32, 48, 48)
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 32, 3))
    eager = copy.deepcopy(model)
    assert sorted(place.pattern for place in fl.fuse(model, x).replaced) == ["activation", "batch_norm"]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(_step(compiled, x), _step(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model[1].running_mean, eager[1].running_mean)


def test_exported(x: Tensor) -> None:
    """A program holds PyTorch's own operations, as of the plain model."""
    model = nn.Sequential(MLP(), Gated(), RMSNorm(IN), nn.Linear(IN, 2)).eval()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    ours, theirs = (torch.export.export(each, (x,)) for each in (model, eager))
    assert [str(n.target) for n in ours.graph.nodes] == [str(n.target) for n in theirs.graph.nodes]


def test_traced_for_torchscript(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.Linear(IN, 2)).eval()
    fl.fuse(model, x)
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.trace"):
        traced = torch.jit.trace(model, (x,))
    torch.testing.assert_close(traced(x), model(x))


def test_threads_do_not_meet(x: Tensor) -> None:
    model = nn.Sequential(Functional(), Gated(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    expected, results = eager(x), []
    threads = [threading.Thread(target=lambda: results.append(model(x).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.allclose(result, expected, atol=1e-5) for result in results)


def test_an_exception_leaves_nothing_behind(x: Tensor) -> None:
    class Fails(Functional):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise ArithmeticError
            return super().forward(x)

    model = nn.Sequential(Functional(), Fails(), nn.Linear(IN, 2))
    fl.fuse(model, x)
    model[1].fail = True  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        model(x)
    assert torch.overrides._get_current_function_mode() is None


def test_other_modes_see_the_operations(x: Tensor) -> None:
    """A ``TorchFunctionMode`` of the user's, and tensors of classes of their own."""

    class Counts(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    class Own(Tensor):
        pass

    model = nn.Sequential(Functional(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    with Counts() as mode:
        y = model(x)
    assert mode.count > 3
    torch.testing.assert_close(y, eager(x))
    y = model(x.as_subclass(Own))
    assert type(y) is Own
    torch.testing.assert_close(y.as_subclass(Tensor), eager(x))


def test_regions_within_regions(x: Tensor) -> None:
    """Each has its own operations, and the outer one its own again behind the inner one."""

    class Outer(MLP):
        def __init__(self) -> None:
            super().__init__(act=nn.Identity())
            self.inner = Functional()

        def forward(self, x: Tensor) -> Tensor:
            h = F.silu(self.up(self.inner(x)))
            return self.down(F.silu(self.up(self.inner(self.down(h)))))

    model = nn.Sequential(Outer(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert _kinds(model) == {"0": {"silu"}, "0.inner": {"gelu"}}
    assert _bytes(eager, x) - _bytes(model, x) == 4 * HIDDEN_BYTES
    _same(model, eager, x)


def test_frozen_parts_and_adapters(x: Tensor) -> None:
    """The layer before an activation is frozen, or the one after it; an adapter is added later."""
    for frozen in ("up", "down"):
        model = nn.Sequential(nn.Linear(IN, IN), MLP(), nn.Linear(IN, 2))
        getattr(model[1], frozen).requires_grad_(False)
        eager = copy.deepcopy(model)
        fl.fuse(model, x)
        _same(model, eager, x)
        assert _bytes(model, x) <= _bytes(eager, x)

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.low = nn.Linear(base.in_features, 4)
            self.high = nn.Linear(4, base.out_features)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.high(self.low(x))

    model = nn.Sequential(MLP(), nn.Linear(IN, 2))
    fl.fuse(model, x)
    model[0].up, model[0].down = Adapter(model[0].up), Adapter(model[0].down)
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    _same(model, eager, x)
    assert _bytes(model, x) < _bytes(eager, x)


# --- what is recomputed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MLP, Functional, Gated, lambda: Gated(packed=True), lambda: MLP(QuickGELU(), 0.1)])
def test_mlps_recomputed(x: Tensor, make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), make(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x, save="recompute")
    (place,) = report.replaced
    assert (place.pattern, place.modules) == ("mlp", ("1",))
    assert _bytes(model, x) <= 2 * 4 * ROWS * IN + 1024
    _same(model, eager, x)


def test_mlps_that_share_an_activation_are_all_recomputed(x: Tensor) -> None:
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(IN, IN), MLP(gelu), MLP(gelu), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    (place,) = fl.fuse(model, x, save="recompute").replaced
    assert (place.pattern, place.modules) == ("mlp", ("1", "2"))
    _same(model, eager, x)


@pytest.mark.parametrize("which", ["activation", "function", "parts"])
def test_checkpoints_inside_hide_no_mlp(x: Tensor, which: str) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), Checkpointed(which, use_reentrant=False), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    (place,) = fl.fuse(model, x, save="recompute").replaced
    assert (place.pattern, place.modules) == ("mlp", ("1",))
    assert _bytes(model, x) <= 2 * 4 * ROWS * IN + 1024
    _same(model, eager, x)


def test_what_is_checkpointed_already_is_left(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), Checkpointed("all", use_reentrant=False), nn.Linear(IN, 2))
    report = fl.fuse(model, x, save="recompute")
    assert not report.replaced


# --- wrong inputs -----------------------------------------------------------------------------------------------------


def test_what_is_refused(x: Tensor) -> None:
    model = nn.Sequential(MLP(), nn.Linear(IN, 2))
    contents = {name: {*vars(module)} for name, module in model.named_modules()}
    with pytest.raises(TypeError, match=r"fuse: model must be an nn\.Module, got int"):
        fl.fuse(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unfuse: model must be an nn\.Module"):
        fl.unfuse(F.gelu)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="save must be 'auto' or 'recompute', got 'output'"):
        fl.fuse(model, x, save="output")
    with pytest.raises(ValueError, match="the model does not run on these inputs: RuntimeError"):
        fl.fuse(model, torch.randn(3, IN + 1))
    with pytest.raises(
        ValueError,
        match=r"inputs \(a dict holds keyword arguments, .* write \(batch,\)\): TypeError",
    ):
        fl.fuse(model, {"no_such": x})
    loader = torch.utils.data.DataLoader([x])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"\(a data loader or a dataset is among the inputs; pass a batch, such as next"
    ):
        fl.fuse(model, loader)
    with pytest.raises(ValueError, match="has no shape yet; call the model once"):
        fl.fuse(nn.Sequential(nn.LazyLinear(3)))
    assert {name: {*vars(module)} for name, module in model.named_modules()} == contents
    fl.unfuse(model)  # which was not fused


def test_in_inference_mode_nothing_changes(x: Tensor) -> None:
    model = MLP()
    fl.fuse(model, x)
    kinds = _kinds(model)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"call it outside torch\.inference_mode"):
        fl.fuse(model, x)
    assert kinds and _kinds(model) == kinds


def test_a_model_in_evaluation_is_told_so(x: Tensor) -> None:
    model = MLP(dropout=0.1).eval()
    assert "model.train()" in str(fl.fuse(model, x)) and "model.train()" not in str(fl.fuse(model.train(), x))
    assert "model.train()" in str(fl.fit(model.eval(), x, fraction=1.0, plan_only=True))


@pytest.mark.parametrize("function", [fl.fuse, fl.unfuse, fl.memory_report, fl.plan_of, fl.fit, fl.explain])
def test_classes_are_no_models(function: Callable[..., Any]) -> None:
    name = function.__name__
    inputs = {"fit": {"fraction": 0.5}}.get(name, {})
    arguments = () if name in ("unfuse", "explain") else (torch.ones(2, 2),)
    with pytest.raises(TypeError, match=f"{name}: .*must be an instance, .*, and not the class|{name}: .* instance"):
        function(MLP, *arguments, **inputs)


def test_arrays_are_no_tensors(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a NumPy array is among the inputs; torch\.from_numpy makes a tensor of it"):
        fl.fuse(MLP(), x.detach().numpy())


@pytest.mark.parametrize("inputs", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input": x}])
def test_example_inputs(x: Tensor, inputs: Callable[[Tensor], Any]) -> None:
    assert fl.fuse(nn.Sequential(MLP(), nn.Linear(IN, 2)), inputs(x)).replaced


def test_meta_devices(x: Tensor) -> None:
    with torch.device("meta"):
        model = nn.Sequential(MLP(), MLP(QuickGELU()), RMSNorm(IN), nn.LayerNorm(IN), nn.Linear(IN, 2))
        fl.fuse(model)
        report = fl.fuse(model, torch.empty(ROWS, IN))
    assert "What the places free was not measured: tensors of the meta device hold no data." in report.notes
    assert "backend" not in str(report)
    assert model(x.to("meta")).is_meta


def test_script_and_graph_modules(x: Tensor) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU()))
    graph = torch.fx.symbolic_trace(MLP())
    model = nn.Sequential(scripted, nn.Linear(HIDDEN, IN), graph, nn.Linear(IN, 2))
    fl.fuse(model, x)
    assert _kinds(model).keys() <= {"2", "2.act"}
    model(x).sum().backward()


def test_compiled_parts(x: Tensor) -> None:
    """What is compiled is seen as it was written."""
    inner = MLP()
    inner.compile(backend="eager")
    model = nn.Sequential(inner, nn.Linear(IN, 2))
    fl.fuse(model, x)
    assert _kinds(model) == {"0.act": {"gelu"}}
    model(x).sum().backward()


# --- what random programs have found ----------------------------------------------------------------------------------


class Edits(nn.Module):
    """A part, and an edit of its result in place, when told to; or an activation in place behind it."""

    def __init__(self, part: nn.Module, *, edit: bool = True) -> None:
        super().__init__()
        self.up, self.part, self.down, self.edit = nn.Conv2d(3, 8, 1), part, nn.Conv2d(8, 2, 1), edit

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(F.gelu(self.up(x)))
        if self.edit:
            y += 0.1
        return self.down(y)


def _joined() -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.Dropout(0.1))


def test_a_place_that_is_left_within_another_region() -> None:
    """The module's own operations keep less; those of the same kind in its part, whose result is edited, must not."""
    model, x = Edits(nn.GELU()), torch.randn(8, 3, 16, 16)
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert _kinds(model) == {"": {"gelu"}, "part": set()}
    assert "fused" not in repr(model.part)
    _same(model, eager, x)
    fl.unfuse(model)
    assert not _kinds(model)


@pytest.mark.parametrize(
    "make",
    [nn.GELU, _joined, lambda: nn.GroupNorm(4, 8), lambda: nn.LayerNorm(16)],
)
@pytest.mark.parametrize("with_norm", [True, False])
def test_edits_of_outputs_within_checkpoints_are_noticed(make: Callable[[], nn.Module], with_norm: bool) -> None:
    """PyTorch looks at no tensor that a checkpoint brings back."""
    part = nn.Sequential(nn.BatchNorm2d(8), make()) if with_norm else make()
    model, x = Edits(part, edit=False), torch.randn(8, 3, 16, 16)
    fl.fuse(model, x)
    assert _kinds(model).keys() & {"part", "part.1", "part.1.0"}

    _Checkpointed(model)(x).sum().backward()
    model.edit = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _Checkpointed(model)(x).sum().backward()


@pytest.mark.parametrize("with_norm", [True, False])
def test_what_is_written_in_place_within_checkpoints_may_be_edited(with_norm: bool) -> None:
    """PyTorch writes it there, a copy of what is saved."""
    silu = nn.SiLU(inplace=True)
    model, x = (
        Edits(nn.Sequential(nn.BatchNorm2d(8), silu) if with_norm else silu, edit=False),
        torch.randn(8, 3, 16, 16),
    )
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.edit = eager.edit = True
    _same(_Checkpointed(model), _Checkpointed(eager), x)


@pytest.mark.parametrize("inplace", [False, True])
def test_small_examples_do_for_larger_inputs(x: Tensor, inplace: bool) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.SiLU(inplace), nn.Linear(HIDDEN, IN))
    (place,) = fl.fuse(model, x[:1]).too_small
    assert place.reason.startswith("results of less than 1 KiB") and _bytes(model, x) == HIDDEN_BYTES


@pytest.mark.parametrize("rows", [1, ROWS])
def test_in_place_pytorch_may_keep_the_output_itself(x: Tensor, rows: int) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.LeakyReLU(inplace=True), nn.Linear(HIDDEN, IN))
    report = fl.fuse(model, x[:rows])
    assert [place.reason for place in report.skipped] == ["PyTorch saves no more than the output"]
    assert not (report.replaced or report.too_small)


class _OfGradients(nn.Module):
    """Its result contains a gradient by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x))).sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.energy(x) + torch.func.grad(self.energy)(x).square().sum()


def test_models_that_call_transforms_are_measured_by_their_graphs(x: Tensor) -> None:
    """For transforms refuse saved-tensor hooks."""
    model = _OfGradients()
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    (note,) = report.notes
    assert note.startswith("The model refuses saved-tensor hooks, as torch.func does.")
    assert [(place.activation, place.calls) for place in report.replaced] == [("silu", 1)]
    before, after = report.saved_bytes or (0, 0)
    assert before - after == HIDDEN * len(x) * 4
    assert fl.memory_report(model, x).saved_bytes == after
    _same(model, eager, x)
    assert note in fl.fit(model, x, fraction=1.0).notes


def test_what_a_transform_runs_is_left_to_pytorch(x: Tensor) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.dropout = nn.Linear(IN, IN), nn.GELU(), nn.Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.func.grad(lambda z: self.dropout(self.act(z)).sum())(x))

    report = fl.fuse(Model(), x)
    assert not report.replaced
    assert [(place.activation, place.reason) for place in report.skipped] == [
        ("gelu", "a transform of torch.func runs it")
    ]


@pytest.mark.parametrize("dry_run", [False, True])
def test_progress_is_told_how_far_fuse_has_come(x: Tensor, dry_run: bool) -> None:
    stages: list[tuple[str, float]] = []
    fl.fuse(MLP(), x, dry_run=dry_run, progress=lambda *stage: stages.append(stage))
    names, parts = [name for name, _ in stages], [part for _, part in stages]
    assert names[:3] == ["measuring the model", "finding operations", "measuring what operations free, run 1"]
    assert parts == sorted(parts) and parts[0] == 0 and stages[-1] == ("done", 1.0)
    assert any(name.startswith("timing steps, round ") for name in names) is dry_run
    with pytest.raises(TypeError, match=r"fuse: progress must be True, False, or a function .* as print, got 'bar'$"):
        fl.fuse(MLP(), x, progress="bar")  # type: ignore[arg-type]


def test_progress_can_be_shown(x: Tensor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    fl.fuse(MLP(), x, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and re.search(r"\n 10% measuring what operations free, run 1, \d+ s left\n(.*\n)*100% done", err)
    fl.fuse(MLP(), progress=True)
    assert capsys.readouterr().err == "  0% looking at the classes of modules\n100% done\n"
    fl.fuse(MLP(), x)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("norm_first", [True, False])
def test_in_place_with_and_without_a_batch_norm(norm_first: bool) -> None:
    """Of the norm's input less is kept."""
    act, convs = nn.LeakyReLU(inplace=True), [nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 8, 3)]
    norm = nn.BatchNorm2d(16)
    first, second = ([norm], []) if norm_first else ([], [norm])
    model = nn.Sequential(convs[0], *first, act, convs[1], *second, act, convs[2])
    report = fl.fuse(model, torch.randn(8, 3, 96, 96))
    assert report.saved_bytes is not None and report.saved_bytes[1] < 0.7 * report.saved_bytes[0]


@pytest.mark.parametrize("name", ["SiLU", "CELU"])
def test_writes_over_views_are_left_to_pytorch(x: Tensor, name: str) -> None:
    """The result of a linear layer of three dimensions with a bias is a view."""
    act = getattr(nn, name)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), act(inplace=True), nn.Linear(HIDDEN, IN))
    x, large = x.view(2, -1, IN), x.repeat(16, 1).view(4, -1, IN)
    eager = saved_bytes(model, large)
    for inputs in (x, large, None):  # whatever they are, no call saves more
        report = fl.fuse(model, inputs)
        if inputs is not None:
            (skipped,) = report.skipped
            assert skipped.reason.startswith("it writes over a view in place, of which autograd makes a copy")
        assert saved_bytes(model, large) == eager
    memory = fl.memory_report(model, large)
    assert memory.saved_bytes + memory.unlisted_bytes == eager - large.nbytes
    assert ("not listed" in str(memory)) == (name == "SiLU")  # of the other one its output is saved, as by the next
    model[1] = act()
    assert [place.activation for place in fl.fuse(model, large).replaced] == [name.lower()]


@pytest.mark.parametrize("name", ["ELU", "CELU", "LeakyReLU"])
def test_in_place_behind_a_batch_norm_that_is_too_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The activation alone frees nothing, and waits with the norm."""
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", _IMAGE_BYTES)
    model, x = _model(lambda: _in_front(getattr(nn, name)(inplace=True)), True)
    eager = saved_bytes(model, x)
    report = fl.fuse(model, x[:4])
    assert not report.skipped and [place.modules for place in report.too_small] == [("1.0",), ("1.1",)]
    fused_on_small = saved_bytes(model, x)
    fl.fuse(model, x)
    assert saved_bytes(model, x) == fused_on_small < 0.7 * eager


@pytest.mark.parametrize("channels", [(32, 4), (4, 32)])
def test_in_place_behind_batch_norms_of_which_one_is_too_small(
    channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activation has calls of both kinds."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", _IMAGE_BYTES // 4)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", _IMAGE_BYTES)
    act, (first, second) = nn.ELU(inplace=True), channels
    norms = nn.BatchNorm2d(first), nn.BatchNorm2d(second)
    convs = nn.Conv2d(4, first, 1), nn.Conv2d(first, second, 1), nn.Conv2d(second, 4, 1)
    model = nn.Sequential(convs[0], norms[0], act, convs[1], norms[1], act, convs[2])
    x = torch.randn(_IMAGE_BYTES // 4 // 256, 4, 4, 4)
    report = fl.fuse(model, x)
    (elu,) = (place for place in report.replaced if place.activation == "elu")
    assert (elu.calls, elu.saves, len(report.too_small)) == (2, "saves the output", 1)
    assert report.saved_bytes is not None and report.saved_bytes[0] > report.saved_bytes[1] == _bytes(model, x)


def test_a_batch_norm_before_what_a_checkpoint_leaves_to_pytorch(x: Tensor) -> None:
    act = nn.SiLU(inplace=True)
    block = nn.Sequential(nn.Linear(IN, HIDDEN), nn.BatchNorm1d(HIDDEN), act, nn.Linear(HIDDEN, IN))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
            return result

    for inputs in (x[:2], x.repeat(64, 1)):
        report = fl.fuse(Model(), inputs)
        assert not (report.replaced or report.too_small)
        norm = next(place for place in report.skipped if place.pattern == "batch_norm")
        assert norm.reason.startswith("the activation behind it is left to PyTorch: it writes over its input, of which")


@pytest.mark.parametrize(
    "at", ["by classes", "finding operations", "measuring what operations free, run 2", "timing steps, round 1"]
)
def test_errors_of_progress_are_raised_and_change_nothing(x: Tensor, at: str) -> None:
    def fails(stage: str, part: float) -> None:
        if stage in (at, "looking at the classes of modules"):
            raise OSError("disk full") from KeyError("device")

    model = MLP()
    fl.fuse(model, x)
    before = _kinds(model)
    with pytest.raises(OSError, match=r"^disk full$") as caught:
        fl.fuse(model, None if at == "by classes" else x, dry_run=True, progress=fails)
    assert _kinds(model) == before != {}
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.__context__ is None


def test_fuse_under_hooks_says_so(x: Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        report = fl.fuse(MLP(), x)
    assert any(note.startswith("Saved-tensor hooks are on here.") for note in report.notes)


@pytest.mark.parametrize("which", [0, 1])
def test_blocks_of_which_some_are_checkpointed_are_apart(x: Tensor, which: int) -> None:
    """The results of both are not saved by what follows, so that nothing is freed of the one that runs plainly."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(IN, IN), nn.SiLU()) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            for number, block in enumerate(self.blocks):
                y = checkpoint(block, x, use_reentrant=False) if number == which else block(x)
                x = y.sum(-1, keepdim=True).expand(-1, IN)  # type: ignore[union-attr]
            return x

    report = fl.fuse(Model(), x.requires_grad_())
    assert [place.modules for place in report.idle] == [(f"blocks.{which}.1",)]
    assert [place.modules for place in report.skipped] == [(f"blocks.{1 - which}.1",)]


def test_what_would_keep_no_less_within_checkpoints_is_left(x: Tensor) -> None:
    """Such a function saves its input, wherever it runs."""
    turns = nn.LeakyReLU(-0.1)
    model = nn.Sequential(nn.Linear(IN, IN), _Checkpointed(nn.Linear(IN, HIDDEN), turns, nn.Linear(HIDDEN, IN)))
    report = fl.fuse(model, x)
    assert not (report.replaced or report.idle)
    assert [skipped.reason.startswith("saves the input: ") for skipped in report.skipped] == [True]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (nn.ELU, "PyTorch saves no more than the output"),
        (nn.SiLU, "it writes over its input, of which a checkpoint around it may hold a copy"),
    ],
)
def test_what_is_written_in_place_within_checkpoints_is_pytorchs(kind: Callable[..., nn.Module], reason: str) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), kind(inplace=True))]
    model, x = nn.Sequential(nn.Linear(64, 64), _Checkpointed(*layers)), torch.randn(512, 64)
    peak = fl.memory_report(model, x).peak_bytes
    report = fl.fuse(model, x)
    assert {place.reason for place in report.skipped} == {reason}
    assert not (report.replaced or report.idle) and fl.memory_report(model, x).peak_bytes == peak
    fl.fuse(nn.Sequential(*model[1]), x)  # without the checkpoint
    assert fl.memory_report(model, x).peak_bytes == peak


def test_code_without_gradients_may_be_of_any_kind() -> None:
    """Tensors of inference mode count no versions; those of a transform have no memory of their own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                y = F.gelu(F.silu(x * 2))
            with torch.no_grad():
                torch.func.vmap(F.mish)(x)
                F.gelu(y)
                torch.func.vmap(F.gelu)(x)
            return self.down(F.gelu(F.mish(self.up(x))))

    report = fl.fuse(Model(), torch.randn(64, 16))
    (place,) = report.replaced  # of the two with gradients one is enough
    assert place.saves.startswith("saves the output") and place.saved_bytes == 64 * 64 * 4
    assert [idle.activation for idle in report.idle] == ["silu"] and "freed nothing" in report.skipped[0].reason


class _Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    "put",
    [
        lambda x: x.register_hook(lambda g: 0.5 * g),
        lambda x: x.grad_fn.register_prehook(lambda grads: (0.5 * grads[0],)),
    ],
    ids=["tensor", "node"],
)
def test_mlps_that_put_hooks_are_not_recomputed(x: Tensor, put: Callable[[Tensor], object]) -> None:
    """A second run would put them once more, on the same input."""

    class Hooked(MLP):
        def forward(self, x: Tensor) -> Tensor:
            put(x)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(IN, IN), Hooked(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x, save="recompute")
    _same(model, eager, x)


@pytest.mark.parametrize("make", [nn.LogSigmoid, lambda: nn.RMSNorm(ROWS), lambda: RMSNorm(ROWS), nn.GELU])
def test_results_are_laid_out_as_pytorchs(x: Tensor, make: Callable[[], nn.Module]) -> None:
    """Code that follows may view them, and a dropout draws numbers in the order of memory."""

    class Transposes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.last = nn.Linear(IN, HIDDEN), make(), nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.part(self.first(x).t())
            self.strides = h.stride()
            return self.last(F.dropout(h, 0.5).t())

    model = Transposes()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    _same(model, eager, x)
    assert model.strides == eager.strides


@pytest.mark.parametrize("is_packed", [False, True])
def test_norms_of_heads_keep_less(x: Tensor, is_packed: bool) -> None:
    """Heads are views of a product, the sequence in front of them or behind; of one with keys and values, with gaps."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(IN, 3 * HIDDEN if is_packed else HIDDEN)
            self.norm, self.last = RMSNorm(16), nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)[:, :HIDDEN].view(4, ROWS // 4, HIDDEN // 16, 16).transpose(1, 2)
            h = self.norm(h)
            self.strides = h.stride()
            return self.last(F.dropout(h, 0.5).sin().transpose(1, 2).flatten(2))

    model = Heads()
    eager = copy.deepcopy(model)
    kept = _bytes(model, x)
    fl.fuse(model, x)
    assert region_of(model.norm) is not None
    _same(model, eager, x.requires_grad_())
    assert model.strides == eager.strides
    assert _bytes(model, x) <= kept - HIDDEN_BYTES


def test_what_reads_a_product_may_be_edited(x: Tensor) -> None:
    """Also with more than two dimensions, where the result is a view of its buffer."""

    class Residual(Gated):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y += x
            return y

    model, x = nn.Sequential(nn.Linear(IN, IN), Residual(), nn.Linear(IN, 2)), x.view(4, -1, IN)
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert _kinds(model) == {"1": {"gate"}, "1.down": {"product"}}
    _same(model, eager, x)


@pytest.mark.parametrize("make", [QuickGELU, lambda: RMSNorm(IN)])
def test_hooks_of_spelled_modules_run_once(x: Tensor, make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), make(), nn.Linear(IN, 2))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    for each in (model, eager):
        each[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        each[1].register_forward_hook(lambda module, args, y: y * 3)
    _same(model, eager, x)
    assert region_of(model[1]) is not None and _bytes(model, x) < _bytes(eager, x)


@pytest.mark.parametrize("make", [QuickGELU, lambda: RMSNorm(IN)])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_spelled_modules_with_a_forward_of_their_own_are_left(
    x: Tensor, make: Callable[[], nn.Module], with_inputs: bool
) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), make(), nn.Linear(IN, 2))
    model[1].forward = lambda x: x * 3
    expected = model(x)
    fl.fuse(model, *((x,) if with_inputs else ()))
    torch.testing.assert_close(model(x), expected)
