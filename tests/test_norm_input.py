"""Batch norm and activation in one node that saves x: in 16 bits, and where outputs do not determine the input."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.backends import cpu
from fusedlayers.backends.cpu import build
from fusedlayers.memory import saved_bytes

pytestmark = pytest.mark.skipif(build.shared_object() is None, reason=str(build.missing_because()))

CHANNELS = 24
SHAPES = {2: (900, CHANNELS), 3: (30, CHANNELS, 37), 4: (6, CHANNELS, 15, 13), 5: (4, CHANNELS, 5, 6, 7)}
FUSED = {2: fl.FusedBatchNormAct1d, 3: fl.FusedBatchNormAct1d, 4: fl.FusedBatchNormAct2d, 5: fl.FusedBatchNormAct3d}
TORCHS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CASES = [
    *itertools.product(("silu", "gelu", "hardswish", "mish"), (torch.bfloat16, torch.float16)),
    *itertools.product(("hardswish", "relu", "tanh"), [torch.float32]),
]
every_case = pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
training_or_not = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Eager(nn.Module):
    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        self.norm, self.activation = norm, resolve(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.plain(self.norm(x))


def _pair(name: str, dims: int = 4, *, training: bool = True, **options: Any) -> tuple[Any, Eager]:
    norm = TORCHS[dims](CHANNELS, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 3.0)
    layer = FUSED[dims].from_modules(copy.deepcopy(norm), name)
    return layer.train(training), Eager(norm, name).train(training)


def _x(dims: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(SHAPES[dims]) * 2 + 0.5).to(dtype)


def _run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    assert isinstance(module, Eager) or type(y.grad_fn).__name__ == "NormActOfInputBackward"
    parameters = list(module.parameters())
    found = torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))
    return [y.detach(), *found, *(b for b in module.buffers() if b.is_floating_point())]


@training_or_not
@pytest.mark.parametrize("dims", SHAPES)
@every_case
def test_as_good_as_torch(name: str, dtype: torch.dtype, dims: int, training: bool) -> None:
    layer, eager = _pair(name, dims, training=training)
    x = _x(dims, dtype)
    if dims == 4 and name != "gelu":
        x = x.contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    truths = _run(copy.deepcopy(eager).double(), x.double(), dy.double())
    for ours, theirs, truth in zip(_run(layer, x, dy), _run(eager, x, dy), truths, strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        errors = [float((t.double() - truth).norm()) for t in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + 4 * torch.finfo(torch.float32).eps * float(truth.norm())


@every_case
def test_the_input_alone_is_saved(name: str, dtype: torch.dtype) -> None:
    layer, _ = _pair(name)
    x = _x(4, dtype).requires_grad_()
    statistics = 2 * 4 * CHANNELS  # in float32
    assert saved_bytes(lambda x: layer(x * 1), x) == x.nbytes + statistics


@training_or_not
@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3))[:-1], ids=str)
def test_what_is_frozen_gets_no_gradient(needs: tuple[bool, ...], training: bool) -> None:
    layer, eager = _pair("silu", training=training)
    x, results = _x(4, torch.bfloat16).requires_grad_(needs[0]), []
    dy = torch.randn_like(x)
    for module in (layer, eager):
        for parameter, need in zip(module.parameters(), needs[1:], strict=True):
            parameter.requires_grad_(need)
        x.grad = None
        module(x).backward(dy)
        assert [t.grad is not None for t in (x, *module.parameters())] == list(needs)
        results.append([t.grad for t in (x, *module.parameters()) if t.grad is not None])
    for ours, theirs in zip(*results, strict=True):
        assert reference.relative(ours, theirs) < 1e-2


def _first(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], create_graph=True))


def _second(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(sum(g.square().mean() for g in _first(module, x)), [x, *module.parameters()]))


def _batched(module: nn.Module, x: Tensor) -> list[Tensor]:
    dys = torch.linspace(-1, 1, 3 * x.numel(), dtype=x.dtype).view(3, *x.shape)
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], dys, is_grads_batched=True))


def _negative(module: nn.Module, x: Tensor) -> list[Tensor]:
    dy = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], torch._neg_view(dy)))


def _gaps(module: nn.Module, x: Tensor) -> list[Tensor]:
    wide = torch.stack([x, x], -1).detach().requires_grad_()
    return list(torch.autograd.grad(module(wide[..., 0]).square().sum(), [wide, *module.parameters()]))


def _expanded(module: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x).sum(), [x, *module.parameters()]))


@training_or_not
@pytest.mark.parametrize("how", [_first, _second, _batched, _negative, _gaps, _expanded])
def test_odd_gradients_are_torchs(how: Callable[[nn.Module, Tensor], list[Tensor]], training: bool) -> None:
    layer, eager = _pair("hardswish", training=training)
    x = _x(4, torch.float32).requires_grad_()
    results = [how(module, x) for module in (layer, eager)]
    for ours, theirs in zip(*results, strict=True):
        assert reference.relative(ours, theirs) < 1e-4


def _in_a_pool(t: Tensor) -> Tensor:
    pool = torch.full((*t.shape[:-1], t.shape[-1] + 8), math.nan, dtype=t.dtype)
    pool[..., : t.shape[-1]] = t
    return pool[..., : t.shape[-1]]


@pytest.mark.parametrize(
    ("unpack", "tolerance"),
    [(_in_a_pool, 1e-5), (lambda t: t.mT.contiguous().mT, 1e-5), (Tensor.half, 1e-2)],
    ids=["in a pool", "transposed", "half"],
)
def test_hooks_may_bring_the_input_back_in_another_layout_or_dtype(
    unpack: Callable[[Tensor], Tensor], tolerance: float
) -> None:
    layer, _ = _pair("hardswish")
    x, found = _x(4, torch.float32).requires_grad_(), []
    for bring_back in (lambda t: t, lambda t: unpack(t) if t.dim() == 4 else t):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), bring_back):
            y = layer(x)
        found.append(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        assert reference.relative(ours, theirs) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "bias"), [("selu", 6.0), ("leaky_relu", -6.0), ("silu", 0.0)])
def test_what_cancels_in_torch_cancels_here(name: str, bias: float, dtype: torch.dtype) -> None:
    """As the gradient of an average over pixels does, where the slope is the same for all."""
    layer, eager = _pair(name)
    for norm in (layer, eager.norm):
        nn.init.ones_(norm.weight)
        nn.init.constant_(norm.bias, bias)
    x = torch.randn(8, CHANNELS, 30, 30).to(dtype)
    dy = torch.full_like(x, 0.01)
    truth = _run(copy.deepcopy(eager).double(), x.double(), dy.double())[1]
    errors = [float((_run(module, x, dy)[1].double() - truth).norm()) for module in (layer, eager)]
    assert errors[0] <= 1.05 * errors[1] + 1e-5 * float(dy.double().norm())


@pytest.mark.parametrize("name", ["hardswish", "silu"])
def test_results_are_laid_out_as_torchs(name: str) -> None:
    layer, eager = _pair(name, 3)
    x = torch.randn(30, 37, CHANNELS).transpose(1, 2)
    for ours, theirs in zip(*(_first(module, x.detach().requires_grad_()) for module in (layer, eager)), strict=True):
        assert reference.relative(ours, theirs) < 1e-4
    assert layer(x.requires_grad_()).stride() == eager(x).stride()


@pytest.mark.parametrize(
    "layer", [fl.FusedBatchNormAct2d(CHANNELS, "relu"), fl.FusedBatchNormAct2d(CHANNELS), fl.SiLU()], ids=str
)
def test_a_trace_of_backward_sees_operations(layer: nn.Module) -> None:
    x = _x(4, torch.float32).requires_grad_()
    y = layer(x)
    dy = torch.randn_like(y)
    backward = lambda dy: torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    traced = make_fx(backward)(dy)
    assert reference.relative(traced(2 * dy), backward(2 * dy)) < 1e-4
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(layer(x), FakeTensor)


def test_the_input_must_not_be_edited() -> None:
    layer, _ = _pair("silu")
    x = _x(4, torch.bfloat16).requires_grad_() * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_values_that_are_no_numbers_are_torchs() -> None:
    layer, eager = _pair("silu")
    x = _x(4, torch.bfloat16)
    x[1, 2, 3, 4], x[2, 5, 1, 1] = math.nan, math.inf
    for ours, theirs in zip(*(_run(module, x, torch.ones_like(x)) for module in (layer, eager)), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_on_any_number_of_threads(dtype: torch.dtype, last: bool) -> None:
    x, dy = (torch.randn(3, 300, 41, 20).to(dtype) for _ in range(2))
    if last:
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    passes = cpu.input_passes(resolve("hardswish"), dtype)
    assert passes is not None
    factors, results, before = torch.randn(3, 300).unbind(), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*passes.moments(x), passes.norm_act(x, *factors), *passes.gradient(dy, x, *factors)])
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
    exact = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    for found, truth in zip(results[0][:2], reversed(exact), strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)
