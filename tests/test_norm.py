"""Batch norm and activation in one layer, against ``nn.BatchNormNd`` and the activation after it."""

import copy
import functools
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from gpu import DEVICE, INTERPRETER_WARNINGS
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import resolve, rows
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import batch_norm

Function = Callable[[Tensor], Tensor]

CHANNELS = 8
SHAPES = {
    "1d": (80, CHANNELS),
    "1d, length": (6, CHANNELS, 15),
    "2d": (4, CHANNELS, 5, 7),
    "3d": (3, CHANNELS, 4, 3, 5),
}
#: Of all calls with more than a few elements.
PLANE = SHAPES["2d"]
FUSED = {2: fl.FusedBatchNormAct1d, 3: fl.FusedBatchNormAct1d, 4: fl.FusedBatchNormAct2d, 5: fl.FusedBatchNormAct3d}
TORCHS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}

MONOTONE, FOLDED, NEEDS_INPUT = ("relu", "tanh", "elu"), ("silu", "gelu", "mish"), ("leaky_relu(-0.5)", "snake")


class Snake(nn.Module):
    """A user's module, with a parameter for each channel."""

    def __init__(self, dims: int = 4) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.linspace(0.5, 1.5, CHANNELS).view(-1, *(1,) * (dims - 2)))

    def forward(self, z: Tensor) -> Tensor:
        return z + torch.sin(self.alpha * z) ** 2 / self.alpha


def _wave(z: Tensor) -> Tensor:
    return z * torch.sin(z)


#: What is not in the table or has arguments; made for so many dimensions.
MAKERS: dict[str, Callable[[int], Any]] = {
    "leaky_relu(-0.5)": lambda dims: nn.LeakyReLU(-0.5),
    "snake": Snake,
    "prelu": lambda dims: nn.PReLU(CHANNELS, 0.1),
    "prelu, one": lambda dims: nn.PReLU(),
    "function": lambda dims: _wave,
    "partial": lambda dims: functools.partial(F.elu, alpha=0.5),
    "softmax": lambda dims: nn.Softmax(dim=1),
    "dropout": lambda dims: nn.Dropout(0.5),
    "None": lambda dims: None,
}


def make(name: str, dims: int = 4) -> Any:
    return MAKERS[name](dims) if name in MAKERS else name


EVERY_NAME = [*(row.name for row in rows()), *MAKERS]
every_name = pytest.mark.parametrize("name", EVERY_NAME)
some_names = pytest.mark.parametrize("name", ["relu", "elu", "silu", "gelu", "snake", "prelu", "function", "None"])
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_float = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_save = pytest.mark.parametrize("save", ["auto", "output", "input", "recompute"])
residual_or_not = pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
training_or_not = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")

CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
#: What saving the output costs a folded derivative in float32.
FOLDED_CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-3}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of every size are had from the output where that tells them, as large ones are."""
    monkeypatch.setattr(batch_norm, "WORTH_IT", 1)


class Eager(nn.Module):
    """What the layer replaces."""

    def __init__(self, norm: Any, activation: Any) -> None:
        super().__init__()
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        z = self.norm(x)
        return resolve(self.activation).plain(z if residual is None else z + residual)


def _pair(activation: Any, dims: int = 4, *, save: str = "auto", **options: Any) -> tuple[Any, Eager]:
    """A layer, and torch's with values of its own and the same; gamma has both signs and a zero."""
    norm = TORCHS[dims](CHANNELS, **options)
    for tensor in norm.parameters():
        nn.init.normal_(tensor)
    if norm.affine:
        with torch.no_grad():
            norm.weight[1], norm.weight[2] = 0.0, -1.5
    if norm.running_mean is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    eager = Eager(norm, activation)
    theirs = copy.deepcopy(eager)
    return FUSED[dims].from_modules(norm, activation, save=save), theirs


def _run(layer: nn.Module, *tensors: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    """The output, all gradients and all buffers."""
    leaves = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    layer.zero_grad()
    y = layer(*leaves)
    found = {"y": y.detach().clone()}
    y.backward(dy.to(y.dtype))
    named = dict(zip(("input", "residual"), leaves, strict=False))
    params = {name.replace("norm.", ""): p for name, p in layer.named_parameters()}
    for name, tensor in {**named, **params}.items():
        if tensor is not None and tensor.grad is not None:
            found[f"d {name}"] = tensor.grad
    found.update({name.replace("norm.", ""): b.clone() for name, b in layer.named_buffers()})
    return found


def _doubled(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)


def _assert_as_good_as_torch(
    layer: Any, eager: Eager, draw: Callable[[], Tensor], *, with_residual: bool = True
) -> None:
    """Over several draws in 16 bits, and by the mean error alone: the gradients of parameters are few numbers, the
    largest error of which is luck."""
    pooled: dict[str, list[list[Tensor]]] = {}
    for _ in range(16 if draw().dtype.itemsize == 2 else 1):
        for own, torchs in zip(layer.buffers(), eager.buffers(), strict=True):
            own.copy_(torchs)  # the truth is what follows from these
        x, residual = draw(), draw() if with_residual else None
        dy = torch.randn(x.shape).to(x.dtype).double()
        exact = _run(copy.deepcopy(eager).double(), _doubled(x), _doubled(residual), dy=dy)
        results = _run(layer, x, residual, dy=dy), _run(eager, x, residual, dy=dy), exact
        assert set(results[0]) == set(results[1])
        for name in results[0]:
            pooled.setdefault(name, []).append([result[name].flatten() for result in results])
    for name, found in pooled.items():
        ours, theirs, truth = (torch.cat(parts) for parts in zip(*found, strict=True))
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        if len(truth) < 1000:
            errors = [float((value.double() - truth).norm()) for value in (ours, theirs)]
            assert errors[0] <= 2 * errors[1] + 1e-6 * float(truth.norm()), name
        else:
            reference.assert_as_good_as_torch(ours, theirs, truth)


def _assert_close(layer: Any, eager: Eager, *tensors: Tensor | None, dy: Tensor | None = None, **close: float) -> None:
    """To torch; not-a-number and infinities where torch has them."""
    (x, *_) = (t for t in tensors if t is not None)
    dy = torch.randn_like(x) if dy is None else dy
    theirs, ours = _run(eager, *tensors, dy=dy), _run(layer, *tensors, dy=dy)
    assert set(ours) == set(theirs)
    torch.testing.assert_close(ours, theirs, equal_nan=True, **(close or CLOSE))


def _x(shape: tuple[int, ...] = PLANE, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 2 + 0.5).to(dtype).requires_grad_()


# --- values, gradients and statistics ---------------------------------------------------------------------------------


@every_name
@residual_or_not
@training_or_not
def test_it_computes_batch_norm_then_activation(name: str, with_residual: bool, training: bool) -> None:
    layer, eager = _pair(make(name))
    layer.train(training), eager.train(training)
    x, residual = _x(), _x() if with_residual else None
    dy = torch.randn_like(x)
    results = []
    for module in (layer, eager):
        torch.manual_seed(1)  # for dropout
        results.append(_run(module, x, residual, dy=dy))
    torch.testing.assert_close(*results, **FOLDED_CLOSE)


@every_shape
@pytest.mark.parametrize("name", [*MONOTONE, *FOLDED, *NEEDS_INPUT, "prelu"])
def test_every_dimension_is_as_good_as_torch(name: str, shape: tuple[int, ...]) -> None:
    layer, eager = _pair(make(name, len(shape)), len(shape), save="auto" if name not in FOLDED else "recompute")
    _assert_as_good_as_torch(layer, eager, lambda: _x(shape))


@every_float
@training_or_not
@pytest.mark.parametrize("name", ["relu", "elu", "silu", "snake", "prelu", "function"])
def test_every_dtype_is_as_good_as_torch(name: str, training: bool, dtype: torch.dtype) -> None:
    save = "recompute" if name == "silu" else "auto"
    layer, eager = _pair(make(name), save=save, dtype=dtype)
    layer.to(dtype).train(training), eager.to(dtype).train(training)
    _assert_as_good_as_torch(layer, eager, lambda: _x(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@training_or_not
@pytest.mark.parametrize("name", ["relu", "silu", "elu", "function"])
def test_sixteen_bits_with_parameters_of_float32_are_as_good_as_torch(
    name: str, training: bool, dtype: torch.dtype
) -> None:
    layer, eager = _pair(make(name), save="recompute" if name == "silu" else "auto")
    layer.train(training), eager.train(training)
    _assert_as_good_as_torch(layer, eager, lambda: _x(dtype=dtype))
    assert layer.weight.dtype is layer.running_mean.dtype is torch.float32


@pytest.mark.parametrize("name", FOLDED)
@residual_or_not
def test_a_folded_derivative_that_is_had_from_the_output_is_close(name: str, with_residual: bool) -> None:
    layer, eager = _pair(name)
    _assert_close(layer, eager, _x(), _x() if with_residual else None, **FOLDED_CLOSE)


@every_save
@every_shape
@residual_or_not
@pytest.mark.parametrize("name", ["relu", "silu", "None"])
def test_every_save_computes_the_same(name: str, shape: tuple[int, ...], save: str, with_residual: bool) -> None:
    layer, eager = _pair(make(name), len(shape), save=save)
    residual = _x(shape) if with_residual else None
    _assert_close(layer, eager, _x(shape), residual, **(FOLDED_CLOSE if save in ("auto", "output") else CLOSE))


@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
@residual_or_not
@training_or_not
@pytest.mark.parametrize("shape", [(7,), (5, 1), (1,), (1, CHANNELS, 1, 1), (4, 1, 1, 1), (CHANNELS, 1, 7)], ids=str)
def test_parameters_of_users_may_run_along_any_dimension(
    shape: tuple[int, ...], training: bool, with_residual: bool, save: str
) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.rand(shape) + 0.5)

        def forward(self, z: Tensor) -> Tensor:
            return z * torch.tanh(self.alpha * z)

    layer, eager = _pair(Gate(), save=save)
    layer.train(training), eager.train(training)
    _assert_close(layer, eager, _x(), _x() if with_residual else None)


@pytest.mark.parametrize("save", ["input", "recompute"])
@pytest.mark.parametrize("name", ["snake", "prelu", "prelu, one", "function"])
def test_every_save_serves_functions_of_users(name: str, save: str) -> None:
    layer, eager = _pair(make(name), save=save)
    _assert_close(layer, eager, _x(), _x())


@some_names
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"eps": 0.1},
    ],
    ids=str,
)
def test_hyperparameters_mean_what_they_do_in_torch(name: str, options: dict[str, Any]) -> None:
    layer, eager = _pair(make(name), save="auto" if name in MAKERS else "recompute", **options)
    for training in (True, True, False, True):
        layer.train(training), eager.train(training)
        _assert_close(layer, eager, _x(), _x())
    assert layer.training and (layer.num_batches_tracked is None) == (not eager.norm.track_running_stats)


@every_shape
def test_batches_are_counted_and_averaged_as_by_torch(shape: tuple[int, ...]) -> None:
    layer, eager = _pair("relu", len(shape), momentum=None)
    layer.reset_running_stats(), eager.norm.reset_running_stats()
    batches = [scale * _x(shape).detach() for scale in (1, 2, 3)]
    for x in batches:
        layer(x), eager(x)
    assert int(layer.num_batches_tracked) == 3
    average = torch.stack([x.transpose(0, 1).flatten(1).mean(1) for x in batches]).mean(0)
    torch.testing.assert_close(layer.running_mean, average)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()))


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_tracking_may_be_switched_off_later(small: bool) -> None:
    layer, eager = _pair("elu")
    for module in (layer, eager.norm):
        module.track_running_stats = False
    x = _x((2, CHANNELS, 2, 2) if small else PLANE)
    _assert_close(layer, eager, x)
    layer.eval(), eager.eval()  # by the running statistics, which are there
    _assert_close(layer, eager, x)


def test_a_buffer_that_counts_may_be_missing() -> None:
    layer, eager = _pair("elu", momentum=None)
    layer.num_batches_tracked = eager.norm.num_batches_tracked = None
    _assert_close(layer, eager, _x())


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight bias", "weight bias input", "all but alpha"])
@training_or_not
@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
@pytest.mark.parametrize("name", ["relu", "silu", "snake"])
def test_what_is_frozen_gets_no_gradient(name: str, save: str, training: bool, frozen: str) -> None:
    layer, eager = _pair(make(name), save=save)
    frozen = "weight bias input" if frozen == "all but alpha" and name == "snake" else frozen
    layer.train(training), eager.train(training)
    for norm in (layer, eager.norm):
        norm.weight.requires_grad_("weight" not in frozen)
        norm.bias.requires_grad_("bias" not in frozen)
    x = _x().detach().requires_grad_("input" not in frozen)
    residual = None if name == "snake" else _x()
    _assert_close(layer, eager, x, residual, **FOLDED_CLOSE)
    assert (layer.weight.grad is None) == ("weight" in frozen)


# --- memory formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@some_names
@pytest.mark.parametrize(
    ("shape", "memory_format"), [(SHAPES["2d"], "channels_last"), (SHAPES["3d"], "channels_last_3d")]
)
def test_channels_last_formats_are_kept(name: str, shape: tuple[int, ...], memory_format: str, training: bool) -> None:
    layout = getattr(torch, memory_format)
    layer, eager = _pair(make(name, len(shape)), len(shape), save="auto" if name in MAKERS else "recompute")
    layer.train(training), eager.train(training)
    x, residual = (_x(shape).detach().contiguous(memory_format=layout).requires_grad_() for _ in range(2))
    y = layer(x, residual)
    assert y.is_contiguous(memory_format=layout)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert dx.is_contiguous(memory_format=layout)
    eager(x, residual)
    _assert_close(layer, eager, x, residual, dy=torch.randn_like(x))


@pytest.mark.parametrize("name", ["relu", "silu", "snake"])
def test_unusual_strides_give_what_torch_gives(name: str) -> None:
    layer, eager = _pair(make(name), save="recompute")
    batch, channels, height, width = PLANE
    bases = {
        "transposed": torch.randn(batch, channels, width, height).transpose(2, 3),
        "sliced": torch.randn(batch, 2 * channels, height, 2 * width)[:, ::2, :, ::2],
        "expanded": torch.randn(1, channels, height, width).expand(PLANE),
        "turned": torch.randn(channels, batch, height, width).transpose(0, 1),
    }
    for one, other in itertools.product(bases.values(), [None, *bases.values()]):
        dy = torch.randn(PLANE)
        results = []
        for module in (layer, eager):
            x = one.detach().requires_grad_()
            y = module(x, other)
            params = [x, *module.parameters()]
            results.append([y, *torch.autograd.grad(y, params, dy.expand_as(y))])
        torch.testing.assert_close(*results, **CLOSE)


def test_the_residual_may_have_another_format_than_the_input() -> None:
    layer, eager = _pair("elu")
    x, residual = _x(), _x().detach().contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x, residual), eager(x, residual))
    torch.testing.assert_close(layer(residual, x), eager(residual, x))


def test_the_residual_may_be_the_input() -> None:
    for name in ("relu", "silu", "function"):
        layer, eager = _pair(make(name), save="recompute")
        results = []
        x = _x()
        for module in (layer, eager):
            y = module(x, x)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# --- odd numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "elu", "tanh", "silu", "snake", "function"])
@residual_or_not
@training_or_not
def test_where_gamma_is_zero_or_negative(name: str, training: bool, with_residual: bool) -> None:
    for gamma in (0.0, -1.0, 1e-30, -1e-8):
        layer, eager = _pair(make(name), save="recompute" if name == "silu" else "auto")
        layer.train(training), eager.train(training)
        for norm in (layer, eager.norm):
            nn.init.constant_(norm.weight, gamma)
        _assert_as_good_as_torch(layer, eager, _x, with_residual=with_residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["relu", "elu", "silu", "snake", "function"])
def test_channels_without_variance(name: str, dtype: torch.dtype) -> None:
    layer, eager = _pair(make(name), save="recompute" if name in ("elu", "silu") else "auto")
    layer.to(dtype), eager.to(dtype)

    def draw() -> Tensor:
        x = _x(dtype=dtype).detach()
        x[:, :3] = 0.75
        x[:, 3] = 0.0
        return x.requires_grad_()

    _assert_as_good_as_torch(layer, eager, draw, with_residual=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["elu", "silu", "snake", "function"])
@pytest.mark.parametrize(("mean", "std"), [(100.0, 1.0), (1000.0, 0.1), (0.0, 1e-4), (-3e4, 10.0), (0.0, 1e3)])
def test_means_and_variances_of_every_size(name: str, dtype: torch.dtype, mean: float, std: float) -> None:
    layer, eager = _pair(make(name), save="recompute" if name == "silu" else "auto")

    def draw() -> Tensor:
        return (mean + std * torch.randn(PLANE)).to(dtype).requires_grad_()

    _assert_as_good_as_torch(layer, eager, draw, with_residual=False)


@pytest.mark.parametrize("eps", [1e-44, 1e-30, 1e-12, 1e3, 1e30])
def test_an_eps_of_every_size(eps: float) -> None:
    layer, eager = _pair(_wave, save="recompute", eps=eps)
    x = _x().detach()
    x[:, 3] = 0.5
    x[:, 4] *= 1e-6
    _assert_close(layer, eager, x.requires_grad_(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["relu", "elu", "silu", "snake", "prelu", "function", "None"])
@training_or_not
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_not_a_number_and_infinities_go_where_torchs_go(name: str, training: bool, value: float) -> None:
    layer, eager = _pair(make(name), save="auto" if name in MAKERS else "recompute")
    layer.train(training), eager.train(training)
    x, residual = _x().detach(), _x().detach()
    x[1, 2, 3, 4] = value
    residual[0, 0, 0, 0] = value
    _assert_close(layer, eager, x.requires_grad_(), residual.requires_grad_())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_so_do_those_of_parameters_and_running_statistics(value: float) -> None:
    for name, where in itertools.product(("relu", "elu", "snake"), ("weight", "bias", "running_mean", "running_var")):
        if name != "snake" and where == "weight" and math.isinf(value):
            continue  # (x - mean) inf + b is infinite, and torch's x inf + (b - mean inf) is no number
        layer, eager = _pair(make(name))
        for norm in (layer, eager.norm):
            with torch.no_grad():
                getattr(norm, where)[4] = value
        for training in (True, False):
            layer.train(training), eager.train(training)
            _assert_close(layer, eager, _x())


@every_save
@pytest.mark.parametrize("name", ["relu", "silu"])
@training_or_not
def test_an_empty_batch_is_torchs(name: str, training: bool, save: str) -> None:
    for shape in SHAPES.values():
        layer, eager = _pair(name, len(shape), save=save)
        layer.train(training), eager.train(training)
        _assert_close(layer, eager, _x((0, *shape[1:])), _x((0, *shape[1:])))


@pytest.mark.parametrize("save", ["auto", "recompute"])
def test_a_batch_of_one_has_a_variance_over_its_pixels(save: str) -> None:
    for shape in ((1, CHANNELS, 40), (1, CHANNELS, 1, 2), (1, CHANNELS, 8, 8), (1, CHANNELS, 3, 4, 5)):
        layer, eager = _pair("elu", len(shape), save=save)
        _assert_close(layer, eager, _x(shape), _x(shape))


@every_save
@pytest.mark.parametrize("shape", [(1, 300), (1, 300, 1), (1, 300, 1, 1), (1, 300, 1, 1, 1)], ids=str)
def test_one_value_per_channel_has_none(shape: tuple[int, ...], save: str) -> None:
    layer = FUSED[len(shape)](300, "relu", save=save)
    with pytest.raises(ValueError, match=rf"{type(layer).__name__}: one value per channel has no variance, got \(1, "):
        layer(_x(shape))
    assert int(layer.num_batches_tracked) == 0 and not layer.running_mean.any()
    assert torch.equal(layer.eval()(_x(shape)) >= 0, torch.ones(shape, dtype=torch.bool))
    untracked = FUSED[len(shape)](300, "relu", track_running_stats=False).eval()
    with pytest.raises(ValueError, match="one value per channel has no variance"):
        untracked(_x(shape))


@pytest.mark.parametrize("eps", [0.0, -1e-5])
def test_eps_must_be_positive_as_for_torch(eps: float) -> None:
    layer, eager = _pair("relu", eps=eps)
    with pytest.raises(ValueError, match="FusedBatchNormAct2d: eps must be positive, got"):
        layer(_x())
    assert int(layer.num_batches_tracked) == 0
    layer.eval(), eager.eval()
    if eps < 0:
        with pytest.raises(ValueError, match="eps must be positive"):
            layer(_x())
        return
    norm = eager.norm
    own = norm.weight, norm.bias, norm.running_mean, norm.running_var
    # Not by nn.BatchNorm2d, which in torch 2.11 refuses 0 here, too.
    norm.forward = lambda x: torch.batch_norm(x, *own, False, 0.1, eps, False)
    _assert_close(layer, eager, _x())


# --- second derivatives, second passes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tanh", "elu", "silu", "gelu", "snake", "function"])
@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
@training_or_not
def test_first_and_second_derivatives(name: str, training: bool, save: str) -> None:
    layers = [module.train(training) for module in _pair(make(name), save=save)]
    x, residual = (torch.randn(2, CHANNELS, 4, 5, requires_grad=True) for _ in range(2))

    def call(layer: nn.Module, x: Tensor, residual: Tensor, *values: Tensor) -> Tensor:
        buffers = {n: b.to(x.dtype, copy=True) for n, b in layer.named_buffers()}
        return functional_call(
            layer, {**dict(zip(dict(layer.named_parameters()), values, strict=True)), **buffers}, (x, residual)
        )

    tensors = (x, residual, *layers[0].parameters())
    assert [p.shape for p in layers[0].parameters()] == [p.shape for p in layers[1].parameters()]
    reference.check_orders(*(functools.partial(call, layer) for layer in layers), tensors, 1e-4)


@pytest.mark.parametrize("name", ["elu", "silu", "snake"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@training_or_not
def test_a_gradient_penalty_is_torchs(name: str, training: bool, dtype: torch.dtype) -> None:
    layer, eager = _pair(make(name))
    layer.train(training), eager.train(training)
    x = _x(dtype=dtype)
    results = []
    for module in (layer, eager):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        results.append(list(torch.autograd.grad(dx.square().sum(), [x, *module.parameters()], allow_unused=True)))
    close = {"rtol": 1e-3, "atol": 1e-2} if dtype is torch.float32 else {"rtol": 0.1, "atol": 1.0}
    torch.testing.assert_close(*results, **close)


@pytest.mark.parametrize("name", ["relu", "silu", "snake", "function"])
def test_a_layer_may_be_called_several_times_before_backward(name: str) -> None:
    # As a discriminator is, and by its own result.
    layer, eager = _pair(make(name), save="recompute")
    real, fake, results = _x(), _x(), []
    for module in (layer, eager):
        y = module(real)
        loss = y.square().sum() + module(fake).sum() + module(y).square().sum()
        results.append(torch.autograd.grad(loss, [real, fake, *module.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()))


@pytest.mark.parametrize("name", ["snake", "function", "prelu"])
def test_a_result_that_is_not_kept_may_be_overwritten(name: str) -> None:
    layer, eager = _pair(make(name))
    results, x, dy = [], _x(), torch.randn(PLANE)
    for module in (layer, eager):
        y = module(x).add_(1.0)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    torch.testing.assert_close(*results, **CLOSE)


@some_names
@pytest.mark.parametrize("started", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("backward_in", [True, False], ids=["training", "eval"])
def test_the_mode_may_change_between_forward_and_backward(name: str, started: bool, backward_in: bool) -> None:
    layer, eager = _pair(make(name), save="auto" if name in MAKERS else "recompute")
    results = []
    x, dy = _x(), torch.randn(PLANE)
    for module in (layer, eager):
        y = module.train(started)(x)
        module.train(backward_in)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("name", ["snake", "function", "silu"])
@training_or_not
def test_running_statistics_may_move_on_between_forward_and_backward(name: str, training: bool) -> None:
    # Other batches come in; torch's own batch norm notices nothing of that, and is asked for nothing here.
    layer, eager = _pair(make(name), save="recompute")
    for norm in (layer, eager.norm):
        norm.weight.requires_grad_(False)
        norm.bias.requires_grad_(False)
    residual, results = _x(), []
    x, dy = _x().detach(), torch.randn(PLANE)
    for module in (layer, eager):
        torch.manual_seed(1)
        y = module.train(training)(x, residual)
        module.train()(10 * _x())
        trainable = [residual, *(p for p in module.parameters() if p.requires_grad)]
        results.append([y, *torch.autograd.grad(y, trainable, dy)])
    torch.testing.assert_close(*results, **CLOSE)


def test_running_statistics_that_are_edited_in_eval_mode_raise_as_in_torch() -> None:
    for module in _pair(make("snake")):  # where torch computes the norm
        y = module.eval()(_x())
        norm = getattr(module, "norm", module)
        norm.running_mean.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("name", ["relu", "silu", "snake"])
def test_in_training_they_may_be_read_and_loaded(name: str) -> None:
    # As by an exponential moving average of the whole model, or by a checkpoint.
    layer, eager = _pair(make(name), save="recompute")
    x, dy, results = _x(), torch.randn(PLANE), []
    for module in (layer, eager):
        y = module(x)
        norm = getattr(module, "norm", module)
        norm.running_mean, norm.running_var = torch.zeros(CHANNELS), torch.ones(CHANNELS)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("which", ["weight", "bias", "input", "residual", "alpha"])
def test_what_was_saved_must_not_be_edited(which: str) -> None:
    layer, _ = _pair(Snake())
    x, residual = (_x() * 1 for _ in range(2))
    y = layer(x, residual)
    edited = {"weight": layer.weight, "bias": layer.bias, "input": x, "residual": residual}
    with torch.no_grad():
        edited.get(which, layer.activation.alpha).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- saved bytes ------------------------------------------------------------------------------------------------------


def _network(activation: Any, fused: bool, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    norm: list[nn.Module] = [fl.FusedBatchNormAct2d(CHANNELS, activation)]
    if not fused:
        norm = [nn.BatchNorm2d(CHANNELS), activation]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3), *norm, nn.Conv2d(CHANNELS, 3, 3)).to(dtype)


#: The statistics of the batch, or what stands for them in torch's backward.
STATISTICS = 8 * CHANNELS * 4


def _buffers(network: nn.Sequential, dtype: torch.dtype = torch.float32) -> float:
    """How many buffers of the hidden size are kept."""
    images = torch.randn(2, 3, 18, 18, dtype=dtype)
    hidden = 2 * CHANNELS * 16 * 16 * dtype.itemsize
    kept = saved_bytes(network, images, exclude=[images, *network.buffers()])
    return (kept // hidden) + (0 if kept % hidden <= STATISTICS else 0.5)


@training_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("make_activation", "ours", "eagers"),
    [
        (nn.ReLU, 2, 2),
        (nn.ELU, 1, 3),
        (lambda: nn.LeakyReLU(inplace=True), 1, 2),
        (nn.SiLU, 1, 3),
        (nn.GELU, 1, 3),
        (lambda: nn.PReLU(CHANNELS), 2, 3),
        (lambda: nn.PReLU(), 2, 3),
        (Snake, 2, 4),
        (lambda: fl_module(_wave), 2, 4),
    ],
    ids=["relu", "elu", "leaky_relu", "silu", "gelu", "prelu", "prelu, one", "snake", "function"],
)
def test_one_buffer_where_the_output_tells_the_input_and_two_elsewhere(
    make_activation: Callable[[], Any], ours: int, eagers: int, dtype: torch.dtype, training: bool
) -> None:
    # On CPUs the statistics have the 16 bits of the parameters here, and say too little.
    ours = ours if dtype is torch.float32 else 2
    assert _buffers(_network(make_activation(), True, dtype).train(training), dtype) == ours
    eager = _buffers(_network(make_activation(), False, dtype).train(training), dtype)
    assert eager >= eagers or (eagers == 3 and eager == 2 and isinstance(make_activation(), nn.ELU))


def test_an_activation_whose_output_is_refused_tells_no_input() -> None:
    layer, eager = _pair(nn.CELU(-1.0))
    x = torch.randn(8, CHANNELS, 32, 32, requires_grad=True)
    assert x.numel() >= batch_norm.WORTH_IT and fl.plan_of(layer, x)[0].path == "fused"
    dy = torch.randn_like(x)
    got, expected = (torch.autograd.grad(module(x), x, dy)[0] for module in (layer, eager))
    torch.testing.assert_close(got, expected)


@training_or_not
def test_two_buffers_of_what_is_small(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for activation in (nn.ReLU, nn.ELU, nn.SiLU, Snake):
        assert _buffers(_network(activation(), True).train(training)) == 2


def fl_module(function: Function) -> nn.Module:
    class Module(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return function(z)

    return Module()


@training_or_not
@pytest.mark.parametrize("name", ["relu", "silu", "snake", "function"])
def test_a_residual_costs_nothing_that_is_not_kept_anyway(name: str, training: bool) -> None:
    layer, _ = _pair(make(name))
    layer.train(training)
    after = nn.Conv2d(CHANNELS, 3, 1)
    x, residual = _x((2, CHANNELS, 16, 16)), _x((2, CHANNELS, 16, 16))
    kept = saved_bytes(lambda: after(layer(x * 1, residual * 1)), exclude=list(layer.buffers()))
    # x, y, and, where z is computed again, the residual, which the layers that made it keep in a residual network.
    buffers = 2 if name in ("relu", "silu") else 3
    assert kept // (4 * x.numel()) == buffers


@pytest.mark.parametrize(("save", "buffers"), [("auto", 1), ("output", 1), ("recompute", 2), ("input", 3)])
def test_each_save_keeps_what_it_says(save: str, buffers: int) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3), fl.FusedBatchNormAct2d(CHANNELS, "silu", save=save), nn.Conv2d(CHANNELS, 3, 3)
    )
    assert _buffers(network) == buffers


def test_nothing_is_kept_without_gradients() -> None:
    for name in ("relu", "silu", "snake"):
        layer, eager = _pair(make(name))
        for training in (True, False):
            layer.train(training), eager.train(training)
            x, residual = _x(), _x()
            before = x.detach().clone(), residual.detach().clone()
            with torch.no_grad():
                assert saved_bytes(lambda: layer(x, residual)) == 0  # noqa: B023  # called at once
                eager(x, residual)
                y = layer(x, residual)
                torch.testing.assert_close(y, eager(x, residual), **CLOSE)
            assert not y.requires_grad and torch.equal(x, before[0]) and torch.equal(residual, before[1])
        torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()))
        with torch.inference_mode():
            torch.testing.assert_close(layer(x), eager(x), **CLOSE)


# --- contexts ---------------------------------------------------------------------------------------------------------


@some_names
@residual_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@training_or_not
def test_autocast_leaves_batch_norm_its_dtype(
    name: str, training: bool, dtype: torch.dtype, with_residual: bool
) -> None:
    layer, eager = _pair(make(name), save="auto" if name in MAKERS else "recompute")
    layer.train(training), eager.train(training)
    x, residual = _x(dtype=dtype), _x(dtype=dtype) if with_residual else None
    dy = torch.randn_like(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, eagers = layer(x, residual), eager(x, residual)
    if name == "prelu" or (name == "snake" and dtype is torch.bfloat16):
        # torch's autocast has 16 bits for the operator, and what else reads parameters of float32 becomes float32. The
        # layer keeps to the dtype of what comes in.
        assert y.dtype is dtype
    else:
        assert y.dtype is eagers.dtype is dtype
    close = CLOSE if dtype is torch.float32 and name != "prelu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(y, eagers, check_dtype=False, **close)
    grads = [torch.autograd.grad(v, x, dy.to(v.dtype))[0] for v in (y, eagers)]
    torch.testing.assert_close(*grads, **({"rtol": 5e-2, "atol": 5e-2} if close is not CLOSE else CLOSE))


def test_under_autocast_a_residual_of_another_dtype_decides_on_the_sums() -> None:
    layer, eager = _pair("silu")
    with torch.autocast("cpu", torch.bfloat16):
        x = _x(dtype=torch.bfloat16)
        y, eagers = layer(x, _x()), eager(x, _x())
    assert y.dtype is eagers.dtype is torch.float32


@pytest.mark.parametrize("name", ["relu", "silu", "snake"])
def test_under_autocast_a_convolution_before_it_gives_two_buffers_of_sixteen_bits(name: str) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3), fl.FusedBatchNormAct2d(CHANNELS, make(name)), nn.Conv2d(CHANNELS, 3, 3)
    )
    images = torch.randn(2, 3, 18, 18)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(x)

    hidden = 2 * CHANNELS * 16 * 16 * 2
    casts = 2 * (images.numel() + 2 * 3 * CHANNELS * 9)
    assert saved_bytes(step, images, exclude=list(network.buffers())) <= 2 * hidden + casts + STATISTICS


@compiles
@pytest.mark.parametrize("name", ["relu", "silu", "snake", "function", "None"])
@residual_or_not
def test_compiled(name: str, with_residual: bool) -> None:
    torch.compiler.reset()
    layer, eager = _pair(make(name))
    x, residual = _x(), _x() if with_residual else None
    for training in (True, False):
        layer.train(training), eager.train(training)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        dy = torch.randn_like(x)
        ours, theirs = (_run(module, x, residual, dy=dy) for module in (compiled, eager))
        ours = {key.replace("_orig_mod.", ""): value for key, value in ours.items()}
        torch.testing.assert_close(ours, theirs, **FOLDED_CLOSE)


@compiles
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("aot_eager", "relu"),
        # The rest is left to the compiler, which takes batch norm apart and computes it again.
        ("inductor", "silu"),
        ("inductor", "snake"),
    ],
)
def test_compiled_code_keeps_two_buffers_too(backend: str, name: str) -> None:
    torch.compiler.reset()
    network = _network(make(name), True)
    compiled = torch.compile(network, fullgraph=True, backend=backend)
    images = torch.randn(2, 3, 18, 18)
    compiled(images)
    kept = saved_bytes(compiled, images, exclude=[images, *network.buffers()])
    assert kept // (2 * CHANNELS * 16 * 16 * 4) == 2


@compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler looks at after a graph break
def test_compiled_code_of_any_length_is_checked_as_eager_is() -> None:
    torch.compiler.reset()
    layer, eager = _pair("relu", momentum=None)
    compiled = torch.compile(layer, backend="eager", dynamic=True)
    for count in (4, 5, 7):
        x = torch.randn(count, CHANNELS, 5, 5)
        torch.testing.assert_close(compiled(x), eager(x))


@compiles
@pytest.mark.parametrize("momentum", [0.1, None])
def test_compiled_code_that_computes_again_counts_once(momentum: float | None) -> None:
    torch.compiler.reset()
    layer, eager = _pair(nn.ReLU(), momentum=momentum, save="recompute")
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(3):
        x = _x()
        compiled(x).sum().backward(), eager(x).sum().backward()
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()))


@compiles
@pytest.mark.parametrize("name", ["relu", "snake"])
def test_compiled_for_every_size(name: str) -> None:
    torch.compiler.reset()
    layer, eager = _pair(make(name))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (3, 5, 9):
        x = torch.randn(size, CHANNELS, 6, size + 3)
        torch.testing.assert_close(compiled(x), eager(x), **CLOSE)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()))


@compiles
@pytest.mark.parametrize("name", ["silu", "None"])
def test_compiled_code_that_computes_it_again_counts_a_batch_once(name: str) -> None:
    torch.compiler.reset()
    layer, eager = _pair(make(name), save="recompute")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = _x(), torch.randn(PLANE)
    ours, theirs = _run(compiled, x, dy=dy), _run(eager, x, dy=dy)
    torch.testing.assert_close({n.replace("_orig_mod.", ""): t for n, t in ours.items()}, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["silu", "snake", "relu"])
def test_functorch(name: str) -> None:
    layer, eager = _pair(make(name))
    layer.eval(), eager.eval()
    xs = torch.randn(3, *PLANE)
    params = {n: p.detach() for n, p in layer.named_parameters()}
    theirs = {f"norm.{n}" if n in ("weight", "bias") else n: p for n, p in params.items()}

    def loss(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, params, (x,)).square().sum()

    ours = vmap(grad(functools.partial(loss, layer)), (None, 0))(params, xs)
    expected = vmap(grad(functools.partial(loss, eager)), (None, 0))(theirs, xs)
    torch.testing.assert_close(ours, {n.replace("norm.", ""): p for n, p in expected.items()}, rtol=1e-4, atol=1e-3)
    layer.train()
    with pytest.raises(RuntimeError, match="the running_mean or running_var, which will be updated in place"):
        vmap(layer)(xs)


@pytest.mark.parametrize("name", ["relu", "silu", "snake", "function", "None"])
def test_symbolic_traces_hold_the_layer(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), fl.FusedBatchNormAct2d(CHANNELS, make(name)))
    eager = copy.deepcopy(model)
    traced = torch.fx.symbolic_trace(model)
    assert int(model[1].num_batches_tracked) == 0  # tracing is not a batch
    images = torch.randn(2, 3, 9, 9)
    for _ in range(2):
        torch.testing.assert_close(traced(images), eager(images))
    torch.testing.assert_close(dict(traced.named_buffers()), dict(eager.named_buffers()))
    traced(images).sum().backward()
    eager(images).sum().backward()
    grads = ({n: p.grad for n, p in m.named_parameters()} for m in (traced, eager))
    torch.testing.assert_close(*grads, **FOLDED_CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@training_or_not
def test_exported_programs_compute_the_same(training: bool) -> None:
    layer, eager = _pair(Snake())
    layer.train(training), eager.train(training)
    exported = torch.export.export(layer, (_x().detach(),)).module()
    x = _x().detach()
    torch.testing.assert_close(exported(x), eager(x), **CLOSE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_traces_hold_the_composite() -> None:
    layer, eager = _pair(Snake())
    layer.eval(), eager.eval()
    traced = torch.jit.trace(layer, (_x().detach(),))
    x = torch.randn(2, *PLANE[1:])
    torch.testing.assert_close(traced(x), eager(x), **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
@some_names
def test_checkpointed(name: str, reentrant: bool) -> None:
    layer, eager = _pair(make(name), save="auto" if name in MAKERS else "recompute")
    results = []
    x, dy = _x(), torch.randn(PLANE)
    for module in (layer, eager):
        y = checkpoint(module, x, use_reentrant=reentrant)
        y.backward(dy)
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
        x.grad = None
    torch.testing.assert_close(*results, **CLOSE)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(eager.norm.named_buffers()), **CLOSE)


def test_a_subclass_that_overrides_torch_functions_is_asked() -> None:
    class Counting(Tensor):
        pass

    layer, eager = _pair("silu")
    x = _x().detach()
    y = layer(x.as_subclass(Counting))
    assert type(y) is Counting
    torch.testing.assert_close(y.as_subclass(Tensor), eager(x))
    assert int(layer.num_batches_tracked) == 1


# --- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [3, 4, 5])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_its_state_is_that_of_torchs(dims: int, options: dict[str, Any]) -> None:
    layer, norm = FUSED[dims](CHANNELS, "silu", **options), TORCHS[dims](CHANNELS, **options)
    assert list(layer.state_dict()) == list(norm.state_dict())
    torch.testing.assert_close(dict(layer.state_dict()), dict(norm.state_dict()), rtol=0, atol=0)
    norm(torch.randn(SHAPES["1d, length"] if dims == 3 else SHAPES[f"{dims - 2}d"]))
    layer.load_state_dict(norm.state_dict())
    norm.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    TORCHS[dims](CHANNELS, **options).load_state_dict(torch.load(buffer, weights_only=True))


def test_from_modules_takes_a_layer_whose_statistics_were_taken_away_or_whose_bias_was() -> None:
    norm = nn.BatchNorm2d(CHANNELS)
    norm.bias = None  # type: ignore[assignment]
    eager = Eager(copy.deepcopy(norm), "elu")
    _assert_close(fl.FusedBatchNormAct2d.from_modules(norm, "elu"), eager, _x(), _x())
    norm.running_mean = norm.running_var = None
    eager = Eager(copy.deepcopy(norm), "elu").eval()
    _assert_close(fl.FusedBatchNormAct2d.from_modules(norm, "elu").eval(), eager, _x())


def test_its_repr_says_what_is_saved() -> None:
    for activation, said in {
        "relu": "saves its input, and of some calls the output: float32 outputs do not determine the input)",
        "silu": "activation=silu, saves the output, which determines the input)",
        nn.LeakyReLU(): "activation=leaky_relu, saves the output, which determines the input\n",
        nn.LeakyReLU(
            0.0
        ): "saves its input, and of some calls the output: float32 outputs determine the input too coarsely\n",
        _wave: "saves its input: float32 outputs do not determine the input",
        nn.PReLU(): "saves its input: float32 outputs do not determine the input\n",
        None: "activation=identity, saves the output, which determines the input)",
    }.items():
        layer = fl.FusedBatchNormAct2d(CHANNELS, activation)
        assert said in repr(layer) and f"{CHANNELS}, eps=1e-05, momentum=0.1" in repr(layer)
    for dtype, said in {
        torch.float64: "not fused: float64 is computed by PyTorch)",
        torch.bfloat16: "saves its input: bfloat16 outputs determine the input too coarsely)",
    }.items():
        assert said in repr(fl.FusedBatchNormAct2d(CHANNELS, "silu", dtype=dtype))
    assert repr(fl.FusedBatchNormAct2d(CHANNELS, "tanh", dtype=torch.float16)).endswith(
        "saves its input, and of some calls the output: float16 outputs determine the input too coarsely)"
    )
    for save, said in {
        "input": "saves its input and the activation's)",
        "recompute": "saves its input)",
        "output": "saves the output, which determines the input)",
    }.items():
        assert said in repr(fl.FusedBatchNormAct2d(CHANNELS, "silu", save=save))
    assert "not fused: " in repr(fl.FusedBatchNormAct2d(CHANNELS, nn.Softmax(dim=1)))


def test_meta_layers_give_shapes() -> None:
    layer = fl.FusedBatchNormAct2d(CHANNELS, "silu", device="meta", dtype=torch.bfloat16)
    assert layer(torch.empty(PLANE, device="meta", dtype=torch.bfloat16)).shape == PLANE


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            (torch.randn(4, CHANNELS, 6),),
            ValueError,
            r"expected input \(batch, channels, \.\.\.\) with 4 dimensions, got",
        ),
        ((torch.randn(CHANNELS),), ValueError, r"with 4 dimensions, got \(8,\)"),
        ((torch.randn(4, 7, 6, 6),), ValueError, r"weight \(8,\) is not for the 7 channels of input \(4, 7, 6, 6\)"),
        (
            (torch.randn(PLANE).double(),),
            ValueError,
            "must have one dtype, the input's, or float32 .* input torch.float64",
        ),
        ((torch.ones(PLANE, dtype=torch.int64),), TypeError, "input must have a floating dtype"),
        ((torch.ones(PLANE, dtype=torch.complex64),), TypeError, "input must have a floating dtype"),
        ((None,), TypeError, "input must be a tensor, got NoneType"),
        (([1.0],), TypeError, "input must be a tensor, got list"),
        ((torch.randn(PLANE), 1.0), TypeError, "residual must be a tensor, got float; pass None for no residual"),
        ((torch.randn(PLANE), torch.randn(PLANE).double()), ValueError, "all tensors must have one dtype"),
        ((torch.randn(PLANE), torch.randn(CHANNELS, 1, 1)), ValueError, r"expected residual \(4, 8, 5, 7\), like the"),
        ((torch.randn(PLANE), torch.empty(PLANE, device="meta")), ValueError, "residual is on meta but input is on"),
        ((torch.empty(PLANE, device="meta"),), ValueError, "is on cpu but input is on meta"),
    ],
    ids=range(13),
)
def test_bad_input_is_refused_before_anything_is_counted(
    arguments: tuple[Any, ...], error: type[Exception], said: str
) -> None:
    for training in (True, False):
        layer, _ = _pair("relu")
        layer.train(training)
        before = copy.deepcopy(dict(layer.named_buffers()))
        with pytest.raises(error, match=f"FusedBatchNormAct2d: .*{said}"):
            layer(*arguments)
        torch.testing.assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_parameters_and_statistics_that_do_not_fit_are_refused(name: str) -> None:
    for wrong, said in {
        torch.ones(CHANNELS + 1): rf"{name} \(9,\) is not for the 8 channels",
        torch.ones(CHANNELS).double(): "must have one dtype",
        torch.ones(CHANNELS, device="meta"): f"{name} is on meta but input is on cpu",
    }.items():
        layer, _ = _pair("relu")
        before = layer.running_var.clone()
        setattr(layer, name, nn.Parameter(wrong) if name in ("weight", "bias") else wrong)
        with pytest.raises(ValueError, match=f"FusedBatchNormAct2d: .*{said}"):
            layer(_x())
        assert int(layer.num_batches_tracked) == 0
        assert name == "running_var" or torch.equal(layer.running_var, before)


def test_errors_of_arguments_say_no_private_name() -> None:
    for layer, given in ((fl.FusedBatchNormAct2d, (CHANNELS,)), (fl.FusedConvAct2d, (3, 4, 1))):
        with pytest.raises(TypeError, match=r"^Fused\w+Act\.__init__\(\) got an unexpected keyword argument 'drop'"):
            layer(*given, drop=0.1)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((4, 8, 6, 6), r"FusedBatchNormAct1d: .* with 2 or 3 dimensions"), ((4, 8), "FusedBatchNormAct3d: .* with 5 dim")],
    ids=["1d", "3d"],
)
def test_every_dimension_names_itself(shape: tuple[int, ...], said: str) -> None:
    layer = (fl.FusedBatchNormAct1d if "1d" in said else fl.FusedBatchNormAct3d)(CHANNELS, "relu")
    with pytest.raises(ValueError, match=said):
        layer(torch.randn(shape))


# --- on Triton --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.parametrize("name", ["relu", "silu", "elu", "snake", "prelu"])
@residual_or_not
@training_or_not
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_triton_kernels_serve_it(
    name: str, training: bool, memory_format: Any, with_residual: bool, on_triton: Callable[..., None]
) -> None:
    pytest.importorskip("triton")
    on_triton(True)
    layer, eager = (half.to(DEVICE).train(training) for half in _pair(make(name)))
    x, residual = (_x().detach().to(DEVICE, memory_format=memory_format).requires_grad_() for _ in range(2))
    _assert_close(layer, eager, x, residual if with_residual else None, **FOLDED_CLOSE)
