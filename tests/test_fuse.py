"""``fuse`` and ``unfuse``: what is found and what is left, that modules stay what they were, and that whoever uses them
in another way than ``fuse`` has seen gets what the model would have computed."""

import collections
import copy
import gc
import io
import logging
import pickle
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import custom, resolve
from fusedlayers.fusion.known import known_of
from fusedlayers.fusion.report import FuseReport
from fusedlayers.memory import saved_bytes
from fusedlayers.utils.bounded_cache import BoundedCache

# Machines that measure on GPUs need not have it.
ACT2FN = pytest.importorskip("transformers.activations").ACT2FN
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

ROWS, IN, HIDDEN = 64, 16, 48
BUFFER = ROWS * HIDDEN * 4

compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch")


class Net(nn.Module):
    """A layer, an activation, and a norm, which keeps its input, in front of another layer."""

    def __init__(self, act: nn.Module | None = None, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = first or nn.Linear(IN, HIDDEN)
        self.act = act or nn.GELU()
        self.norm = nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.act(self.first(x))))


class Images(nn.Module):
    """A convolution, a batch norm and an activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.act1 = nn.SiLU()
        self.conv2 = nn.Conv2d(8, 12, 3)
        self.norm = nn.BatchNorm2d(12)
        self.act2 = act
        self.conv3 = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.act2(self.norm(self.conv2(self.act1(self.conv1(x))))))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, IN)


def gradients(model: nn.Module, *args: Tensor) -> list[Tensor]:
    """The output, and the gradients of the arguments and of the parameters."""
    args = tuple(arg.detach().clone().requires_grad_() for arg in args)
    model.zero_grad()
    y = model(*args)
    y.square().sum().backward()
    found = [y.detach(), *(arg.grad for arg in args), *(p.grad for p in model.parameters() if p.requires_grad)]
    assert all(g is not None for g in found)
    return [g.clone() for g in found if g is not None]


def check(fused: nn.Module, eager: nn.Module, *args: Tensor, activations: int = 1) -> None:
    """Against float64: no more than twice eager's error, and the floor of what outputs tell of a derivative, once for
    each of the activations in a row."""
    exact = copy.deepcopy(eager).double()
    ours, theirs, wanted = (
        gradients(fused, *args),
        gradients(eager, *args),
        gradients(exact, *(a.double() for a in args)),
    )
    for one, other, reference in zip(ours, theirs, wanted, strict=True):
        error, torchs = ((g.double() - reference).norm() for g in (one, other))
        assert error <= 2 * torchs + 2e-6 * activations * reference.norm()


def places(report: FuseReport) -> list[tuple[str, tuple[str, ...]]]:
    return [(place.pattern, place.modules) for place in report.replaced]


def reasons(report: FuseReport) -> dict[str, str]:
    return {place.module: place.reason for place in report.skipped}


# --- layers, and the activations after them ---------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "silu-in-place": lambda: nn.SiLU(inplace=True),
    "leaky-relu": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "prelu": nn.PReLU,
    "transformers-gelu": lambda: ACT2FN["gelu"],
    "transformers-gelu-new": lambda: ACT2FN["gelu_new"],
    "transformers-relu2": lambda: ACT2FN["relu2"],
}


@pytest.mark.parametrize("make", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
@pytest.mark.parametrize("with_inputs", [True, False])
def test_dense(x: Tensor, make: Callable[[], nn.Module], with_inputs: bool) -> None:
    model = Net(make())
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x if with_inputs else None)
    assert places(report) == [("dense", ("first", "act"))] and not report.skipped
    check(model, eager, x)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_saved_bytes(x: Tensor, kind: Any) -> None:
    model = Net(first=Conv1D(HIDDEN, IN) if kind is Conv1D else nn.Linear(IN, HIDDEN))
    eager = copy.deepcopy(model)
    before = saved_bytes(eager, x, exclude=x)
    report = fl.fuse(model, x)
    assert saved_bytes(model, x, exclude=x) == before - BUFFER
    assert report.saved_bytes == (before, before - BUFFER)
    check(model, eager, x)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.1, inplace=True), nn.Hardswish()])
@pytest.mark.parametrize("training", [True, False])
def test_convolutions_and_batch_norms(act: nn.Module, training: bool) -> None:
    model = Images(act).train(training)
    images = torch.randn(4, 3, 18, 18)
    eager = copy.deepcopy(model)
    report = fl.fuse(model, images)
    assert places(report) == [("conv", ("conv1", "act1")), ("norm", ("norm", "act2"))]
    assert report.saved_bytes is not None and report.saved_bytes[1] < report.saved_bytes[0]
    for name, buffer in model.named_buffers():  # as if it had not been run
        assert torch.equal(buffer, eager.get_buffer(name))
    check(model, eager, images)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name))
    assert int(model.norm.num_batches_tracked) == int(training)


def test_modules_stay_what_they_were(x: Tensor) -> None:
    model = Net()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state, printed = model.state_dict(), repr(model)
    optimizer = torch.optim.Adam(model.parameters())
    fl.fuse(model, x)
    assert dict(model.named_modules()) == modules
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert isinstance(model, Net) and isinstance(model.first, nn.Linear) and isinstance(model.act, nn.GELU)
    assert repr(model) == printed and type(model).__name__ == "Net"
    before = [p.clone() for p in parameters.values()]
    model(x).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_signatures_stay(x: Tensor) -> None:
    import inspect

    class Named(Net):
        def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(input_ids) * scale

    model = Named()
    before = inspect.signature(model.forward)
    fl.fuse(model, x)
    assert inspect.signature(model.forward) == before
    model(input_ids=x, scale=2.0)


def test_unfuse(x: Tensor) -> None:
    model = Net()
    classes, before = [type(module) for module in model.modules()], model(x)
    contents = [set(vars(module)) for module in model.modules()]
    fl.fuse(model, x)
    assert [type(module) for module in model.modules()] != classes
    fl.unfuse(model)
    assert [type(module) for module in model.modules()] == classes
    assert [set(vars(module)) for module in model.modules()] == contents
    assert torch.equal(model(x), before)
    fl.unfuse(model)  # nothing is left to do


def test_fusing_twice(x: Tensor) -> None:
    model = nn.Sequential(Net(), nn.Tanh())
    fl.fuse(model[0], x)
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("0.last", "1"))]
    assert reasons(report) == {"0.first": "it is fused already"}
    for again in (fl.fuse(model, x), fl.fuse(model)):
        assert not again.replaced and reasons(again).keys() == {"0.first", "0.last"}
    check(model, eager, x)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(x: Tensor, how: str) -> None:
    model = Net(ACT2FN["gelu"])
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert saved_bytes(copied, x, exclude=x) == saved_bytes(model, x, exclude=x) < saved_bytes(eager, x, exclude=x)
    check(copied, eager, x)
    fl.unfuse(copied)
    assert {type(module) for module in copied.modules()} == {type(module) for module in eager.modules()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(x: Tensor, dtype: torch.dtype) -> None:
    model = Net()
    fl.fuse(model, x)
    model.to(dtype)
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(gradients(model, x.to(dtype)), gradients(eager, x.to(dtype)), strict=True):
        assert (ours - theirs).norm() <= 8 * eps * theirs.norm()
    before, after = (saved_bytes(m, x.to(dtype), exclude=x) for m in (eager, model))
    assert after <= before - (BUFFER * dtype.itemsize // 4 if dtype is not torch.float64 else 0)


def test_frozen_parts(x: Tensor) -> None:
    model = Net()
    for parameter in (model.first.weight, model.first.bias, model.last.weight):
        parameter.requires_grad_(False)
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    check(model, eager, x)
    assert saved_bytes(model, x, exclude=x) <= saved_bytes(eager, x, exclude=x)


def test_tied_weights(x: Tensor) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(IN, HIDDEN)
            self.again.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.again(x)[:, :IN]

    model = Tied()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    assert model.again.weight is model.first.weight
    check(model, eager, x)


def test_a_layer_that_is_called_twice(x: Tensor) -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model = Twice()
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("dense", ("first", "act"))]
    check(model, eager, x, activations=2)


def test_an_activation_of_several_layers(x: Tensor) -> None:
    class Shared(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.last(self.norm(self.act(self.first(x)))) + x)

    model = Shared(nn.SiLU())
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("dense", ("first", "act"))]
    check(model, eager, x)  # after the sum it computes, and keeps its output


def test_a_layer_with_two_parents(x: Tensor) -> None:
    layer = nn.Linear(IN, IN)
    one, two = nn.Sequential(layer, nn.GELU(), nn.LayerNorm(IN)), nn.Sequential(layer, nn.LayerNorm(IN))
    model = nn.Sequential(one, two)
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("0.0", "0.1"))] and not report.skipped
    check(model, eager, x)


def test_parents_that_are_nested(x: Tensor) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.LayerNorm(IN), nn.Linear(IN, HIDDEN)), nn.Sequential(nn.Identity(), nn.GELU())
    )
    eager = copy.deepcopy(model)
    for inputs in (None, x):
        assert places(fl.fuse(model, inputs)) == [("dense", ("0.1", "1.1"))]
        check(model, eager, x)
        assert saved_bytes(model, x, exclude=x) == saved_bytes(eager, x, exclude=x) - 0
        fl.unfuse(model)


# --- functions that a module's code calls -----------------------------------------------------------------------------


class Functional(Net):
    """Whose code calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__(nn.Identity())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        assert z.shape == (*x.shape[:-1], HIDDEN) and z.dim() == x.dim() and z.dtype is x.dtype
        return self.last(self.norm(self.function(z)))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu-in-place": lambda z: F.relu(z, inplace=True),
    "method": lambda z: z.relu(),
    "method-in-place": lambda z: z.relu_(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "leaky-relu": lambda z: F.leaky_relu(z, 0.3),
    "softplus": F.softplus,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_functions(x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    model = Functional(function)
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("first",))] and not report.skipped
    check(model, eager, x)
    assert report.saved_bytes is not None and report.saved_bytes[1] <= report.saved_bytes[0]
    copied = copy.deepcopy(model)
    check(copied, eager, x)
    assert saved_bytes(copied, x, exclude=x) == saved_bytes(model, x, exclude=x)


@pytest.mark.parametrize("function", [F.gelu, F.softplus])
def test_many_calls_of_a_function_are_looked_into_once(
    x: Tensor, function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom, "_variants", BoundedCache())
    monkeypatch.setattr(custom, "_VARIANTS", 2)
    monkeypatch.setattr(custom, "_ANALYSED", 1)
    model = nn.Sequential(*(Functional(function) for _ in range(4)))
    report = fl.fuse(model, x)
    assert len(report.replaced) == 4 and len({place.saves for place in report.replaced}) == 1
    copied = pickle.loads(pickle.dumps(model[0])) if function is F.gelu else copy.deepcopy(model[0])
    assert copied.fused_pairs[0].activation is model[0].fused_pairs[0].activation


class ResidualBlock(nn.Module):
    """As in the networks for CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        out = F.silu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return F.silu(out)


@pytest.mark.parametrize("with_inputs", [True, False])
def test_functions_after_batch_norms(with_inputs: bool) -> None:
    images = torch.randn(4, 8, 16, 16)
    model = nn.Sequential(ResidualBlock(), ResidualBlock())
    eager = copy.deepcopy(model)
    report = fl.fuse(model, images if with_inputs else None)
    assert places(report) == [("norm", ("0.bn1",)), ("norm", ("1.bn1",))]
    check(model, eager, images, activations=4)
    assert saved_bytes(model, images, exclude=images) < saved_bytes(eager, images, exclude=images)


def test_transformer_layers_of_torchs() -> None:
    layer = nn.TransformerEncoderLayer(IN, 2, HIDDEN, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    eager, tokens = copy.deepcopy(model), torch.randn(4, 8, IN)
    report = fl.fuse(model, tokens)
    assert places(report) == [("dense", (f"layers.{i}.linear1",)) for i in range(2)]
    check(model, eager, tokens, activations=2)
    model.eval(), eager.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), eager(tokens))


def test_other_functions(x: Tensor) -> None:
    model = Functional()
    fl.fuse(model, x)
    functions: list[Callable[[Tensor], Tensor]] = [
        *(F.silu, lambda z: F.gelu(z, approximate="tanh"), lambda z: F.gelu(z + 1), lambda z: z.t().exp().t(), F.gelu)
    ]
    for model.function in functions:
        eager = copy.deepcopy(model)
        fl.unfuse(eager)
        check(model, eager, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_functions_under_checkpoints(x: Tensor, use_reentrant: bool) -> None:
    class Checkpointed(Functional):
        def forward(self, x: Tensor) -> Tensor:
            z = checkpoint(self.first, x, use_reentrant=use_reentrant)
            y = checkpoint(super().forward, x, use_reentrant=use_reentrant)
            return self.last(self.norm(F.gelu(z))) + y

    model = Checkpointed()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    check(model, eager, x)


def test_activations_alone_under_a_checkpoint(x: Tensor) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return self.last(self.norm(checkpoint(self.act, z, use_reentrant=True) if self.training else self.act(z)))

    model = Checkpointed().eval()
    fl.fuse(model, x)
    with pytest.raises(RuntimeError, match="went somewhere else"):
        model.train()(x)  # it would be computed again, of its own result


@compiles
def test_functions_in_other_contexts(x: Tensor) -> None:
    class Plain(Functional):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(F.gelu(self.first(x))))

    model = Plain()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), eager(x))
    torch.testing.assert_close(torch.vmap(model)(x), eager(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), eager(x))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), eager(x), rtol=0.05, atol=0.05)
    model.first.register_forward_hook(lambda module, args, output: output + 1)
    eager.first.register_forward_hook(lambda module, args, output: output + 1)
    check(model, eager, x)


# --- used in another way ----------------------------------------------------------------------------------------------


def test_a_layer_alone_is_a_plain_layer(x: Tensor) -> None:
    model = Net()
    fl.fuse(model, x)
    assert torch.equal(model.first(x), F.linear(x, model.first.weight, model.first.bias))
    torch.testing.assert_close(model.act(x), F.gelu(x))


def test_hooks_see_what_they_saw(x: Tensor) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    seen: list[Tensor] = []
    handle = model.first.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    check(model, eager, x)
    torch.testing.assert_close(seen[0], eager.first(x))
    handle.remove()
    model.act.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    check(model, eager, x)
    torch.testing.assert_close(seen[1], eager.first(x))


def test_layers_with_hooks_are_left(x: Tensor) -> None:
    model = Net()
    model.first.register_forward_hook(lambda module, args, output: None)
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert reasons(report) == {"first": "it has hooks"}
    assert places(report) == [("activation", ("act",))]
    check(model, eager, x)


class Adapter(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(IN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("before", [True, False])
def test_adapters(x: Tensor, before: bool) -> None:
    model = Net()
    if before:
        model.first = Adapter(model.first)
        assert places(fl.fuse(model, x)) == [("activation", ("act",))]
    else:
        fl.fuse(model, x)
        model.first = Adapter(model.first)
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model, eager, x)
    assert saved_bytes(model, x, exclude=x) == saved_bytes(eager, x, exclude=x) - BUFFER


def test_an_activation_that_is_exchanged(x: Tensor) -> None:
    model = Net()
    fl.fuse(model, x)
    model.act = nn.Tanh()
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model, eager, x)


def test_attributes_of_an_activation_that_change(x: Tensor) -> None:
    model = Net(ACT2FN["gelu"])
    fl.fuse(model, x)
    model.act.act = torch.sin
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model, eager, x)
    model = Net(nn.LeakyReLU(0.1))
    fl.fuse(model, x)
    model.act.negative_slope = 0.5
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model, eager, x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def _put_beside(act: nn.Module, z: Tensor) -> Tensor:
    return act(torch.stack([z, z])).sum(0)


def _written_first(act: nn.Module, z: Tensor) -> Tensor:
    z *= 2
    return act(z)


#: Of the activation and the layer's result.
PATHS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "added": lambda act, z: act(z) + z,
    "added before": lambda act, z: z + act(z),
    "scaled": lambda act, z: act(z * 2),
    "in a list": _put_beside,
    "called twice": lambda act, z: act(z) + act(z),
    "not called": lambda act, z: z,
    "indexed": lambda act, z: act(z[..., :1]) + z,
    "written first": _written_first,
    "data": lambda act, z: act(z) + z.data,
    "item": lambda act, z: act(z) * (2.0 if z[0, 0] > 0 else 1.0),
    "keyword": lambda act, z: F.layer_norm(input=z, normalized_shape=(HIDDEN,)),
    "operation": lambda act, z: torch.ops.aten.neg(z),
    "another module": lambda act, z: nn.Tanh()(z),
}


class Paths(Net):
    """Whose code does something else after it has been fused."""

    path: Any = None

    def __init__(self, act: Any, first: nn.Module | None = None) -> None:
        super().__init__(act if isinstance(act, nn.Module) else nn.Identity(), first)
        self.function = None if isinstance(act, nn.Module) else act

    def forward(self, x: Tensor) -> Tensor:
        act, z = self.function or self.act, self.first(x)
        return self.last(self.norm(act(z) if self.path is None else self.path(act, z)))


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("make", [nn.GELU, lambda: F.gelu], ids=["module", "function"])
def test_other_paths(x: Tensor, path: Callable[..., Tensor], make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is not the activation does not get what is activated already, but what the layer computes."""
    model = Paths(make())
    eager = copy.deepcopy(model)
    assert [place.pattern for place in fl.fuse(model, x).replaced] == ["dense"]
    eager.path = model.path = path
    for _ in range(2):
        check(model, eager, x, activations=2)
    (said,) = [record.message for record in caplog.records if record.name == "fusedlayers"]
    assert "a Linear computed the" in said and "it is computed twice: this call takes another path" in said
    model.path = eager.path = None
    check(model, eager, x)
    assert saved_bytes(model, x, exclude=x) < saved_bytes(eager, x, exclude=x)


@pytest.mark.parametrize("training", [True, False])
def test_other_paths_after_batch_norms(training: bool) -> None:
    """Whose statistics count every input once."""
    x = torch.randn(ROWS, IN)
    model = Paths(nn.SiLU(), nn.BatchNorm1d(IN))
    model.norm, model.last = nn.LayerNorm(IN), nn.Linear(IN, IN)  # type: ignore[assignment]
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("norm", ("first", "act"))]
    for one in (model, eager):
        one.train(training).path = lambda act, z: act(z) + z
    check(model, eager, x, activations=2)
    for found, wanted in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("use_autocast", [True, False])
def test_other_paths_under_autocast(x: Tensor, use_autocast: bool) -> None:
    model = Paths(nn.GELU())
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.path = eager.path = lambda act, z: act(z) + z
    with torch.autocast("cpu", torch.bfloat16, enabled=use_autocast):
        torch.testing.assert_close(model(x), eager(x), atol=0.05 if use_autocast else 1e-5, rtol=0)
        assert model(x).dtype is eager(x).dtype


def _returned(act: nn.Module, z: Tensor) -> Any:
    act(z.clone())
    return z


def _after_in_place(act: nn.Module, z: Tensor) -> Tensor:
    act(z)
    return z * 2


def _without_gradients(act: nn.Module, z: Tensor) -> Tensor:
    with torch.no_grad():
        return act(z)


ERRORS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "autograd Function": lambda act, z: Double.apply(z),  # which takes it for a tensor
    "in place": _after_in_place,
    "without gradients": _without_gradients,
    "other autocast": lambda act, z: torch.autocast("cpu", torch.bfloat16)(lambda: z * 2)(),
}


@pytest.mark.parametrize("path", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("make", [lambda: nn.SiLU(inplace=True), lambda: F.silu], ids=["module", "function"])
def test_paths_that_are_an_error(x: Tensor, path: Callable[..., Tensor], make: Any) -> None:
    """Where the layer cannot be computed once more as it was."""
    model = Paths(nn.SiLU(inplace=True) if path is _after_in_place else make())
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.path = path
    with pytest.raises(RuntimeError, match=r"a Linear computed the (SiLU|silu) after it.*takes another path"):
        model(x)
    model.path = None
    check(model, eager, x)


def test_results_that_are_returned_are_an_error(x: Tensor) -> None:
    class Returns(Net):
        returns = False

        def forward(self, x: Tensor) -> Any:
            z = self.first(x)
            return z if self.returns else self.last(self.norm(self.act(z)))

    model = Returns()
    fl.fuse(model, x)
    model.returns = True
    with pytest.raises(RuntimeError, match=r"a Linear computed the GELU after it.*went somewhere else"):
        model(x)
    fl.unfuse(model)
    assert model(x) is not None


def test_results_that_are_returned_too(x: Tensor) -> None:
    class Returns(Net):
        def forward(self, x: Tensor) -> Any:
            z = self.first(x)
            y = self.last(self.norm(self.act(z)))
            return (y, z) if self.training else y

    model = Returns().eval()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    for one in (model, eager):
        one.train()
        y, z = one(x)
        (y.sum() + (2 * z).sum()).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_what_is_known_before_the_layer_computes(x: Tensor, is_module: bool) -> None:
    class Asks(Net):
        wastes = False

        def forward(self, x: Tensor) -> Tensor:
            z, again = self.first(x), self.first(x + 1)
            facts = z.shape, z.dtype, z.stride(), z.requires_grad, len(z), z.is_contiguous()
            act = self.act if is_module else F.gelu
            y = act(again) + act(z)  # two at once, in another order
            assert facts == (y.shape, y.dtype, y.stride(), y.requires_grad, len(y), y.is_contiguous())
            assert z.size(0) == again.shape[0] == x.shape[0]  # afterwards too
            if self.wastes:
                self.first(x)
            return self.last(self.norm(y))

    model = Asks()
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("dense", ("first", "act") if is_module else ("first",))]
    for model.wastes in (False, True):
        check(model, eager, x, activations=2)


STATEMENTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "module": lambda act, z: (act(z), z)[1],
    "function": lambda act, z: (F.silu(z, inplace=True), z)[1],
    "method": lambda act, z: (z.relu_(), z)[1],
    "view": lambda act, z: (z.view(-1).relu_(), z)[1],
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
@pytest.mark.parametrize("with_inputs", [True, False])
def test_statements_in_place(x: Tensor, statement: Callable[..., Tensor], with_inputs: bool) -> None:
    """The code goes on with what it had, not with what the activation returns."""

    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(statement(self.act, self.first(x))))

    model = InPlace(nn.SiLU(inplace=True))
    eager = copy.deepcopy(model)
    assert not fl.fuse(model, x if with_inputs else None).replaced
    check(model, eager, x)


class Doubles(nn.Module):
    inplace = True

    def forward(self, y: Tensor) -> Tensor:
        return y.mul_(2)


def _added_to(y: Tensor) -> Tensor:
    y += 1
    return y


def _viewed(y: Tensor) -> Tensor:
    y.view(-1)[:3].mul_(2)
    return y


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "statement": _added_to,
    "method": lambda y: y.mul_(2),
    "view": _viewed,
    "module": Doubles(),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_outputs_that_are_written_over(
    x: Tensor, written: Callable[[Tensor], Tensor], with_inputs: bool, alone: bool
) -> None:
    """They would be kept."""

    class Writes(Net):
        def __init__(self) -> None:
            super().__init__(nn.SiLU())
            self.written = written

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return self.last(self.norm(self.written(self.act(z + 1 if alone else z))))

    model = Writes()
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x if with_inputs else None)
    if written is _viewed and not with_inputs:
        fl.unfuse(model)  # no pass, no views: autograd says it then
    else:
        assert not report.replaced
        check(model, eager, x)
    if not alone and written is not _viewed:
        assert reasons(report) == {"first": "the output of its activation, which would be kept, is written over"}


def test_hooks_for_all_modules_see_what_they_saw(x: Tensor) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    fl.fuse(block := MLP(nn.GELU()), x)
    seen: list[tuple[str, Tensor]] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append((type(module).__name__, output.detach().clone()))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        model(x)
        wanted, seen[:] = [*seen], []
        eager(x)
        assert [name for name, _ in seen] == [name for name, _ in wanted]
        for (_, one), (_, other) in zip(seen, wanted, strict=True):
            torch.testing.assert_close(one, other)
        seen.clear()
        block(x)
        assert [name for name, _ in seen] == ["Linear", "GELU", "Dropout", "Linear", "Dropout", "MLP"]
    finally:
        handle.remove()


def test_memory_reports_are_of_the_fused_model(x: Tensor) -> None:
    model = Net()
    fl.fuse(model, x)
    assert fl.memory_report(model, x).saved_bytes == saved_bytes(model, x, exclude=x)


@pytest.mark.parametrize("where", ["attribute", "list", "dict", "another module"])
@pytest.mark.parametrize("with_inputs", [True, False])
def test_models_that_store_what_passes(x: Tensor, where: str, with_inputs: bool) -> None:
    class Stores(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Any = {"list": [], "dict": {}}.get(where)

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            if where == "list":
                self.seen.append(z)
            elif where == "dict":
                self.seen["z"] = z
            else:
                (self if where == "attribute" else self.norm).seen = z
            return self.last(self.norm(self.act(z)))

    model = Stores()
    contents = copy.deepcopy(vars(model)), [*vars(model.norm)]
    report = fl.fuse(model, x if with_inputs else None)
    assert reasons(report) == {"first": "its output is read by the activation and by somebody who keeps it"}
    if not with_inputs:  # nothing has been run
        assert vars(model).keys() == contents[0].keys() and [*vars(model.norm)] == contents[1]
        assert model.seen == contents[0]["seen"]


def test_options_are_what_they_are_by_default(x: Tensor) -> None:
    class Options(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
            z = self.first(x)
            if mask is not None:
                z = z * mask
            return self.last(self.norm(self.act(2 * z if twice else z)))

    model = Options()
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model)) == [("dense", ("first", "act"))]
    check(model, eager, x)
    for options in ({"twice": True}, {"mask": torch.rand(HIDDEN)}):
        torch.testing.assert_close(model(x, **options), eager(x, **options))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("which", ["layer", "both", "model"])
def test_checkpoints(x: Tensor, use_reentrant: bool, which: str) -> None:
    def again(function: Callable[..., Any], *args: Tensor) -> Any:
        return checkpoint(function, *args, use_reentrant=use_reentrant)

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            if which == "layer":
                return self.last(self.norm(self.act(again(self.first, x))))
            if which == "both":
                return self.last(self.norm(again(lambda x: self.act(self.first(x)), x)))
            return again(super().forward, x)

    model = Checkpointed()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    check(model, eager, x)


@compiles
def test_compiled(x: Tensor) -> None:
    model = Net(ACT2FN["gelu"])
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), eager(x))
    check(model, eager, x)  # and not compiled again


@compiles
def test_compiled_modules_are_left(x: Tensor) -> None:
    inner = Net()
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(IN, HIDDEN), nn.SiLU(), nn.LayerNorm(HIDDEN))
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("1", "2"))]
    assert "compiled" in reasons(report)["0"] and type(inner.first) is nn.Linear
    inner.compile(backend="eager")
    assert "compiled" in reasons(fl.fuse(inner, x))[""]


def test_transforms(x: Tensor) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)

    def loss(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found, wanted = (torch.func.grad(loss)(dict(m.named_parameters()), m) for m in (model, eager))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name])
    torch.testing.assert_close(torch.vmap(model)(x), eager(x))
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), eager(x))


def test_threads_do_not_meet(x: Tensor) -> None:
    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    inputs = [torch.randn(ROWS, IN) for _ in range(8)]
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        for _ in range(20):
            found[number] = model(inputs[number]).detach()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in found.items():
        torch.testing.assert_close(result, eager(inputs[number]))


def test_an_exception_leaves_nothing_behind(x: Tensor) -> None:
    class Fails(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            if self.fails:
                raise KeyError("on purpose")
            return self.last(self.norm(self.act(z)))

    model = Fails()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.fails = True
    with pytest.raises(KeyError, match="on purpose"):
        model(x)
    model.fails = False
    check(model, eager, x)


def test_keywords(x: Tensor) -> None:
    class Options(nn.GELU):
        def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(input) * scale

    class Keywords(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.act(input=self.first(input=x))))

    for act in (nn.GELU(), Options()):
        model = Keywords(act)
        eager = copy.deepcopy(model)
        fl.fuse(model, x)
        check(model, eager, x)
        torch.testing.assert_close(
            model.act(x, scale=2.0) if isinstance(act, Options) else model.act(x) * 2, 2 * F.gelu(x)
        )


def test_registries_of_classes_stay(x: Tensor) -> None:
    registry: dict[str, type] = {}

    class Registered(Net):
        def __init_subclass__(cls) -> None:
            registry[cls.__name__] = cls

    class Mine(Registered):
        pass

    model = Mine()
    fl.fuse(model, x)
    assert registry == {"Mine": Mine} and type(model) is not Mine


# --- what is left as it is --------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_classes_that_are_not_torchs(x: Tensor) -> None:
    model = Net(first=Scaled(IN, HIDDEN))
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert reasons(report) == {"first": "it is a Scaled, which may compute something else"}
    assert places(report) == [("activation", ("act",))]
    check(model, eager, x)


def test_parametrized_layers(x: Tensor) -> None:
    model = Net(first=parametrizations.weight_norm(nn.Linear(IN, HIDDEN)))
    report = fl.fuse(model, x)
    assert "ParametrizedLinear" in reasons(report)["first"]
    model = Net()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    parametrizations.weight_norm(model.first)
    parametrizations.weight_norm(eager.first)
    check(model, eager, x)
    with pytest.raises(ValueError, match="unfuse: first: the class has been changed once more"):
        fl.unfuse(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_layers(x: Tensor) -> None:
    model = torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear})
    with torch.no_grad():
        before = model(x)
        report = fl.fuse(model, x)
        assert not [place for place in report.replaced if place.pattern == "dense"]
        torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("read", ["residual", "returned", "kept"])
def test_pre_activations_that_others_read(x: Tensor, read: str) -> None:
    class Reads(Net):
        def forward(self, x: Tensor) -> Any:
            z = self.first(x)
            y = self.act(z)
            if read == "residual":
                y = y + z
            if read == "kept":
                self.pre_activation = z.detach()
            y = self.last(self.norm(y))
            return (y, z) if read == "returned" else y

    model = Reads()
    report = fl.fuse(model, x)
    who = {"residual": "add as well", "returned": "somebody who keeps it", "kept": "detach as well"}[read]
    assert not report.replaced
    assert reasons(report) == {"first": f"its output is read by the activation and by {who}"}


def test_code_by_hand(x: Tensor) -> None:
    class ByHand(Net):
        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return self.last(self.norm(z * torch.sigmoid(z)))

    for inputs in (x, None):
        assert not fl.fuse(ByHand(), inputs).replaced


@pytest.mark.parametrize("training", [True, False])
def test_dropouts_in_between(x: Tensor, training: bool) -> None:
    class Drops(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.act(F.dropout(self.first(x), 0.5, self.training))))

    assert ("dense", ("first", "act")) not in places(fl.fuse(Drops().train(training), x))


def test_scales_are_no_activations(x: Tensor) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    report = fl.fuse(Net(Scale()), x)
    assert not report.replaced and not report.skipped


def test_no_words_in_the_log(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand_like(x)

    with caplog.at_level(logging.WARNING):
        assert not fl.fuse(Net(Random()), x).replaced
    assert not caplog.records


def test_a_model_that_fails_is_left(x: Tensor) -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fl.fuse(model, torch.randn(3, IN + 1))
    assert type(model.first) is nn.Linear and not model.first._forward_hooks


def test_what_does_not_run_when_fused_is_put_back(x: Tensor) -> None:
    class Careful(Net):
        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            if type(z) is not Tensor:
                raise TypeError("what is this?\nReally")
            return self.last(self.norm(self.act(z)))

    model = nn.Sequential(Net(), Careful())
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert reasons(report) == {"": "fused, it raised TypeError: what is this?"}
    assert places(report) == [("activation", ("0.act",)), ("activation", ("1.act",))]
    check(model, eager, x, activations=2)

    class Other(Net):
        """That hands out what the layer gives in another way only with gradients, which a record is made without."""

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return self.last(self.norm(self.act(2 * z if torch.is_grad_enabled() else z)))

    model = nn.Sequential(Net(), Other())
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("0.first", "0.act")), ("activation", ("1.act",))]
    assert reasons(report) == {"1.first": "what it computes reaches its activation in a way that torch does not show"}
    check(model, eager, x, activations=2)


def test_what_would_keep_more_is_left(x: Tensor) -> None:
    class Kept(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.act(torch.sigmoid(self.first(x)))  # which keeps its result
            return self.last(self.norm(y + 1))

    model = Kept()
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("first",))] and type(model.act) is nn.GELU
    assert reasons(report) == {"act": "its input is kept anyway"}


# --- MLPs -------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """In the words of many models."""

    def __init__(self, act: Any, kind: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.gate = nn.Linear(IN, 2 * HIDDEN if kind.startswith("packed") else HIDDEN, bias=False)
        self.up = nn.Linear(IN, HIDDEN) if kind.startswith("gated") else None
        self.act = act
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, IN)
        self.after = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("packed"):
            gate, up = self.gate(x).chunk(2, dim=-1)
            hidden = self.act(up) * gate if self.kind == "packed-up-first" else self.act(gate) * up
        elif self.kind.startswith("gated"):
            assert self.up is not None
            up = self.up(x)
            hidden = up * self.act(self.gate(x)) if self.kind == "gated-up-first" else self.act(self.gate(x)) * up
        else:
            hidden = self.act(self.gate(x))
        return self.after(self.down(self.drop(hidden)))


KINDS = {"plain": "mlp", "gated": "gated mlp", "gated-up-first": "gated mlp", "packed": "gated mlp"}


def by_hand(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "act", [nn.SiLU(), F.gelu, by_hand, ACT2FN["relu2"]], ids=["module", "function", "code", "relu2"]
)
@pytest.mark.parametrize("with_inputs", [True, False])
def test_blocks(x: Tensor, kind: str, act: Any, with_inputs: bool) -> None:
    model = nn.Sequential(MLP(act, kind), nn.LayerNorm(IN))
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x if with_inputs else None)
    assert places(report) == [(KINDS[kind], ("0",))] and not report.skipped
    check(model, eager, x)
    check(pickle.loads(pickle.dumps(model)) if act is not by_hand else copy.deepcopy(model), eager, x)
    assert saved_bytes(model, x, exclude=x) < saved_bytes(eager, x, exclude=x)
    fl.unfuse(model)
    assert type(model[0]) is MLP


def test_blocks_recomputed(x: Tensor) -> None:
    model = MLP(nn.SiLU(), "gated")
    eager = copy.deepcopy(model)
    fl.fuse(model, x, save="recompute")
    assert saved_bytes(model, x, exclude=x) == 0
    check(model, eager, x)


def test_a_gate_that_comes_second(x: Tensor) -> None:
    report = fl.fuse(MLP(nn.SiLU(), "packed-up-first"), x)
    assert reasons(report) == {"": "no MLP block: one layer makes both, and the gate's rows come second"}


@pytest.mark.parametrize("training", [True, False])
def test_dropouts_of_blocks(x: Tensor, training: bool) -> None:
    model = MLP(nn.GELU(), dropout=0.4).train(training)
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("mlp", ("",))]
    assert model.drop.p == model.after.p == 0.4 and model.training is training
    check(model.eval(), eager.eval(), x)
    model.train()
    torch.manual_seed(0)
    zeros = torch.stack([model(x) == 0 for _ in range(50)]).double().mean()
    assert abs(float(zeros) - 0.4) < 0.01  # of the output; the hidden layer's cannot be seen
    model.after.p = 0.0
    mean = torch.stack([model(x) for _ in range(300)]).mean(0)
    assert (mean - eager(x)).norm() < 0.15 * eager(x).norm()
    assert not torch.equal(model(x), model(x))


def test_functional_dropout_is_no_block(x: Tensor) -> None:
    class Functional(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.dropout(self.act(self.gate(x)), 0.5, self.training))

    for training in (True, False):
        assert places(fl.fuse(Functional(nn.GELU()).train(training), x)) == [("dense", ("gate", "act"))]


def test_a_block_in_another_mode(x: Tensor) -> None:
    class Moody(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.act(self.gate(x)))
            if self.training:
                y.mul_(2)  # in place: the same in the record
            return y

    model = Moody(nn.GELU()).eval()
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert "in training the block's results are not the module's" in reasons(report)[""]
    check(model.train(), eager.train(), x)


def test_inner_layers_that_must_be_called(x: Tensor) -> None:
    model = MLP(nn.GELU())
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    seen: list[Tensor] = []
    model.down.register_forward_hook(lambda module, args, output: seen.append(output))
    check(model, eager, x)
    assert seen
    model.down._forward_hooks.clear()
    model.gate, eager.gate = Scaled(IN, HIDDEN), Scaled(IN, HIDDEN)
    eager.gate.load_state_dict(model.gate.state_dict())
    check(model, eager, x)


def _exchange(model: Any) -> None:
    model.drop = nn.Tanh()


def _add(model: Any) -> None:
    model.gate = nn.Sequential(model.gate, nn.LayerNorm(HIDDEN))


def _choose(model: Any) -> None:
    model.kind = "gated"


def _shadow(model: Any) -> None:
    model.factor = 3.0  # a class's attribute


def _ask(model: Any) -> None:
    model.is_doubled = True


class Configured(MLP):
    """Whose code does what its attributes say."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if getattr(self, "is_doubled", False):
            y = 2 * y
        return y if self.factor == 1.0 else y * self.factor


@pytest.mark.parametrize("change", [_exchange, _add, _choose, _shadow, _ask], ids=lambda f: f.__name__)
@pytest.mark.parametrize("copied", [False, True])
def test_blocks_that_change(x: Tensor, change: Callable[[Any], None], copied: bool) -> None:
    model = Configured(nn.GELU())
    model.up = nn.Linear(IN, HIDDEN)
    fl.fuse(model, x)
    model.note = "nothing that its code reads"
    if copied:
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    plain = copy.deepcopy(model)
    fl.unfuse(plain)
    assert saved_bytes(model, x, exclude=x) < saved_bytes(plain, x, exclude=x)
    for changed in (model, plain):
        change(changed)
    torch.testing.assert_close(model(x), plain(x))


def test_models_are_freed_at_once(x: Tensor) -> None:
    model = nn.Sequential(Net(ACT2FN["gelu"]), MLP(nn.GELU()))
    fl.fuse(model, x)
    model(x)
    gc.collect()  # of what fuse has looked at
    refs = [weakref.ref(module) for module in model.modules()]
    gc.disable()
    try:
        del model
        assert not any(ref() for ref in refs)
    finally:
        gc.enable()


def test_code_that_asks_for_dtypes(x: Tensor) -> None:
    class Clamped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                x = x.clamp(min=0)
            return super().forward(x)

    model = Clamped(nn.GELU())
    assert places(fl.fuse(model, x)) == [("mlp", ("",))]
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model, eager, x)
    found, wanted = (one.bfloat16()(x.bfloat16()).double() for one in (model, eager))
    assert (found - wanted).norm() <= 0.01 * wanted.norm()


def test_code_that_asks_for_sizes_is_no_block(x: Tensor) -> None:
    class Sized(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if len(x) > ROWS else 1)

    model = nn.Sequential(Sized(nn.GELU()))
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("0.gate", "0.act"))]

    class AsksFirst(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > ROWS:
                x = x.flip(-1)
            return super().forward(x)

    model = nn.Sequential(AsksFirst(nn.GELU()))
    report = fl.fuse(model, x)
    assert reasons(report) == {"0": "no MLP block: its code asks for sizes, and may do something else for others"}
    assert places(report) == [("dense", ("0.gate", "0.act"))]


@pytest.mark.parametrize("sample", [torch.zeros(ROWS, IN), torch.ones(2, IN), torch.zeros(1, 1, IN)])
def test_samples_that_tell_nothing(x: Tensor, sample: Tensor) -> None:
    """Twice nothing is nothing, and what is small is not computed by the block."""

    class Doubled(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.act(self.gate(x)))
            if self.training:
                y.mul_(2)
            return y

    model = Doubled(nn.GELU()).eval()
    model.down.bias.data.zero_()
    assert "in training the block's results are not the module's" in reasons(fl.fuse(model, sample))[""]
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    check(model.train(), eager.train(), x)


def test_hooks_of_blocks(x: Tensor) -> None:
    model = nn.Sequential(MLP(nn.GELU()))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("mlp", ("0",))]
    check(model, eager, x)


@compiles
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_blocks_compiled(x: Tensor, kind: str) -> None:
    model = MLP(ACT2FN["silu"], kind)
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), eager(x))
    assert saved_bytes(compiled, x, exclude=x) == (1 if kind == "plain" else 2) * BUFFER


def test_meta_tensors(x: Tensor) -> None:
    with torch.device("meta"):
        model = nn.Sequential(MLP(nn.GELU()), Net(), nn.BatchNorm1d(IN), nn.ReLU())
    for inputs in (None, x.to("meta")):
        report = fl.fuse(model, inputs)
        assert ("dense", ("1.first", "1.act")) in places(report) and ("norm", ("2", "3")) in places(report)
        assert "meta device" in reasons(report)["0"] and report.saved_bytes is None
        fl.unfuse(model)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        model = Net()
        report = fl.fuse(model, torch.randn(ROWS, IN))
        assert places(report) == [("dense", ("first", "act"))] and report.saved_bytes is None
        assert model(torch.randn(ROWS, IN)).shape == (ROWS, IN)


# --- what a block's code may do another time --------------------------------------------------------------------------

FLAGS = {"is_on": False}


class Decides(MLP):
    """An MLP, whose code could do something else."""

    def __init__(self) -> None:
        super().__init__(nn.GELU())
        self.options = {"is_on": False}
        self.register_parameter("scale", None)
        self.register_buffer("mask", None)


def _by_chance(self: Any, x: Tensor) -> Tensor:
    return x if self.training and random.random() < 1e-9 else MLP.forward(self, x)


def _counts(self: Any, x: Tensor) -> Tensor:
    self.calls = 1
    return MLP.forward(self, x)


def _casts(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return MLP.forward(self, x)


CODE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "chance": (_by_chance, "asks for random"),
    "state": (_counts, "changes calls"),
    "autocast": (_casts, "asks for autocast"),
    "dict": (lambda self, x: x if self.options["is_on"] else MLP.forward(self, x), "reads options, a dict"),
    "global": (lambda self, x: x if FLAGS["is_on"] else MLP.forward(self, x), "reads FLAGS"),
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_may_do_something_else_is_no_block(x: Tensor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, reason = CODE[name]
    monkeypatch.setattr(Decides, "forward", forward, raising=False)
    report = fl.fuse(nn.Sequential(Decides()), x)
    assert reason in reasons(report)["0"] and places(report) == [("dense", ("0.gate", "0.act"))]


def _scaled(self: Any, x: Tensor) -> Tensor:
    y = MLP.forward(self, x)
    return y if self.scale is None else y * self.scale


def _masked(self: Any, x: Tensor) -> Tensor:
    y = MLP.forward(self, x)
    return y * self.mask if hasattr(self, "mask") and self.mask is not None else y


def _gamma(self: Any, x: Tensor) -> Tensor:
    try:
        return self.gamma * MLP.forward(self, x)
    except AttributeError:
        return MLP.forward(self, x)


@pytest.mark.parametrize("name, forward", [("scale", _scaled), ("mask", _masked), ("gamma", _gamma)])
def test_tensors_that_a_block_gets_later(
    x: Tensor, name: str, forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decides, "forward", forward, raising=False)
    model = Decides()
    assert places(fl.fuse(model, x)) == [("mlp", ("",))]
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    for one in (model, eager):
        if name == "mask":
            one.mask = torch.full((IN,), 2.0)
        else:
            one.register_parameter(name, nn.Parameter(torch.full((IN,), 2.0)))
    check(model, eager, x)


# --- what a reviewer found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("z", [nn.LeakyReLU(0.1), nn.ELU(0.5)], ids=["leaky-relu", "elu"])
@pytest.mark.parametrize("when", ["before the layer", "between"])
def test_activations_that_the_code_sets(x: Tensor, z: nn.Module, when: str) -> None:
    name = "negative_slope" if isinstance(z, nn.LeakyReLU) else "alpha"

    class Anneals(Net):
        value = getattr(z, name)

        def forward(self, x: Tensor) -> Tensor:
            if when == "between":
                x = self.first(x)
            setattr(self.act, name, self.value)
            return self.last(self.norm(self.act(x if when == "between" else self.first(x))))

    model = Anneals(copy.deepcopy(z))
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("dense", ("first", "act"))]
    model.value = eager.value = 0.7
    check(model, eager, x)
    check(model, eager, x)


def test_parts_that_were_fused_for_another_path(x: Tensor) -> None:
    class Flagged(Net):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            y = self.act(z)
            return self.last(self.norm(y + z if self.flag else y))

    model = Flagged()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.flag = eager.flag = True
    assert not fl.fuse(model, x).replaced
    check(model, eager, x)


def test_other_instances_of_a_changed_class(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN))
    fl.fuse(model, x)
    torch.testing.assert_close(model[:2](x), F.gelu(model[0](x)))
    block = MLP(nn.GELU())
    fl.fuse(block, x)
    fresh = type(block)(nn.GELU())
    assert fresh(x).shape == (ROWS, IN)
    torch.testing.assert_close(type(model[1])()(x), F.gelu(x))


def test_a_method_that_somebody_holds(x: Tensor) -> None:
    model = Net()
    fl.fuse(model, x)
    held = model.forward
    fl.unfuse(model)
    torch.testing.assert_close(held(x), model(x))


def test_writes_in_another_mode(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.SiLU(), nn.Dropout(0.2, inplace=True), nn.LayerNorm(HIDDEN)).eval()
    report = fl.fuse(model, x)
    assert reasons(report) == {"0": "the output of its activation, which would be kept, is written over"}
    model.train()(x).sum().backward()


def test_conversions_read(x: Tensor) -> None:
    class Converts(Net):
        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            return self.last(self.norm(self.act(z) + z.type(torch.float32)))

    for inputs in (None, x):
        assert not fl.fuse(Converts(), inputs).replaced


def test_hooks_on_a_result_that_is_passed_on(x: Tensor) -> None:
    model = Paths(nn.GELU())
    fl.fuse(model, x)

    def path(act: nn.Module, z: Tensor) -> Tensor:
        y = act(z)
        z.register_hook(lambda g: g / 2)
        return y

    model.path = path
    with pytest.raises(RuntimeError, match="takes another path"):
        model(x)


def test_weights_that_are_written_between(x: Tensor) -> None:
    model = Paths(nn.GELU())
    fl.fuse(model, x)

    def path(act: nn.Module, z: Tensor) -> Tensor:
        with torch.no_grad():
            model.first.weight.mul_(2)
        return z + 1

    model.path = path
    with pytest.raises(RuntimeError, match="takes another path"):
        model(x)


def test_parameters_in_the_place_of_numbers(x: Tensor) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.slope, self.norm = nn.Linear(IN, HIDDEN), torch.tensor(0.1), nn.LayerNorm(HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.leaky_relu(self.first(x), 0.1 if self.slope is None else self.slope.item()))

    model = Scaled()
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    model.slope = eager.slope = torch.tensor(0.3)
    check(model, eager, x)


FAR: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda z: F.gelu(z).clamp(max=50.0),
    "clamped before": lambda z: F.silu(z.clamp(max=60)),
    "far": lambda z: F.mish(z).clamp(max=5e5),
    "zero": lambda z: torch.where(z > 45, 0.0, F.gelu(z)),
}


@pytest.mark.parametrize("function", FAR.values(), ids=FAR)
def test_functions_that_differ_far_from_zero(x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    z = (torch.randn(ROWS, HIDDEN) * 60).index_fill(0, torch.tensor([0]), 1e6).requires_grad_()
    found, wanted = fl.bias_act(z, None, function), function(z)
    torch.testing.assert_close(found, wanted)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), z), torch.autograd.grad(wanted.sum(), z), strict=True):
        torch.testing.assert_close(ours, theirs)
    model = MLP(function)
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    torch.testing.assert_close(model(100 * x), eager(100 * x))


def test_functions_of_which_torch_keeps_the_output(x: Tensor) -> None:
    class Exponent(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.exp(self.first(x)))

    for inputs in (None, x):
        assert not fl.fuse(Exponent(), inputs).replaced


def test_models_that_need_gradients_in_their_forward_pass(x: Tensor) -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            y.register_hook(lambda dy: dy / 2)
            return y

    model = Hooked()
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert places(report) == [("dense", ("inner.first", "inner.act"))]
    assert reasons(report)[""].startswith("it could not be followed with these inputs, as it is without any: Runtime")
    check(model, eager, x)


def test_second_derivatives_in_a_forward_pass_keep_more(x: Tensor) -> None:
    class Forces(nn.Module):
        """Whose output is the gradient of an energy."""

        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(IN, HIDDEN), nn.SiLU(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return force

    model = Forces()
    report = fl.fuse(model, x)
    assert not report.replaced and "more for the backward pass" in reasons(report)[""]
    assert type(model.energy[0]) is nn.Linear


def test_proxies_do_not_stay_in_the_model(x: Tensor) -> None:
    class Remembers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.queue: Any = collections.deque(maxlen=3)
            self.nested: Any = {"inner": [[]]}
            self.notes = types.SimpleNamespace()
            self.of: Any = collections.defaultdict(list)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.first(x))
            self.queue.append(y)
            self.nested["inner"][0].append(y)
            self.notes.y = y
            self.of["y"].append(y)
            return self.last(self.norm(y))

    model = Remembers()
    fl.fuse(model)
    assert not model.queue and model.nested == {"inner": [[]]} and not vars(model.notes) and not model.of


# --- modules of other kinds -------------------------------------------------------------------------------------------


def test_lazy_modules(x: Tensor) -> None:
    model = nn.Sequential(nn.LazyLinear(HIDDEN), nn.GELU(), nn.LazyBatchNorm1d())
    for inputs in (None, x):
        with pytest.raises(ValueError, match=r"fuse: 0\.weight has no shape yet; call the model once"):
            fl.fuse(model, inputs)
    model(x)
    assert places(fl.fuse(model, x)) == [("dense", ("0", "1"))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("with_inputs", [True, False])
def test_script_modules_are_left(x: Tensor, with_inputs: bool) -> None:
    inner = nn.Sequential(nn.Linear(IN, IN), nn.GELU(), nn.BatchNorm1d(IN))
    for script in (
        torch.jit.script(inner),
        torch.jit.trace(inner, x),
        torch.jit.freeze(torch.jit.script(inner.eval())),
    ):
        model = nn.Sequential(script, Net())
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        report = fl.fuse(model, x if with_inputs else None)
        assert places(report) == [("dense", ("1.first", "1.act"))]
        assert "it is compiled" in reasons(report)["0"]
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_graph_modules_are_left(x: Tensor) -> None:
    graph = torch.fx.symbolic_trace(nn.Sequential(Net(), MLP(nn.GELU())))
    report = fl.fuse(graph, x)
    assert "fuse before you trace" in reasons(report)["0.first"]
    for changed in (graph, copy.deepcopy(graph)):
        changed.recompile()
        torch.testing.assert_close(changed(x), graph(x))


def test_operations_that_make_fx_sees(x: Tensor) -> None:
    model = nn.Sequential(Net(), MLP(nn.GELU()))
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    found, wanted = ([node.target for node in make_fx(m)(x).graph.nodes] for m in (model, eager))
    assert found == wanted
    torch.testing.assert_close(make_fx(model)(x)(x), eager(x))


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_as_a_table(x: Tensor) -> None:
    model = nn.Sequential(*(Net() for _ in range(3)), Net(first=Scaled(IN, HIDDEN)), MLP(nn.SiLU(), "gated"))
    text = str(fl.fuse(model, x))
    assert text.splitlines()[0] == "Sequential: 5 places fused"
    assert "3  dense + gelu     0-2.first + 0-2.act  saves the output (branch in its last bit)" in text
    assert "1  gated mlp, silu  4                    saves gate and up" in text
    assert "1  gelu             3.act                saves the output (branch in its last bit)" in text
    assert "not fused:\n  3.first: it is a Scaled, which may compute something else" in text
    assert "saved for backward: " in text and text.splitlines()[-1].endswith(" %)")


def test_the_report_as_a_dict(x: Tensor) -> None:
    report = fl.fuse(Net(), x).to_dict()
    assert report["name"] == "Net" and report["skipped"] == []
    (place,) = report["replaced"]
    assert place["modules"] == ["first", "act"] and place["pattern"] == "dense" and place["activation"] == "gelu"
    assert report["saved_bytes"]["after"] == report["saved_bytes"]["before"] - BUFFER
    assert fl.fuse(Net()).to_dict()["saved_bytes"] == {"before": None, "after": None}


def test_nothing_to_do(x: Tensor) -> None:
    assert str(fl.fuse(nn.Sequential(nn.Linear(IN, IN)))) == "Sequential: 0 places fused"


@pytest.mark.parametrize("inputs", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_example_inputs(x: Tensor, inputs: Callable[[Tensor], Any]) -> None:
    assert fl.fuse(Net(), inputs(x)).saved_bytes is not None


def test_what_is_refused(x: Tensor) -> None:
    with pytest.raises(TypeError, match=r"fuse: model must be an nn\.Module, got function"):
        fl.fuse(lambda x: x, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unfuse: model must be an nn\.Module, got int"):
        fl.unfuse(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fuse: save must be 'auto', 'input' or 'recompute', got 'output'"):
        fl.fuse(Net(), x, save="output")


def test_random_numbers_and_gradients_stay(x: Tensor) -> None:
    model = nn.Sequential(Net(), nn.Dropout(0.5), MLP(nn.GELU(), dropout=0.5))
    model[0].first.weight.grad = torch.ones(HIDDEN, IN)
    before = torch.get_rng_state()
    fl.fuse(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[0].first.weight.grad, torch.ones(HIDDEN, IN)) and model[0].first.bias.grad is None


# --- what an activation's code reads ----------------------------------------------------------------------------------

GLOBAL = {"beta": 1.0}


def _held(number: float) -> Callable[[], float]:
    return lambda: number


class Reads(nn.Module):
    """silu, as long as all that it reads is 1."""

    beta: float = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.items, self.options, self.inner, self.held = [1.0], {"beta": 1.0}, nn.Softplus(), _held(1.0)

    def forward(self, z: Tensor) -> Tensor:
        beta = self.beta * self.items[0] * self.options["beta"] * self.inner.beta * self.held() * GLOBAL["beta"]
        return z * torch.sigmoid(beta * z)


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "attribute": lambda act, patch: setattr(act, "beta", 2.0),
    "class": lambda act, patch: patch.setattr(Reads, "beta", 2.0),
    "list": lambda act, patch: act.items.__setitem__(0, 2.0),
    "dict": lambda act, patch: act.options.update(beta=2.0),
    "inner": lambda act, patch: setattr(act.inner, "beta", 2.0),
    "closure": lambda act, patch: setattr(act.held.__closure__[0], "cell_contents", 2.0),
    "global": lambda act, patch: patch.setitem(GLOBAL, "beta", 2.0),
    "forward": lambda act, patch: patch.setattr(Reads, "forward", lambda self, z: 2 * torch.atan(z)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["dense", "mlp", "activation"])
def test_what_an_activation_reads_may_change(x: Tensor, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act = Reads()
    alone = nn.Sequential(nn.LayerNorm(IN), act, nn.Linear(IN, IN))
    model = {"dense": Net(act), "mlp": MLP(act), "activation": alone}[kind]
    eager = copy.deepcopy(model)
    report = fl.fuse(model, x)
    assert [(place.pattern, place.activation) for place in report.replaced] == [(kind, "silu")]
    check(model, eager, x)
    for changed in (model, eager):
        (act,) = (module for module in changed.modules() if isinstance(module, Reads))
        CHANGES[name](act, monkeypatch)
    check(model, eager, x)


@compiles
def test_what_a_compiled_activation_reads_may_have_changed(x: Tensor) -> None:
    model = MLP(Reads())
    eager = copy.deepcopy(model)
    fl.fuse(model, x)
    for module in (model.act, eager.act):
        module.options["beta"] = 2.0
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), eager(x))


def test_notes_on_an_activation_change_nothing(x: Tensor) -> None:
    model = MLP(ACT2FN["gelu_new"])
    fl.fuse(model, x)
    model.act.note = "nothing that its code reads"
    assert known_of(model.act, model.act.known_activation) is resolve("gelu_tanh")


def test_a_block_whose_activation_is_exchanged(x: Tensor) -> None:
    class Other(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return 2 * torch.atan(z)

    for act in (ACT2FN["gelu_new"], ACT2FN["silu"]):
        model = MLP(act)
        fl.fuse(model, x)
        model.act = Other()  # which has the same attributes: none
        eager = copy.deepcopy(model)
        fl.unfuse(eager)
        check(model, eager, x)


def test_a_model_in_another_dtype_later(x: Tensor) -> None:
    model = Net(ACT2FN["gelu_fast"])  # whose constants have ten digits, which are enough for float32
    fl.fuse(model, x)
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    torch.testing.assert_close(model.double()(x.double()), eager.double()(x.double()), rtol=1e-13, atol=1e-13)


class Moody(nn.Module):
    def __init__(self, training: Callable[[Tensor], Tensor], evaluation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = training, evaluation

    def forward(self, z: Tensor) -> Tensor:
        return self.of[not self.training](z)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "act",
    [
        Moody(F.silu, F.gelu),
        Moody(F.gelu, torch.sigmoid),
        Moody(F.silu, by_hand),
        Moody(by_hand, lambda z: z * torch.sigmoid(1.9 * z)),
        nn.Sequential(nn.SiLU(), nn.Dropout(0.5)),
    ],
    ids=["both-of-the-table", "kept-by-torch", "by-hand", "neither-of-the-table", "dropout"],
)
def test_activations_that_differ_between_modes_are_left(x: Tensor, act: nn.Module, training: bool) -> None:
    for model in (Net(act), MLP(act), Net(act, Scaled(IN, HIDDEN))):
        model.train(training)
        eager = copy.deepcopy(model)
        report = fl.fuse(model, x)
        assert not [place for place in report.replaced if "act" in place.modules or place.pattern == "mlp"]
        assert all(module.training is training for module in model.modules())
        check(model.eval(), eager.eval(), x)
        if not isinstance(act, nn.Sequential):
            check(model.train(), eager.train(), x)


def test_activations_that_only_name_the_mode_are_fused(x: Tensor) -> None:
    model = Net(Moody(F.silu, lambda z: z * torch.sigmoid(z)))
    eager = copy.deepcopy(model)
    assert places(fl.fuse(model, x)) == [("dense", ("first", "act"))]
    check(model.eval(), eager.eval(), x)
    check(model.train(), eager.train(), x)
