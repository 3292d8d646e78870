"""Batch norm and its activation on Triton, from the norm's input, beside the reference, float64 and torch."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import DEVICE, INTERPRETED, INTERPRETER_WARNINGS
from pairs import covering
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
norm_statistics = pytest.importorskip("fusedlayers.backends.triton.norm_statistics")
tiles = pytest.importorskip("fusedlayers.backends.triton.tiles")
fallback = pytest.importorskip("fusedlayers.backends.triton.fallback")
OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources

pytestmark = [pytest.mark.usefixtures("interpreter_converts"), pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)]
DTYPES = (torch.float32, torch.bfloat16)  # float16 among the layers
SHAPES = {
    "images": ((3, 10, 7, 5), torch.contiguous_format),
    "channels last": ((3, 10, 7, 5), torch.channels_last),
    "more channels than a tile has": ((2, 300, 3, 2), torch.channels_last),
    "several rows in one": ((4, 24, 8, 4), torch.channels_last),
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
    for module in (batch_norm, norm_statistics):  # another test's work was divided in another way
        monkeypatch.setattr(module, "_launches", BoundedCache(64))


@every_dtype
@every_shape
@pytest.mark.parametrize("steps", [False, True], ids=["one step", "several steps"])
def test_it_computes_what_the_reference_does(
    shape: str, dtype: torch.dtype, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps:
        monkeypatch.setattr(tiles, "TILE", 64)
        monkeypatch.setattr(tiles, "SUMMING_PROGRAMS", 3)
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


@pytest.mark.parametrize(
    ("name", "shape", "steps"), covering(["silu", "leaky_relu", "softplus"], SHAPES, (False, True)), ids=str
)
def test_from_outputs_it_computes_what_the_reference_does(
    name: str, shape: str, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if steps:
        monkeypatch.setattr(tiles, "TILE", 64)
        monkeypatch.setattr(tiles, "SUMMING_PROGRAMS", 3)
    x, dy, mean, scale, shift = _case(shape, torch.float32)
    activation = resolve(name)
    passes, error = triton.norm_passes(x, activation), 2e-3 if name == "silu" else 1e-5  # near SiLU's minimum
    expected = torch.empty_like(x)
    ends = reference.norm_act_between(x, (mean, scale, shift), expected, activation)
    y, found = passes.norm_act(x, mean, scale, shift)
    assert y.stride() == x.stride()
    torch.testing.assert_close(y, expected)
    for ours, truth in zip(found, (ends[0], -ends[1]), strict=True):
        torch.testing.assert_close(ours, truth)
    z = x.clone()
    version = z._version
    passes.act(z, z)
    assert z._version > version
    torch.testing.assert_close(z, reference.bias_act(x, None, activation, dim=1, encode=True, out=None))
    for overwrite in (False, True):
        given = y.clone()
        version = given._version
        dz, v, *sums = passes.gradient(dy, given, shift, overwrite)
        assert (v is given) is overwrite and (given._version > version) is overwrite
        again = torch.empty_like(y)
        truth, total = reference.norm_output_gradient(dy, y, shift, again, activation)
        torch.testing.assert_close(v, again, rtol=error, atol=error)
        torch.testing.assert_close(dz, truth, rtol=error, atol=error)
        for ours, right in zip(sums, total, strict=True):
            torch.testing.assert_close(ours, right, rtol=error, atol=error * math.sqrt(x.numel() / x.shape[1]))


@pytest.mark.parametrize("which", ["all", "some", "none"])
@pytest.mark.parametrize("has_w", [True, False])
@every_dtype
def test_factors(dtype: torch.dtype, has_w: bool, which: str) -> None:
    channels, generator = 2 * batch_norm.CHANNELS + 3, torch.Generator().manual_seed(0)
    mean, w, total, product = torch.randn(4, channels, generator=generator).to(DEVICE).unbind()
    inverse_std = torch.rand(channels, generator=generator).to(DEVICE) + 0.5
    b = torch.randn(channels, generator=generator).to(DEVICE).to(dtype) if has_w else None
    given = mean, inverse_std, (w + 3 * w.sign()).to(dtype) if has_w else None, b, total, product
    kept: Any = {"all": "all", "some": torch.tensor([0, 5, channels - 1], device=DEVICE), "none": None}[which]
    found = batch_norm.norm_factors(*given, kept, 77)
    truth = reference.norm_factors(*(None if t is None else t.double() for t in given), kept, 77)
    for ours, right in zip(found, truth, strict=True):
        _close(ours, right, torch.float32, 4)


@every_dtype
@every_shape
@pytest.mark.parametrize("steps", [False, True], ids=["one step", "several steps"])
def test_statistics(shape: str, dtype: torch.dtype, steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if steps:
        monkeypatch.setattr(tiles, "TILE", 64)
        monkeypatch.setattr(tiles, "SUMMING_PROGRAMS", 3)
        monkeypatch.setattr(norm_statistics, "PROGRAMS", 2)
    x, *_ = _case(shape, dtype)
    x = x * 3 + 200  # far from 0, where sums of squares would cancel
    channels, count = x.shape[1], x.numel() // x.shape[1]
    for running_dtype in (torch.float32, torch.bfloat16, None):
        running: list[Any] = [None, None]
        if running_dtype is not None:
            running = [torch.full((channels,), value, device=DEVICE, dtype=running_dtype) for value in (0.5, 2.0)]
        versions = [None if t is None else t._version for t in running]
        momentum = None if running_dtype is torch.bfloat16 else 0.3  # with None each call's part is another
        norm = BatchNorm(*running, None, True, momentum, 1e-5, dims=x.dim())
        mean, inverse_std = triton.input_passes(resolve("silu"), dtype).statistics(x, norm, 0.3)
        dims = other_dims(x, 1)
        exact_mean, exact_var = x.double().mean(dims), x.double().var(dims, correction=0)
        _close(mean, exact_mean, torch.float32, 4)
        _close(inverse_std, (exact_var + norm.eps).rsqrt(), torch.float32, 64)
        unbiased = exact_var * count / (count - 1)
        for found, old, own, version in zip(running, (0.5, 2.0), (exact_mean, unbiased), versions, strict=True):
            if found is not None:
                assert found._version == version
                # A number is rounded to eps times 200, of standard deviations of 3.
                _close(found, 0.7 * old + 0.3 * own, found.dtype, 64 if found.itemsize == 4 else 1)


def test_running_statistics_with_gaps() -> None:
    """Which the kernel does not write."""
    x, *_ = _case("images", torch.float32)
    running = [torch.zeros(2 * 10, device=DEVICE)[::2], torch.ones(10, device=DEVICE)]
    triton.input_passes(resolve("silu"), torch.float32).statistics(x, BatchNorm(*running, None, True, 0.1, 1e-5), 0.1)
    torch.testing.assert_close(running[0], 0.1 * x.mean(other_dims(x, 1)))
    torch.testing.assert_close(running[1], 0.9 + 0.1 * x.var(other_dims(x, 1)))


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
        # In evaluation eager's gradient of a channels-last x is contiguous on a GPU.
        assert ours.dtype is theirs.dtype and (ours.stride() == theirs.stride() or not (INTERPRETED or training))
        errors = [float((t.double() - truth).norm()) for t in (ours, theirs)]
        assert errors[0] <= 1.05 * errors[1] + 4 * torch.finfo(torch.float32).eps * float(truth.norm())


@pytest.mark.parametrize("name", ["silu", "leaky_relu"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_layers_that_save_outputs(name: str, layout: torch.memory_format, on_triton: Callable[[bool], None]) -> None:
    on_triton(True)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.weight[3] = 1e-4  # of this channel the input is kept
        norm.bias.normal_()
    norm.to(DEVICE)
    layer, eager = fl.FusedBatchNormAct2d.from_modules(copy.deepcopy(norm), name, save="output"), Eager(norm, name)
    x = torch.randn(6, 24, 15, 13).to(DEVICE).contiguous(memory_format=layout)
    dy = torch.randn_like(x)
    y = layer(x.detach().requires_grad_())
    assert type(y.grad_fn).__name__ == "NormActBackward"
    assert saved_bytes(layer, x.clone().requires_grad_()) < 1.2 * x.nbytes
    layer.load_state_dict(eager.norm.state_dict(), strict=False)
    for ours, theirs in zip(_run(layer, x, dy), _run(eager, x, dy), strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


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
    monkeypatch.setattr(norm_statistics, "statistics_kernel", Broken())
    monkeypatch.setattr(fallback, "_failed", set())
    x, dy, mean, scale, shift = _case("images", torch.float32)
    activation = resolve("silu")
    from_input, from_output = triton.input_passes(activation, torch.float32), triton.norm_passes(x, activation)
    for _ in range(2):
        y = from_input.norm_act(x, mean, scale, shift)
        assert torch.equal(y, reference.norm_act(x, mean, scale, shift, activation))
        dz, *sums = from_input.gradient(dy, x, mean, scale, shift)
        expected, truth = reference.norm_gradient(dy, x, mean, scale, shift, activation)
        assert torch.equal(dz, expected) and all(map(torch.equal, sums, truth))
        found = from_input.factors(mean, scale, None, *sums, 35)
        assert all(map(torch.equal, found, reference.norm_factors(mean, scale, None, None, *sums, "all", 35)))
        assert torch.equal(from_input.combine(dz, x, *found[1:]), reference.combine(expected, x, *found[1:]))
        y, (smallest, _) = from_output.norm_act(x, mean, scale, shift)
        torch.testing.assert_close(
            smallest,
            (torch.einsum("nchw,c->nchw", x - mean.view(-1, 1, 1), scale) + shift.view(-1, 1, 1)).amin((0, 2, 3)),
        )
        z, truth = torch.empty_like(y), torch.empty_like(y)
        dz, z, *_ = from_output.gradient(dy, y, shift, False)
        expected, _ = reference.norm_output_gradient(dy, y, shift, truth, activation)
        assert torch.equal(dz, expected) and torch.equal(z, truth)
        found_mean, _ = from_input.statistics(x, BatchNorm(None, None, None, True, 0.1, 1e-5), 0.1)
        torch.testing.assert_close(found_mean, x.mean(other_dims(x, 1)))
    assert fallback.has_failed("norm_act", (x, activation))
