"""Users' modules without children, which backward runs again: ``fuse`` of one, and how often it runs."""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numpy import random as npr
from recipe_cases import NewGELU, Noisy, OwnFunction, Trained
from subjects import living_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.recipes import leaves, region, second_run

WIDTH = 64


pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


class Counted(NewGELU):
    """It notes each run; ``between`` is called in it."""

    def __init__(self, between: Callable[[Counted, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), 1.0
        self.note = list[int]().append
        self.between = between

    @property
    def runs(self) -> Any:
        return self.note.__self__

    def forward(self, x: Tensor) -> Tensor:
        self.note(threading.get_ident())
        if self.between is not None:
            x = self.between(self, x)
        return super().forward(x * self.scale) * torch.sigmoid(x + self.shift)


def between_layers(leaf: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), leaf, nn.Linear(WIDTH, WIDTH))


def gradients(model: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    npr.seed(0)
    model.zero_grad()
    run(model, x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def same(model: nn.Module, x: Tensor, **options: Any) -> bool:
    """Whether the fused model's gradients and buffers are those of a copy of what it was."""
    eager = copy.deepcopy(model)
    fl.unfuse(eager)
    pairs = [*zip(gradients(model, x, **options), gradients(eager, x, **options), strict=True)]
    pairs += zip(model.buffers(), eager.buffers(), strict=True)
    return all(torch.equal(a.to_dense(), b.to_dense()) for a, b in pairs)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, WIDTH)


def kept(model: nn.Module, x: Tensor) -> int:
    return saved_bytes(model, x, exclude=[model, x])


# --- how often, and on what -------------------------------------------------------------------------------------------


def test_a_backward_pass_runs_it_once_and_the_result_is_made_by_that_run(x: Tensor) -> None:
    leaf = Counted()
    model = between_layers(leaf)
    fl.fuse(model)
    assert kept(model, x) == x.nbytes  # what the first layer has made
    leaf.runs.clear()
    loss = model(x).square().mean()
    assert len(leaf.runs) == 1
    loss.backward(retain_graph=True)
    assert len(leaf.runs) == 2
    loss.backward()
    assert len(leaf.runs) == 3
    assert same(model, x)


def test_a_norm_of_which_only_statistics_would_be_freed_is_called_as_it_is(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Norm(Counted):
        def forward(self, x: Tensor) -> Tensor:
            self.note(1)
            return self.scale * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    leaf = Norm()
    model = between_layers(leaf)
    fl.fuse(model)
    for _ in range(2):
        model(x).sum().backward()
    monkeypatch.setattr(leaves, "Log", None)  # a call that is looked at needs it
    assert same(model, x)
    assert len(leaf.runs) == 4  # of which one of its copy


@pytest.mark.parametrize("is_large", [False, True])
def test_a_run_ends_behind_the_last_large_value_that_is_read(
    is_large: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_run, "STOPPED_BYTES", x.nbytes if is_large else x.nbytes + 1)
    ends: list[str] = []

    class Long(Counted):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.end("reached")
            return y + 1  # saves nothing, and nobody reads it

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Long())
    model[1].end = ends.append  # type: ignore[assignment]
    fl.fuse(model)
    model(x).sum().backward()
    assert len(ends) == 2 - is_large and len(model[1].runs) == 2  # type: ignore[arg-type]


def test_the_peak_of_a_step_is_not_above_eagers(x: Tensor) -> None:
    x = torch.randn(512, WIDTH)
    model = nn.Sequential(*[between_layers(Trained()) for _ in range(4)])
    peaks = []
    for run in (lambda m: None, fl.fuse):
        run(model)
        gradients(model, x)
        peaks.append(peak_bytes(lambda: gradients(model, x)))
    assert peaks[1] <= 1.01 * peaks[0]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Checkpointed(nn.Sequential):
    is_on = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=True) if self.is_on else super().forward(x)


def test_a_leaf_is_looked_at_again_where_more_is_trained_or_checkpoints_are_off() -> None:
    x = torch.randn(8, 16, WIDTH, requires_grad=True)
    model = Checkpointed(Sine(), nn.Linear(WIDTH, WIDTH))
    eager = copy.deepcopy(model)
    fl.fuse(model)

    def held(model: nn.Module) -> int:  # no hooks count it: under these each leaf is looked at
        model.zero_grad()
        return living_bytes(lambda: model(x), [x, *model.parameters()])

    for trained, model.is_on in ((False, False), (True, True)):
        model[1].weight.requires_grad_(trained)
        for _ in range(3):
            model(x).sum().backward()
    model.is_on, x.grad = False, None
    assert all(held(model) <= held(eager) - x.nbytes for _ in range(4))


def test_the_result_of_a_function_of_a_users_is_not_saved(x: Tensor) -> None:
    model = between_layers(OwnFunction())
    before = kept(model, x)
    fl.fuse(model)
    assert kept(model, x) == before - x.nbytes and same(model, x)


def test_the_result_is_not_saved_where_the_leaf_saves_a_view_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (8,), eps=1e-3)

    class Transpose(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    monkeypatch.setattr(region, "LEAST_BYTES", 1 << 10)  # more than the statistics take
    x = torch.randn(4, 8, 16)
    model = nn.Sequential(nn.Conv1d(8, 8, 1), Transpose(), Norm(), nn.Linear(8, 8))
    before = kept(model, x)
    fl.fuse(model)
    assert kept(model, x) == before - x.nbytes and same(model, x)


# --- what the second run finds ----------------------------------------------------------------------------------------


def test_attributes_are_as_they_were(x: Tensor) -> None:
    """Others may have changed them since."""
    leaf = Counted()
    model = between_layers(leaf)
    eager = copy.deepcopy(model)
    fl.fuse(model)
    found = []
    for each in (model, eager):
        y = each(x)
        each[1].shift = 3.0
        y = y + each(2 * x)
        each[1].shift = -7.0
        each.eval()
        y.square().mean().backward()
        found.append([p.grad for p in each.parameters()])
    assert all(map(torch.equal, *found)) and len(leaf.runs) == 6  # eager's copy notes in the same list


class OwnView(nn.Module):
    """A view of a tensor without a graph is saved."""

    def forward(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[-1]).float()
        decay = (0.01 * (t[:, None] - t[None, :])).exp().t()[: len(x)]
        return (x * decay + 1).sin() * (x - 1).exp()


class Lazy(nn.Module):
    """What the first call makes stays, as a cache of rotations."""

    cos: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cos is None:
            self.cos = (torch.arange(len(x))[:, None] * torch.linspace(0, 1, WIDTH)).cos()
        return x * self.cos + (x + 1).sin() * (x - 1).exp()


class Remembering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = (x + 1).sin() * (x - 1).exp()
        self.out = {"y": y}
        return y


class Conditioned(nn.Module):
    """It reads a tensor that is handed on within a container."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.given["scale"].tanh()) + self.given["scale"].sin() * x.sigmoid()


class SavingOnce(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with fl.save_once():
            y = (x + 1).sin() * (x - 1).exp()
        return y * (x + 2).cos() * F.gelu(y)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(WIDTH)[:1].to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * x.exp() * self.get_buffer("matrix").to_dense()


class Sloped(nn.Module):
    """It computes a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() * x.exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope


class Parts(nn.Module):
    """Views of what it has made itself are saved."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x + 1).chunk(2, -1)
        return torch.cat([a * b.sin(), b * a.exp()], -1)


GIVEN: dict[str, Tensor] = {}


class Masked(nn.Module):
    """It reads a global variable, which changes before backward."""

    given = GIVEN

    def forward(self, x: Tensor) -> Tensor:
        return (x * GIVEN["scale"].detach()).sin() * x.exp()


class Kept:
    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __deepcopy__(self, memo: Any) -> Any:
        return None


class Watched(nn.Module):
    """Its result becomes an attribute, which a checkpoint's second run finds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.register_forward_hook(lambda module, given, y: setattr(module, "result", Kept(y)))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.scale * (centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-6)) + self.shift


class Started(NewGELU):
    """A quantiser, whose first call sets its step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(()))
        self.register_buffer("is_started", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.get_buffer("is_started"):
            self.step.data.copy_(x.detach().abs().mean())
            self.get_buffer("is_started").fill_(1)
        z = (x / self.step).clamp(-8, 7)
        return ((z.round() - z).detach() + z) * self.step


class OwnNorm(nn.BatchNorm1d):
    """It writes to buffers whose versions stay."""

    def __init__(self) -> None:
        super().__init__(WIDTH, affine=False)
        self.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * F.relu6(y + 3) * y.sin()


class Centered(OwnNorm):
    """The same, without a node."""

    def forward(self, x: Tensor) -> Tensor:
        F.batch_norm(x.detach(), self.running_mean, self.running_var, training=True)
        return (x - self.running_mean).tanh() * (x + 1).exp() * x.sin()


CORNERS = OwnView, Lazy, Conditioned, SavingOnce, Sparse, Sloped, Parts, Masked, Watched, Started, OwnNorm, Centered


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", CORNERS)
def test_corners_are_right(kind: type[nn.Module], is_checkpointed: bool, x: Tensor) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        if is_checkpointed:
            getattr(model[1], "given", {})["scale"] = x.mean(0)  # type: ignore[index]
            return checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)  # type: ignore[no-any-return]
        found = []
        for given in (x, -x):
            getattr(model[1], "given", {})["scale"] = given.mean(0)  # type: ignore[index]
            found.append(model(given))
        return torch.stack(found)

    model = between_layers(kind())
    fl.fuse(model)
    for _ in range(2):
        assert same(model, x, run=run)


def test_a_checkpoints_second_run_ends_where_pytorchs_ends(x: Tensor) -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.shift = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False), Shift()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).sin()
            self.norm(h.detach())  # which is behind the last tensor that is saved
            return self.shift(h)  # type: ignore[no-any-return]

    model = Observed()
    fl.fuse(model)
    gradients(model, x, RUNS["checkpoint"])
    assert model.norm.num_batches_tracked == 1


def test_what_a_leaf_remembers_is_freed(x: Tensor) -> None:
    model = between_layers(Remembering())
    model[1].out = {"y": torch.zeros(8)}  # type: ignore[assignment]
    fl.fuse(model)
    results = []
    for _ in range(3):
        results.append(weakref.ref(model[1].out["y"]))  # type: ignore[index, union-attr]
        gradients(model, x)
    assert [result() for result in results] == [None] * 3


def _keep(kept: dict[str, Tensor], module: nn.Module, given: Any, y: Tensor) -> None:
    kept["y"] = y


def test_a_model_that_its_leaf_knows_is_freed(x: Tensor) -> None:
    model: Any = between_layers(NewGELU())
    model[1].parent = [model]
    fl.fuse(model)
    gradients(model, x)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_hooks_that_keep_what_a_leaf_has_made_hold_no_graph(x: Tensor) -> None:
    kept: dict[str, Tensor] = {}
    model = between_layers(NewGELU())
    model[1].register_forward_hook(functools.partial(_keep, kept))
    fl.fuse(model)
    gradients(model, x)
    result = weakref.ref(kept["y"])
    del model, kept
    gc.collect()
    assert result() is None


def test_tensors_of_inference_are_left_alone(x: Tensor) -> None:
    class Position(nn.Module):
        position: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.position is None:
                self.position = torch.linspace(0, 1, WIDTH)
            return (x + self.position).tanh() * x.exp()

    model = between_layers(Position())
    fl.fuse(model)
    with torch.inference_mode():
        model(x)
    assert same(model, x)


@pytest.mark.parametrize("leaf", [Noisy(), Counted(lambda leaf, x: x + torch.rand_like(x))], ids=["buffer", "random"])
def test_modules_that_write_to_buffers_or_draw_numbers_run_once(leaf: nn.Module, x: Tensor) -> None:
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)
    if isinstance(leaf, Counted):
        leaf.runs.clear()
        gradients(model, x)
        assert len(leaf.runs) == 1


def _drop(x: Tensor) -> Tensor:
    return F.dropout(x + 1, 0.5 if len(x) > 32 else 0.0)


def _skip(x: Tensor) -> Tensor:
    return x.sin() if random.random() < 0.8 else x.cos()  # the first numbers are .84, and then .76


def _skip_by_numpy(x: Tensor) -> Tensor:
    return x.sin() if npr.uniform() < 0.65 else x.cos()  # .55 and .72, and then .60


class Drawn:
    def __call__(self, x: Tensor) -> Tensor:
        return _skip(x)


def _skip_unnamed(x: Tensor) -> Tensor:
    return Drawn()(x)


@pytest.mark.parametrize("draw", [_drop, _skip, _skip_by_numpy, _skip_unnamed])
def test_a_leaf_may_draw_numbers_from_some_call_on(draw: Callable[[Tensor], Tensor], x: Tensor) -> None:
    class Drawing(NewGELU):
        def forward(self, x: Tensor) -> Tensor:
            return draw(super().forward(x))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([model(x), model(torch.cat([x, x]))])

    model = between_layers(Drawing())
    fl.fuse(model)
    assert all(same(model, x, run=run) for _ in range(4))


STATE = {"scale": 1.0}


def _by_state(x: Tensor, state: dict[str, float]) -> Tensor:
    return x * state["scale"]


class ByFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * STATE["scale"]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Helper:
    scale = STATE

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * Helper.scale["scale"]


class OfClass(NewGELU):
    held = STATE

    @property
    def scale(self) -> float:
        return STATE["scale"]


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an attribute of the class": lambda leaf, x: x * leaf.held["scale"],
    "a property": lambda leaf, x: x * leaf.scale,
    "a method of another class": lambda leaf, x: Helper.scaled(x),
    "a Function": lambda leaf, x: ByFunction.apply(x),  # type: ignore[no-any-return]
    "a partial": lambda leaf, x: leaf.partial(x),  # type: ignore[no-any-return]
}


@pytest.mark.parametrize("way", READS)
def test_a_leaf_that_reads_what_may_change_is_left_alone(way: str, x: Tensor) -> None:
    read = READS[way]

    class Reading(OfClass):
        partial = staticmethod(functools.partial(_by_state, state=STATE))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(read(self, x)) * x.sigmoid()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        found = []
        for STATE["scale"] in (1.0, 2.0):
            found.append(model(x))
        return torch.cat(found)

    model = between_layers(Reading())
    fl.fuse(model)
    assert same(model, x, run=run)


def all_reduce(x: Tensor) -> Tensor:
    return x + 1


def test_a_leaf_in_which_all_processes_take_part_runs_once(x: Tensor) -> None:
    leaf = Counted(lambda leaf, x: all_reduce(x))
    model = between_layers(leaf)
    fl.fuse(model)
    gradients(model, x)
    assert len(leaf.runs) == 1


def test_a_leaf_that_holds_a_matrix_is_left_alone(x: Tensor) -> None:
    model: Any = between_layers(NewGELU())
    model[1].register_forward_hook(lambda module, given, y: setattr(module, "result", y.detach()))
    fl.fuse(model)
    results = []
    for _ in range(3):
        gradients(model, x)
        results.append(weakref.ref(model[1].result))
    assert [result() is None for result in results] == [True, True, False]


def _step(p: Tensor) -> None:
    p.detach().sub_(p.grad)  # type: ignore[arg-type]


def test_optimizers_may_step_in_backward(x: Tensor) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(_step)
        h: Tensor = model[0](x)  # type: ignore[index]
        return h + model[1](model[2](h))  # type: ignore[index, no-any-return]

    model = between_layers(Watched())
    fl.fuse(model)
    assert same(model, x, run=run)


def test_vmap_of_a_backward_pass(x: Tensor) -> None:
    model, directions = between_layers(NewGELU()), torch.randn(3, *x.shape)
    x.requires_grad_()
    found = []
    for _ in range(2):
        y = model(x)
        found.append(torch.vmap(lambda dy, y=y: torch.autograd.grad(y, x, dy, retain_graph=True)[0])(directions))
        fl.fuse(model)
    assert torch.equal(*found)


def test_a_context_around_backward_keeps_no_casts_of_arguments(x: Tensor) -> None:
    kept: list[bool] = []
    model: Any = between_layers(Counted(lambda leaf, x: leaf.keep(torch.is_autocast_cache_enabled()) or x))
    model[1].keep = kept.append
    fl.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    assert kept == [True, False]


@pytest.mark.parametrize("is_trained", [False, True])
def test_parameters_may_be_frozen_or_trained_between_the_passes(is_trained: bool, x: Tensor) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        model[1].requires_grad_(is_trained)  # type: ignore[index]
        y: Tensor = model(x)
        model[1].requires_grad_(not is_trained)  # type: ignore[index]
        return y

    model = between_layers(Counted())
    fl.fuse(model)
    model(x)
    found = []
    for _ in range(2):
        found.append([each for each in gradients(model, x, run) if each is not None])
        fl.unfuse(model)
    assert all(map(torch.equal, *found))


class Scaled(NewGELU):
    p = 0.0

    def forward(self, x: Tensor, factor: Tensor | None = None, p: float = 0.0, other: Tensor | None = None) -> Tensor:
        x = x if factor is None else x * factor
        x = x if other is None else x + other
        return super().forward(_shifted(x, self.p + p))


def _shifted(x: Tensor, p: float) -> Tensor:
    return (x + p).sin() if p else x


def test_each_way_to_call_a_leaf_is_looked_at(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    """Where a call finds another attribute or code, or has other arguments, than the calls before it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.leaf, self.last = nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.leaf(h, h.sigmoid()) + self.leaf(h, other=h.sigmoid()) + self.leaf(h, p=0.0)
            y = y + self.leaf(h, None, 0.5) + self.leaf(h, None, 0.0)
            return self.last(y)  # type: ignore[no-any-return]

    twice, once = Twice(), between_layers(Scaled())
    for model, leaf in ((twice, twice.leaf), (once, once[1])):
        fl.fuse(model)
        for p in (0.0, 0.5, 0.0):
            leaf.p = p
            assert same(model, x) and same(model, x)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: _shifted(x.sin() * x.exp(), 0.5))
    assert same(once, x)


def test_modules_that_multiply_matrices_run_once(x: Tensor) -> None:
    class Attention(Counted):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.softmax(x @ x.mT, -1) @ x)

    leaf = Attention()
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)
    leaf.runs.clear()
    gradients(model, x)
    assert len(leaf.runs) == 1


def test_what_it_saves_and_writes_to_is_eagers_error(x: Tensor) -> None:
    model = between_layers(Counted(lambda leaf, x: x.exp().mul_(2)))
    fl.fuse(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)


def test_a_slice_that_hooks_keep_takes_all_of_its_memory(x: Tensor) -> None:
    class Sliced(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            h = self[0](x)
            return (h.sin() if self.is_read else h).mean() + self[2](self[1](h[:, :WIDTH]))

        is_read = False

    model = Sliced(nn.Linear(WIDTH, 20 * WIDTH), Counted(lambda leaf, x: x + 1), nn.Linear(WIDTH, WIDTH))
    before, _ = kept(model, x), fl.fuse(model)
    assert all(kept(model, x) <= before for _ in range(3))
    model[1].runs.clear()
    model.is_read = True
    model(x).sum().backward()
    assert len(model[1].runs) == 2  # without hooks it pays, and has not been given up


def test_arguments_that_are_written_to_are_left_alone(x: Tensor) -> None:
    leaf = Counted(lambda leaf, x: x.mul_(2))
    model = between_layers(leaf)
    fl.fuse(model)
    assert same(model, x)


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(m, x.requires_grad_(), use_reentrant=True),
    "twice": lambda m, x: m(m(x)),
    "views": lambda m, x: m(x.view(2, 16, WIDTH)[:, ::2]),
}


@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, x: Tensor) -> None:
    model = between_layers(Counted())
    fl.fuse(model)
    assert same(model, x, run=RUNS[run])


@pytest.mark.parametrize("is_swapped", [False, True])
def test_parameters_may_be_replaced(is_swapped: bool, x: Tensor) -> None:
    block = nn.Sequential(nn.GroupNorm(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block)
    fl.fuse(model)

    def run(model: nn.Module, x: Tensor) -> Tensor:
        first, block = model
        return checkpoint(block, first(x), use_reentrant=False)  # type: ignore[no-any-return]

    assert same(model, x, run=run)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(is_swapped)
    try:
        model.zero_grad()
        model.double()
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=not is_swapped
        )
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert same(model, x.double(), run=run)


def test_a_mask_may_begin_within_a_storage(x: Tensor) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
            return torch.where(given["mask"].unsqueeze(1), x.sin(), x.exp())

    mask = copy.deepcopy((torch.rand(36, 1 << 11) > 0.5)[4:])
    model, values = Masked(), torch.randn(32, 1, 1 << 11, requires_grad=True)
    wanted = torch.autograd.grad(model(values, {"mask": mask}).sum(), values)
    fl.fuse(model)
    assert torch.equal(torch.autograd.grad(model(values, {"mask": mask}).sum(), values)[0], wanted[0])


# --- what cannot be the same ------------------------------------------------------------------------------------------


TIMES = 1


def test_a_module_that_computes_something_else_is_named(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = between_layers(Counted(lambda leaf, x: torch.cat([x] * TIMES)))
    fl.fuse(model)
    loss = model(x).sum()
    monkeypatch.setitem(globals(), "TIMES", 2)
    with pytest.raises(RuntimeError, match=r"Counted: backward ran this module again.*fl\.unfuse\(module\) leaves it"):
        loss.backward()


def test_a_module_whose_argument_is_written_to_is_named(x: Tensor) -> None:
    model = between_layers(NewGELU())
    fl.fuse(model)
    h = model[0](x)
    y = model[1](h)
    h += model[2](y)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* A NewGELU has it as its argument\."):
        h.sum().backward()


def test_an_argument_for_which_there_is_no_memory_is_said_by_torch(x: Tensor) -> None:
    def unpack(packed: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    model = between_layers(Watched())
    fl.fuse(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = model[1](model[0](x))
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        y.sum().backward()


def test_a_parameter_that_is_written_to_is_an_error(x: Tensor) -> None:
    model = between_layers(Counted(lambda leaf, x: x + leaf.offset))
    leaf: Any = model[1]
    leaf.offset = nn.Parameter(torch.zeros(WIDTH))
    fl.fuse(model)
    loss = model(x).sum()
    with torch.no_grad():
        leaf.offset.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: it belongs to a Counted"):
        loss.backward()


# --- layers by hand ---------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Layers by hand that read a norm's result, with a module of a user's as the activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), act
        self.last = fl.FusedConvAct2d(8, 8, 1, act)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, 8, -1, 16)
        return self.last(fl.bias_act(self.norm(self.conv(x)), None, self.act)).reshape(-1, WIDTH)  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: fl.FusedDenseAct(WIDTH, WIDTH, "gelu"),
    "block": lambda: fl.FusedMLP(WIDTH, 2 * WIDTH, activation="silu"),
    "gate": lambda: fl.FusedGatedMLP(WIDTH, 2 * WIDTH),
    "drop-in": fl.GELU,
    "spelled out": NewGELU,
    "trained": Trained,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "by hand, trained": lambda: ByHand(Trained()),
    "by hand": lambda: ByHand(NewGELU()),
    "container": lambda: fl.SublinearSequential(nn.Linear(WIDTH, WIDTH), NewGELU(), nn.Linear(WIDTH, WIDTH)),
    "inverted": lambda: fl.InvertibleSequential(fl.InvertibleLinear(WIDTH, WIDTH), fl.InvertibleLinear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("second", PARTS)
@pytest.mark.parametrize("first", PARTS)
def test_no_pair_of_parts_saves_more_after_fuse(first: str, second: str) -> None:
    x = torch.randn(64, WIDTH)
    model = nn.Sequential(PARTS[first](), PARTS[second](), nn.Linear(WIDTH, WIDTH))
    eager, before = copy.deepcopy(model), kept(model, x)
    fl.fuse(model)
    assert kept(model, x) <= before
    for ours, theirs in zip(gradients(model, x), gradients(eager, x), strict=True):
        torch.testing.assert_close(ours, theirs)
