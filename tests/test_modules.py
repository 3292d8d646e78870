"""``FusedDenseAct``, and drop-in activations as torch's own."""

import copy
import functools
import inspect
import io
import pickle
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

_ACTIVATIONS = [
    name for name in fl.__all__ if getattr(getattr(fl, name), "__module__", "") == "fusedlayers.nn.activations"
]
DROP_IN_MODULES = [name for name in _ACTIVATIONS if hasattr(nn, name)]
DROP_IN_FUNCTIONS = [name for name in _ACTIVATIONS if hasattr(F, name)]

#: Arguments other than the defaults, in torch's order.
OTHER_ARGUMENTS: dict[str, dict[str, Any]] = {
    "celu": {"alpha": 0.5},
    "elu": {"alpha": 0.5},
    "gelu": {"approximate": "tanh"},
    "hardtanh": {"min_val": -0.3, "max_val": 2.5},
    "leaky_relu": {"negative_slope": 0.2},
    "softplus": {"beta": 2.0, "threshold": 18.0},
    "softshrink": {"lambd": 0.2},
}
SAMPLE = torch.linspace(-8, 8, 1001)
BIG = 2e-4  # a folded derivative from float32 outputs


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- FusedDenseAct ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [*fl.activations(), None])
def test_it_computes_linear_then_activation(name: str | None, bias: bool) -> None:
    layer = fl.FusedDenseAct(12, 40, name, bias)
    x = torch.randn(3, 10, 12, requires_grad=True)
    torch.testing.assert_close(layer(x), fl.dense_bias_act(x, layer.weight, layer.bias, name))
    assert (layer.bias is None) == (not bias)
    layer(x).sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("activation", ["gelu", nn.SiLU(), nn.LeakyReLU(0.2), F.gelu, None], ids=reference.label)
def test_state_loads_into_linear_and_back(activation: object) -> None:
    layer, linear, again = fl.FusedDenseAct(12, 40, activation), nn.Linear(12, 40), fl.FusedDenseAct(12, 40, activation)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    linear.load_state_dict(torch.load(buffer, weights_only=True))
    again.load_state_dict(linear.state_dict())
    x = torch.randn(30, 12)
    assert torch.equal(again(x), layer(x))
    assert torch.equal(linear.weight, layer.weight)


def test_dtype_and_device() -> None:
    layer = fl.FusedDenseAct(12, 40, "relu", device="meta", dtype=torch.bfloat16)
    assert layer.weight.is_meta and layer.weight.dtype is torch.bfloat16
    assert layer(torch.empty(30, 12, device="meta", dtype=torch.bfloat16)).shape == (30, 40)
    moved = fl.FusedDenseAct(12, 40, "gelu").to(torch.bfloat16)
    assert moved(torch.randn(30, 12, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gelu",), "activation=gelu, saves the output (last bit = side of minimum)"),
        (("relu",), "activation=relu, saves the output"),
        ((nn.LeakyReLU(-1.0),), "activation=leaky_relu(negative_slope=-1), saves the input: with negative_slope = -1"),
        ((torch.sin,), "activation=sin, saves the input: the function has a derivative that does not settle"),
        ((None,), "activation=identity, saves nothing"),
    ],
)
def test_its_repr_says_what_is_saved(arguments: tuple[object, ...], said: str) -> None:
    assert said in repr(fl.FusedDenseAct(12, 40, *arguments))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fl.FusedDenseAct(64, "gelu"),
            "FusedDenseAct: out_features must be an int, got str: 'gelu'",
        ),
        (
            lambda: fl.FusedMLP(64, "gelu", 256),
            "FusedMLP: hidden_features must be an int, got str: 'gelu'",
        ),
        (
            lambda: fl.FusedMLP(64, 256, "gelu"),
            "FusedMLP: out_features must be an int, got str: 'gelu'",
        ),
        (lambda: fl.FusedGatedMLP(64, 2.5), "FusedGatedMLP: hidden_features must be an int, got float: 2.5"),
        (
            lambda: fl.FusedConvAct2d(3, 8, "relu"),
            "FusedConvAct2d: kernel_size must be an int, or one for each dimension, got 'relu'",
        ),
        (
            lambda: fl.FusedConvAct1d(3, "silu", 3),
            "FusedConvAct1d: out_channels must be an int, got str: 'silu'",
        ),
    ],
)
def test_arguments_that_slipped_are_named(make: Any, words: str) -> None:
    hint = r"(; if an activation is meant, write activation='\w+')" if "got str" in words else ""
    with pytest.raises(TypeError, match=f"^{words}{hint}$"):
        make()


def test_sizes_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^FusedDenseAct: in_features must not be negative, got -1$"):
        fl.FusedDenseAct(-1, 64)


def test_its_repr_knows_the_dtype_and_the_choice() -> None:
    assert "not fused: float64 is comp" in repr(fl.FusedDenseAct(12, 40, "gelu", dtype=torch.float64))
    assert "saves nothing and recomputes" in repr(fl.FusedDenseAct(12, 40, "gelu", save="recompute"))


def test_its_first_line_in_the_docs_is_true() -> None:
    x = torch.randn(64, 12, requires_grad=True)
    next_layer = nn.Linear(40, 12)
    hidden_bytes = 64 * 40 * 4
    fused, linear = fl.FusedDenseAct(12, 40, "gelu"), nn.Linear(12, 40)
    assert saved_bytes(lambda: next_layer(fused(x))) == hidden_bytes
    assert saved_bytes(lambda: next_layer(F.gelu(linear(x)))) == 2 * hidden_bytes


# --- drop-ins ---------------------------------------------------------------------------------------------------------


def test_there_are_drop_ins_for_what_does_not_save_its_output_already() -> None:
    assert {"GELU", "SiLU", "Mish", "Hardswish", "ELU", "Softplus"} <= set(DROP_IN_MODULES)
    assert {"gelu", "silu", "mish", "hardswish", "elu", "softplus"} <= set(DROP_IN_FUNCTIONS)


def _function_name(module_name: str) -> str:
    return {"LeakyReLU": "leaky_relu"}.get(module_name, module_name.lower())


@pytest.mark.parametrize("name", DROP_IN_MODULES)
@pytest.mark.parametrize("other", [False, True], ids=["defaults", "arguments"])
def test_drop_in_modules(name: str, other: bool) -> None:
    arguments = OTHER_ARGUMENTS.get(_function_name(name), {}) if other else {}
    ours, torchs = getattr(fl, name)(**arguments), getattr(nn, name)(**arguments)
    assert isinstance(ours, getattr(nn, name))
    assert repr(ours) == repr(torchs)
    assert list(inspect.signature(type(ours)).parameters) == list(inspect.signature(type(torchs)).parameters)
    x, same = SAMPLE.clone().requires_grad_(), SAMPLE.clone().requires_grad_()
    torch.testing.assert_close(ours(x), torchs(same))
    dy = torch.linspace(-1, 1, len(SAMPLE))
    ours(x).backward(dy)
    torchs(same).backward(dy)
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=BIG)
    for clone in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(clone) is type(ours)
        assert torch.equal(clone(SAMPLE), ours(SAMPLE))


@pytest.mark.parametrize("name", DROP_IN_MODULES)
def test_drop_in_modules_save_their_output_only(name: str) -> None:
    x = torch.randn(1000, requires_grad=True)
    module = getattr(fl, name)()
    w = torch.randn(1000, requires_grad=True)

    def followed(f: nn.Module) -> int:
        return saved_bytes(lambda: (f(2 * x) * w).sum())  # the product keeps y

    assert followed(module) == 4000
    assert followed(module) <= followed(getattr(nn, name)())


@pytest.mark.parametrize("name", DROP_IN_FUNCTIONS)
def test_drop_in_functions(name: str) -> None:
    ours, torchs = getattr(fl, name), getattr(F, name)
    other = OTHER_ARGUMENTS.get(name, {})
    cases: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((), other)]
    if name != "gelu":  # its argument is keyword-only in torch
        cases.append((tuple(other.values()), {}))
    for positional, keywords in cases:
        x, same = SAMPLE.clone().requires_grad_(), SAMPLE.clone().requires_grad_()
        y, expected = ours(x, *positional, **keywords), torchs(same, *positional, **keywords)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-5, atol=BIG)


@pytest.mark.parametrize("name", ["quick_gelu", "squared_relu"])
def test_functions_that_torch_lacks(name: str) -> None:
    formula = {"quick_gelu": lambda z: z * torch.sigmoid(1.702 * z), "squared_relu": lambda z: F.relu(z) ** 2}[name]
    torch.testing.assert_close(getattr(fl, name)(SAMPLE), formula(SAMPLE))


@pytest.mark.parametrize(
    "name", [n for n in DROP_IN_MODULES if "inplace" in inspect.signature(getattr(nn, n)).parameters]
)
def test_inplace_modules_overwrite(name: str) -> None:
    module = getattr(fl, name)(inplace=True)
    leaf = SAMPLE.clone().requires_grad_()
    z = leaf * 1
    assert module(z) is z
    torch.testing.assert_close(z, getattr(nn, name)()(SAMPLE))
    with pytest.raises(RuntimeError, match="inplace=True on a leaf"):
        module(leaf)


@pytest.mark.parametrize("name", [n for n in DROP_IN_FUNCTIONS if n != "gelu"])
def test_inplace_functions_overwrite(name: str) -> None:
    z = SAMPLE.clone()
    assert getattr(fl, name)(z, inplace=True) is z
    torch.testing.assert_close(z, getattr(F, name)(SAMPLE))


def test_drop_in_functions_refuse_what_they_do_not_take() -> None:
    with pytest.raises(ValueError, match="gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        fl.gelu(SAMPLE, approximate="erf")
    with pytest.raises(TypeError, match=r"elu\(\) takes input, alpha, got 3 positional arguments"):
        fl.elu(SAMPLE, 1.0, 2.0)
    with pytest.raises(ValueError, match=r"'silu' got unknown parameters \['beta'\]"):
        fl.silu(SAMPLE, beta=2.0)
    with pytest.raises(TypeError, match="must have a floating dtype"):
        fl.silu(torch.arange(3))
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        fl.GELU("erf")(SAMPLE)  # as torch's: made, and refused when called


def test_a_subclass_of_a_drop_in_keeps_its_own_forward() -> None:
    class Doubled(fl.GELU):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Renamed(fl.GELU):
        pass

    torch.testing.assert_close(Doubled()(SAMPLE), 2 * F.gelu(SAMPLE))
    torch.testing.assert_close(fl.FusedDenseAct(1001, 3, Doubled())(SAMPLE).shape, torch.Size([3]))
    torch.testing.assert_close(Renamed()(SAMPLE), F.gelu(SAMPLE))
    layer = fl.FusedDenseAct(1001, 300, Renamed())
    torch.testing.assert_close(layer(SAMPLE), F.gelu(F.linear(SAMPLE, layer.weight, layer.bias)))


def test_drop_ins_work_in_a_sequential_that_is_moved_and_scripted_by_name() -> None:
    model = nn.Sequential(nn.Linear(12, 40), fl.GELU(), nn.Linear(40, 40), fl.LeakyReLU(0.2, inplace=True))
    reference = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 40), nn.LeakyReLU(0.2))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(30, 12)
    torch.testing.assert_close(model(x), reference(x))
    grads = [torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (model, reference)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.double()(x.double()), reference.double()(x.double()))
    assert functools.reduce(lambda n, p: n + p.numel(), model.parameters(), 0) == 12 * 40 + 40 + 40 * 40 + 40


def test_drop_ins_refuse_a_parameter_given_twice() -> None:
    with pytest.raises(TypeError, match=r"elu\(\) got multiple values for alpha"):
        fl.elu(torch.ones(3), 1.0, alpha=2.0)
