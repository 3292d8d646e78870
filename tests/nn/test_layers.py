"""Fused layers beside torch's: modules that no ``isinstance`` takes for a layer without an activation, with the same
parameters, buffers, attributes and first values; and drop-in activations as torch's own."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from subjects import hooked, parametrized, replaced
from torch import Tensor, nn

import fusedlayers as fl


class Kind(NamedTuple):
    """A fused layer, torch's, the arguments of both, and the shape of an input; the activation is SiLU."""

    ours: Any
    torchs: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    shape: tuple[int, ...]

    def fused(self, **options: Any) -> Any:
        return self.ours(*self.arguments, activation="silu", **self.options, **options)

    def plain(self, **options: Any) -> Any:
        return self.torchs(*self.arguments, **self.options, **options)

    def input(self) -> Tensor:
        return torch.randn(self.shape)


KINDS = {
    "dense": Kind(fl.FusedDenseAct, nn.Linear, (6, 40), {}, (20, 6)),
    "dense, no bias": Kind(fl.FusedDenseAct, nn.Linear, (6, 40), {"bias": False}, (20, 6)),
    "conv 1d": Kind(fl.FusedConvAct1d, nn.Conv1d, (6, 8, 3), {"stride": 2, "padding_mode": "circular"}, (4, 6, 30)),
    "conv 2d": Kind(fl.FusedConvAct2d, nn.Conv2d, (6, 8, (3, 1)), {"padding": "same", "groups": 2}, (4, 6, 9, 8)),
    "conv 3d": Kind(fl.FusedConvAct3d, nn.Conv3d, (6, 8, 2), {"dilation": 2, "bias": False}, (4, 6, 5, 5, 4)),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}


def _assert_same_state(one: nn.Module, other: nn.Module) -> None:
    ours, torchs = one.state_dict(), other.state_dict()
    assert list(ours) == list(torchs)
    for name, tensor in ours.items():
        assert tensor.dtype is torchs[name].dtype and torch.equal(tensor, torchs[name])


def _assert_computes(layer: Any, plain: Any, x: Tensor) -> None:
    """The plain layer and the activation, and their gradients."""
    y, expected = layer(x), F.silu(plain(x))
    torch.testing.assert_close(y, expected)
    ours, torchs = (list(m.parameters()) for m in (layer, plain))
    got, wanted = (torch.autograd.grad(o.square().sum(), p) for o, p in ((y, ours), (expected, torchs)))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


# --- what they are ----------------------------------------------------------------------------------------------------


@every_kind
def test_they_have_torchs_attributes_and_words(kind: Kind) -> None:
    layer, plain = kind.fused(), kind.plain()
    ours = _own(layer)
    assert {ours.pop("activation"), ours.pop("save")} == {"silu", "auto"}
    assert ours == _own(plain)
    assert repr(layer).startswith(f"{kind.ours.__name__}({plain.extra_repr()}, activation=silu, saves ")
    assert layer._version == plain._version
    assert list(layer.state_dict()) == list(plain.state_dict())


@every_kind
def test_they_have_torchs_first_values(kind: Kind) -> None:
    torch.manual_seed(3)
    plain, after = kind.plain(dtype=torch.float64), torch.rand(())
    torch.manual_seed(3)
    layer = kind.fused(dtype=torch.float64)
    assert torch.equal(torch.rand(()), after)
    _assert_same_state(layer, plain)

    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.fill_(5)
    torch.manual_seed(3)
    layer.reset_parameters()
    _assert_same_state(layer, plain)


@every_kind
def test_they_are_made_without_values_and_given_some_later(kind: Kind) -> None:
    torch.manual_seed(3)
    plain, x = kind.plain(), kind.input()
    with torch.device("meta"):
        by_context = kind.fused()
    skipped = nn.utils.skip_init(kind.ours, *kind.arguments, activation="silu", **kind.options)
    for layer in (kind.fused(device="meta"), by_context):
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
        meta = x.to("meta")
        assert layer.eval()(meta).shape == kind.plain(device="meta").eval()(meta).shape
        layer.train()
    for layer in (kind.fused(device="meta").to_empty(device="cpu"), skipped):
        torch.manual_seed(3)
        layer.reset_parameters()
        _assert_same_state(layer, plain)
        _assert_computes(layer, copy.deepcopy(plain), x)


@every_kind
def test_state_loads_either_way(kind: Kind) -> None:
    layer, plain, x = kind.fused(), kind.plain(), kind.input()
    layer.load_state_dict(plain.state_dict())
    _assert_same_state(layer, plain)
    _assert_computes(layer, plain, x)
    again = kind.plain()
    again.load_state_dict(layer.state_dict())
    _assert_same_state(again, layer)
    for mode in (False, True):
        _assert_computes(layer.train(mode), plain.train(mode), x)


@every_kind
def test_from_modules_shares_everything(kind: Kind) -> None:
    plain = kind.plain().eval()
    plain.note = "the first"
    layer = kind.ours.from_modules(plain, "silu", save="recompute")
    for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        assert getattr(layer, name) is tensor
    assert _own(layer) == {**_own(plain), "activation": "silu", "save": "recompute"} and not layer.training
    assert list(layer.state_dict()) == list(plain.state_dict())
    _assert_computes(layer, plain, kind.input())
    layer.extra = nn.Parameter(torch.ones(()))
    layer.register_buffer("other", torch.ones(()))
    layer.train()
    assert "extra" not in plain._parameters and "other" not in plain._buffers and not plain.training


# --- torch's tools ----------------------------------------------------------------------------------------------------


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[Any], Any]] = {
    "own": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", _Doubled()),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("parametrize", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS)
@pytest.mark.parametrize("name", ["dense", "conv 2d"])
def test_parametrized_weights(name: str, parametrize: Callable[[Any], Any]) -> None:
    kind = KINDS[name]
    layer, plain, x = kind.fused().eval(), kind.plain().eval(), kind.input()
    plain.load_state_dict(layer.state_dict())
    torch.manual_seed(1)
    parametrize(layer)
    torch.manual_seed(1)
    parametrize(plain)
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert isinstance(layer, kind.ours) and type(layer) is not kind.ours
    _assert_computes(layer, plain, x)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    nn.utils.parametrize.remove_parametrizations(plain, "weight")
    assert type(layer) is kind.ours
    _assert_computes(layer, plain, x)


# --- what is noticed at each call -------------------------------------------------------------------------------------


def test_a_drop_in_notices_what_is_changed() -> None:
    x = torch.linspace(-4, 4, 301)
    elu, gelu = fl.ELU(), fl.GELU()
    for alpha in (1.0, 0.5, 2, True):
        elu.alpha = alpha
        torch.testing.assert_close(elu(x), F.elu(x, float(alpha)))
    for approximate in ("none", "tanh", "none"):
        gelu.approximate = approximate
        torch.testing.assert_close(gelu(x), F.gelu(x, approximate=approximate))
    seen: list[Tensor] = []
    with gelu.register_forward_hook(lambda module, arguments, y: seen.append(y)):
        y = gelu(x)
    assert seen == [y]


BLOCKS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: fl.FusedMLP(8, 40, dropout=0.1),
    "gated": lambda: fl.FusedGatedMLP(8, 40, dropout=0.1),
    "packed": lambda: fl.FusedGatedMLP(8, 40, packed=True),
}
every_block = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


class _Kept(nn.Parameter):
    """A subclass of whose arithmetic nothing is known."""


def subclassed(layer: Any) -> None:
    layer._parameters["weight"] = layer.weight.detach().as_subclass(_Kept)


@every_block
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hooked, "must be called: it has hooks"),
        (replaced, "must be called: its forward has been replaced"),
        (parametrized, "is a ParametrizedLinear"),
        (subclassed, "has a _Kept, which may compute something else"),
    ],
    ids=["hook", "forward", "parametrization", "subclass"],
)
def test_a_block_notices_at_each_call_what_was_done_to_a_layer(
    make: Callable[[], Any], change: Callable[[Any], object], said: str
) -> None:
    x = torch.randn(32, 8)
    for name in make().layers():
        block = make().eval()
        expected = block(x)
        change(block.layers()[name])
        torch.testing.assert_close(block(x), expected)
        assert f"not fused: {name} {said}" in repr(block)


@every_block
def test_a_block_notices_at_each_call_that_a_layer_was_replaced(make: Callable[[], Any]) -> None:
    class Halved(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 0.5 * super().forward(input)

    block, x = make().eval(), torch.randn(32, 8)
    whole = block(x)
    name, last = list(block.layers().items())[-1]
    with torch.no_grad():
        last.bias = None
        expected = block(x)
        halved = Halved(last.in_features, last.out_features, bias=False)
        halved.weight = last.weight
        setattr(block, name, halved)
        torch.testing.assert_close(block(x), 0.5 * expected)
        assert f"not fused: {name} is a Halved" in repr(block)
        setattr(block, name, last)
        assert torch.equal(block(x), expected) and whole.shape == expected.shape


# --- what layers say --------------------------------------------------------------------------------------------------


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


# --- drop-ins ---------------------------------------------------------------------------------------------------------

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


def test_layers_of_other_dtypes_are_refused_when_they_are_made() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"^FusedDenseAct: weight must have a floating dtype .*, got torch\.int8"):
        fl.FusedDenseAct.from_modules(layer, "gelu")
