"""Users' own functions as activations: which are fused, with what result; which are left to PyTorch, and why."""

import functools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from literature import PUBLISHED
from plans import plans_of
from reference import relative
from settings import compiles
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedlayers as fl
from fusedlayers.activations import custom, partition, resolve
from fusedlayers.calls.tracers import with_operands
from fusedlayers.memory import saved_bytes
from fusedlayers.utils.caching import BoundedCache

Function = Callable[[Tensor], Tensor]

TRAINED = tuple(entry for entry in PUBLISHED if entry.trainable)
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each trace of a user's function."""
    made: list[int] = []
    original = partition.aten_graph

    def counting(*arguments: Any) -> Any:
        made.append(1)
        return original(*arguments)

    monkeypatch.setattr(partition, "aten_graph", counting)
    monkeypatch.setattr(custom, "_traces", BoundedCache())
    monkeypatch.setattr(custom, "_trace_counts", BoundedCache())
    return made


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged; nothing has been said before."""
    monkeypatch.setattr(custom, "_logged", BoundedCache())
    monkeypatch.setattr(custom, "_traces", BoundedCache())
    caplog.set_level(logging.WARNING, "fusedlayers")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "fusedlayers"]


def _reason(function: object, *shape: int, dtype: torch.dtype = torch.float32) -> str | None:
    """Why it is left to PyTorch, or None where it is fused."""
    return with_operands(resolve(function), shape or (40, 16), dtype).activation.fallback_reason


def _gradients(y: Tensor, dy: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y, tensors, dy, allow_unused=True, materialize_grads=True))


# --- traces and their keys --------------------------------------------------------------------------------------------


def _swish(z: Tensor, beta: Any) -> Tensor:
    return z * torch.sigmoid(beta * z)


def test_other_tensors_share_a_trace_and_other_numbers_do_not(traces: list[int]) -> None:
    z = torch.randn(40, 16)

    def make(beta: Any) -> Function:
        return lambda z: _swish(z, beta)

    def run(beta: Any, z: Tensor = z) -> int:
        before = len(traces)
        function = make(beta)
        torch.testing.assert_close(fl.bias_act(z, None, function), function(z))
        return len(traces) - before

    scalars = [nn.Parameter(torch.tensor(value)) for value in (0.5, 1.0, 2.0)]
    vectors = [nn.Parameter(torch.rand(16)) for _ in range(3)]
    assert [run(p) for p in scalars] == [1, 0, 0]
    assert [run(p) for p in vectors] == [1, 0, 0]
    assert [run(n) for n in (0.5, 1.0, 0.5, 2.0, 1.0)] == [1, 1, 0, 1, 0]
    # Sizes that no tensor has do not matter, dimensions and dtypes do.
    assert run(scalars[0], torch.randn(70, 30)) == run(vectors[0], torch.randn(70, 16)) == 0
    assert run(scalars[0], torch.randn(4, 7, 16)) == 1 <= run(scalars[0], torch.randn(40, 16).bfloat16())
    assert run(scalars[0], torch.randn(40, 16).double()) == 0  # which PyTorch computes
    assert run(scalars[0].detach()) == 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda z: F.gelu(z, approximate="tanh"), "gelu_tanh"),
        (lambda z: z * torch.sigmoid(1.702 * z), "quick_gelu"),
        (lambda z: F.silu(z), "silu"),
        (lambda z: F.leaky_relu(z), "leaky_relu"),
        (lambda z: torch.maximum(z, torch.zeros_like(z)) ** 2, "squared_relu"),
        (lambda z: z * torch.sigmoid(1.703 * z), None),
        (lambda z: F.leaky_relu(z, 0.02), None),
        (lambda z: F.gelu(z) + 1, None),
        (lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))), "gelu"),
        (lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))), "gelu_tanh"),
        (lambda z: 0.5 * z * (1 + torch.tanh(0.79788 * (z + 0.044715 * z**3))), None),
        (lambda z: z / (1 + torch.exp(-z)), "silu"),
        (lambda z: z * torch.tanh(F.softplus(z)), "mish"),
        (lambda z: (z.abs() + z) / 2, None),  # whose slope at 0 is not torch.relu's
        (lambda z: torch.where(z > 0, z, 0.0), None),  # which makes 0 of NaN
        (lambda z: torch.relu(z) * ~((z > 1e-9) & (z < 1e-4)), None),
    ],
)
def test_what_the_table_has_is_recognised(function: Function, name: str | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = custom.trace_activation(resolve(function), (4, 8), dtype).activation
        if name is None:
            assert found.is_fusible and found.is_traced
        else:
            assert found is resolve(name)


#: Functions with the values of silu or gelu, whose slopes are others.
NOT_THEIRS: dict[str, Function] = {
    "of-the-gate": lambda z: z.detach() * torch.sigmoid(z),
    "of-the-gated": lambda z: z * torch.sigmoid(z).detach(),
    "of-the-identity": lambda z: z + (F.gelu(z) - z).detach(),
    "of-tanh": lambda z: torch.tanh(z) + (F.silu(z) - torch.tanh(z)).detach(),
    "none": lambda z: F.silu(z.detach()),
}


@pytest.mark.parametrize("name", NOT_THEIRS)
def test_equal_values_are_not_enough_to_be_recognised(name: str) -> None:
    function = NOT_THEIRS[name]
    x, w = torch.randn(64, 16), torch.randn(48, 16, requires_grad=True)
    found, expected = fl.dense_bias_act(x, w, None, function), function(F.linear(x, w))
    if name != "none":
        _same_as_eager(found, expected, [w])
    assert found.requires_grad == expected.requires_grad


#: Formulas that overflow (to 0, far out), saturate, fall and turn.
BENT = {
    "overflows to 0": lambda z: z * torch.rsqrt(1 + z * z),
    "saturates": lambda z: 0.3 * torch.tanh(z),
    "saturates below": lambda z: torch.where(z > 0, z, 0.5 * torch.expm1(2 * z)),
    "falls": lambda z: -z - torch.sigmoid(z),
    "turns": lambda z: z * torch.tanh(torch.exp(z)),
}
#: rms and largest errors of second and third derivatives, four times what was found.
HIGHER_ORDER = {torch.float32: (1.2e-4, 4e-3), torch.bfloat16: (4e-2, 0.4)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HIGHER_ORDER, ids=str)
@pytest.mark.parametrize("name", BENT)
def test_higher_derivatives(name: str, dtype: torch.dtype, dropout: float) -> None:
    function = BENT[name]
    z = (3 * torch.randn(400, 400)).to(dtype)
    z[0, :4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    torch.manual_seed(0)
    kept = F.dropout(torch.ones_like(z), dropout).double()

    def derivatives(call: Callable[[Tensor], Tensor], z: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        y, found = call(z.requires_grad_()), []
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), z, create_graph=True)
            found.append(y.detach().double())
        return found[1:]

    ours = derivatives(lambda z: fl.bias_act(z, None, function, save="output", dropout=dropout), z)
    truth = derivatives(lambda z: function(z) * kept, z.double())
    for found, exact in zip(ours, truth, strict=True):
        rms, largest = HIGHER_ORDER[dtype]
        error = found - exact
        assert float(error.square().mean().sqrt()) <= rms and float(error.abs().max()) <= largest  # no NaN is


def test_numbers_that_change_at_every_call_are_given_up(traces: list[int], records: Callable[[], list[str]]) -> None:
    z = torch.randn(40, 16, requires_grad=True)
    p = nn.Parameter(torch.tensor(0.5))
    for step in range(custom._MAX_TRACES + 6):
        function = functools.partial(lambda z, n: _swish(z, p) * n, n=step / 7)
        y = fl.bias_act(z, None, function)
        torch.testing.assert_close(y, function(z))
        torch.testing.assert_close(
            _gradients(y, torch.ones_like(y), [z, p]), _gradients(function(z), torch.ones_like(y), [z, p])
        )
    assert len(traces) == custom._MAX_TRACES
    assert ["that it reads change from call to call" in text for text in records()] == [True]


def _same_as_eager(found: Tensor, expected: Tensor, sources: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    dy = torch.randn(found.shape)
    torch.testing.assert_close(_gradients(found, dy, sources), _gradients(expected, dy, sources), rtol=1e-5, atol=1e-4)


def test_a_refusal_is_not_another_functions_result() -> None:
    # The two share their key, and so the refusal; each must run its own tensors.
    z = torch.randn(40, 16)

    def make(table: Tensor) -> Function:
        return lambda z: torch.softmax(z * table, -1)

    first, second = make(nn.Parameter(torch.tensor(1.0))), make(nn.Parameter(torch.tensor(5.0)))
    for function in (first, second, first):
        assert _reason(function) is not None
        assert torch.equal(fl.bias_act(z, None, function), function(z))


# --- what is left to PyTorch ------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        self.mean += 1
        return z * self.mean


def _hooked(where: str) -> nn.Module:
    module = nn.Sequential(nn.Tanhshrink(), nn.Sequential(nn.Softplus(3.0)))
    if where == "submodule":
        module[1][0].register_forward_hook(lambda m, i, o: o * 2)
    elif where == "pre":
        module[0].register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    else:
        module.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return module


def _counter() -> Function:
    count = 0

    def function(z: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return z * count

    return function


def _without_gradient(z: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.relu(z) * 2


def _masked(z: Tensor) -> Tensor:
    z = z.clone()
    z[z < 0] = 0.5 * z[z < 0]
    return z


def _by_autocast(z: Tensor) -> Tensor:
    return z.tanh() if torch.is_autocast_enabled("cpu") else z.sigmoid()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * z

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 0.5


class Scale:
    """An object that is called."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, z: Tensor) -> Tensor:
        return _swish(z, self.beta)


class ByProperty(nn.Module):
    value = 0.3

    @property
    def beta(self) -> float:
        return self.value

    def forward(self, z: Tensor) -> Tensor:
        return _swish(z, self.beta)


NUMBER, CHANNELS_OF_16 = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.rand(16))
ROWS, BOTH = nn.Parameter(torch.rand(40, 1)), nn.Parameter(torch.rand(40, 16))
WHOLE = torch.tensor(3)

#: What makes the function, and what is said of it.
FALLBACKS: dict[str, tuple[Callable[[], Any], str]] = {
    "softmax": (lambda: lambda z: torch.softmax(z * NUMBER, -1), "softmax is not pointwise"),
    "transposed twice": (lambda: lambda z: torch.relu(z.t()).t() * NUMBER, "is not pointwise"),
    "two results": (lambda: lambda z: (z, z), ""),
    "dropout module": (lambda: nn.Sequential(nn.Tanhshrink(), nn.Dropout()), "it is random"),
    "autocast": (lambda: _by_autocast, "names is_autocast_enabled"),
    "compiler": (lambda: lambda z: z.tanh() if torch.compiler.is_compiling() else z.erf(), "names is_compiling"),
    "object": (lambda: Scale(0.3), "it reads a Scale, which is no tensor, module, function or plain number"),
    "property": (lambda: ByProperty(), "it reads a property"),
    "compiled": (lambda: torch.compile(torch.tanh, backend="eager"), "pass what torch.compile was given"),
    "branch": (lambda: lambda z: z * 2 if z.sum() > 0 else z * NUMBER, "depends on the values of a tensor"),
    "item": (lambda: lambda z: z * NUMBER.item(), "turns a tensor into a number"),
    "length": (lambda: lambda z: torch.relu(z) * NUMBER if len(z) > 1500 else z.tanh(), "do not give its value"),
    "in place": (lambda: lambda z: z.mul_(z.sigmoid()), "it writes over its argument; use inplace=False"),
    "size": (lambda: lambda z: z / z.shape[0], "its code names shape, which a trace does not follow"),
    "counting variable": (_counter, "changes what it reads from call to call"),
    "changing buffer": (Remembers, "changes a tensor that it holds"),
    "own backward": (lambda: Squared.apply, "it calls an autograd.Function"),
    "no_grad": (lambda: _without_gradient, "its operations do not give its gradient"),
    "other dtype": (lambda: lambda z: (z * NUMBER).double(), "it returns torch.float64 for torch.float32"),
    "two dimensions": (lambda: lambda z: z * BOTH, "a tensor that it reads has more than one dimension"),
    "one of each": (lambda: lambda z: z * ROWS + CHANNELS_OF_16, "its tensors run along several dimensions"),
    "whole number": (lambda: lambda z: z * WHOLE, "a tensor that is not floating"),
    "nothing of z": (lambda: lambda z: torch.zeros_like(z) + NUMBER, "its result does not depend on its argument"),
    "mask": (lambda: _masked, "is not pointwise"),
    "table": (lambda: lambda z: z * torch.tensor([0.5, 2.0]).repeat(8), "does not work for inputs of every shape"),
    "straight": (lambda: lambda z: z + (torch.round(z) - z).detach(), "PyTorch keeps nothing"),
    "hook on a submodule": (lambda: _hooked("submodule"), "it has hooks"),
    "hook before": (lambda: functools.partial(_hooked("pre")), "it has hooks"),
    "backward hook": (lambda: _hooked("backward"), "it has hooks"),
    "batch norm": (lambda: nn.BatchNorm1d(16), ""),
    "raises in a trace": (lambda: lambda z: z * torch.from_numpy(z.detach().numpy()), "let it read one"),
    "transform": (lambda: torch.func.vmap(torch.func.vmap(torch.func.grad(lambda t: t.cosh().log()))), ""),
}  # fmt: skip


@compiles
@pytest.mark.parametrize("name", FALLBACKS)
def test_what_is_left_to_pytorch_is_pytorchs_and_says_why(name: str, records: Callable[[], list[str]]) -> None:
    make, words = FALLBACKS[name]
    # Calls change some: the two are one function in two copies, called as often as each other.
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    eager = make()
    layer = fl.FusedDenseAct(12, 16, ours)
    if words:
        text = repr(layer)  # of two rows, with which some cannot even be called
        assert "not fused: " in text and "is left to PyTorch because" in text
        assert words in text or name in ("two dimensions", "one of each")
        assert words in (_reason(ours) or "")
    z = torch.randn(40, 16, requires_grad=True)
    if name == "two results":
        with pytest.raises(TypeError, match="the activation must return a tensor, <lambda> returned tuple"):
            fl.bias_act(z, None, ours)
        return
    parameters = [NUMBER, CHANNELS_OF_16, ROWS, BOTH]
    for _ in range(2):
        results = []
        for call in (lambda: fl.bias_act(z * 1 if name == "in place" else z, None, ours), lambda: eager(z * 1)):
            torch.manual_seed(1)
            random.seed(1)
            y = call()
            weight = torch.linspace(0.5, 1.5, y.numel()).to(torch.float64).view_as(y)
            gradients = _gradients(y, weight.to(y.dtype), [z, *parameters]) if y.requires_grad else []
            results.append([y, *gradients])
        torch.testing.assert_close(*results, rtol=0, atol=0)
    if isinstance(ours, nn.Module):
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), rtol=0, atol=0)
    layer(torch.randn(40, 12, requires_grad=True))
    assert len(records()) == len(set(records()))
    if words and name != "backward hook":  # of a module that is itself hooked its repr tells
        assert any(words in text for text in records())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_between_two_layers_no_more_is_kept_than_pytorch_keeps(dtype: torch.dtype) -> None:
    x, w, v = (torch.randn(size, dtype=dtype).requires_grad_() for size in ((64, 32), (48, 32), (8, 48)))
    trained, frozen = torch.tensor(0.3, dtype=dtype, requires_grad=True), torch.tensor(0.7, dtype=dtype)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda z: 2 * z,
        lambda z: z + trained,
        torch.floor,
        lambda z: torch.where(z > 0, z + 1, z),
        lambda z: torch.where(z > 0, trained, frozen),
        torch.exp,
        lambda z: torch.exp(z * frozen),
        lambda z: torch.relu(z + trained),
        torch.sin,
        lambda z: torch.exp(-z),
        lambda z: torch.exp(z * trained),
        lambda z: torch.exp(z.detach() * trained) * z,
        lambda z: torch.where(z > 0, z * z, z),
        lambda z: torch.clamp(z, -1, 1) + 1,
        lambda z: z * torch.sin(torch.exp(z)),
    ]
    for number, function in enumerate(functions):
        kept, by_torch = (
            saved_bytes(lambda h=hidden, f=function: F.linear(h(f), v), exclude=[x, w, v, trained])
            for hidden in (lambda f: fl.dense_bias_act(x, w, None, f), lambda f: f(F.linear(x, w)))
        )
        assert kept <= by_torch, number
    assert plans_of(fl.dense_bias_act, x, w, None, torch.exp)[0].reason.startswith("not fused: PyTorch keeps less")
    assert "not fused: PyTorch keeps less" in repr(fl.FusedDenseAct(32, 48, torch.exp))
    # Blocks keep less than that, and a layer that is asked to.
    block = fl.FusedMLP(32, 48, activation=torch.exp, save="recompute", dtype=dtype)
    assert saved_bytes(block, x, exclude=[x, block]) == 0
    assert saved_bytes(lambda: fl.dense_bias_act(x, w, None, torch.exp, save="recompute"), exclude=[x, w]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slope", [lambda z: torch.tensor([0.2], dtype=z.dtype), lambda z: z.new_tensor([0.2])])
def test_constants_of_one_dtype(slope: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """A trace holds them as they are; some operations take arguments of one dtype alone."""
    x, w = torch.randn(64, 32, dtype=dtype), torch.randn(48, 32, dtype=dtype).requires_grad_()
    function: Callable[[Tensor], Tensor] = lambda z: F.prelu(z, slope(z))
    assert torch.equal(fl.dense_bias_act(x, w, None, function), function(F.linear(x, w)))
    assert "it computes in one dtype alone" in (_reason(function) or "")


def test_what_fails_in_a_trace_is_said_once_and_by_this_library_alone(
    records: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(5, 3)
    function: Callable[[Tensor], Tensor] = lambda z: z @ weight
    assert "it cannot be traced: " in (_reason(function) or "")
    line = function.__code__.co_firstlineno
    assert records()[0].startswith(f"fusedlayers: <lambda> (test_custom.py, line {line}) is left to PyTorch because ")
    assert len(records()) == len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_what_is_left_to_pytorch_raises_what_pytorch_raises() -> None:
    z = torch.randn(40, 16)
    for function, error in (
        (nn.PReLU(5), RuntimeError),
        (lambda z: z @ torch.ones(3), RuntimeError),
        (lambda z: {}["none"], KeyError),
        (lambda: 0, TypeError),
    ):
        with pytest.raises(error):
            fl.bias_act(z, None, function)


# --- what is fused ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``make(*tensors)`` is the function; ``values`` are its tensors, as they start; ``shape`` is that of z."""

    name: str
    make: Callable[..., Function]
    values: tuple[Tensor, ...]
    shape: tuple[int, ...] = (40, 16)
    dim: int = -1

    def __str__(self) -> str:
        return self.name


class Trainable(nn.Module):
    """A function from the literature with its parameters."""

    def __init__(self, function: Callable[..., Tensor], *values: Tensor) -> None:
        super().__init__()
        self.function, self.values = function, nn.ParameterList(values)

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z, *self.values)


def _trainable(name: str, *values: Tensor) -> Trainable:
    (entry,) = (entry for entry in PUBLISHED if entry.name == name)
    return Trainable(entry.function, *values)


def _pau(coefficients: Tensor) -> Function:
    def function(z: Tensor) -> Tensor:
        a, b = coefficients[:4], coefficients[4:]
        return (a[0] + z * (a[1] + z * (a[2] + z * a[3]))) / (1 + (z * (b[0] + z * b[1])).abs())

    return function


def _gabor(a: Tensor, b: Tensor) -> Function:
    return lambda z: torch.cos(5 * (z - b) / a) * torch.exp(-0.5 * ((z - b) / a) ** 2)


def _ste(scale: Tensor) -> Function:
    return lambda z: (z * scale) + (torch.round(z * scale) - z * scale).detach()


def _prelu(p: Tensor) -> nn.Module:
    module = nn.PReLU(p.numel())
    module.weight = p  # type: ignore[assignment]
    return module


def _positive(p: Tensor) -> nn.Module:
    module = _prelu(p)
    nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    return module


def _of_literature() -> Iterator[Case]:
    for entry in TRAINED:
        initial = [torch.tensor(value + 0.05) for _, value in entry.trainable]
        make = functools.partial(Trainable, entry.function)
        yield Case(f"{entry}, numbers", make, tuple(initial))
        yield Case(f"{entry}, channels", make, tuple(v + 0.1 * torch.arange(16) / 16 for v in initial))
        first = tuple(v + torch.rand(5, 1, 1) / 8 for v in initial)
        yield Case(f"{entry}, channels first", make, first, (3, 5, 6, 7), 1)


ONE = (torch.tensor(0.8),)
CHANNELS = torch.linspace(0.1, 1.4, 16)
CASES = [
    *_of_literature(),
    Case("lambda", lambda p: lambda z: _swish(z, p), ONE),
    Case("PReLU, 2-d", _prelu, (CHANNELS,), (40, 16), 1),
    Case("PReLU, 4-d", _prelu, (CHANNELS,), (3, 16, 5, 4), 1),
    Case("PReLU, parametrised", _positive, (CHANNELS,), (40, 16), 1),
    Case("snake", lambda p: _trainable("snake", p), (CHANNELS.view(16, 1, 1),), (3, 16, 5, 4), 1),
    Case("along the rows", lambda p: lambda z: _swish(z, p), (torch.linspace(0.1, 2, 40).view(40, 1),), (40, 16), 0),
    Case("PAU of one vector", _pau, (torch.tensor([0.02, 0.5, 1.6, 0.5, 0.1, 1.2]),)),
    Case("scaled gelu", lambda p, q: lambda z: F.gelu(z * p) * q, (torch.tensor(1.3), CHANNELS)),
    Case("the first of two", lambda p: lambda z: z + torch.sin(p * z) ** 2, (torch.rand(16, 1),), (4, 16, 16), -2),
    Case("terms that cancel", _gabor, (torch.rand(16, 1) + 0.5, torch.randn(16, 1)), (4, 16, 100), 1),
    Case("used twice", lambda p: lambda z: torch.where(z > 0, p * z, torch.sin(p * z) * p), (CHANNELS,)),
    Case("a choice between two", lambda p, q: lambda z: z * torch.where(z > 0, p, q), (CHANNELS, ONE[0])),
    Case("a softplus beforehand", lambda p: lambda z: _swish(z, F.softplus(p).cumsum(0)), (CHANNELS - 1,)),
    Case("in place", lambda p: lambda z: z.mul(p).sigmoid_() * z, (CHANNELS,)),
    Case("straight through", _ste, (torch.tensor(1.7),)),
    Case("clamped by a parameter", lambda p: lambda z: torch.minimum(torch.relu(z), p), (CHANNELS,)),
    Case("power", lambda p: lambda z: torch.relu(z).add(0.1) ** p, (CHANNELS,)),
    Case("unused besides", lambda p, q: lambda z: _swish(z, p) + 0 * q.sum(), (CHANNELS, torch.ones(3, 4))),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def _check(
    case: Case, dtype: torch.dtype, ours: Callable[..., Tensor], eager: Callable[..., Tensor], *others: Tensor
) -> None:
    """Value and gradients may be twice as far from float64's as plain PyTorch's in the same dtype."""
    leaves = [nn.Parameter(t.detach().to(dtype)) for t in (*others, *case.values)]
    doubles = [nn.Parameter(t.detach().double()) for t in leaves]
    results = []
    for call, tensors in ((ours, leaves), (eager, leaves), (eager, doubles)):
        y = call(case.make(*tensors[len(others) :]), *tensors[: len(others)])
        dy = torch.linspace(-1, 1.5, y.numel(), dtype=torch.float64).view(y.shape).to(dtype)
        results.append([y.detach(), *_gradients(y, dy.to(y.dtype), tensors)])
    for mine, theirs, truth in zip(*results, strict=True):
        assert mine.dtype is dtype and mine.shape == truth.shape
        assert relative(mine, truth) <= 2 * relative(theirs, truth) + 3 * torch.finfo(dtype).eps


# Of each in 16 bits one dtype.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for i, case in enumerate(CASES) for dtype in (torch.float32, HALVES[i % 2])],
    ids=str,
)
def test_values_and_gradients(case: Case, dtype: torch.dtype) -> None:
    z = 2 * torch.randn(case.shape)
    assert _reason(case.make(*(nn.Parameter(v.to(dtype)) for v in case.values)), *case.shape, dtype=dtype) is None
    for given in [z, z.contiguous(memory_format=torch.channels_last)] if len(case.shape) == 4 else [z]:
        _check(case, dtype, lambda f, z: fl.bias_act(z, None, f, dim=case.dim), lambda f, z: f(z * 1), given)


@every_case
def test_a_bias_may_run_along_another_dimension(case: Case) -> None:
    z = 2 * torch.randn(case.shape)
    for dim in range(len(case.shape)):
        _check(
            case,
            torch.float32,
            lambda f, z, b, dim=dim: fl.bias_act(z, b, f, dim=dim),
            lambda f, z, b, dim=dim: reference.bias_act(z, b, f, dim=dim),
            z,
            torch.randn(case.shape[dim]),
        )


@pytest.mark.parametrize("shape", [(0, 16), (5, 0, 3), (), (1,), (400,)], ids=str)
@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
def test_odd_shapes(shape: tuple[int, ...], save: str) -> None:
    p, z = nn.Parameter(torch.tensor(0.7)), torch.randn(shape, requires_grad=True)
    for dim in (-1, 0):
        _same_as_eager(fl.bias_act(z, None, lambda z: _swish(z, p), save=save, dim=dim), _swish(z, p), [z, p])


@pytest.mark.parametrize("shape", [(40, 16), (3, 5, 7)])
def test_a_gradient_of_zeros_has_the_arguments_shape(shape: tuple[int, ...]) -> None:
    """That of sgn is zeros, expanded: to the shape of the example that was traced."""
    z, function = torch.randn(shape, requires_grad=True), lambda z: torch.sgn(z) * z**2
    _same_as_eager(fl.bias_act(z * 1, None, function, save="input"), function(z), [z])


@pytest.mark.parametrize("result", [None, 3.0, [], (0, 0), torch.sort(torch.ones(2))])
@pytest.mark.parametrize("rows", [4, 40_000])
def test_what_is_no_tensor_is_refused(result: Any, rows: int) -> None:
    x, w = torch.randn(rows, 8, requires_grad=True), torch.randn(16, 8)
    make = lambda z: result
    for call in (
        fl.FusedMLP(8, 16, activation=make),
        fl.FusedMLP(8, 16, activation=make, save="recompute"),
        fl.FusedGatedMLP(8, 16, activation=make),
        lambda x: fl.dense_bias_act(x, w, None, make),
    ):
        with pytest.raises(TypeError, match="the activation must return a tensor") as error:
            call(x)
    named = "tuple" if isinstance(result, tuple) else type(result).__name__
    assert str(error.value).endswith(f"returned {named}")


@pytest.mark.parametrize("step", [torch.floor, torch.round, torch.sign])
def test_a_step_behind_gelu(step: Function) -> None:
    """Its derivative is the number 0, which oneDNN's backward of GELU does not take for a tensor."""
    z = torch.randn(64, 256, requires_grad=True)
    y = fl.bias_act(z, None, lambda z: z * step(F.gelu(z)))
    expected = z * step(F.gelu(z))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(_gradients(y, torch.ones_like(y), [z]), _gradients(expected, torch.ones_like(y), [z]))


def test_a_parameter_that_an_earlier_layer_computes() -> None:
    # A hypernetwork's: not a leaf, and its gradient goes on.
    source = nn.Parameter(torch.randn(16))
    z = torch.randn(40, 16, requires_grad=True)
    results = []
    for apply in (lambda f: fl.bias_act(z, None, f), lambda f: f(z)):
        scale = torch.exp(source)
        results.append(_gradients(apply(lambda z: _swish(z, scale)), torch.ones(40, 16), [z, source]))  # noqa: B023  # called at once
    torch.testing.assert_close(*results)


PER_CHANNEL = nn.Parameter(CHANNELS.clone())


@pytest.mark.parametrize("function", [lambda z: _swish(z, PER_CHANNEL), lambda z: torch.sin(z) * 2, F.softplus])
def test_in_place_writes_over_the_input_and_no_further(function: Function) -> None:
    leaf, b = torch.randn(40, 16, requires_grad=True), torch.randn(40)
    z = leaf * 1
    y = fl.bias_act(z, b, function, dim=0, inplace=True)
    assert y is z
    _same_as_eager(y, function(leaf + b[:, None]), [leaf, PER_CHANNEL])
    with torch.no_grad():
        given = leaf.detach().clone()
        assert fl.bias_act(given, None, function, inplace=True) is given
        torch.testing.assert_close(given, function(leaf).detach())


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_the_first_use_may_be_anywhere(traces: list[int]) -> None:
    # Traces are made as if nothing were switched on, and serve afterwards.
    def make() -> Function:
        p = nn.Parameter(torch.tensor(0.7))
        return lambda z: torch.sin(_swish(z, p))

    z = torch.randn(40, 16, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), FakeTensorMode):
        custom._traces.clear()
        first = make()
        with mode():
            fl.bias_act(z, None, first) if mode is not FakeTensorMode else repr(fl.FusedDenseAct(3, 16, first))
        count = len(traces)
        function = make()
        y = fl.bias_act(z, None, function)
        assert len(traces) == count
        torch.testing.assert_close(y, function(z))
        assert y.grad_fn is not None


def test_layers_without_numbers_of_their_own_can_be_shown() -> None:
    # And what is said of those is not remembered of others.
    def make() -> fl.FusedDenseAct:
        return fl.FusedDenseAct(8, 24, Trainable(_swish, torch.full((24,), 0.7)))

    with FakeTensorMode():
        fake = make()
    with torch.device("meta"):
        meta = make()
    assert "it reads a FakeTensor" in repr(fake)
    for layer in (meta, make(), meta.to_empty(device="cpu")):
        assert "saves the input: Trainable reads tensors" in repr(layer)


def test_several_threads_may_be_first() -> None:
    z = torch.randn(40, 16)

    def run(i: int) -> None:
        p = nn.Parameter(torch.tensor(0.5 + i))
        function = [lambda z: _swish(z, p) + torch.sin(p), lambda z: torch.cos(z) * p, nn.PReLU(16)][i % 3]
        y, eager = fl.bias_act(z, None, function), function(z)
        torch.testing.assert_close(y, eager)
        torch.testing.assert_close(_gradients(y, z, [p]), _gradients(eager, z, [p]))
        assert _reason(function) is None

    custom._traces.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(24)))


# --- far from 0, and what hangs on more than values -------------------------------------------------------------------

FAR = {
    "cut off": (lambda z: torch.where(z > 100, torch.zeros_like(z), z), [1.0, 50.0, 150.0, 1000.0]),
    "kink": (lambda z: torch.where(z > 100, 2 * z - 100, z), [1.0, 50.0, 150.0, 1000.0]),
    "kink very far": (lambda z: torch.where(z > 1e9, 2 * z - 1e9, z), [1.0, 1e8, 2e9, 1e12]),
    "waves": (lambda z: torch.where(z > 50, torch.sin(z), z), [55.0, 60.0, 65.0, 70.0]),
    "stretched": (lambda z: z * torch.sigmoid(0.01 * z), [-572.0, -580.0, -100.0, 10.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAR)
def test_gradients_far_from_zero(name: str, dtype: torch.dtype) -> None:
    function, places = FAR[name]
    z = torch.tensor(places, dtype=torch.float64).clamp(max=float(torch.finfo(dtype).max) / 4).to(dtype).repeat(64, 4)
    slopes = []
    for apply, at in ((function, z.double()), (lambda z: fl.bias_act(z, None, function), z)):
        at = at.clone().requires_grad_()
        slopes.append(torch.autograd.grad(apply(at).sum(), at)[0].double())
    torch.testing.assert_close(slopes[1], slopes[0], rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


ASKING = {
    "eps of the dtype": lambda z: z / (z.abs() + torch.finfo(z.dtype).eps),
    "the dtype": lambda z: torch.sin(z) if z.dtype == torch.float32 else torch.cos(z),
    "layout": lambda z: torch.sin(z) if z.is_contiguous() else torch.cos(z),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_asks_for_more_than_values_is_pytorchs(name: str) -> None:
    function = ASKING[name]
    for z in (torch.randn(40, 16), torch.randn(16, 40).t(), (1e-3 * torch.randn(40, 16)).bfloat16()):
        torch.testing.assert_close(fl.bias_act(z, None, function), function(z), rtol=1e-6, atol=0)
