"""Batch norm and its activation on Triton, from the norm's input, beside the reference, float64 and torch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import DEVICE, INTERPRETER_WARNINGS
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.backends import torch as reference
from fusedlayers.backends.operations import BatchNorm
from fusedlayers.call import with_operands
from fusedlayers.memory import saved_bytes
from fusedlayers.utils.bounded_cache import BoundedCache
from fusedlayers.utils.layout import other_dims

triton = pytest.importorskip("fusedlayers.backends.triton")
batch_norm = pytest.importorskip("fusedlayers.backends.triton.batch_norm")
elementwise = pytest.importorskip("fusedlayers.backends.triton.elementwise")
fallback = pytest.importorskip("fusedlayers.backends.triton.fallback")
OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources

pytestmark = [pytest.mark.usefixtures("interpreter_converts"), pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "images": ((3, 10, 7, 5), torch.contiguous_format),
    "channels last": ((3, 10, 7, 5), torch.channels_last),
    "more channels than a tile has": ((2, 300, 3, 2), torch.channels_last),
    "long rows": ((2, 3, 900), torch.contiguous_format),
    "vectors": ((33, 70), torch.contiguous_format),
    "one channel": ((4, 1, 6, 6), torch.contiguous_format),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _case(shape: str, dtype: torch.dtype) -> list[Tensor]:
    """x, dy; mean, scale, shift."""
    size, layout = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(size, generator=generator)
    x, dy = (torch.empty(size, dtype=dtype, memory_format=layout).copy_(randn(*size)) for _ in range(2))
    mean, scale = randn(size[1]) * 0.3, torch.rand(size[1], generator=generator) + 0.5
    return [t.to(DEVICE) for t in (x, dy, mean, scale, randn(size[1]).to(dtype))]


def _close(found: Tensor, truth: Tensor, dtype: torch.dtype, units: float) -> None:
    """Within so many units of the largest number."""
    assert found.shape == truth.shape
    limit = units * torch.finfo(dtype).eps * float(truth.abs().max())
    assert float((found.double() - truth.double()).abs().max()) <= limit


@pytest.fixture(autouse=True)
def no_launch_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for launches in ("_launches", "_gradient_launches"):  # another test's work was divided in another way
        monkeypatch.setattr(batch_norm, launches, BoundedCache(64))


@every_dtype
@every_shape
@pytest.mark.parametrize("steps", [False, True], ids=["one step", "several steps"])
def test_it_computes_what_the_reference_does(
    shape: str, dtype: torch.dtype, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps:
        monkeypatch.setattr(elementwise, "TILE", 64)
        monkeypatch.setattr(elementwise, "SUMMING_PROGRAMS", 3)
    x, dy, mean, scale, shift = _case(shape, dtype)
    activation = resolve("silu")
    passes = triton.input_passes(activation, dtype)
    y = passes.norm_act(x, mean, scale, shift)
    assert y.dtype is dtype and y.stride() == x.stride()
    wide = [t.double() for t in (x, mean, scale, shift)]
    _close(y, reference.norm_act(*wide, activation), dtype, 2)
    dz, total, product = passes.gradient(dy, x, mean, scale, shift)
    assert dz.dtype is dtype and dz.stride() == x.stride()
    expected, sums = reference.norm_gradient(dy.double(), *wide, activation)
    _close(dz, expected, dtype, 2)
    for found, truth in zip((total, product), sums, strict=True):
        assert found.dtype is torch.float32
        _close(found, truth, torch.float32, 4 * math.sqrt(x.numel() / x.shape[1]))
    factors = torch.randn(3, x.shape[1], generator=torch.Generator().manual_seed(1)).to(DEVICE).unbind()
    truth = reference.combine(dz.double(), x.double(), *(t.double() for t in factors))
    assert passes.combine(dz, x, *factors) is dz
    _close(dz, truth, dtype, 4)


@pytest.mark.parametrize("has_w", [True, False])
@every_dtype
def test_factors(dtype: torch.dtype, has_w: bool) -> None:
    channels, generator = 2 * batch_norm.CHANNELS + 3, torch.Generator().manual_seed(0)
    mean, w, total, product = torch.randn(4, channels, generator=generator).to(DEVICE).unbind()
    given = mean, torch.rand(channels, generator=generator).to(DEVICE) + 0.5, w.to(dtype) if has_w else None
    found = triton.input_passes(resolve("silu"), dtype).factors(*given, total, product, 77)
    truth = reference.norm_factors(*(None if t is None else t.double() for t in (*given, total, product)), 77)
    for ours, right in zip(found, truth, strict=True):
        _close(ours, right, torch.float32, 4)


@every_dtype
def test_statistics(dtype: torch.dtype) -> None:
    x, *_ = _case("channels last", dtype)
    x = x * 3 + 20
    norm, theirs = (nn.BatchNorm2d(10, device=DEVICE) for _ in range(2))
    operation = BatchNorm.of(norm, 4)
    mean, inverse_std = triton.input_passes(resolve("silu"), dtype).statistics(x, operation, 0.3)
    exact, dims = x.double(), other_dims(x, 1)
    _close(mean, exact.mean(dims), torch.float32, 4)
    _close(inverse_std, (exact.var(dims, correction=0) + norm.eps).rsqrt(), torch.float32, 64)
    theirs.momentum = 0.3
    theirs(x.float())
    torch.testing.assert_close(norm.running_mean, theirs.running_mean)
    torch.testing.assert_close(norm.running_var, theirs.running_var, rtol=1e-5, atol=1e-5)


class Eager(nn.Module):
    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        self.norm, self.activation = norm, resolve(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.plain(self.norm(x))


def _run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    found = torch.autograd.grad(y, [x, *module.parameters()], dy.to(y.dtype))
    return [y.detach(), *found, *(b for b in module.buffers() if b.is_floating_point())]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("silu", torch.bfloat16), ("relu", torch.bfloat16), ("gelu", torch.float16), ("hardswish", torch.float32)],
    ids=str,
)
def test_layers_are_as_good_as_torchs(
    name: str, dtype: torch.dtype, layout: torch.memory_format, training: bool, on_triton: Callable[[bool], None]
) -> None:
    on_triton(True)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24, device=DEVICE)
    with torch.no_grad():
        for t in (*norm.parameters(), norm.running_mean):
            t.normal_()
    layer = fl.FusedBatchNormAct2d.from_modules(copy.deepcopy(norm), name).train(training)
    eager = Eager(norm, name).train(training)
    x = (torch.randn(6, 24, 15, 13, device=DEVICE) * 2 + 0.5).to(dtype).contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    y = layer(x.detach().requires_grad_())
    assert type(y.grad_fn).__name__ == "NormActOfInputBackward"
    layer.load_state_dict(eager.norm.state_dict(), strict=False)
    truths = _run(copy.deepcopy(eager).double(), x.double(), dy.double())
    for ours, theirs, truth in zip(_run(layer, x, dy), _run(eager, x, dy), truths, strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        errors = [float((t.double() - truth).norm()) for t in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + 4 * torch.finfo(torch.float32).eps * float(truth.norm())


def test_the_input_alone_is_saved(on_triton: Callable[[bool], None]) -> None:
    on_triton(True)
    layer = fl.FusedBatchNormAct2d(24, "silu", device=DEVICE)
    x = torch.randn(6, 24, 15, 13, device=DEVICE).bfloat16().requires_grad_()
    assert saved_bytes(lambda x: layer(x * 1), x) == x.nbytes + 2 * 4 * 24


def test_what_has_no_passes() -> None:
    passes = triton.input_passes
    assert passes(resolve(None), torch.bfloat16) is None  # torch's kernels take as many passes
    traced, *_ = with_operands(resolve(nn.PReLU(3)), (2, 3, 4, 5), torch.float32)
    assert traced.operand_dims and passes(traced, torch.float32) is None
    assert passes(resolve("silu"), torch.float64) is None
    assert passes(resolve("silu"), torch.bfloat16) is not None


def test_what_cannot_be_launched_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        arg_names = ()

        def __getitem__(self, grid: object) -> Any:
            raise OutOfResources(9, 1, "registers")

    for kernel in ("norm_act_kernel", "norm_gradient_kernel", "norm_factors_kernel", "combine_kernel"):
        monkeypatch.setattr(batch_norm, kernel, Broken())
    monkeypatch.setattr(fallback, "_failed", set())
    x, dy, mean, scale, shift = _case("images", torch.float32)
    activation = resolve("silu")
    passes = triton.input_passes(activation, torch.float32)
    for _ in range(2):
        assert torch.equal(
            passes.norm_act(x, mean, scale, shift), reference.norm_act(x, mean, scale, shift, activation)
        )
        dz, *sums = passes.gradient(dy, x, mean, scale, shift)
        expected, truth = reference.norm_gradient(dy, x, mean, scale, shift, activation)
        assert torch.equal(dz, expected) and all(map(torch.equal, sums, truth))
        found = passes.factors(mean, scale, None, *sums, 35)
        assert all(map(torch.equal, found, reference.norm_factors(mean, scale, None, *sums, 35)))
        assert torch.equal(passes.combine(dz, x, *found[1:]), reference.combine(expected, x, *found[1:]))
    assert fallback.has_failed("norm_act", (x, activation))
