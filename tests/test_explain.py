"""``explain``: what it says of an activation is what happens, and what it measures is so."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from literature import PUBLISHED, Published
from reference import derivative
from test_architecture import BLOCK_TRITON
from torch import Tensor, nn

import fusedlayers as fl
from examples.custom_activation import ACTIVATIONS as MODULES
from fusedlayers import sizes
from fusedlayers.activations import resolve
from fusedlayers.profiling.explanation import COUNT, DTYPES
from fusedlayers.profiling.explanation_plot import pair_of
from fusedlayers.profiling.model_explanation import ModelExplanation

Function = Callable[[Tensor], Tensor]

ROOT = Path(__file__).parents[1]
KINDS = {"monotone": "monotone", "folded": "folded", "input": "needs input"}


# --- kinds and reasons ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", PUBLISHED[::3], ids=str)
def test_functions_of_the_literature(published: Published) -> None:
    report = fl.explain(published.with_tensors())
    assert report.kind == KINDS[published.kind]
    assert report.reason and "\n" not in report.reason
    assert ("reads tensors" in report.reason) == bool(published.trainable)
    saved = {"needs input": "saves the input", "folded": "saves the output (last bit = side of minimum)"}
    assert report.saves["float32"].startswith(saved.get(report.kind, "saves the output"))
    assert report.source.count("def ") == 2
    assert set(report.accuracy) == set(report.saved_bytes) == {"float32", "float16", "bfloat16"}
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("name", fl.activations())
def test_names_of_the_table(name: str) -> None:
    report = fl.explain(name)
    assert len(str(report)) > 0
    record = fl.FusedDenseAct(8, 8, name)
    assert report.name == name and report.saves["float32"] in repr(record)
    assert report.source.startswith(f"def {name}_forward(") or name == "identity"
    # Nothing but the outputs that the next layer saves anyway, or more than them where the reason says so.
    assert report.kind in ("monotone", "folded")
    assert {dtype: here for dtype, (_, here) in report.saved_bytes.items()} == {
        "float32": 4.0, "float16": 2.0, "bfloat16": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("activation", "kind", "reason"),
    [
        (None, "monotone", "the derivative is 1"),
        (nn.Identity(), "monotone", "the derivative is 1"),
        (nn.GELU(), "folded", "it turns once, at z = -0.751792; negative outputs carry the branch in their last bit"),
        (torch.abs, "folded", "it turns once, at z = 0; positive outputs carry the branch in their last bit"),
        (lambda z: -F.gelu(z), "folded", "positive outputs carry the branch"),
        (torch.tanh, "monotone", "the output determines the derivative"),
        (nn.LeakyReLU(-0.5), "needs input", ""),
        (nn.PReLU(), "needs input", "PReLU reads tensors that training may change"),
        (nn.PReLU(48), "needs input", "PReLU reads tensors that training may change"),
        (nn.PReLU(48).bfloat16(), "needs input", "PReLU reads tensors that training may change"),
        (nn.PReLU(COUNT + 1), "needs input", "PReLU reads tensors that training may change"),
        (MODULES["snake"](48), "needs input", "Snake reads tensors that training may change"),
        (nn.Softmax(-1), "fallback", "softmax is not pointwise"),
        (nn.Dropout(), "fallback", "it is random"),
        (nn.RReLU(), "fallback", "it is random"),
        (lambda z: z if z.sum() > 0 else -z, "fallback", "depends on the values of a tensor"),
        (lambda z: z.no_such_method(), "fallback", "no_such_method"),
        (torch.sort, "fallback", "sort is not pointwise"),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else "",
)
def test_kinds_and_reasons(activation: object, kind: str, reason: str) -> None:
    report = fl.explain(activation)
    assert report.kind == kind and reason in report.reason
    first, second, *_ = str(report).splitlines()
    assert first == f"{report.name}: {kind}" and second == f"  {report.reason}"
    if kind == "fallback":
        assert report.source == "" and report.accuracy == {}
        assert ("nothing is measured" in str(report)) == (not report.saved_bytes)
        for eager, here in report.saved_bytes.values():
            assert eager == here


@pytest.mark.parametrize(
    ("layer", "kept", "said"),
    [
        (fl.FusedDenseAct(4, 8, "silu"), (8, 4), "the output (last bit = side of minimum)"),
        (fl.FusedDenseAct(4, 8, "silu", save="input"), (8, 8), "the input"),
        (fl.FusedConvAct2d(4, 8, 3, "tanh"), (4, 4), "the output"),
        (fl.FusedMLP(4, 16), (8, 4), "the output (last bit = side of minimum)"),
        (fl.FusedMLP(4, 16, activation=nn.PReLU(), save="recompute"), (8, 0), "nothing and recomputes"),
        (fl.FusedGatedMLP(4, 16), (16, 8), "gate and up"),
        (fl.FusedGatedMLP(4, 16, save="recompute"), (16, 0), "nothing and recomputes"),
    ],
    ids=lambda value: value.extra_repr() if isinstance(value, nn.Module) else "",
)
def test_layers_say_what_they_keep(layer: nn.Module, kept: tuple[int, int], said: str) -> None:
    report = fl.explain(layer)
    assert tuple(math.floor(bytes_) for bytes_ in report.saved_bytes["float32"]) == kept
    assert report.saves["float32"].startswith(f"saves {said}") and said in str(report)
    first, second, *_ = str(report).splitlines()
    assert first == report.layer == f"{type(layer).__name__}: {layer.extra_repr()}" and f", saves {said}" in first
    assert second == f"{report.name}: {report.kind}" and report.to_dict()["layer"] == report.layer


class Snake(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


@pytest.mark.parametrize(
    "shape", [(), (1,), (32,), (32, 1), (1, 32, 1), (32, 1, 1), (1, 32, 1, 1), (1, 1, 1), (1, 1, 32)]
)
@pytest.mark.parametrize("in_layer", [False, True])
def test_tensors_along_any_dimension_are_tried_on_inputs_that_have_it(shape: tuple[int, ...], in_layer: bool) -> None:
    report = fl.explain(fl.FusedConvAct1d(32, 32, 7, Snake(*shape)) if in_layer else Snake(*shape))
    assert report.kind == "needs input" and report.saved_bytes["float32"] == pytest.approx((20, 8), rel=0.01)


def test_a_module_with_a_hook_is_left_to_pytorch() -> None:
    module = nn.GELU()
    module.register_forward_hook(lambda *_: None)
    report = fl.explain(module)
    assert (report.kind, report.reason) == ("fallback", "it has hooks")


def test_what_returns_another_shape_is_measured() -> None:
    report = fl.explain(nn.GLU())  # which keeps its input for an output of half the size
    assert report.saved_bytes["float32"] == (6.0, 6.0) and "raises" not in str(report)


def test_a_module_without_values_yet() -> None:
    here, meta = nn.PReLU(48), nn.PReLU(48, device="meta")
    assert fl.explain(meta).saved_bytes == fl.explain(here).saved_bytes != {}


def test_registered_functions() -> None:
    @fl.activation(derivative_given_output=lambda y: 1 - y.abs(), name="explained_laplace")
    def laplace(z: Tensor) -> Tensor:
        return torch.sign(z) * -torch.expm1(-z.abs())

    for activation in ("explained_laplace", laplace):
        report = fl.explain(activation)
        assert (report.name, report.kind) == ("explained_laplace", "monotone")
        assert report.source.startswith("def explained_laplace_forward(")


def test_what_is_no_activation_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"explain: unknown activation 'gelo'; did you mean 'gelu'\? The known ones are: identity"
    ):
        fl.explain("gelo")
    with pytest.raises(TypeError, match="explain: Linear is a layer without an activation; pass"):
        fl.explain(nn.Linear(3, 4))
    for given, said in ((3, "int: 3"), (torch.ones(3), "Tensor"), (nn.Parameter(torch.ones(3)), "Parameter")):
        with pytest.raises(TypeError, match=f"explain: activation must be a name, .* got {said}$"):
            fl.explain(given)


# --- numbers ----------------------------------------------------------------------------------------------------------


def kept_bytes(activation: object, z: Tensor, *, fused: bool) -> int:
    """Of all tensors that autograd keeps of the activation between two layers, each counted once."""
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= z.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = z.clone().requires_grad_() + 1
        y = fl.bias_act(x, None, activation) if fused else activation(x)  # type: ignore[operator]
        (y * torch.ones((), dtype=z.dtype, requires_grad=True)).sum()
    return sum(kept.values())


@pytest.mark.parametrize(
    "activation",
    [F.gelu, F.silu, torch.tanh, F.relu, lambda z: z * torch.tanh(torch.exp(z)), torch.cos, F.hardshrink],
    ids=["gelu", "silu", "tanh", "relu", "tanhexp", "cos", "hardshrink"],
)
def test_bytes(activation: Function) -> None:
    report = fl.explain(activation)
    for dtype in DTYPES:
        z = torch.randn(64, 128, dtype=dtype)
        expected = tuple(kept_bytes(activation, z, fused=fused) / z.numel() for fused in (False, True))
        assert report.saved_bytes[str(dtype).removeprefix("torch.")] == expected


@pytest.mark.parametrize("activation", ["gelu", "tanh", "softplus", "mish"])
def test_errors(activation: str) -> None:
    report = fl.explain(activation)
    function = resolve(activation).function
    for dtype in DTYPES:
        errors = report.accuracy[str(dtype).removeprefix("torch.")]
        assert all(0 <= value < 1 for value in vars(errors).values())
        z = torch.randn(COUNT, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()
        exact = derivative(function, z)
        (slope,) = torch.autograd.grad(fl.bias_act(z, None, activation).sum(), z)
        error = (slope.double() - exact).norm() / exact.norm()
        # Other random numbers from the same distribution.
        assert 0.8 * float(error) <= errors.rms <= 1.25 * float(error)
        floor = (exact.to(dtype).double() - exact).norm() / exact.norm()
        assert 0.8 * float(floor) <= errors.floor_rms <= 1.25 * float(floor)
        assert errors.floor_rms <= 1.01 * errors.rms and errors.rms <= errors.largest / float(
            exact.square().mean().sqrt()
        )


def test_infinite_derivatives_do_not_count() -> None:
    report = fl.explain(lambda z: torch.sqrt(z))
    for errors in report.accuracy.values():
        assert all(value == value and value < 100 for value in vars(errors).values())


def test_json_has_no_infinities() -> None:
    report = fl.explain("relu")
    broken = {dtype: replace(errors, largest=float("inf")) for dtype, errors in report.accuracy.items()}
    found = replace(report, accuracy=broken).to_dict()
    assert found["accuracy"]["float32"]["largest"] is None
    json.dumps(found, allow_nan=False)


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_is_a_table() -> None:
    lines = str(fl.explain(lambda z: F.softsign(0.1 * z - 3))).splitlines()
    header, *rows = lines[4:8]
    assert header.split() == ["eager", "here", "eager", "here", "rounding", "eager", "here"]
    starts = [header.index("eager"), header.index("here"), header.index("rounding"), header.rindex("here")]
    for row, dtype in zip(rows, ("float32", "float16", "bfloat16"), strict=True):
        assert row.startswith(f"  {dtype} ") and len(row) < 125
        assert all(row[start - 1] == " " != row[start] for start in starts)
    assert "the output" in rows[0] and "the input" in rows[2]
    # What differs in one dtype is said once.
    assert sum("too coarsely" in line for line in lines) == 1 and lines[-1].startswith("  bfloat16: ")


def test_reasons_are_not_repeated() -> None:
    for activation in (nn.PReLU(), nn.Softmax(-1), torch.cos):
        report = fl.explain(activation)
        assert str(report).count(report.reason) == 1


def test_what_cannot_be_printed_is_said() -> None:
    report = fl.explain(lambda z: z * torch.special.airy_ai(z))
    assert report.source.startswith("# On GPUs it is left to torch operations: special_airy_ai has no Triton counter")


def test_it_works_without_triton() -> None:
    script = BLOCK_TRITON.replace("sys.meta_path", "import importlib.util\nsys.meta_path") + (
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import torch, fusedlayers as fl\n"
        "for activation in ('gelu', torch.cos, torch.nn.PReLU()):\n"
        "    report = fl.explain(activation)\n"
        "    print(report, report.source)\n"
        "assert 'triton' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("# Triton is not installed; torch operations do the work.") == 3
    assert "gelu: folded" in done.stdout


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "tanh", nn.PReLU(48), MODULES["snake"](7)], ids=str)
def test_pictures(activation: object, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = fl.explain(activation)
    for suffix, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        report.plot(tmp_path / f"picture.{suffix}")
        assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(start)
    curves = report.curves
    errors = [error for of_dtype in curves.errors.values() for error in of_dtype]
    assert {curve.shape for curve in (curves.y, curves.slope, *errors)} == {curves.z.shape}


FOLDED = {
    **{name: name for name in fl.activations() if resolve(name).is_folded},
    "abs": torch.abs,
    "falling": lambda z: -F.gelu(z),
    "far": lambda z: F.silu(z + 3),
}


@pytest.mark.parametrize("name", FOLDED)
def test_the_last_bit_tells_two_inputs_with_one_output_apart(name: str) -> None:
    curves = fl.explain(FOLDED[name]).curves
    pair = pair_of(curves, curves.fold)
    marked, other = pair.bits
    assert marked[:-3] == other[:-3] and (marked[-3:], other[-3:]) == ("[1]", "[0]")
    assert curves.fold.marks(torch.tensor(pair.z)).tolist() == [True, False]
    function = resolve(FOLDED[name]).function
    z = torch.tensor(pair.z, dtype=torch.float64)
    assert function(z).tolist() == pytest.approx([pair.y] * 2, abs=0.003)
    assert derivative(function, z).tolist() == pytest.approx(pair.slope, abs=1e-6)
    assert pair.slope[0] * pair.slope[1] < 0
    assert f"{torch.tensor(pair.y).bfloat16().view(torch.int16).item() & 0xFFFF:016b}" == re.sub(r"[ \[\]]", "", other)
    # And so does a layer.
    y = fl.bias_act(z.float().repeat(1024).requires_grad_(), None, FOLDED[name]).detach()
    assert (y.view(torch.int32) & 1)[:2].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("activation", "panel"),
    [
        ("gelu", "Derivative over the output: the last bit is the branch"),
        ("tanh", "Derivative over the output: one value for each"),
        (torch.cos, "Derivative over the output (not saved)"),
        (fl.FusedDenseAct(4, 8, "gelu", save="input"), "Derivative over the output (not saved)"),
        (fl.FusedGatedMLP(4, 8), "Derivative over the output (not saved)"),
    ],
    ids=["gelu", "tanh", "cos", "gelu, save=input", "gated"],
)
def test_a_picture_is_of_what_the_layer_does(activation: object, panel: str) -> None:
    pytest.importorskip("matplotlib")
    report = fl.explain(activation)
    assert panel in [axes.get_title(loc="left") for axes in report.figure().axes]
    here, eager, rounding = report.curves.errors["float32"]
    assert (report.curves.fold is not None) == (activation == "gelu")
    if report.curves.given == "input":  # as exact as PyTorch's; the outputs of gelu err by 1e-5
        assert float(here.max()) < 1e-6
    # The picture and the table measure the same thing.
    assert float(here.max()) <= 2 * report.accuracy["float32"].largest and float(rounding.max()) <= float(eager.max())


def test_different_dtypes_may_keep_different_things() -> None:
    pytest.importorskip("matplotlib")
    title = fl.explain(lambda z: F.softsign(0.1 * z - 3)).figure().get_suptitle()
    assert title.startswith("<lambda> saves the output, in bfloat16 saves the input\nthe output determines")


def test_a_picture_of_what_raises_an_error_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="Softmax is left to PyTorch, so that there is nothing to draw"):
        fl.explain(nn.Softmax(-1)).plot(tmp_path / "picture.png")
    report = fl.explain("relu")
    with pytest.raises(ValueError, match="relu or its derivative raises an error, so that there is nothing to draw"):
        replace(report, curves=None).plot(tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = fl.explain("relu")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib, .* pip install 'fusedlayers\[demo\]'"):
        report.plot(tmp_path / "picture.png")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (fl.FusedGatedMLP(4, 8), "the layer keeps its input, which determines the derivative"),
        (fl.FusedMLP(4, 8, save="input"), "the layer keeps its input, which determines the derivative"),
        (fl.FusedMLP(4, 8, save="recompute"), "the layer computes its input again, which determines the derivative"),
        (fl.FusedDenseAct(4, 8, "tanh", save="input"), "the layer keeps its input, which determines the derivative"),
    ],
    ids=str,
)
def test_layers_that_do_not_keep_their_output_say_so(layer: Any, reason: str) -> None:
    found = fl.explain(layer)
    assert found.reason == reason and "_gradient(dy, z, " in found.source and "branch" not in found.reason


def test_bytes_are_those_of_results_that_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bounds of the library, which tests lower."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", 512 << 10)
    monkeypatch.setattr(sizes, "MEDIUM_BYTES", 2 << 20)
    found = fl.explain("gelu").saved_bytes
    assert found == {"float32": (8.0, 4.0), "float16": (4.0, 2.0), "bfloat16": (4.0, 2.0)}


@pytest.mark.parametrize("exact", [True, False])
def test_a_fused_model_is_said_to_save_every_value_once(exact: bool) -> None:
    part = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    model = nn.Sequential(part, fl.FusedDenseAct(8, 4))
    assert "every value" not in str(fl.explain(model))
    fl.fuse(part, exact=exact)
    found = fl.explain(model)
    assert isinstance(found, ModelExplanation)
    places = dict(found.places)
    assert places["0"] == ("saves every value once, exactly" if exact else "saves every value once")
    assert list(places) == ["0", "1"]
