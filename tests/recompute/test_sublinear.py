"""Recomputed segments against ``nn.Sequential``, to the bit: a drop-in for it, and for any function."""

from __future__ import annotations

import copy
import functools
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from copies import COPIES
from recomputing import Counting, block, blocks, every_mode, images, outcome, rows, same, twins
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import fusedlayers as fl
from fusedlayers.memory import saved_bytes


@pytest.mark.parametrize("recompute", ["all", "cheap"])
def test_a_function_of_several_inputs(recompute: Any) -> None:
    """Some by names that torch's checkpoint has as well, some in containers."""
    first, second = block(), block()
    initial = copy.deepcopy([first, second])

    def function(a: Tensor, factor: float, b: Tensor, *, debug: list[str], also: dict[str, Any]) -> dict[str, Any]:
        return {debug[0]: first(a) * factor, debug[1]: (second(b), also["c"].sin())}

    def run(through: Any) -> list[Any]:
        first.load_state_dict(initial[0].state_dict())
        second.load_state_dict(initial[1].state_dict())
        net = lambda a, b, c: through(function, a, 2.0, b, debug=["u", "v"], also={"c": c, "d": None})
        return outcome(net, *inputs) + [buffer.clone() for m in (first, second) for buffer in m.buffers()]

    inputs = rows(), rows(), rows()
    expected = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    same(run(functools.partial(fl.sublinear, recompute=recompute)), expected)


def test_a_list_that_a_function_writes_to_is_the_callers() -> None:
    found: list[Tensor] = []
    y = fl.sublinear(lambda x, log: [log.append(x.detach()), x.sin()][1], rows().requires_grad_(), found)
    y.sum().backward()
    assert len(found) == 1


def test_what_a_forward_pass_without_a_backward_pass_leaves() -> None:
    plain, net = twins(blocks())
    for module in (plain, net):
        torch.manual_seed(1)
        module(rows() * 0 + 1)
    same(list(net.buffers()), list(plain.buffers()))
    for call in (plain, net):
        call(rows()).sum().backward()  # an input without requires_grad does not detach the output
        assert all(parameter.grad is not None for parameter in call.parameters())


def test_forward_passes_before_one_backward_pass() -> None:
    """A larger input makes the container measure its children anew, while graphs of batch norms wait."""
    plain, net = twins(blocks())
    inputs = [torch.randn(size, 8) for size in (16, 8, 64)]
    for module in (plain, net):
        torch.manual_seed(1)
        torch.stack([module(x).square().sum() for x in inputs]).sum().backward()
    same([p.grad for p in net.parameters()], [p.grad for p in plain.parameters()])
    same(list(net.buffers()), list(plain.buffers()))


def test_recomputation_is_switched_off_and_on() -> None:
    plain, net = twins(blocks())
    x = rows()
    for recompute in ("all", "nothing", "cheap", "all", "nothing"):
        net.recompute = recompute  # type: ignore[assignment]
        assert (saved_bytes(net, x) == saved_bytes(plain, x)) == (recompute == "nothing")
    assert fl.SublinearSequential()(x) is x


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x.tanh(), {"b": x.sin(), "n": 3}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, parts: tuple[Tensor, dict[str, Any]]) -> Tensor:
        return self.linear(parts[0]) * parts[1]["b"] * parts[1]["n"]  # type: ignore[no-any-return]


def test_inputs_may_be_tuples() -> None:
    parts = [Join(), Split(), Join(), nn.Tanh(), Split(), Join(), Split()]
    plain, net = nn.Sequential(*parts), fl.SublinearSequential(*parts)
    a, b = rows(), rows()
    found = [outcome(lambda a, b, module=module: module((a, {"b": b, "n": 2})), a, b) for module in (net, plain)]
    same(*found)


@pytest.mark.parametrize("recompute", ["all", "cheap"])
def test_autocast_is_replayed(recompute: str) -> None:
    plain, net = twins([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], recompute=recompute)
    x, dtypes = rows(), []
    for linear in (module for module in net.modules() if isinstance(module, nn.Linear)):
        linear.register_forward_hook(lambda module, inputs, y: dtypes.append(y.dtype))

    def under(module: nn.Module) -> list[Any]:
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(leaf)
        return [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *module.parameters()])]

    same(under(net), under(plain))
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) > 8


def test_evaluation_runs_plainly() -> None:
    calls: list[int] = []
    net = fl.SublinearSequential(*blocks()).eval()
    net[1].register_forward_hook(lambda *_: calls.append(1))
    net(rows().requires_grad_()).sum().backward()
    with torch.no_grad():
        net.train()(rows())
    with torch.inference_mode():
        net(rows())
    assert calls == [1, 1, 1]


# --- a drop-in for nn.Sequential --------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda net: net[1:3],
    "insert before the last": lambda net: net.insert(-1, nn.Tanh()),
    "append": lambda net: net.append(nn.Tanh()),
    "delete": lambda net: [net.__delitem__(1), net][1],
    "+=": lambda net: net.__iadd__(nn.Sequential(nn.Tanh())),
    "*=": lambda net: net.__imul__(2),
    **COPIES,
    "to": lambda net: net.double().float(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_is_changed_as_a_sequential(operation: str) -> None:
    plain, net = twins([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)], segments=2)
    x = rows()
    same(outcome(net, x), outcome(plain, x))
    made, expected = OPERATIONS[operation](net), OPERATIONS[operation](plain)
    assert type(made) is fl.SublinearSequential and made.segments == 2
    assert list(made.state_dict()) == list(expected.state_dict()) and len(made) == len(expected)
    if len(made):
        same(outcome(made, x), outcome(expected, x))
    assert made(x) is x if not len(made) else made.plan.segments[-1].stop == len(made)


def test_it_is_built_from_an_ordered_dict() -> None:
    parts = [("a", nn.Linear(8, 8)), ("b", nn.Tanh()), ("1", nn.Linear(8, 8))]
    plain, net = nn.Sequential(OrderedDict(parts)), fl.SublinearSequential(OrderedDict(parts), segments=2)
    same(outcome(net, rows() * 0 + 1), outcome(plain, torch.ones(16, 8)))
    assert net.a is parts[0][1] and list(net.state_dict()) == list(plain.state_dict())


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
    ({"segments": [2, 0]}, "segments must be a positive number, or a list of such, got [2, 0]"),
    ({"segments": True}, "segments must be a positive number, or a list of such, got True"),
    ({"segments": 1.5}, "segments must be a positive number, or a list of such, got 1.5"),
    ({"segments": "3"}, "segments must be a positive number, or a list of such, got '3'"),
    ({"segments": []}, "segments must be a positive number, or a list of such, got []"),
    (
        {"memory_budget_bytes": -1},
        'memory_budget_bytes must be a number of bytes, 0 or more, or a size such as "8GiB", got -1',
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


NETS: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())],
    "instance norm": lambda: [
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
        for _ in range(4)
    ],
    "dropout": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.Dropout(0.5))],
    "spectral norm": lambda: [
        m for _ in range(4) for m in (parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    ],
    "old spectral norm": lambda: [m for _ in range(4) for m in (spectral_norm(nn.Linear(8, 8)), nn.Tanh())],
    "reads its statistics": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), ReadsWhatItWrites(8))],
    "counts": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), Counting())],
    "tied buffers": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), Tied())],
    "one module often": lambda: [block()] * 5,
    "in place": lambda: [m for _ in range(4) for m in (nn.Linear(8, 8), nn.ReLU(inplace=True))],
    "frozen": lambda: [m.requires_grad_(k > 2) for k, m in enumerate(blocks())],
    "in evaluation": lambda: [m.train(k != 2) for k, m in enumerate(blocks())],
    "attention": lambda: [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3)],
}


@pytest.mark.parametrize(
    ("name", "recompute"),
    [(name, recompute) for name in NETS for recompute in ("all", "cheap")
     if (name, recompute) != ("in place", "cheap")],  # which is refused
)  # fmt: skip
def test_all_is_as_in_a_sequential(name: str, recompute: str) -> None:
    plain, net = twins(NETS[name](), segments=3, recompute=recompute)
    for seed in range(2):
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


def test_cheap_refuses_what_writes_over_products() -> None:
    """A budget is met without it."""
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(6)]
    for flat in (parts, [child for part in parts for child in part]):
        plain, net = twins(flat, recompute="cheap")
        with pytest.raises(
            ValueError, match=r"SublinearSequential: recompute='cheap' saves .* pass inplace=False there"
        ):
            net(images())
        net.recompute, net.memory_budget_bytes = None, 600_000
        same(outcome(net, images()), outcome(plain, images()))
        assert net.plan is not None and {segment.recompute for segment in net.plan.segments} == {"all", "nothing"}
    y = fl.sublinear(parts[0], images(), recompute="cheap")
    with pytest.raises(RuntimeError, match="has been mutated"):
        y.sum().backward()


# --- the functional form ----------------------------------------------------------------------------------------------

_norm = block()


def _by_global(x: Tensor) -> Tensor:
    return _norm(x)  # type: ignore[no-any-return]


class _Holder:
    def __init__(self, net: nn.Module) -> None:
        self.nets = {"a": [net]}

    def method(self, x: Tensor) -> Tensor:
        return self.nets["a"][0](x)  # type: ignore[no-any-return]

    __call__ = method


FUNCTIONS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "module": lambda net: net,
    "lambda": lambda net: lambda x: net(x),
    "method of a module": lambda net: net.forward,
    "callable object": _Holder,
    "partial": lambda net: functools.partial(lambda net, x: net(x), net),
    "global": lambda net: _by_global,
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_modules_in_a_function_are_found(kind: str) -> None:
    initial = copy.deepcopy(_norm)
    function = FUNCTIONS[kind](_norm)
    x = rows()
    sources: list[list[Any]] = []
    for through in (lambda x: fl.sublinear(function, x), lambda x: function(x)):
        _norm.load_state_dict(initial.state_dict())
        sources.append(outcome(through, x) + [buffer.clone() for buffer in _norm.buffers()])
    same(*sources)
    assert _norm[1].num_batches_tracked == initial[1].num_batches_tracked + 1


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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_whose_parameters_were_exchanged(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(8, 8), torch.randn(5, 3, 8)
    old = dict(layer.named_parameters())
    expected = torch.autograd.grad(layer(x)[0].sum(), [*old.values()])
    y = fl.sublinear(layer, x)[0]
    for name, parameter in old.items():
        setattr(layer, name, nn.Parameter(torch.full_like(parameter, 0.1)))
    for found, wanted in zip(torch.autograd.grad(y.sum(), [*old.values()]), expected, strict=True):
        torch.testing.assert_close(found, wanted)
