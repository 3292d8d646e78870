"""``find_variables``: which functions count as equal, which tensors they read, and how others take their place."""

import functools
import types
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.activations.free_variables import find_variables

Function = Callable[[Tensor], Tensor]

GLOBAL = 1.0
TENSOR = nn.Parameter(torch.tensor(0.5))
SETTINGS = types.ModuleType("settings")
Z = torch.linspace(-3, 3, 7)


def swish(z: Tensor, beta: float | Tensor) -> Tensor:
    return z * torch.sigmoid(beta * z)


class Swish(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))
        self.scale = 1.0

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * swish(z, self.beta)


class Network(nn.Module):
    """Large: what its code does not name is not looked at."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(40))
        self.beta = nn.Parameter(torch.tensor(beta))
        self.power = 2.0
        self.step = 0

    def act(self, z: Tensor) -> Tensor:
        return self.inner(z) * self.beta

    def inner(self, z: Tensor) -> Tensor:
        return torch.relu(z) ** self.power


class Base(nn.Module):
    beta = 1.0

    def forward(self, z: Tensor) -> Tensor:
        return self.first(z)

    def first(self, z: Tensor) -> Tensor:
        return swish(z, self.beta) * GLOBAL


class Child(Base):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z)


def _default(z: Tensor, beta: Tensor = TENSOR) -> Tensor:
    return swish(z, beta)


def _keyword(z: Tensor, *, beta: Tensor = TENSOR) -> Tensor:
    return swish(z, beta)


def _attribute(z: Tensor) -> Tensor:
    return swish(z, helper.beta) * GLOBAL  # type: ignore[attr-defined]


def helper(z: Tensor) -> Tensor:
    return z * GLOBAL


helper.beta = TENSOR  # type: ignore[attr-defined]


def _reading(held: Any, read: Callable[[Any], Any]) -> Function:
    return lambda z: swish(z, read(held))


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


# --- the tensors ------------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Tensor], Function]] = {
    "closure": lambda p: lambda z: swish(z, p),
    "partial": lambda p: functools.partial(swish, beta=p),
    "list": lambda p: _reading([p, 2], lambda held: held[0]),
    "module": lambda p: _with(Swish(1.0), beta=p),
    "method": lambda p: _with(Swish(1.0), beta=p).forward,
    "decorated": lambda p: functools.wraps(swish)(lambda z: swish(z, p)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_found_and_replaced_wherever_it_is(place: str) -> None:
    first, second = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(3.0))
    function = PLACES[place](first)
    variables = find_variables(function)
    assert [id(t) for t in variables.tensors] == [id(first)] and variables.refusal is None
    torch.testing.assert_close(variables.rebind([second])(Z), swish(Z, second))
    torch.testing.assert_close(function(Z), swish(Z, first))


@pytest.mark.parametrize("function", [_default, _keyword, _attribute, lambda z: swish(z, TENSOR)])
def test_defaults_attributes_and_globals_are_read(function: Function) -> None:
    variables = find_variables(function)
    assert [id(t) for t in variables.tensors] == [id(TENSOR)]
    other = torch.tensor(2.0)
    torch.testing.assert_close(variables.rebind([other])(Z), swish(Z, other))
    torch.testing.assert_close(function(Z), swish(Z, TENSOR))


def test_modules_are_copied_with_all_that_they_hold() -> None:
    network, swishes = Network(), nn.Sequential(Swish(1.0), nn.Sequential(Swish(2.0)), nn.PReLU(3))
    z = torch.randn(5, 3)
    for function, count, value in ((network.act, 1, 0.75), (swishes, 3, 0.6), (lambda z: swishes(z), 3, 0.45)):
        variables = find_variables(function)
        assert len(variables.tensors) == count
        before = function(z)
        theirs = variables.rebind([torch.full_like(t, value) for t in variables.tensors])(z)
        assert not torch.allclose(theirs, before) and torch.equal(function(z), before)
        with torch.no_grad():
            for tensor in variables.tensors:
                tensor.fill_(value)
        torch.testing.assert_close(theirs, function(z))


def test_a_tensor_that_is_read_twice_is_one() -> None:
    p, q = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.5))

    def make(a: Tensor, b: Tensor) -> Function:
        return lambda z: torch.where(z > 0, a * z, b * z)

    assert len(find_variables(make(p, p)).tensors) == 1 and len(find_variables(make(p, q)).tensors) == 2
    assert find_variables(make(p, p)).key != find_variables(make(p, q)).key
    assert find_variables(make(p, p)).key == find_variables(make(q, q)).key


# --- the key ----------------------------------------------------------------------------------------------------------


class Number(float):
    pass


MAKERS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda n: lambda z: swish(z, n),
    "default": lambda n: lambda z, beta=n: swish(z, beta),
    "partial": lambda n: functools.partial(swish, beta=n),
    "module": lambda n: _with(Swish(1.0), scale=n),
    "method of a large module": lambda n: _with(Network(), power=n).act,
    "method that is called": lambda n: _with(Child(), beta=n),
    "list": lambda n: _reading([n], lambda held: held[0]),
    "NumPy's number": lambda n: _reading(np.float64(n), lambda held: held),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_equal_numbers_make_equal_keys_and_others_do_not(maker: str) -> None:
    make = MAKERS[maker]
    first, same, other = find_variables(make(1.0)), find_variables(make(1.0)), find_variables(make(2.0))
    assert first.refusal is None and first.key == same.key and hash(first.key) == hash(same.key)
    assert first.key != other.key


def test_numbers_of_another_kind_are_others() -> None:
    keys = [find_variables(MAKERS["closure"](n)).key for n in (0.0, -0.0, 0, False, None, "0", 0j, torch.float32)]
    assert len(set(keys)) == len(keys)
    nan = find_variables(MAKERS["closure"](float("nan"))).key
    assert nan == find_variables(MAKERS["closure"](float("nan"))).key
    assert find_variables(MAKERS["closure"](Number(1))).key != find_variables(MAKERS["closure"](Number(2))).key


def test_other_tensors_of_the_same_kind_make_the_same_key() -> None:
    make, (p, q) = MAKERS["closure"], [nn.Parameter(torch.randn(())) for _ in range(2)]
    assert find_variables(make(p)).key == find_variables(make(q)).key
    for other in (p.detach(), p.double(), p.reshape(1)):
        assert find_variables(make(other)).key != find_variables(make(p)).key
    assert find_variables(Swish(1.0)).key == find_variables(Swish(2.0)).key
    dropout = nn.Sequential(nn.Dropout())
    assert find_variables(dropout).key != find_variables(dropout.eval()).key


def test_what_the_code_does_not_name_does_not_count() -> None:
    network = Network()
    assert find_variables(network.act).key == find_variables(_with(Network(), step=7, unheard=8).act).key
    assert find_variables(_with(network, step={}).act).refusal is None


@pytest.mark.parametrize(
    ("function", "holder", "name", "other"),
    [
        (Child(), Base, "beta", 2.0),
        (Child(), Base, "first", lambda self, z: z),
        (Child(), globals(), "GLOBAL", 2.0),
        (lambda z: swish(z, Base.beta), Base, "beta", 2.0),
        (lambda z: swish(z, SETTINGS.beta), SETTINGS, "beta", 2.0),
        (lambda z: helper(z), globals(), "GLOBAL", 2.0),
        (lambda z: helper(z), globals(), "helper", swish),
        (_attribute, helper, "beta", 2.0),
        (Swish(1.0), Swish, "forward", lambda self, z: z),
    ],
)
def test_what_changes_outside_changes_the_key(
    function: Function, holder: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SETTINGS, "beta", 1.0, raising=False)
    before = find_variables(function)
    assert find_variables(function).key == before.key and before.refusal is None
    if isinstance(holder, dict):
        monkeypatch.setitem(holder, name, other)
    else:
        monkeypatch.setattr(holder, name, other)
    assert find_variables(function).key != before.key


def test_cycles_end() -> None:
    network = Swish(1.0)
    network.scale = [network]  # type: ignore[assignment]

    def recursive(z: Tensor, depth: int = 0) -> Tensor:
        return network(z) if depth else recursive(z, 1)

    variables = find_variables(recursive)
    assert variables.key == find_variables(recursive).key and len(variables.tensors) == 1


def test_a_variable_that_is_not_set_yet_is_no_obstacle() -> None:
    def function(z: Tensor) -> Tensor:
        return z * later

    find_variables(function)
    later = 2.0
    assert find_variables(function).key is not None and float(function(torch.ones(()))) == later


def test_what_packages_define_is_fixed() -> None:
    functions = [torch.tanh, F.gelu, F.softplus, torch.ops.aten.sin.default, torch.Tensor.relu]
    functions += [lambda z: F.elu(z) * np.sqrt(2.0), lambda z: torch.special.i0e(z) + Tensor.abs(z)]
    for function in functions:
        assert find_variables(function).refusal is None and find_variables(function).tensors == ()
    assert len({find_variables(function).key for function in functions}) == len(functions)


# --- what is refused --------------------------------------------------------------------------------------------------


class Mode(Enum):
    ON = 1


class Pair(NamedTuple):
    beta: Any


REFUSED: dict[str, tuple[Any, str]] = {
    "long list": ([1.0] * 65, "a list of 65 values"),
    "named tuple": (Pair(1.0), "a Pair of 1 values"),
    "dict": ({"b": 1.0}, "a dict"),
    "array": (np.ones(2), "a ndarray"),
    "ContextVar": (ContextVar("held", default=1.0), "a ContextVar"),
    "enum": (Mode.ON, "a Mode"),
    "object": (types.SimpleNamespace(beta=1.0), "a SimpleNamespace"),
    "cached": (functools.cache(lambda: 1.0), "a _lru_cache_wrapper"),
    "method of a tensor": (TENSOR.mul, "a Parameter"),
    "subclass": (torch.ones(2).as_subclass(type("Labelled", (Tensor,), {})), "a Labelled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tensor_module_function_or_number_is_refused(name: str) -> None:
    value, words = REFUSED[name]
    for function in (lambda z: z * value, functools.partial(swish, beta=value), _with(Swish(1.0), scale=value)):
        assert f"it reads {words}" in (find_variables(function).refusal or "")


def test_modules_with_hooks_are_refused_wherever_they_are() -> None:
    inner = nn.Tanhshrink()
    outer = nn.Sequential(nn.Sequential(inner))
    for function in (outer, lambda z: inner(z), functools.partial(outer)):
        assert find_variables(function).refusal is None
        handle = inner.register_forward_hook(lambda *_: None)
        assert find_variables(function).refusal == "it has hooks"
        handle.remove()
    network = Network()
    network.register_forward_hook(lambda *_: None)
    assert find_variables(network.act).refusal is None  # a method that is called by itself runs none
