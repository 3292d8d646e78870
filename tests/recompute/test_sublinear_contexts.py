"""Recomputation together with what surrounds it: selective saving, fused layers, other features of autograd and
PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recomputing import (
    Checkpointed,
    Counting,
    blocks,
    convolutions,
    every_mode,
    images,
    outcome,
    rows,
    same,
    saved_inside,
    twins,
)
from settings import compiles
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

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


def test_backward_passes_again_and_of_second_order() -> None:
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

    plain, net = twins(parts, segments=2)
    expected = all_of(plain)
    for found, reference in zip(all_of(net), expected, strict=True):
        # Where a graph is built, gradients are summed in another order: as exact as torch's own second run.
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    net.recompute = "cheap"
    with pytest.raises(RuntimeError, match="only allowed to backward once"):
        all_of(net)


def test_a_second_backward_pass_without_retain_graph_raises() -> None:
    for recompute in ("all", "cheap"):
        y = fl.SublinearSequential(*blocks(), segments=2, recompute=recompute)(rows()).sum()  # type: ignore[arg-type]
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()


FUSED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "dense": (lambda: [fl.FusedDenseAct(64, 64, a) for a in ("gelu", "mish", "relu", "silu")], (64, 64)),
    "mlp": (lambda: [nn.LayerNorm(64), fl.FusedMLP(64, 128), nn.LayerNorm(64), fl.FusedGatedMLP(64, 128)], (64, 64)),
    "convolution": (
        lambda: [fl.FusedConvAct2d(8, 8, 3, padding=1, activation="gelu") for _ in range(4)],
        (4, 8, 16, 16),
    ),
}


def test_reports_name_what_is_kept() -> None:
    net = fl.SublinearSequential(*convolutions(), segments=3, recompute="cheap")
    report = fl.memory_report(net, images())
    assert "checkpoint" in str(report) and "8 x 16 x 16 float32" in str(report)
    assert report.saved_bytes == pytest.approx(saved_bytes(net, images(), exclude=images()), rel=0.01)


# --- what may be switched on around it --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_func_and_tracers_see_plain_operations() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    plain, net = nn.Sequential(*parts), fl.SublinearSequential(*parts, segments=2)
    x = rows()

    def all_of(module: Any) -> list[Any]:
        values = {name: parameter.detach() * 2 for name, parameter in module.named_parameters()}
        loss = lambda values, x: torch.func.functional_call(module, values, (x,)).square().sum()
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


def test_inside_and_around_torchs_checkpoint() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    plain, net = nn.Sequential(*parts), fl.SublinearSequential(*parts, segments=2)
    x = rows()
    expected = outcome(plain, x)
    same(outcome(Checkpointed(net), x), expected)
    inside = fl.SublinearSequential(*(Checkpointed(part) for part in parts), segments=2)
    same(outcome(inside, x), expected)


class Failing(nn.Module):
    fails_in: str | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails_in == "forward" or (self.fails_in == "again" and self.calls > 1):
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
    failing.fails_in, failing.calls = where, 0
    with pytest.raises(KeyError, match="on purpose"):
        net(x).sum().backward()
    failing.fails_in = None
    assert all(a is b for a, b in zip(net.buffers(), buffers, strict=True))
    net.load_state_dict(plain.state_dict())
    same(outcome(net, x), outcome(plain, x))


@pytest.mark.parametrize("recompute", ["all", "cheap", None])
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_inside_are_planned_as_they_run(name: str, recompute: Any) -> None:
    """None: with half of the bytes as a budget."""
    make, shape = FUSED[name]
    parts, x = [*make(), *make()], torch.randn(*shape)
    plain, net = twins(parts, recompute=recompute)
    kept = saved_bytes(plain, x, exclude=[plain, x])
    if recompute is None:
        net.memory_budget_bytes = int(0.6 * kept)
    found, expected, reference = outcome(net, x), outcome(plain, x), outcome(copy.deepcopy(plain).double(), x.double())
    # What "cheap" saves may not be written over, so that plain operations run: as exact as torch's.
    for a, b, r in zip(found[:-1], expected[:-1], reference[:-1], strict=True):
        scale = r.abs().max().clamp_min(1e-30)
        assert torch.equal(a, b) or (a - r).abs().max() / scale <= 4 * (b - r).abs().max() / scale + 4e-7
    leaf = x.clone().requires_grad_()
    assert net.plan is not None and saved_inside(net, leaf) == pytest.approx(net.plan.saved_bytes, rel=0.02)
    assert net.plan.saved_bytes <= net.plan.eager_bytes


def test_a_module_that_a_function_can_reach_may_be_trained_meanwhile() -> None:
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
