"""``explain``: what it says of an activation is what happens, and what it measures is so."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from literature import PUBLISHED, Published
from reference import derivative
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.reports.explanation import COUNT, DTYPES, ModelExplanation

KINDS = {"monotone": "monotone", "folded": "folded", "input": "needs input"}
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


# --- kinds and reasons ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", PUBLISHED[::3], ids=str)
def test_functions_of_the_literature(published: Published) -> None:
    report = fl.explain(published.with_tensors())
    assert report.kind == KINDS[published.kind]
    assert report.reason and "\n" not in report.reason
    assert ("reads tensors" in report.reason) == bool(published.trainable)
    saved = {"needs input": "saves the input", "folded": "saves the output (last bit = side of minimum)"}
    assert report.saves["float32"].startswith(saved.get(report.kind, "saves the output"))
    assert list(report.accuracy) == list(report.saved_bytes) == NAMES
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["kind"] == report.kind and plain["accuracy"]["float32"]["rms"] == report.accuracy["float32"].rms
    assert "samples" not in plain


@pytest.mark.parametrize("name", fl.activations())
def test_names_of_the_table(name: str) -> None:
    report = fl.explain(name)
    assert str(report).startswith(f"{name}: ")
    assert report.name == name and report.saves["float32"] in repr(fl.FusedDenseAct(8, 8, name))
    # Nothing but the outputs that the next layer saves anyway, or more than them where the reason says so.
    assert report.kind in ("monotone", "folded")
    here = {dtype: here for dtype, (_, here) in report.saved_bytes.items()}
    assert here == {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


class Snake(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


def with_hook() -> nn.Module:
    module = nn.GELU()
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("activation", "kind", "reason"),
    [
        (None, "monotone", "the derivative is 1"),
        (nn.GELU(), "folded", "it turns once, at z = -0.751792; negative outputs carry the branch in their last bit"),
        (lambda z: z * torch.tanh(z), "needs input", "has outputs that are not negative on both sides of its minimum"),
        (lambda z: -F.gelu(z), "needs input", "has a maximum"),
        (torch.tanh, "monotone", "the output determines the derivative"),
        (nn.LeakyReLU(-0.5), "needs input", ""),
        (nn.PReLU(48).bfloat16(), "needs input", "PReLU reads tensors that training may change"),
        (nn.Softmax(-1), "fallback", "softmax is not pointwise"),
        (nn.GLU(), "fallback", "glu is not pointwise"),
        (nn.Dropout(), "fallback", "it is random"),
        (with_hook(), "fallback", "it has hooks"),
        (lambda z: z if z.sum() > 0 else -z, "fallback", "depends on the values of a tensor"),
        (lambda z: z.no_such_method(), "fallback", "no_such_method"),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else "",
)
def test_kinds_and_reasons(activation: object, kind: str, reason: str) -> None:
    report = fl.explain(activation)
    assert report.kind == kind and reason in report.reason
    first, second, *_ = str(report).splitlines()
    assert first == f"{report.name}: {kind}" and second == f"  {report.reason}"
    assert str(report).count(report.reason) == 1
    if kind == "fallback":
        assert report.accuracy == {}
        assert ("nothing is measured" in str(report)) == (not report.saved_bytes)
        assert all(eager == here for eager, here in report.saved_bytes.values())


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1), (1, 32, 1), (32, 1, 1), (1, 32, 1, 1), (1, 1, 32)])
@pytest.mark.parametrize("in_layer", [False, True])
def test_tensors_along_any_dimension_are_tried_on_inputs_that_have_it(shape: tuple[int, ...], in_layer: bool) -> None:
    report = fl.explain(fl.FusedConvAct1d(32, 32, 7, Snake(*shape)) if in_layer else Snake(*shape))
    assert report.kind == "needs input" and report.saved_bytes["float32"] == pytest.approx((20, 8), rel=0.01)


KEEPS = "the layer keeps its input, which determines the derivative"
AGAIN = "the layer computes its input again, which determines the derivative"


@pytest.mark.parametrize(
    ("layer", "kept", "said", "reason"),
    [
        (fl.FusedDenseAct(4, 8, "silu"), (8, 4), "the output (last bit = side of minimum)", "it turns once"),
        (fl.FusedDenseAct(4, 8, "tanh", save="input"), (4, 8), "the input", KEEPS),
        (fl.FusedConvAct2d(4, 8, 3, "tanh"), (4, 4), "the output", "the output determines"),
        (fl.FusedMLP(4, 16), (8, 4), "the output (last bit = side of minimum)", "it turns once"),
        (fl.FusedMLP(4, 16, activation=nn.PReLU(), save="recompute"), (8, 0), "nothing and recomputes", "PReLU reads"),
        (fl.FusedMLP(4, 16, save="recompute"), (8, 0), "nothing and recomputes", AGAIN),
        (fl.FusedGatedMLP(4, 16), (16, 8), "gate and up", KEEPS),
        (fl.FusedGatedMLP(4, 16, save="recompute"), (16, 0), "nothing and recomputes", AGAIN),
    ],
    ids=lambda value: value.extra_repr() if isinstance(value, nn.Module) else "",
)
def test_layers_say_what_they_keep(layer: nn.Module, kept: tuple[int, int], said: str, reason: str) -> None:
    report = fl.explain(layer)
    assert tuple(math.floor(bytes_) for bytes_ in report.saved_bytes["float32"]) == kept
    assert report.saves["float32"].startswith(f"saves {said}") and report.reason.startswith(reason)
    first, second, *_ = str(report).splitlines()
    assert first == report.layer == f"{type(layer).__name__}: {layer.extra_repr()}" and f", saves {said}" in first
    assert second == f"{report.name}: {report.kind}"


def test_a_model_is_a_table_of_what_is_fused_in_it() -> None:
    part = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    model = nn.Sequential(part, *(fl.FusedDenseAct(8, 8) for _ in range(2)))
    assert "nothing is fused. fusedlayers.fuse(model)" in str(fl.explain(part))
    assert "every value" not in str(fl.explain(model))
    fl.fuse(part)
    found = fl.explain(model)
    assert isinstance(found, ModelExplanation) and [path for path, _ in found.places] == ["0", "1", "2"]
    assert dict(found.places)["0"] == "saves every value once"
    lines = str(found).splitlines()
    assert lines[2] == f"  1-2  FusedDenseAct: {model[1].extra_repr()}" and len(lines) == 3


def test_a_module_without_values_yet() -> None:
    assert fl.explain(nn.PReLU(48, device="meta")).saved_bytes == fl.explain(nn.PReLU(48)).saved_bytes != {}


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("gelo", ValueError, r"unknown activation 'gelo'; did you mean 'gelu'\? The known ones are: identity"),
        (nn.Linear(3, 4), TypeError, "Linear is a layer without an activation; pass"),
        (3, TypeError, "activation must be a name, .* got int: 3$"),
        (torch.ones(3), TypeError, "activation must be a name, .* got Tensor$"),
    ],
    ids=["name", "layer", "number", "tensor"],
)
def test_what_is_no_activation_is_an_error(given: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"explain: {said}"):
        fl.explain(given)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "eager", "here"),
    [
        (F.gelu, 8, 4),
        (torch.tanh, 4, 4),
        (F.relu, 4, 4),
        (lambda z: z * torch.tanh(torch.exp(z)), 16, 4),
        (torch.cos, 8, 8),
        (F.hardshrink, 8, 4),
    ],
    ids=["gelu", "tanh", "relu", "tanhexp", "cos", "hardshrink"],
)
def test_bytes(activation: Callable[[Tensor], Tensor], eager: int, here: int) -> None:
    half = eager / 2, here / 2
    assert fl.explain(activation).saved_bytes == {"float32": (eager, here), "float16": half, "bfloat16": half}


@pytest.mark.usefixtures("sizes_that_ship")
def test_bytes_are_those_of_results_that_are_fused() -> None:
    found = fl.explain("gelu").saved_bytes
    assert found == {"float32": (8.0, 4.0), "float16": (4.0, 2.0), "bfloat16": (4.0, 2.0)}


@pytest.mark.parametrize("activation", ["gelu", "tanh", "softplus", "mish"])
def test_errors(activation: str) -> None:
    report = fl.explain(activation)
    function = resolve(activation).function
    for dtype, name in zip(DTYPES, NAMES, strict=True):
        errors = report.accuracy[name]
        assert all(0 <= value < 1 for value in vars(errors).values())
        z = torch.randn(COUNT).to(dtype).requires_grad_()
        exact = derivative(function, z)
        (slope,) = torch.autograd.grad(fl.bias_act(z, None, activation).sum(), z)
        error = (slope.double() - exact).norm() / exact.norm()
        # Other random numbers from the same distribution.
        assert 0.8 * float(error) <= errors.rms <= 1.25 * float(error)
        assert errors.rms <= errors.largest / float(exact.square().mean().sqrt())


def test_infinite_derivatives_do_not_count() -> None:
    for errors in fl.explain(lambda z: torch.sqrt(z)).accuracy.values():
        assert all(value == value and value < 100 for value in vars(errors).values())


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_is_a_table() -> None:
    report: Any = fl.explain(lambda z: torch.tanh(z) + 5)
    lines = str(report).splitlines()
    header, *rows = lines[3:7]
    assert [header.count(word) for word in ("eager", "here")] == [3, 3] and len(header) <= 100
    starts = [header.index("bytes"), header.index("rms error"), header.index("largest")]
    for row, dtype in zip(rows, NAMES, strict=True):
        assert row.startswith(f"  {dtype} ")
        assert all(row[start - 1] == " " != row[start] for start in starts)
    assert "the output" in rows[0] and "the input" in rows[2]
    # What differs in one dtype is said once.
    assert sum("too coarsely" in line for line in lines) == 1 and lines[-1].startswith("  bfloat16: ")
