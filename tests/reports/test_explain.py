"""``explain``: what it says of an activation is what happens, and what it measures is so."""

import pytest
import torch
import torch.nn.functional as F
from reference import derivative
from subjects import hooked
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.reports.explanation import COUNT, DTYPES, ModelExplanation

NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


# --- kinds and reasons ------------------------------------------------------------------------------------------------


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
        (hooked(nn.GELU()), "fallback", "it has hooks"),
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
