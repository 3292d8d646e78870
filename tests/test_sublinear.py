"""Recomputed segments against ``nn.Sequential``, to the bit: outputs, gradients, buffers, and random numbers after it.

The six items, and the faults, are those of the package that this idea was first had from. ``Naive`` does as that did;
what is tested here goes wrong with it.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
import random
import re
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from bench.reference import RESNETS, resnet
from fusedlayers.checkpoint.measurement import measure
from fusedlayers.memory import peak_bytes, saved_bytes

Make = Callable[..., nn.Module]

MODES = ("all", "cheap", "nothing")
every_mode = pytest.mark.parametrize("recompute", MODES)
# torch's compiler uses deprecated parts of torch itself.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# --- what is compared -------------------------------------------------------------------------------------------------


def outcome(net: Any, *inputs: Any, seed: int = 7) -> list[Any]:
    """Outputs, gradients of inputs and parameters, buffers, and the generators' states."""
    torch.manual_seed(seed)
    random.seed(seed)
    inputs = tuple(x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs)
    outputs = [leaf for leaf in tree_leaves(net(*inputs)) if isinstance(leaf, Tensor)]
    parameters = [p for p in net.parameters() if p.requires_grad] if isinstance(net, nn.Module) else []
    sources = [x for x in inputs if isinstance(x, Tensor)] + parameters
    loss = torch.stack([output.float().square().sum() for output in outputs]).sum()
    gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    buffers = [buffer.clone() for buffer in net.buffers()] if isinstance(net, nn.Module) else []
    states = [torch.get_rng_state(), random.getstate()]
    return [*outputs, *gradients, *buffers, *states]


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def twins(parts: Sequence[nn.Module], **options: Any) -> tuple[nn.Sequential, fl.SublinearSequential]:
    return nn.Sequential(*copy.deepcopy(list(parts))), fl.SublinearSequential(*copy.deepcopy(list(parts)), **options)


def block(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh())


def blocks(count: int = 6) -> list[nn.Module]:
    return [block() for _ in range(count)]


def rows(width: int = 8) -> Tensor:
    return torch.randn(16, width)


# --- what was there before --------------------------------------------------------------------------------------------


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, replays: bool, x: Tensor) -> Tensor:
        ctx.run, ctx.state = run, torch.get_rng_state() if replays else None
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            y = ctx.run(x)
        torch.autograd.backward(y, dy)
        return None, None, x.grad


class Naive(nn.Sequential):
    """Segments that a Function of autograd's runs again; momentums such that two updates of statistics are one."""

    rescales = replays = True

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        length = len(self) // int(math.sqrt(len(self)))
        self.segment_of = {name: k // length for k, name in enumerate(self._modules)}
        for module in self.modules() if self.rescales else ():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 1 - math.sqrt(1 - module.momentum)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        for _, items in groupby(self._modules.items(), key=lambda item: self.segment_of[item[0]]):
            x = _Again.apply(nn.Sequential(OrderedDict(items)), self.replays, x)  # type: ignore[arg-type]
        return x


class Unscaled(Naive):
    rescales = False


class Forgetful(Naive):
    replays = False


class Nested(nn.Sequential):
    def __init__(self, *modules: Any) -> None:
        super().__init__(*(nn.Sequential(module) for module in modules))


class Checkpointed(nn.Sequential):
    """By torch's own checkpoint."""

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(super().forward, *inputs, use_reentrant=False)


def regression(naive: Make) -> Callable[[Callable[[Make], None]], Callable[[], None]]:
    """A test that ``SublinearSequential`` passes, and something naive does not."""

    def of(check: Callable[[Make], None]) -> Callable[[], None]:
        def test() -> None:
            check(fl.SublinearSequential)
            torch.manual_seed(0)
            with pytest.raises((AssertionError, RuntimeError, TypeError, KeyError, ZeroDivisionError)):
                check(naive)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return of


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
        net = lambda a, b, c: through(function, a, 2.0, b, names=["u", "v"], also={"c": c, "d": None})  # noqa: E731
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
        _Again.apply(net[0], True, x, 2.0, None, [-1, 8])  # type: ignore[no-untyped-call]


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
    ({"memory_budget_bytes": -1}, "memory_budget_bytes must be a number of bytes, got -1"),
    ({"memory_budget_bytes": 1.5}, "memory_budget_bytes must be a number of bytes, got 1.5"),
    ({"recompute": "some"}, "recompute must be one of 'all', 'cheap', 'nothing', got 'some'"),
    ({"segments": 2, "memory_budget_bytes": 9}, "segments and memory_budget_bytes exclude each other"),
]


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
    net = fl.SublinearSequential(*blocks(3), memory_budget_bytes=10)
    with pytest.raises(ValueError, match=r"memory_budget_bytes=10 is less than any plan needs: .* and \d+ at least"):
        net(rows())
    with pytest.raises(RuntimeError, match="call the container once in training before it is compiled, or say segmen"):
        torch.compile(net, backend="eager", fullgraph=True)(rows())


# --- plans and what is measured ---------------------------------------------------------------------------------------


def convolutions(count: int = 8, width: int = 8) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        for _ in range(count)
    ]


@functools.cache
def _images() -> Tensor:
    return torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))


def _peak(net: nn.Module) -> int:
    """Of a forward and a backward pass, beside parameters and their gradients."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = lambda: net(_images()).sum().backward()  # noqa: E731
    step()
    return peak_bytes(step)


def _kept(net: nn.Sequential, x: Tensor) -> int:
    """Without its input and its output, which others hold."""
    plan = getattr(net, "plan", None)
    runs_once = plan is None or plan.segments[-1].recompute == "nothing"
    keeps_output = runs_once and measure(list(net), (x,))[-1].saves_output
    return saved_bytes(net, x, exclude=x) - (net(x).nbytes if keeps_output else 0)


@functools.cache
def _eager_excess() -> int:
    """What is allocated beside what is kept: gradients, and what operators take for themselves."""
    plain = nn.Sequential(*convolutions())
    return _peak(plain) - _kept(plain, _images())


ASKED: list[dict[str, Any]] = [
    {},
    {"segments": 1},
    {"segments": 3},
    {"segments": 8},
    {"segments": 20},
    {"segments": [1, 4, 3]},
    {"segments": (2, 2, 4), "recompute": "cheap"},
    {"recompute": "all"},
    {"recompute": "cheap"},
    {"segments": 2, "recompute": "cheap"},
    {"memory_budget_bytes": 450_000, "recompute": "all"},
    {"memory_budget_bytes": 450_000, "recompute": "cheap"},
    {"memory_budget_bytes": 300_000},
    {"memory_budget_bytes": 400_000},
    {"memory_budget_bytes": 10**9},
]


@pytest.mark.parametrize("options", ASKED, ids=str)
def test_plans_keep_what_they_say(options: dict[str, Any]) -> None:
    parts = convolutions()
    plain, net = twins(parts, **options)
    same(outcome(net, _images()), outcome(plain, _images()))
    plan = net.plan
    assert plan is not None
    assert _kept(net, _images()) == pytest.approx(plan.saved_bytes, rel=0.01)
    assert _kept(plain, _images()) == pytest.approx(plan.eager_bytes, rel=0.01)
    # The gradients are there at some moment, which need not be the worst one of what is kept.
    assert plan.peak_bytes <= _peak(net) <= 1.05 * (plan.peak_bytes + _eager_excess())
    assert plan.saved_bytes <= plan.peak_bytes <= options.get("memory_budget_bytes", plan.eager_bytes)
    segments = options.get("segments")
    if isinstance(segments, int):
        assert len(plan.segments) == min(segments, 8)
    elif segments:
        assert [segment.stop - segment.start for segment in plan.segments] == list(segments)
    if options.get("memory_budget_bytes") == 10**9:
        assert plan.recomputed == 0
    mode = options.get("recompute")
    assert mode is None or {segment.recompute for segment in plan.segments} <= {mode, "nothing"}


def test_a_larger_budget_recomputes_less_and_a_mixture_less_than_one_way() -> None:
    net = fl.SublinearSequential(*convolutions())
    net(_images())
    assert net.plan is not None
    eager = net.plan.eager_bytes
    parts = []
    for budget in (0.6, 0.7, 0.8, 0.9, 1.0):
        net.memory_budget_bytes = int(budget * eager)
        net.recompute = None
        net(_images())
        mixed = net.plan.recomputed
        net.recompute = "all"
        net(_images())
        assert mixed <= net.plan.recomputed
        parts.append(mixed)
    assert parts == sorted(parts, reverse=True) and parts[-1] == 0


def test_the_smallest_budget_that_is_named_is_enough() -> None:
    net = fl.SublinearSequential(*convolutions(), memory_budget_bytes=1000)
    with pytest.raises(ValueError, match="at least") as raised:
        net(_images())
    net.memory_budget_bytes = int(re.findall(r"(\d+) at least", str(raised.value))[0])
    net(_images())
    assert net.plan is not None and net.plan.peak_bytes <= net.memory_budget_bytes


def test_a_plan_is_made_anew_when_it_must_be() -> None:
    calls = []
    parts = blocks()
    parts[0].register_forward_pre_hook(lambda *_: calls.append(1))
    net: Any = fl.SublinearSequential(*parts)

    def runs(x: Tensor) -> bool:
        """Whether the children were run twice, once to be measured."""
        calls.clear()
        net(x)
        return len(calls) > 1

    assert runs(torch.randn(16, 8))
    assert not runs(torch.randn(16, 8)) and not runs(torch.randn(8, 8))
    assert runs(torch.randn(32, 8)) and not runs(torch.randn(16, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert runs(torch.randn(16, 8))
    net.segments = [3, 3]
    assert runs(torch.randn(16, 8))
    net.segments[0], net.segments[1] = 2, 4
    assert runs(torch.randn(16, 8)) and net.plan.segments[0].stop == 2
    net.recompute = "nothing"
    assert not runs(torch.randn(16, 8))
    net.recompute, net.segments = "cheap", 2
    assert runs(torch.randn(16, 8))
    for _ in range(3):  # another one may come to lie where it lay
        net[5] = block()
        assert runs(torch.randn(16, 8))


def test_the_measuring_run_leaves_all_as_it_was() -> None:
    parts = blocks()
    plain, net = twins(parts)
    x, leaf = rows(), rows().requires_grad_()
    torch.manual_seed(5)
    expected = plain(x)
    torch.manual_seed(5)
    found = net(x)
    same([found, torch.get_rng_state(), *net.buffers()], [expected, torch.get_rng_state(), *plain.buffers()])
    net(leaf)
    assert leaf.grad is None and all(parameter.grad is None for parameter in net.parameters())


# --- the same to the bit ----------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from Python's generator and torch's. (NumPy's is not looked at.)"""

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() + torch.rand(()).item()
        return (x * factor).sin()


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


class Counting(nn.Module):
    """Buffers that it replaces, writes to in place, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.ones((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.step = self.step + 1
        self.scale.mul_(0.5)
        return (x * self.scale.sum() * self.step).tanh()


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
    with pytest.raises((AssertionError, RuntimeError)):
        for _ in range(2):
            x = rows()
            same(outcome(net, x), outcome(plain, x))


@every_mode
def test_a_relu_in_place_after_a_convolution(recompute: str) -> None:
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(4)]
    parts += [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(inplace=True)) for _ in range(2)]
    plain, net = twins(parts, segments=2, recompute=recompute)
    same(outcome(net, _images()), outcome(plain, _images()))


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


# --- "cheap" ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = (part.unflatten(-1, (2, 4)).transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        return F.scaled_dot_product_attention(*heads)[0].transpose(0, 1).flatten(1)


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


KEPT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.Linear(8, 8), (16, 8), "addmm"),
    "linear without a bias": (lambda: nn.Linear(8, 8, bias=False), (16, 8), "mm"),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1), (4, 8, 8, 8), "convolution"),
    "attention": (Attention, (16, 8), r"_scaled_dot_product\w*(?<!backward)"),
}


@pytest.mark.parametrize("name", KEPT)
def test_results_of_products_are_kept_and_the_rest_computed_again(name: str) -> None:
    make, shape, operator = KEPT[name]
    net = nn.Sequential(make(), nn.Tanh(), make(), nn.Tanh())
    counts = {}
    for recompute in ("all", "cheap"):
        y = fl.sublinear(net, torch.randn(*shape, requires_grad=True), recompute=recompute)  # type: ignore[arg-type]
        with Operators() as operators:
            y.sum().backward()
        counts[recompute] = sum(re.fullmatch(operator, name) is not None for name in operators.seen)
        assert operators.seen.count("tanh") == 2
    assert counts["all"] - counts["cheap"] == 2


@every_mode
def test_backward_passes_again_and_of_second_order(recompute: Any) -> None:
    parts = [nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh()) for _ in range(4)]
    x = rows().double()

    def all_of(module: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        sources = [leaf, *module.parameters()]
        y = module(leaf).square().sum()
        found = [g for _ in range(2) for g in torch.autograd.grad(y, sources, retain_graph=True)]
        first = torch.autograd.grad(y, sources, create_graph=True)
        loss = torch.stack([gradient.square().sum() for gradient in first]).sum()
        return [*found, *first, *torch.autograd.grad(loss, sources, allow_unused=True)[:-1]]

    plain, net = twins(parts, segments=2, recompute=recompute)
    expected = all_of(plain)
    for found, reference in zip(all_of(net), expected, strict=True):
        # Where a graph is built, gradients are summed in another order: as exact as torch's own second run.
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_without_retain_graph_raises() -> None:
    for recompute in ("all", "cheap"):
        y = fl.SublinearSequential(*blocks(), segments=2, recompute=recompute)(rows()).sum()  # type: ignore[arg-type]
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


FUSED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "dense": (lambda: [fl.FusedDenseAct(64, 64, a) for a in ("gelu", "mish", "relu", "silu")], (64, 64)),
    "mlp": (
        lambda: [nn.LayerNorm(64), fl.FusedMLP(64, 128), nn.LayerNorm(64), fl.FusedGatedMLP(64, 128)],
        (64, 64),
    ),
    "convolution": (
        lambda: [fl.FusedConvAct2d(8, 8, 3, padding=1, activation="gelu") for _ in range(4)],
        (4, 8, 16, 16),
    ),
    "batch norm": (
        lambda: [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3), fl.FusedBatchNormAct2d(8, "silu"))],
        (8, 8, 16, 16),
    ),
}


@pytest.mark.parametrize("recompute", ["all", "cheap"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_inside(name: str, recompute: str) -> None:
    make, shape = FUSED[name]
    plain, net = twins(make(), segments=2, recompute=recompute)
    exact = copy.deepcopy(plain).double()
    x = torch.randn(*shape)
    found, expected, reference = outcome(net, x), outcome(plain, x), outcome(exact, x.double())
    if recompute == "all":
        same(found, expected)
    else:  # what is kept may not be written over, so that plain operations run: as exact as torch's
        for a, b, r in zip(found[:-2], expected[:-2], reference[:-2], strict=True):
            scale = r.abs().max().clamp_min(1e-30)
            assert (a - r).abs().max() / scale <= 4 * (b - r).abs().max() / scale + 4e-7
    leaf = x.clone().requires_grad_()
    assert net.plan is not None
    if recompute == "all":
        assert _kept(net, leaf) == pytest.approx(net.plan.saved_bytes, rel=0.01)
        assert net.plan.saved_bytes < net.plan.eager_bytes


def test_reports_name_what_is_kept() -> None:
    net = fl.SublinearSequential(*convolutions(), segments=3, recompute="cheap")
    report = fl.memory_report(net, _images())
    assert "checkpoint" in str(report) and "8 x 16 x 16 float32" in str(report)
    assert report.saved_bytes == pytest.approx(saved_bytes(net, _images(), exclude=_images()), rel=0.01)


# --- what may be switched on around it --------------------------------------------------------------------------------


@every_mode
def test_autocast(recompute: str) -> None:
    plain, net = twins(blocks(), segments=3, recompute=recompute)
    x = rows()

    def under(module: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        return [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])]

    same(under(net), under(plain))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_func_and_tracers_see_plain_operations() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    plain, net = nn.Sequential(*parts), fl.SublinearSequential(*parts, segments=2)
    x = rows()

    def all_of(module: Any) -> list[Any]:
        values = {name: parameter.detach() * 2 for name, parameter in module.named_parameters()}
        loss = lambda values, x: torch.func.functional_call(module, values, (x,)).square().sum()  # noqa: E731
        with torch.autograd.forward_ad.dual_level():
            dual = module(torch.autograd.forward_ad.make_dual(x, x))
            tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
        return [
            *torch.func.grad(loss)(values, x).values(),
            *torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x).values(),
            torch.func.jvp(module, (x,), (x,))[1],
            tangent,
            torch.func.hessian(lambda x: module(x).sum())(x[0]),
            make_fx(lambda x: module(x))(x)(x),
            symbolic_trace(nn.Sequential(module))(x),
            torch.jit.trace(module, x, check_trace=False)(x),
        ]

    same(all_of(net), all_of(plain))
    same(all_of(Functional(*parts)), all_of(plain))
    traced = [symbolic_trace(nn.Sequential(module)).graph.nodes for module in (net, plain)]
    assert len(traced[0]) == len(traced[1])


class Functional(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return fl.sublinear(super().forward, x)  # type: ignore[no-any-return]


def lambda_module(function: Callable[[Tensor], Tensor], of: nn.Sequential) -> nn.Module:
    class Lambda(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Lambda(*of)


@pytest.mark.parametrize("recompute", ["all", "cheap"])
def test_functional_call_with_its_own_tensors(recompute: Any) -> None:
    """The backward pass comes when the module has its own ones again. (Torch's checkpoint takes those.)"""
    parts: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Counting()) for _ in range(4)]
    plain, net = twins(parts, segments=[3, 1], recompute=recompute)
    x = rows()

    def of(module: nn.Module) -> list[Tensor]:
        own = {name: (p.detach() * 2).requires_grad_() for name, p in module.named_parameters()}
        buffers = {name: b.clone() + 1 for name, b in module.named_buffers()}
        y = torch.func.functional_call(module, {**own, **buffers}, (x,))
        return [y, *torch.autograd.grad(y.square().sum(), list(own.values())), *module.buffers()]

    same(of(net), of(plain))
    with pytest.raises(AssertionError):
        same(of(Checkpointed(*copy.deepcopy(parts))), of(nn.Sequential(*copy.deepcopy(parts))))


@compiles
@every_mode
def test_compiled(recompute: str) -> None:
    parts = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4)]
    plain, net = twins(parts, segments=2, recompute=recompute)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = rows(16)
    found, expected = outcome(compiled, x), outcome(plain, x)
    for a, b in zip(found[:-2], expected[:-2], strict=True):
        torch.testing.assert_close(a, b)
    assert all(m.num_batches_tracked == 1 for m in net.modules() if isinstance(m, nn.BatchNorm1d))
    leaf = x.clone().requires_grad_()
    kept = saved_bytes(compiled, leaf, exclude=leaf)
    # Statistics of batches, which eager batch norms keep as well, are all that is allowed to come on top.
    limit = saved_bytes(Checkpointed(*parts), leaf, exclude=leaf) if recompute == "all" else 0
    eager = saved_bytes(net, leaf, exclude=leaf)
    assert kept <= max(limit, eager) + (4 * 2 * 16 * 4 if recompute != "nothing" else eager)
    if recompute != "nothing":
        assert kept < saved_bytes(plain, leaf, exclude=leaf)


@compiles
def test_compiled_after_it_was_planned() -> None:
    parts = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    plain, net = twins(parts, memory_budget_bytes=6000)
    x = rows(16)
    net(x)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for a, b in zip(outcome(compiled, x), outcome(plain, x), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)
    # What was planned was for something else.
    net.memory_budget_bytes, net.segments = None, [1, 5]
    assert [segment.stop for segment in net._segments_for_compiler()] == [1, 6]


def test_fuse_inside_and_around() -> None:
    def parts() -> list[nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU()]
        return [*layers, nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU()]

    x = torch.randn(64, 64)
    plain = nn.Sequential(nn.Sequential(*parts()))
    expected_report = fl.fuse(plain, x)
    for segments in (1, 3, [1, 2, 2, 3, 1]):  # also between a layer and its activation
        net = nn.Sequential(fl.SublinearSequential(*parts(), segments=segments))
        report = fl.fuse(net, x)
        assert len(report.replaced) == len(expected_report.replaced) == 4
        for a, b in zip(outcome(net, x)[:-2], outcome(plain, x)[:-2], strict=True):
            torch.testing.assert_close(a, b)
        assert net[0].plan is not None
    of_fused = fl.SublinearSequential(*plain[0], segments=3)
    same(outcome(of_fused, x), outcome(plain, x))


def test_layers_of_bert_with_several_inputs() -> None:
    hf = pytest.importorskip("transformers")
    from transformers.models.bert.modeling_bert import BertLayer

    config = hf.BertConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, attn_implementation="sdpa")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = BertLayer(config)

        def forward(self, parts: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
            x, mask = parts
            out = self.layer(x, mask)
            return (out[0] if isinstance(out, tuple) else out), mask

    plain, net = twins([Layer() for _ in range(4)], segments=2)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 1, 5, 5)
    for recompute in ("all", "cheap"):
        net.recompute = recompute  # type: ignore[assignment]
        found = [outcome(lambda x, m=module: m((x, mask))[0], x) for module in (net, plain)]
        same(*found)
        leaf = x.clone().requires_grad_()
        assert saved_bytes(net, (leaf, mask), exclude=x) < saved_bytes(plain, (leaf, mask), exclude=x)


@pytest.mark.parametrize("inner", ["all", "cheap"])
@pytest.mark.parametrize("outer", ["all", "cheap"])
def test_containers_inside_containers(outer: str, inner: str) -> None:
    parts = [blocks(4) for _ in range(3)]
    plain = nn.Sequential(*(nn.Sequential(*copy.deepcopy(inside)) for inside in parts))
    net = fl.SublinearSequential(
        *(fl.SublinearSequential(*inside, segments=2, recompute=inner) for inside in parts),
        segments=2,
        recompute=outer,
    )  # type: ignore[arg-type]
    x = rows()
    same(outcome(net, x), outcome(plain, x))


def test_inside_and_around_torchs_checkpoint() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    plain, net = nn.Sequential(*parts), fl.SublinearSequential(*parts, segments=2)
    x = rows()
    expected = outcome(plain, x)
    same(outcome(lambda_module(lambda x: checkpoint(net, x, use_reentrant=False), plain), x), expected)
    inside = fl.SublinearSequential(*(Checkpointed(part) for part in parts), segments=2)
    same(outcome(inside, x), expected)


class Failing(nn.Module):
    fails_in: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls = types.SimpleNamespace(count=0)  # of all runs: what a second one sets on the module is thrown away

    def forward(self, x: Tensor) -> Tensor:
        self.calls.count += 1
        if self.fails_in == "forward" or (self.fails_in == "again" and self.calls.count > 1):
            raise KeyError("on purpose")
        y = x.sin()
        if self.fails_in == "backward":
            y.register_hook(_raise)
        return y


def _raise(gradient: Tensor) -> Tensor:
    raise KeyError("on purpose")


@pytest.mark.parametrize("recompute", ["all", "cheap"])
@pytest.mark.parametrize("where", ["forward", "again", "backward"])
def test_an_error_leaves_all_as_it_was(where: str, recompute: str) -> None:
    failing = Failing()
    parts = [*blocks(3), failing, *blocks(3)]
    net: Any = fl.SublinearSequential(*parts, segments=[5, 2], recompute=recompute)  # type: ignore[arg-type]
    plain = copy.deepcopy(nn.Sequential(*parts))
    x = rows()
    same(outcome(net, x), outcome(plain, x))
    plain.load_state_dict(net.state_dict())
    buffers = list(net.buffers())
    failing.fails_in, failing.calls.count = where, 0
    with pytest.raises(KeyError, match="on purpose"):
        net(x).sum().backward()
    failing.fails_in = None
    assert all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    net.load_state_dict(plain.state_dict())
    same(outcome(net, x), outcome(plain, x))


def test_threads() -> None:
    """Each with a model of its own, without random numbers: these are the process's."""
    parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)]
    x = rows()
    plain = nn.Sequential(*copy.deepcopy(parts))

    def steps(module: nn.Module) -> list[Any]:
        leaf = x.clone().requires_grad_()
        found = []
        for _ in range(5):
            y = module(leaf)
            found += [y, *torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])]
        return [*found, *module.buffers()]

    expected = steps(plain)
    results: dict[int, list[Any]] = {}
    nets = [fl.SublinearSequential(*copy.deepcopy(parts), segments=2, recompute=m) for m in ("all", "cheap") * 2]  # type: ignore[arg-type]
    threads = [
        threading.Thread(target=lambda k=k, net=net: results.__setitem__(k, steps(net))) for k, net in enumerate(nets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(nets)
    for found in results.values():
        same(found, expected)


# --- several processes ------------------------------------------------------------------------------------------------


def _each(net: Any) -> nn.Module:
    for child in net:
        fully_shard(child)
    return net  # type: ignore[no-any-return]


ENGINES: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DDP,
    "ddp, static graph": lambda net: DDP(net, static_graph=True),
    "fsdp, each child": _each,
    "fsdp, the whole": fully_shard,
    "fsdp, both": lambda net: fully_shard(_each(net)),
}


def _children() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(6)]


def _batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(3))


def _trained(net: nn.Module, parts: Sequence[Tensor]) -> list[Tensor]:
    """Parameters after some steps with the mean of the parts' losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([net(part).square().mean() for part in parts]).mean().backward()
        optimizer.step()
    values = [parameter.detach() for parameter in net.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def _in_processes(rank: int, count: int) -> dict[tuple[str, str], list[Tensor]]:
    part = _batch().chunk(count)[rank]
    return {
        (name, mode): _trained(
            wrap(fl.SublinearSequential(*_children(), segments=3, recompute=mode)),  # type: ignore[arg-type]
            [part],
        )
        for name, wrap in ENGINES.items()
        for mode in ("all", "cheap")
    }


def test_several_processes(tmp_path: Path) -> None:
    expected = _trained(nn.Sequential(*_children()), _batch().chunk(2))
    for of_rank in processes.results(_in_processes, 2, tmp_path):
        assert len(of_rank) == 2 * len(ENGINES)
        for found in of_rank.values():
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("recompute", ["all", "cheap", "nothing"])
def test_fused_layers_are_planned_as_they_run(recompute: Any) -> None:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(fl.FusedDenseAct(32, 64, "gelu"), fl.FusedDenseAct(64, 32, "silu"), nn.LayerNorm(32))

    x = torch.randn(64, 32)
    net = fl.SublinearSequential(*(block() for _ in range(6)), recompute=recompute)
    net(x)
    kept = saved_bytes(net, x, exclude=[net, x])
    if recompute == "nothing":
        net.recompute, net.memory_budget_bytes = None, kept // 2
        net(x)
        kept = saved_bytes(net, x, exclude=[net, x])
        assert net.plan is not None and kept <= net.memory_budget_bytes
    assert net.plan is not None
    assert kept == pytest.approx(net.plan.saved_bytes, rel=0.02)


def test_a_module_that_a_function_can_reach_may_be_trained_meanwhile() -> None:
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def run(self, x: Tensor) -> Tensor:
            return self.one(x).tanh()

    pair, x = Pair(), torch.randn(3, 4)
    for function in (pair.run, lambda x: pair.one(x).tanh()):
        y = fl.sublinear(function, x)
        with torch.no_grad():
            pair.other.weight.add_(1.0)
        found = torch.autograd.grad(y.sum(), pair.one.weight)
        assert torch.equal(*found, *torch.autograd.grad(pair.run(x).sum(), pair.one.weight))
    y = fl.sublinear(pair.one, x)
    with torch.no_grad():
        pair.one.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="Linear: the parameter weight was modified by an in-place operation"):
        y.sum().backward()
