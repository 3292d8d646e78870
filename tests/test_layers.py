"""Fused layers beside torch's: modules that no ``isinstance`` takes for a layer without an activation, with the same
parameters, buffers, attributes and first values."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.flop_counter import FlopCounterMode

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


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


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
def test_they_are_none_of_torchs_layers(kind: Kind) -> None:
    layer = kind.fused()
    assert not isinstance(layer, (nn.Linear, _ConvNd))
    (types,) = (t for t in (fl.LINEAR_TYPES, fl.CONV_TYPES) if issubclass(kind.torchs, t))
    assert isinstance(layer, types) and isinstance(kind.plain(), types)
    others = {fl.LINEAR_TYPES, fl.CONV_TYPES} - {types}
    assert not any(isinstance(layer, other) for other in others)


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


@pytest.mark.parametrize(
    ("ours", "torchs", "arguments", "options"),
    [
        (fl.FusedConvAct2d, nn.Conv2d, (6, 8, 3), {"groups": 4}),
        (fl.FusedConvAct1d, nn.Conv1d, (6, 8, 3), {"padding": "same", "stride": 2}),
    ],
    ids=["groups", "padding"],
)
def test_torchs_constructor_checks_the_arguments(
    ours: Any, torchs: Any, arguments: tuple[int, ...], options: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, RuntimeError)) as expected:
        torchs(*arguments, **options)
    with pytest.raises(expected.type) as found:
        ours(*arguments, **options)
    assert str(found.value) == str(expected.value)


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


@every_kind
@pytest.mark.filterwarnings("ignore:.*stateless.functional_call.*:FutureWarning")
def test_lent_parameters(kind: Kind) -> None:
    layer, plain, x = kind.fused().eval(), kind.plain().eval(), kind.input()
    lent = {name: torch.randn_like(p).abs_() for name, p in plain.named_parameters()}
    before = copy.deepcopy(layer.state_dict())
    expected = F.silu(torch.func.functional_call(plain, lent, (x,)))
    for call in (torch.func.functional_call, torch.nn.utils.stateless.functional_call):
        torch.testing.assert_close(call(layer, lent, (x,)), expected)
        torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    if lent:

        def loss(parameters: dict[str, Tensor], of: nn.Module, after: Callable[[Tensor], Tensor]) -> Tensor:
            return after(torch.func.functional_call(of, parameters, (x,))).square().sum()

        ours = torch.func.grad(functools.partial(loss, of=layer, after=lambda y: y))(lent)
        torchs = torch.func.grad(functools.partial(loss, of=plain, after=F.silu))(lent)
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-3)


# --- arithmetic that is counted ---------------------------------------------------------------------------------------


def _flops(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Forward, and with the backward pass."""
    with FlopCounterMode(display=False) as counter:
        y = module(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops()


#: Small ones and large ones.
COUNTED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[int, ...]]] = {
    "dense": (lambda: [nn.Linear(24, 40), nn.GELU()], fl.FusedDenseAct.from_modules, (16, 24)),
    "large dense": (lambda: [nn.Linear(96, 112), nn.ReLU()], fl.FusedDenseAct.from_modules, (512, 96)),
    "conv": (lambda: [nn.Conv2d(4, 8, 3), nn.SiLU()], fl.FusedConvAct2d.from_modules, (2, 4, 9, 9)),
    "large conv": (lambda: [nn.Conv2d(16, 32, 3), nn.ReLU()], fl.FusedConvAct2d.from_modules, (4, 16, 24, 24)),
    "mlp": (lambda: [nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)], fl.FusedMLP.from_modules, (16, 24)),
    "large mlp": (lambda: [nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)], fl.FusedMLP.from_modules, (512, 96)),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("needs_input", [True, False], ids=["input needs a gradient", "input needs none"])
def test_torch_counts_as_much_arithmetic_as_in_eager(name: str, needs_input: bool) -> None:
    modules, fused, shape = COUNTED[name]
    eager, x = modules(), torch.randn(shape).requires_grad_(needs_input)
    expected = _flops(nn.Sequential(*eager), x)
    assert expected[0] > 0
    assert _flops(fused(*eager), x) == expected  # type: ignore[call-arg]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        fused(*eager)(x)  # type: ignore[call-arg]
    assert counter.get_total_flops() == expected[0]


# --- what a call costs ------------------------------------------------------------------------------------------------


@contextmanager
def _entered() -> Iterator[list[str]]:
    """The Python functions of the package that are entered; generators each time that they go on."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/fusedlayers/" in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def _before(function: str, module: nn.Module, x: Tensor) -> int:
    """How many functions a warm call enters before this one."""
    for _ in range(2):
        module(x)
    with _entered() as names:
        module(x)
    return names.index(function)


_ACTIVATIONS = [
    name for name in fl.__all__ if getattr(getattr(fl, name), "__module__", "") == "fusedlayers.nn.activations"
]
ACTIVATION_MODULES = [name for name in _ACTIVATIONS if hasattr(nn, name)]


@pytest.mark.parametrize("name", ACTIVATION_MODULES)
def test_a_drop_in_is_soon_at_the_function(name: str) -> None:
    assert _before("bias_act", getattr(fl, name)(), torch.randn(300, requires_grad=True)) <= 3


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


@every_block
def test_a_block_is_soon_at_the_function(make: Callable[[], Any]) -> None:
    block = make()
    function = "gated_mlp" if block.is_gated else "mlp"
    assert _before(function, block, torch.randn(32, 8, requires_grad=True)) <= 4


class _Kept(nn.Parameter):
    """A subclass of whose arithmetic nothing is known."""


def _hook(layer: Any) -> Callable[[], object]:
    return layer.register_forward_pre_hook(lambda *_: None).remove


def _forward(layer: Any) -> Callable[[], object]:
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)
    return lambda: delattr(layer, "forward")


def _parametrized(layer: Any) -> Callable[[], object]:
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    return lambda: nn.utils.parametrize.remove_parametrizations(layer, "weight")


def _subclassed(layer: Any) -> Callable[[], object]:
    before = layer.weight
    layer._parameters["weight"] = before.detach().as_subclass(_Kept)
    return lambda: layer.register_parameter("weight", before)


@every_block
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_hook, "must be called: it has hooks"),
        (_forward, "must be called: its forward has been replaced"),
        (_parametrized, "is a ParametrizedLinear"),
        (_subclassed, "has a _Kept, which may compute something else"),
    ],
    ids=["hook", "forward", "parametrization", "subclass"],
)
def test_a_block_notices_at_each_call_what_was_done_to_a_layer(
    make: Callable[[], Any], change: Callable[[Any], Callable[[], object]], said: str
) -> None:
    block, x = make().eval(), torch.randn(32, 8)
    expected, words = block(x), repr(block)
    for name, layer in block.layers().items():
        undo = change(layer)
        with _entered() as names:
            torch.testing.assert_close(block(x), expected)
        assert "by_calls" in names and f"not fused: {name} {said}" in repr(block)
        undo()
        with _entered() as names:
            torch.testing.assert_close(block(x), expected)
        assert "by_calls" not in names and repr(block) == words


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


# --- what from_modules refuses ----------------------------------------------------------------------------------------


def _whole_numbers(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)


#: What is done to a layer of torch's, and the reason to refuse it then; {} is its class.
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (_hook, "the nn.{} must be called: it has hooks; leave it as it is"),
    "forward": (_forward, "the nn.{} must be called: its forward has been replaced; leave it as it is"),
    "parametrization": (_parametrized, "expected a plain nn.{}, got Parametrized{}, which may compute something else"),
    "whole numbers": (_whole_numbers, "torch.int8 is no floating dtype; leave it as it is"),
}
#: By torch's layer, another that is much like it.
OTHERS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: nn.LazyLinear(8),
    "Conv1d": lambda: nn.ConvTranspose1d(6, 8, 3),
    "Conv2d": lambda: nn.LazyConv2d(8, 3),
    "Conv3d": lambda: nn.Conv2d(6, 8, 3),
}


def _changed(layer: Any, change: Callable[[Any], object]) -> Any:
    change(layer)
    return layer


def _refused_layers() -> Iterator[Any]:
    for ours, kind in {kind.ours: kind for kind in KINDS.values()}.items():
        torchs = kind.torchs.__name__
        plain = functools.partial(kind.torchs, *kind.arguments)
        calls: dict[str, tuple[Callable[[], Any], str]] = {
            what: (lambda plain=plain, change=change: _changed(plain(), change), said.format(torchs, torchs))
            for what, (change, said) in CHANGES.items()
        }
        for what, make in {
            "Own": functools.partial(type("Own", (kind.torchs,), {}), *kind.arguments),
            ours.__name__: kind.fused,
            type(OTHERS[torchs]()).__name__: OTHERS[torchs],
        }.items():
            calls[what] = make, f"expected a plain nn.{torchs}, got {what}, which may compute something else"
        for what, (make, said) in calls.items():
            call = functools.partial(lambda ours, make: ours.from_modules(make(), "relu"), ours, make)
            yield pytest.param(call, TypeError, f"{ours.__name__}.from_modules: {said}", id=f"{ours.__name__}, {what}")


_linear = functools.partial(nn.Linear, bias=False)


def _refused_blocks() -> Iterator[Any]:
    def mlp(*layers: Any) -> Callable[[], Any]:
        return lambda: fl.FusedMLP.from_modules(layers[0], "relu", layers[1])

    def gated(*layers: Any) -> Callable[[], Any]:
        return lambda: fl.FusedGatedMLP.from_modules(layers[0], "relu", *layers[1:])

    first, last = _linear(4, 8), _linear(8, 4)
    for call, error, said in (
        (mlp(first, nn.Conv1d(1, 1, 1)), TypeError, "fc2 must be a plain nn.Linear, got Conv1d"),
        (
            lambda: fl.FusedMLP.from_modules(first, last, nn.GELU()),
            TypeError,
            "fc2 must be a plain nn.Linear, got GELU, and Linear as the activation, which comes second",
        ),
        (mlp(fl.FusedDenseAct(4, 8), last), TypeError, "fc1 must be a plain nn.Linear, got FusedDenseAct"),
        (gated(first, first, None), TypeError, "down_proj must be a plain nn.Linear, got NoneType"),
        (mlp(_changed(_linear(4, 8), _whole_numbers), last), TypeError, "fc1 is of torch.int8, which is no floating"),
        (mlp(first, _linear(9, 4)), ValueError, "fc1 makes 8 features of 4, where fc2 with 9 input features needs 9"),
        (gated(first, _linear(4, 9), last), ValueError, "up_proj makes 9 features of 4, where down_proj with 8"),
        (gated(first, _linear(5, 8), last), ValueError, "up_proj makes 8 features of 5, where down_proj with 8"),
        (gated(first, None, last), ValueError, "gate_up_proj makes 8 features of 4, where down_proj with 8"),
        (gated(first, _linear(4, 8, device="meta"), last), ValueError, "up_proj is on meta but down_proj is on cpu"),
    ):
        ours = "FusedGatedMLP" if "proj" in said else "FusedMLP"
        yield pytest.param(call, error, f"{ours}.from_modules: {said}", id=said)


@pytest.mark.parametrize(("call", "error", "said"), [*_refused_layers(), *_refused_blocks()])
def test_from_modules_refuses(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(said)}"):
        call()
