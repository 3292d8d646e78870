"""``find_variables``: which functions count as equal, which tensors they read, and how others take their place."""

import dataclasses
import functools
import re
import types
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedlayers.activations import free_variables as module
from fusedlayers.activations import python_values
from fusedlayers.activations.free_variables import find_variables

Function = Callable[[Tensor], Tensor]

GLOBAL = 1.0
TENSOR = nn.Parameter(torch.tensor(0.5))
SETTINGS = types.ModuleType("settings")


def swish(z: Tensor, beta: float | Tensor) -> Tensor:
    return z * torch.sigmoid(beta * z)


class Swish(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))
        self.scale = 1.0

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * swish(z, self.beta)


class Frozen(NamedTuple):
    beta: Any


# --- the tensors ------------------------------------------------------------------------------------------------------


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


class Holder:
    def __init__(self, beta: Tensor) -> None:
        self.beta = beta

    def __call__(self, z: Tensor) -> Tensor:
        return swish(z, self.beta)


class Slotted:
    __slots__ = ("beta",)

    def __init__(self, beta: Any) -> None:
        self.beta = beta

    def __call__(self, z: Tensor) -> Tensor:
        return swish(z, self.beta)


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


PLACES: dict[str, Callable[[Tensor], Function]] = {
    "closure": lambda p: lambda z: swish(z, p),
    "closure of a closure": lambda p: lambda z: (lambda y: swish(y, p))(z),
    "partial": lambda p: functools.partial(swish, beta=p),
    "partial of a partial": lambda p: functools.partial(functools.partial(swish, beta=p)),
    "list": lambda p: _reading([p, 2], lambda held: held[0]),
    "dict": lambda p: _reading({"b": p}, lambda held: held["b"]),
    "ordered dict": lambda p: _reading(OrderedDict(b=p), lambda held: held["b"]),
    "deque": lambda p: _reading(deque([p]), lambda held: held[0]),
    "named tuple": lambda p: _reading(Frozen(p), lambda held: held.beta),
    "object": Holder,
    "object with slots": Slotted,
    "method of an object": lambda p: Holder(p).__call__,
    "namespace": lambda p: _reading(types.SimpleNamespace(beta=p), lambda held: held.beta),
    "bound builtin": lambda p: p.mul,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_found_and_replaced_wherever_it_is(place: str) -> None:
    first, second = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(3.0))
    z = torch.linspace(-3, 3, 7)
    function = PLACES[place](first)
    variables = find_variables(function)
    assert [id(t) for t in variables.tensors] == [id(first)]
    assert variables.refusal is None
    expected = z * 3 if place == "bound builtin" else swish(z, second)
    torch.testing.assert_close(variables.rebind([second])(z), expected)
    torch.testing.assert_close(function(z), z * 0.5 if place == "bound builtin" else swish(z, first))


@pytest.mark.parametrize("function", [_default, _keyword, _attribute, lambda z: swish(z, TENSOR)])
def test_defaults_attributes_and_globals_are_read(function: Function) -> None:
    variables = find_variables(function)
    assert [id(t) for t in variables.tensors] == [id(TENSOR)]
    z, other = torch.linspace(-3, 3, 7), torch.tensor(2.0)
    if function is not _attribute:  # that function stays what it is, as a class does
        torch.testing.assert_close(variables.rebind([other])(z), swish(z, other))
    torch.testing.assert_close(variables.rebind([TENSOR])(z), function(z))


def test_modules_are_copied_with_all_that_they_hold() -> None:
    network, swishes = Network(), nn.Sequential(Swish(1.0), nn.Sequential(Swish(2.0)), nn.PReLU(3))
    z = torch.randn(5, 3)
    for function, count in ((network.act, 1), (swishes, 3), (lambda z: swishes(z), 3)):
        variables = find_variables(function)
        assert len(variables.tensors) == count
        others = [torch.full_like(t, 0.75) for t in variables.tensors]
        before = [t.clone() for t in variables.tensors]
        theirs = variables.rebind(others)(z)
        assert not torch.allclose(theirs, function(z))
        for tensor, other in zip(variables.tensors, others, strict=True):
            tensor.data.copy_(other)
        torch.testing.assert_close(theirs, function(z))
        for tensor, value in zip(variables.tensors, before, strict=True):
            tensor.data.copy_(value)


def test_a_tensor_that_is_read_twice_is_one() -> None:
    p, q = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.5))

    def make(a: Tensor, b: Tensor) -> Function:
        return lambda z: torch.where(z > 0, a * z, b * z)

    assert len(find_variables(make(p, p)).tensors) == 1 and len(find_variables(make(p, q)).tensors) == 2
    assert find_variables(make(p, p)).key != find_variables(make(p, q)).key
    assert find_variables(make(p, p)).key == find_variables(make(q, q)).key


# --- the key ----------------------------------------------------------------------------------------------------------

P = [nn.Parameter(torch.randn(())) for _ in range(2)]


class Getter:
    """Its number is reached through a property and two methods."""

    def __init__(self, beta: float) -> None:
        self.scale = 1.0
        self._beta = beta

    @property
    def beta(self) -> float:
        return self._beta

    def __call__(self, z: Tensor) -> Tensor:
        return self.scale * self.outer(z)

    def outer(self, z: Tensor) -> Tensor:
        return self.inner(z)

    def inner(self, z: Tensor) -> Tensor:
        return swish(z, self.beta)


class ByName:
    def __init__(self, beta: float) -> None:
        self.p0 = beta

    def __call__(self, z: Tensor) -> Tensor:
        return swish(z, getattr(self, f"p{0}"))


class Indexed:
    def __init__(self, beta: float) -> None:
        self.values = {"beta": beta}

    def __getitem__(self, name: str) -> float:
        return self.values[name]


class Derived(Getter):
    def __call__(self, z: Tensor) -> Tensor:
        return super().__call__(z) + 1


class Cached:
    def __init__(self, beta: float) -> None:
        self.beta = beta

    @functools.cached_property
    def twice(self) -> float:
        return 2 * self.beta

    def __call__(self, z: Tensor) -> Tensor:
        return swish(z, self.twice)


class Number(float):
    pass


@dataclasses.dataclass(frozen=True)
class Data:
    beta: float


class Config:
    def __init__(self, beta: float, unused: int = 0) -> None:
        self.beta, self.unused = beta, unused


def _read_by_helper(config: Any) -> Function:
    return lambda z: _through(z, config)


def _through(z: Tensor, config: Any) -> Tensor:
    return swish(z, config.beta)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda n: lambda z: swish(z, n),
    "default": lambda n: lambda z, beta=n: swish(z, beta),
    "partial": lambda n: functools.partial(swish, beta=n),
    "module": lambda n: _with(Swish(1.0), scale=n),
    "method of a large module": lambda n: _with(Network(), power=n).act,
    "object": Getter,
    "derived object": Derived,
    "method": lambda n: Getter(n).outer,
    "by name": ByName,
    "slots": Slotted,
    "cached property": Cached,
    "dataclass": lambda n: _reading(Data(n), lambda held: held.beta),
    "read elsewhere": lambda n: _read_by_helper(Config(n)),
    "operator": lambda n: _reading(Indexed(n), lambda held: held["beta"]),
    "list": lambda n: _reading([n], lambda held: held[0]),
    "nested": lambda n: _reading({"a": [n]}, lambda held: held["a"][0]),
    "set": lambda n: _reading({n}, lambda held: sum(held)),
    "deque": lambda n: _reading(deque([n]), lambda held: held[0]),
    "array": lambda n: _reading(memoryview(torch.tensor([n]).numpy()), lambda held: held[0]),
    "bytes": lambda n: _reading(bytearray([int(n)]), lambda held: held[0]),
    "function's attribute": lambda n: _with(lambda z: z, beta=n),
    "device": lambda n: _reading(torch.device("cpu", int(n)), lambda held: held.index),
}  # fmt: skip


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


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
    make = MAKERS["closure"]
    assert find_variables(make(P[0])).key == find_variables(make(P[1])).key
    for other in (P[0].detach(), P[0].double(), P[0].reshape(1)):
        assert find_variables(make(other)).key != find_variables(make(P[0])).key
    assert find_variables(Swish(1.0)).key == find_variables(Swish(2.0)).key != find_variables(Swish(1.0).eval()).key
    assert find_variables(Network(1.0).act).key == find_variables(Network(2.0).act).key


def test_what_the_code_does_not_name_does_not_count() -> None:
    network = Network()
    assert find_variables(network.act).key == find_variables(_with(Network(), step=7, unheard=8).act).key
    assert (
        find_variables(_read_by_helper(Config(1.0, unused=1))).key
        == find_variables(_read_by_helper(Config(1.0, unused=2))).key
    )


class Base(nn.Module):
    beta = 1.0

    def forward(self, z: Tensor) -> Tensor:
        return self.first(z)

    def first(self, z: Tensor) -> Tensor:
        return swish(z, self.beta) * GLOBAL


class Child(Base):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z)


class Mode(Enum):
    ON = 1
    OFF = 2


MODE = Mode.ON


def _mode(z: Tensor) -> Tensor:
    return z if MODE is Mode.ON else 2 * z


@pytest.mark.parametrize(
    ("function", "holder", "name", "other"),
    [
        (Child(), Base, "beta", 2.0),
        (Child(), globals(), "GLOBAL", 2.0),
        (lambda z: swish(z, Base.beta), Base, "beta", 2.0),
        (lambda z: swish(z, SETTINGS.beta), SETTINGS, "beta", 2.0),
        (lambda z: helper(z), globals(), "GLOBAL", 2.0),
        (_attribute, helper, "beta", 2.0),
        (_mode, globals(), "MODE", Mode.OFF),
    ],
    ids=["class attribute", "global of a method", "class", "Python module", "global of a helper", "attribute", "enum"],
)
def test_what_changes_outside_changes_the_key(
    function: Function, holder: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SETTINGS, "beta", 1.0, raising=False)
    before = find_variables(function).key
    assert find_variables(function).key == before
    if isinstance(holder, dict):
        monkeypatch.setitem(holder, name, other)
    else:
        monkeypatch.setattr(holder, name, other)
    assert find_variables(function).key != before


@torch.no_grad()
def _decorated() -> float:
    return GLOBAL


@functools.cache
def _remembered() -> float:
    return GLOBAL


class Settings(UserDict[str, float]):
    pass


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda z: z * _decorated(), lambda: globals().update(GLOBAL=2.0)),
        (lambda z: z * _remembered(), lambda: globals().update(GLOBAL=2.0)),
        (functools.partial(lambda z, held: z * held["a"], held=UserDict(a=1.0)), None),
        (functools.partial(lambda z, held: z * held["a"], held=Settings(a=1.0)), None),
        (functools.partial(lambda z, held: z * held["a"], held=ChainMap({"a": 1.0})), None),
    ],
    ids=["decorated", "cached", "UserDict", "subclass of UserDict", "ChainMap"],
)
def test_what_a_package_passes_on_changes_the_key(
    function: Function, change: Callable[[], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)  # and back again
    before = find_variables(function)
    assert before.refusal is None and find_variables(function).key == before.key
    if change is not None:
        change()
    else:
        function.keywords["held"]["a"] = 2.0  # type: ignore[attr-defined]
    assert find_variables(function).key != before.key


def test_a_method_that_is_replaced_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_variables(Swish(1.0)).key
    monkeypatch.setattr(Swish, "forward", lambda self, z: z)
    assert find_variables(Swish(1.0)).key != before


def test_cycles_end() -> None:
    network = Swish(1.0)
    network.me = [network]  # type: ignore[assignment]

    def recursive(z: Tensor, depth: int = 0) -> Tensor:
        return network(z) if depth else recursive(z, 1)

    variables = find_variables(recursive)
    assert variables.key == find_variables(recursive).key and len(variables.tensors) == 1


@pytest.mark.parametrize(
    "value", [Decimal(2), MODE, torch.finfo(torch.float32), re.compile("a"), types.SimpleNamespace(a=2.0)], ids=str
)
def test_values_of_packages_are_read(value: Any) -> None:
    function = functools.partial(lambda z, value: z, value=value)
    assert find_variables(function).refusal is None and find_variables(function).key == find_variables(function).key


def test_a_variable_that_is_not_set_yet_is_no_obstacle() -> None:
    def function(z: Tensor) -> Tensor:
        return z * later

    find_variables(function)
    later = 2.0
    assert find_variables(function).key is not None and float(function(torch.ones(()))) == later


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"), [([1.0] * 65, "a list of 65 values"), (bytearray(5000), "a bytearray of 5000 bytes")]
)
def test_what_is_too_large_to_look_through_is_refused(value: Any, words: str) -> None:
    assert words in (find_variables(lambda z: z * value[0]).refusal or "")


@pytest.mark.parametrize("kind", ["ContextVar", "mappingproxy", "list_iterator"])
def test_what_may_change_out_of_sight_is_refused(kind: str) -> None:
    held = {
        "ContextVar": ContextVar("held", default=1.0), "mappingproxy": types.MappingProxyType({}),
        "list_iterator": iter([1.0]),
    }[kind]  # fmt: skip
    refusal = find_variables(lambda z: z * held.get()).refusal
    assert refusal == f"it reads a {kind}, which may change unseen; let it read a tensor or a number"


def test_modules_with_hooks_are_refused_wherever_they_are() -> None:
    inner = nn.Tanhshrink()
    outer = nn.Sequential(nn.Sequential(inner))
    calls: list[int] = []
    for function in (outer, lambda z: inner(z), functools.partial(outer)):
        assert find_variables(function).refusal is None
        handle = inner.register_forward_hook(lambda *_: calls.append(1))
        assert find_variables(function).refusal == "it has hooks"
        handle.remove()
    network = Network()
    network.register_forward_hook(lambda *_: None)
    assert find_variables(network.act).refusal is None  # a method that is called by itself runs none


def test_it_is_quick() -> None:
    # A second walk is needed once, to learn what the code names.
    network = Network()
    find_variables(network.act)
    visits = []

    class Counting(module._Visitor):
        def __init__(self, names: Any) -> None:
            super().__init__(names)
            visits.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_Visitor", Counting)
        find_variables(network.act)
    assert len(visits) == 1


def test_functions_of_packages_are_fixed() -> None:
    assert find_variables(lambda z: F.gelu(z)).tensors == () and find_variables(F.gelu).refusal is None
    assert python_values.is_library(F.softplus) or python_values.is_fixed(F.softplus)
    assert (
        python_values.is_library(torch) and python_values.is_library(nn.Module) and not python_values.is_library(swish)
    )
    assert not python_values.is_library(Swish) and not python_values.is_library(SETTINGS)
