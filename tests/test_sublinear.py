"""Recomputed segments against ``nn.Sequential``, to the bit: a drop-in for it, and for any function.

The six items, and the faults, are those of the package that had this idea before. ``Naive`` does as that did."""

from __future__ import annotations

import copy
import enum
import functools
import io
import pickle
import random
import re
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recomputing import (
    Checkpointed,
    Counting,
    Forgetful,
    Make,
    Naive,
    Nested,
    Recomputation,
    Unscaled,
    block,
    blocks,
    every_mode,
    images,
    outcome,
    regression,
    rows,
    same,
    twins,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from bench.reference import RESNETS, resnet
from fusedlayers.checkpoint import generators
from fusedlayers.memory import saved_bytes


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- the six items ----------------------------------------------------------------------------------------------------


@regression(Nested)
def test_item_1_state_dicts_are_those_of_a_sequential(container: Make) -> None:
    plain = nn.Sequential(*blocks())
    net = container(*blocks())
    net(rows())
    assert list(net.state_dict()) == list(plain.state_dict())
    net.load_state_dict(plain.state_dict())
    same(list(net.state_dict().values()), list(plain.state_dict().values()))


@regression(Naive)
def test_item_2_recomputation_is_switched_off_and_on(container: Make) -> None:
    plain = nn.Sequential(*blocks())
    net: Any = container(*blocks())
    x = rows()
    net(x)
    all_bytes = saved_bytes(plain, x)
    for recompute in ("all", "nothing", "cheap", "all", "nothing"):
        net.recompute = recompute
        assert (saved_bytes(net, x) == all_bytes) == (recompute == "nothing")


@regression(Unscaled)
def test_item_3_batch_norm_statistics_are_those_of_one_forward(container: Make) -> None:
    parts = blocks()
    plain, net = nn.Sequential(*copy.deepcopy(parts)), container(*parts)
    for seed in range(3):
        x = rows()
        same(outcome(net, x, seed=seed), outcome(plain, x, seed=seed))


@regression(Forgetful)
def test_item_4_dropout_drops_the_same_again(container: Make) -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
    x = rows()
    same(outcome(container(*parts), x), outcome(nn.Sequential(*parts), x))


@pytest.mark.parametrize("depth", RESNETS)
def test_item_5_resnets(depth: int) -> None:
    with torch.device("meta"):
        parts = resnet(depth, widths=(2, 2, 2, 2), classes=4, is_small=True)
    assert len(parts) == sum(RESNETS[depth][2]) + 2
    if depth > 34:
        return
    parts = resnet(depth, widths=(2, 2, 2, 2), classes=4, is_small=True)
    plain, net = twins(parts)
    x = torch.randn(4, 3, 8, 8)
    same(outcome(net, x), outcome(plain, x))
    assert saved_bytes(net, x) < 0.6 * saved_bytes(plain, x)


def test_item_6_a_functional_form_with_several_inputs() -> None:
    first, second = block(), block()

    def function(a: Tensor, factor: float, b: Tensor, *, names: list[str], also: dict[str, Any]) -> dict[str, Any]:
        return {names[0]: first(a) * factor, names[1]: (second(b), also["c"].sin())}

    def run(through: Any) -> list[Any]:
        module = nn.ModuleList(copy.deepcopy(initial))
        first.load_state_dict(module[0].state_dict())
        second.load_state_dict(module[1].state_dict())
        net = lambda a, b, c: through(function, a, 2.0, b, names=["u", "v"], also={"c": c, "d": None})
        return outcome(net, *inputs) + [buffer.clone() for m in (first, second) for buffer in m.buffers()]

    initial = copy.deepcopy([first, second])
    inputs = rows(), rows(), rows()
    expected = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    same(run(fl.sublinear), expected)
    same(run(functools.partial(fl.sublinear, recompute="cheap")), expected)
    with pytest.raises(AssertionError):
        same(run(functools.partial(checkpoint, use_reentrant=False)), expected)


# --- the faults -------------------------------------------------------------------------------------------------------


@regression(Naive)
def test_fault_an_input_without_requires_grad_does_not_detach_the_output(container: Make) -> None:
    net = container(*blocks())
    y = net(rows())
    assert y.requires_grad
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@regression(Naive)
def test_fault_a_forward_without_a_backward_updates_batch_norm_whole(container: Make) -> None:
    parts = blocks()
    plain, net = nn.Sequential(*copy.deepcopy(parts)), container(*parts)
    x = rows()
    for module in (plain, net):
        torch.manual_seed(1)
        module(x)
    same(list(net.buffers()), list(plain.buffers()))


@regression(Naive)
def test_fault_momentum_may_be_none(container: Make) -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)) for _ in range(4)]
    plain, net = nn.Sequential(*copy.deepcopy(parts)), container(*parts)
    for _ in range(3):
        x = rows()
        same(outcome(net, x), outcome(plain, x))


@regression(Naive)
def test_fault_num_batches_tracked_does_not_double(container: Make) -> None:
    net = container(*blocks())
    for _ in range(3):
        net(rows().requires_grad_()).sum().backward()
    counts = [module.num_batches_tracked for module in net.modules() if isinstance(module, nn.BatchNorm1d)]
    assert counts == [3] * 6


@regression(Naive)
def test_fault_nested_containers_do_not_rescale_twice(container: Make) -> None:
    parts = [blocks(4) for _ in range(3)]
    plain = nn.Sequential(*(nn.Sequential(*copy.deepcopy(inner)) for inner in parts))
    net = container(*(container(*inner) for inner in parts))
    for _ in range(2):
        x = rows()
        same(outcome(net, x), outcome(plain, x))
    assert all(module.momentum == 0.1 for module in net.modules() if isinstance(module, nn.BatchNorm1d))


@regression(Naive)
def test_fault_an_empty_container_passes_its_input_on(container: Make) -> None:
    x = rows()
    assert container()(x) is x


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.tanh(), {"b": x.sin(), "n": 3}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, parts: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return self.linear(parts[0]) * parts[1]["b"] * parts[1]["n"]  # type: ignore[no-any-return]


@regression(Naive)
def test_fault_inputs_may_be_tuples(container: Make) -> None:
    parts = [Join(), Split(), Join(), nn.Tanh(), Split(), Join(), Split()]
    plain, net = nn.Sequential(*parts), container(*parts)
    a, b = rows(), rows()
    found = [outcome(lambda a, b, module=module: module((a, {"b": b, "n": 2})), a, b) for module in (net, plain)]
    same(*found)


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda net: net.append(block()),
    "insert": lambda net: net.insert(2, block()),
    "delete": lambda net: net.__delitem__(1),
    "replace": lambda net: net.__setitem__(3, block()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{}, {"segments": 3}, {"recompute": "cheap"}], ids=str)
def test_fault_modules_may_be_changed(change: str, options: dict[str, Any]) -> None:
    plain, net = twins(blocks(), **options)
    x = rows()
    same(outcome(net, x), outcome(plain, x))
    for module in (plain, net):
        torch.manual_seed(3)
        CHANGES[change](module)
    same(outcome(net, x), outcome(plain, x))
    assert net.plan is not None and net.plan.segments[-1].stop == len(net) == len(plain)
    if change == "append":
        naive = Naive(*blocks())
        naive.append(block())
        with pytest.raises(KeyError):
            naive(x)


@regression(Naive)
def test_fault_autocast_is_replayed(container: Make) -> None:
    seen = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    parts: list[nn.Module] = [nn.Sequential(Watched(8, 8), nn.Tanh()) for _ in range(4)]
    plain, net = nn.Sequential(*copy.deepcopy(parts)), container(*parts)
    x = rows()

    def under(module: nn.Module) -> list[Any]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        return [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])]

    same(under(net), under(plain))
    assert set(seen) == {torch.bfloat16}


def test_fault_arguments_need_not_be_tensors() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float, name: str | None, sizes: list[int]) -> Tensor:
            return (x * factor).view(*sizes).tanh()

    parts: list[nn.Module] = [Scaled(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    plain, net = nn.Sequential(*parts[1:]), fl.SublinearSequential(*parts, segments=2)
    x = rows()
    expected = outcome(lambda x: plain(parts[0](x, 2.0, None, [-1, 8])), x)
    same(outcome(lambda x: net(x, 2.0, None, [-1, 8]), x), expected)
    with pytest.raises((TypeError, RuntimeError)):
        Recomputation.apply(net[0], True, x, 2.0, None, [-1, 8])  # type: ignore[no-untyped-call]


@regression(Checkpointed)
def test_fault_evaluation_runs_plainly(container: Make) -> None:
    calls = []
    parts = blocks()
    parts[1].register_forward_hook(lambda *_: calls.append(1))
    net = container(*parts).eval()
    net(rows().requires_grad_()).sum().backward()
    with torch.no_grad():
        net.train()(rows())
    with torch.inference_mode():
        net(rows())
    assert calls == [1, 1, 1]


@regression(Naive)
def test_fault_create_graph_gives_a_second_order_graph(container: Make) -> None:
    parts = [nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()) for _ in range(4)]
    x = rows().double()

    def second(module: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), [leaf, *(p for p in module.parameters())][:-1])]

    same(second(container(*parts)), second(nn.Sequential(*parts)))


# --- a drop-in for nn.Sequential --------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda net: net[1:3],
    "steps": lambda net: net[::2],
    "nothing of it": lambda net: net[3:3],
    "append": lambda net: net.append(nn.Tanh()),
    "insert": lambda net: net.insert(0, nn.Tanh()),
    "insert before the last": lambda net: net.insert(-1, nn.Tanh()),
    "extend": lambda net: net.extend([nn.Tanh(), nn.ReLU()]),
    "pop": lambda net: [net.pop(1), net][1],
    "pop some": lambda net: [net.pop(slice(0, 2)), net][1],
    "+": lambda net: net + nn.Sequential(nn.Tanh()),
    "+ of a slice": lambda net: net[1:] + net,
    "+=": lambda net: net.__iadd__(nn.Sequential(nn.Tanh())),
    "*": lambda net: net * 3,
    "* from the left": lambda net: 2 * net,
    "*=": lambda net: net.__imul__(2),
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": lambda net: _saved_and_loaded(net),
    "to": lambda net: net.double().float(),
}


def _saved_and_loaded(net: Any) -> Any:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_is_built_and_changed_as_a_sequential(operation: str, is_planned: bool) -> None:
    plain, net = twins([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)], segments=2)
    x = rows()
    if is_planned:
        same(outcome(net, x), outcome(plain, x))
    made, expected = OPERATIONS[operation](net), OPERATIONS[operation](plain)
    assert type(made) is fl.SublinearSequential and made.segments == 2
    assert list(made.state_dict()) == list(expected.state_dict()) and len(made) == len(expected)
    if len(made):
        same(outcome(made, x), outcome(expected, x))
    assert made(x) is x if not len(made) else made.plan is not None


def test_its_input_may_be_named() -> None:
    plain, net = twins(blocks())
    same(outcome(lambda x: net(input=x), rows() * 0 + 1), outcome(lambda x: plain(input=x), torch.ones(16, 8)))


def test_it_is_built_from_an_ordered_dict() -> None:
    parts = [("a", nn.Linear(8, 8)), ("b", nn.Tanh()), ("1", nn.Linear(8, 8))]
    plain, net = nn.Sequential(OrderedDict(parts)), fl.SublinearSequential(OrderedDict(parts), segments=2)
    same(outcome(net, rows() * 0 + 1), outcome(plain, torch.ones(16, 8)))
    assert net.a is parts[0][1] and list(net.state_dict()) == list(plain.state_dict())
    assert list((net + net).state_dict()) == list((plain + plain).state_dict())


def test_what_a_sequential_refuses_is_refused() -> None:
    net = fl.SublinearSequential(nn.Tanh())
    with pytest.raises(ValueError, match="Sequential class"):
        net.__add__([nn.Tanh()])
    with pytest.raises(TypeError, match="unsupported operand"):
        net * 1.5
    with pytest.raises(ValueError, match="Non-positive"):
        net * 0


def test_a_slice_forgets_lengths_of_segments_and_keeps_the_rest() -> None:
    net = fl.SublinearSequential(*blocks(4), segments=[2, 2], recompute="cheap")
    assert (net[:3].segments, net[:3].recompute) == (None, "cheap")
    assert fl.SublinearSequential(*blocks(4), memory_budget_bytes=5)[1:].memory_budget_bytes == 5


def test_its_repr_says_what_was_asked_for_and_planned() -> None:
    net = fl.SublinearSequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), segments=[2, 1], recompute="cheap")
    assert "segments=[2, 1], recompute='cheap'" in repr(net) and net.plan is None
    net(rows())
    assert "2 of 3 children are recomputed, in 1 segment:" in repr(net)
    assert "saved in the" not in repr(copy.deepcopy(net)), "the plan is another one's"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"segments": 0}, "segments must be a positive number, or a list of such, got 0"),
    ({"segments": -1}, "segments must be a positive number, or a list of such, got -1"),
    ({"segments": [2, 0]}, "segments must be a positive number, or a list of such, got [2, 0]"),
    ({"segments": True}, "segments must be a positive number, or a list of such, got True"),
    ({"segments": 1.5}, "segments must be a positive number, or a list of such, got 1.5"),
    ({"segments": "3"}, "segments must be a positive number, or a list of such, got '3'"),
    ({"segments": []}, "segments must be a positive number, or a list of such, got []"),
    (
        {"memory_budget_bytes": -1},
        'memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got -1',
    ),
    (
        {"memory_budget_bytes": 1.5},
        'memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got 1.5',
    ),
    ({"recompute": "some"}, "recompute must be one of 'all', 'cheap', 'nothing', got 'some'"),
    ({"segments": 2, "memory_budget_bytes": 9}, "segments and memory_budget_bytes exclude each other"),
]


TOO_LITTLE = (
    r"^SublinearSequential: memory_budget_bytes=1024 is less than any plan needs: these 3 children save [\d.]+ KiB "
    r"without recomputation, and at least [\d.]+ KiB \(\d+ bytes\)$"
)


@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"SublinearSequential: {message}")):
        fl.SublinearSequential(nn.Tanh(), **options)


def test_what_cannot_be_is_refused_when_it_shows() -> None:
    with pytest.raises(ValueError, match=r"^sublinear: recompute must be one of 'all', 'cheap', 'nothing', got 'few'"):
        fl.sublinear(torch.sin, rows(), recompute="few")  # type: ignore[arg-type]
    net = fl.SublinearSequential(*blocks(3), segments=[1, 1])
    with pytest.raises(ValueError, match=r"segments=\[1, 1\] are 2 children, but there are 3"):
        net(rows())
    net = fl.SublinearSequential(*blocks(3), memory_budget_bytes=np.int64(9))
    net.memory_budget_bytes = "1KiB"
    with pytest.raises(ValueError, match=TOO_LITTLE):
        net(rows())
    with pytest.raises(RuntimeError, match="call the container once in training before it is compiled, or say segmen"):
        torch.compile(net, backend="eager", fullgraph=True)(rows())


# --- the same to the bit ----------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from Python's generator and torch's. (NumPy's is not looked at.)"""

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() + torch.rand(()).item()
        return (x * factor).sin()


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_pythons_generator(is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are read from its memory; where they are not there it is asked."""
    if is_elsewhere:
        monkeypatch.setattr(generators.ctypes, "string_at", lambda place, size: bytes(size))
    generator, before = generators._of_python(), random.getstate()
    assert (generator.get == random.getstate) == is_elsewhere
    try:
        for draw in (random.random, functools.partial(random.gauss, 0.0, 1.0), lambda: random.getrandbits(32 * 700)):
            expected, state = random.getstate(), generator.get()
            drawn = draw()
            assert generator.has_moved(state)
            generator.set(state)
            assert random.getstate() == expected and not generator.has_moved(state)
            assert draw() == drawn
    finally:
        random.setstate(before)


class OwnNorm(nn.Module):
    """A batch norm of somebody's own, which torch counts no version of buffers up for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True).tanh()  # type: ignore[arg-type]


class ReadsWhatItWrites(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        z = x * self.running_var.clone() - self.running_mean.clone()
        super().forward(x)
        return z.sin() * x


class Tied(nn.Module):
    """One buffer under two names: what is written by one is read by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.ones(2, 4))
        self.register_buffer("read", self.written)

    def forward(self, x: Tensor) -> Tensor:
        self.written.add_(1)
        return (x * self.read.sum()).sin()


def _old_spectral_norm() -> nn.Module:
    return torch.nn.utils.spectral_norm(nn.Linear(8, 8))


def _spectral_norm() -> nn.Module:
    return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())],
    "instance norm": lambda: [
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
        for _ in range(4)
    ],
    "dropout": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.Dropout(0.5))],
    "draws": lambda: [m for _ in range(4) for m in (Drawing(), nn.Linear(8, 8), nn.Dropout(0.5))],
    "spectral norm": lambda: [m for _ in range(4) for m in (_spectral_norm(), nn.Tanh())],
    "old spectral norm": lambda: [m for _ in range(4) for m in (_old_spectral_norm(), nn.Tanh())],
    "own batch norm": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), OwnNorm())],
    "reads its statistics": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), ReadsWhatItWrites(8))],
    "counts": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), Counting())],
    "tied buffers": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), Tied())],
    "one module often": lambda: [block()] * 5,
    "in place": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU(inplace=True))],
    "frozen": lambda: [m.requires_grad_(k > 2) for k, m in enumerate(blocks())],
    "in evaluation": lambda: [m.train(k != 2) for k, m in enumerate(blocks())],
    "attention": lambda: [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)],
}


@every_mode
@pytest.mark.parametrize("name", NETS)
def test_all_is_as_in_a_sequential(name: str, recompute: str) -> None:
    plain, net = twins(NETS[name](), segments=3, recompute=recompute)
    for seed in range(3):
        x = rows()
        same(outcome(net, x, seed=seed), outcome(plain, x, seed=seed))


@every_mode
def test_lazy_modules_are_there_after_a_first_call(recompute: Any) -> None:
    def parts() -> list[nn.Module]:
        return [nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(8), nn.Tanh()]

    plain, net = nn.Sequential(*parts()), fl.SublinearSequential(*parts(), segments=2, recompute=recompute)
    lazy = nn.Sequential(*parts())
    x = rows()
    for call in (plain, net, lambda x: fl.sublinear(lazy, x)):
        torch.manual_seed(5)
        call(x).sum().backward()
    for module in (net, lazy):
        same(list(module.state_dict().values()), list(plain.state_dict().values()))
        same([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])
    same(outcome(net, x), outcome(plain, x))


@pytest.mark.parametrize("name", ["batch norm", "draws", "spectral norm", "own batch norm", "counts", "tied buffers"])
def test_torchs_checkpoint_is_not_as_a_sequential(name: str) -> None:
    """Of the nets above these tell."""
    parts = NETS[name]()
    plain, net = nn.Sequential(*copy.deepcopy(parts)), Checkpointed(*parts)
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012  # some tell in the second round
        for _ in range(2):
            x = rows()
            same(outcome(net, x), outcome(plain, x))


@every_mode
def test_a_relu_in_place_after_a_convolution(recompute: str) -> None:
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
    parts += [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(inplace=True)) for _ in range(2)]
    plain, net = twins(parts, segments=2, recompute=recompute)
    same(outcome(net, images()), outcome(plain, images()))


# --- the functional form ----------------------------------------------------------------------------------------------

_norm = block()


def _by_global(x: Tensor) -> Tensor:
    return _norm(x)  # type: ignore[no-any-return]


def _through_another_global(x: Tensor) -> Tensor:
    return _by_global(x)


class _Holder:
    def __init__(self, net: nn.Module) -> None:
        self.nets = {"a": [net]}

    def method(self, x: Tensor) -> Tensor:
        return self.nets["a"][0](x)  # type: ignore[no-any-return]

    __call__ = method


def _closure(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    return lambda x: inner(x)


def _by_keyword(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, *, net: nn.Module = net) -> Tensor:
        return net(x)  # type: ignore[no-any-return]

    return function


def _without_module(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """As ``exec`` makes them."""
    return types.FunctionType((lambda x: net(x)).__code__, {"net": net}, closure=(types.CellType(net),))


FUNCTIONS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "module": lambda net: net,
    "lambda": lambda net: lambda x: net(x),
    "lambda with a default": lambda net: lambda x, net=net: net(x),
    "keyword with a default": _by_keyword,
    "method of a module": lambda net: net.forward,
    "method": lambda net: _Holder(net).method,
    "callable object": _Holder,
    "partial": lambda net: functools.partial(lambda net, x: net(x), net),
    "partial by keyword": lambda net: functools.partial(lambda x, nets: nets[0](x), nets=[net]),
    "nested closures": _closure,
    "wrapped": lambda net: functools.wraps(_by_global)(_closure(net)),
    "global": lambda net: _by_global,
    "global through a global": lambda net: _through_another_global,
    "without a module": _without_module,
    "argument": lambda net: functools.partial(_called, net),
}


def _called(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)  # type: ignore[no-any-return]


@every_mode
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_modules_in_a_function_are_found(kind: str, recompute: Any) -> None:
    initial = copy.deepcopy(_norm)
    function = FUNCTIONS[kind](_norm)
    x = rows()
    sources: list[list[Any]] = []
    for through in (lambda x: fl.sublinear(function, x, recompute=recompute), lambda x: function(x)):
        _norm.load_state_dict(initial.state_dict())
        sources.append(outcome(through, x) + [buffer.clone() for buffer in _norm.buffers()])
    same(*sources)
    assert _norm[1].num_batches_tracked == initial[1].num_batches_tracked + 1


class Kind(enum.StrEnum):
    """Text, which a module may be attached to."""

    PLAIN = "plain"


def test_what_an_argument_holds_is_found() -> None:
    def counts(run: Callable[..., Tensor]) -> Tensor:
        Kind.PLAIN.norm = nn.BatchNorm1d(8)  # type: ignore[attr-defined]
        run(lambda x, kind, *, scale: kind.norm(x) * scale, rows(), Kind.PLAIN, scale=2.0).square().sum().backward()
        return Kind.PLAIN.norm.num_batches_tracked  # type: ignore[attr-defined,no-any-return]

    assert counts(lambda f, *args, **kwargs: f(*args, **kwargs)) == counts(fl.sublinear) == 1


class Sigmoids(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_inside() -> None:
    """After its first run TorchScript compiles a function once more, and saves tensors in another order."""
    plain, x = nn.Sequential(nn.Linear(8, 8), Sigmoids(), nn.Linear(8, 8)), rows().requires_grad_()
    model = nn.Sequential(plain[0], torch.jit.script(plain[1]), plain[2])
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (fl.sublinear(model, x), plain(x)))
    torch.testing.assert_close(found, expected)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).sin() @ self.second


def test_parameters_that_exchange_their_names() -> None:
    """Between the passes, the same two in the same order."""
    model, x = Twice(), rows().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    y = fl.sublinear(model, x)
    first, second = model.first, model.second
    del model.first, model.second
    model.second, model.first = first, second
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(found, expected)


def test_names_of_arguments_are_the_functions_own() -> None:
    def function(x: Tensor, *, debug: int, early_stop: int, context_fn: Tensor) -> Tensor:
        return (x * debug * early_stop * context_fn).sin()

    x, other = rows(), rows()
    found = outcome(lambda a, b: fl.sublinear(function, a, debug=2, early_stop=3, context_fn=b), x, other)
    same(found, outcome(lambda a, b: function(a, debug=2, early_stop=3, context_fn=b), x, other))


def test_a_list_that_a_function_writes_to_is_the_callers_and_written_once() -> None:
    def function(x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x.sin())
        return sum(cache).sin() * len(cache)  # type: ignore[union-attr, no-any-return]

    results = []
    for through in (fl.sublinear, lambda f, *args: f(*args)):
        cache: list[Tensor] = [torch.ones(16, 8)]
        results.append(outcome(lambda x, through=through, cache=cache: through(function, x, cache), rows() * 0 + 2))
        assert len(cache) == 2
    same(*results)


def test_an_input_edited_in_place_before_the_backward_pass_raises() -> None:
    weight = rows().requires_grad_()
    for call in (
        lambda t: fl.sublinear(lambda w, t: (w * t).sin(), weight, t),
        lambda t: fl.sublinear(lambda w, t: (w * t).sin(), weight, t=t),
        lambda t: fl.sublinear(lambda w, t: (w * t[0]).sin(), weight, [t]),
    ):
        t = rows()
        y = call(t)
        t.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_containers_of_torchs_own_modules_are_those_of_the_first_run() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    linear.seen = []  # type: ignore[assignment]
    linear.register_forward_hook(lambda module, _, y: y * (module.seen.append(1) or len(module.seen)))
    net = nn.Sequential(linear, nn.GELU())
    y = fl.sublinear(net, x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert linear.seen == [1]
    (expected,) = torch.autograd.grad(F.gelu(F.linear(x, linear.weight, linear.bias)).sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_whose_parameters_were_exchanged(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    layer, x = kind(8, 8), torch.randn(5, 3, 8)
    old = dict(layer.named_parameters())
    expected = torch.autograd.grad(layer(x)[0].sum(), [*old.values()])
    y = fl.sublinear(layer, x)[0]
    for name, parameter in old.items():
        setattr(layer, name, nn.Parameter(torch.full_like(parameter, 0.1)))
    for found, wanted in zip(torch.autograd.grad(y.sum(), [*old.values()]), expected, strict=True):
        torch.testing.assert_close(found, wanted)
