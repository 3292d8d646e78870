"""Batch norm and activation that keep their output alone: what is kept, how good gradients then are, and that nothing
that others hold is touched. ``test_norm.py`` has what holds however the layer is computed."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import Activation, InverseError, measure_inverse_error, resolve, rows, upcast
from fusedlayers.activations.inverse_error import CELL
from fusedlayers.backends import cpu
from fusedlayers.backends.cpu.norm import NormPasses
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import batch_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = [row.bind() for row in rows()]
SERVED = [(a, dtype) for a in TABLE for dtype in DTYPES if measure_inverse_error(a, dtype) is not None]
FUSED = {2: fl.FusedBatchNormAct1d, 3: fl.FusedBatchNormAct1d, 4: fl.FusedBatchNormAct2d, 5: fl.FusedBatchNormAct3d}
TORCHS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}

CHANNELS = 16
PLANE = (4, CHANNELS, 9, 11)
#: Of few numbers an average says little.
SHAPES = {"1d": (400, CHANNELS), "1d, length": (8, CHANNELS, 45), "2d": PLANE, "3d": (4, CHANNELS, 4, 5, 5)}

every_served = pytest.mark.parametrize(("activation", "dtype"), SERVED, ids=str)
training_or_not = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
#: A formula, and a fit.
both_kinds = pytest.mark.parametrize("name", ["elu", "silu"])


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs are served too."""
    torch.manual_seed(0)
    monkeypatch.setattr(batch_norm, "WORTH_IT", 1)


def _named(name: str) -> Activation:
    return next(a for a in TABLE if a.name == name)


def _served(name: str, dtype: torch.dtype = torch.float32) -> InverseError:
    found = measure_inverse_error(_named(name), dtype)
    assert found is not None
    return found


class Eager(nn.Module):
    def __init__(self, norm: Any, activation: Activation) -> None:
        super().__init__()
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.plain(self.norm(x))


def _pair(activation: Activation, dims: int = 4) -> tuple[Any, Eager]:
    """A layer, and torch's with the same values, as training makes them: weights of both signs from 0.2 to 2."""
    norm = TORCHS[dims](CHANNELS)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.2, 2.0, CHANNELS) * torch.tensor([1.0, -1.0]).repeat(CHANNELS // 2))
        norm.bias.uniform_(-0.5, 0.5)
        norm.running_mean.normal_(0.5, 0.1)
        norm.running_var.uniform_(3.5, 4.5)
    eager = Eager(norm, activation)
    return FUSED[dims].from_modules(copy.deepcopy(norm), activation), eager


def _x(shape: tuple[int, ...] = PLANE, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the running statistics, nearly."""
    return (torch.randn(shape) * 2 + 0.5).to(dtype)


Gradients = dict[str, Tensor]


def _run(module: nn.Module, x: Tensor, dy: Tensor) -> Gradients:
    """The output and the gradients, channel by channel."""
    module, x = copy.deepcopy(module), x.detach().requires_grad_()  # which counts the batch
    y = module(x)
    w, b = module.parameters()
    dx, dw, db = torch.autograd.grad(y, [x, w, b], dy.to(y.dtype))
    assert dx.dtype is x.dtype and dw.dtype is w.dtype and dx.stride() == x.stride()
    by_channel = [t.detach().transpose(0, 1).flatten(1) for t in (y, dx)]
    return dict(zip(("y", "dx", "dw", "db"), [*by_channel, dw.unsqueeze(1), db.unsqueeze(1)], strict=True))


def _doubled(eager: Eager) -> Eager:
    return copy.deepcopy(eager).double()


class Exact:
    """What a layer computes, channel by channel, in float64."""

    def __init__(self, eager: Eager, x: Tensor, dy: Tensor) -> None:
        norm, activation = _doubled(eager).norm, eager.activation
        x, dy = (t.double().transpose(0, 1).flatten(1) for t in (x, dy))
        mean, var = (x.mean(1), x.var(1, correction=0)) if norm.training else (norm.running_mean, norm.running_var)
        self.w, self.b = norm.weight.detach(), norm.bias.detach()
        self.inverse_std = (var + norm.eps).rsqrt()
        self.xhat = (x - mean[:, None]) * self.inverse_std[:, None]
        self.z = self.xhat * self.w[:, None] + self.b[:, None]
        self.dy, self.dz = dy, dy * reference.derivative(activation.function, self.z)
        self.bend = reference.second_derivative(activation.function, self.z)
        self.has_statistics = norm.training

    def accepted(self, found: InverseError) -> Gradients:
        """What an input that is as far off as ``InverseError.rms`` says makes of the gradients: the norm of that.

        With xhat wrong by e, of random sign, dx is by ``g (e mean(dz xhat) + xhat mean(dz e))``, dw by ``sum(dz e)``,
        and dz by ``dy f'' e w``.
        """
        error, size, count = found.rms(self.b, self.w).nan_to_num(0.0), self.dz.norm(dim=1), self.dz.shape[1]
        of_dz = self.dy.norm(dim=1) * self.bend.abs().amax(1) * error * self.w.abs()
        correlated = (self.dz * self.xhat).mean(1).abs() * count**0.5
        through_statistics = error * (correlated + size / count**0.5) if self.has_statistics else 0.0
        of_dx = (self.w * self.inverse_std).abs() * (of_dz + through_statistics)
        return {"y": torch.zeros_like(error), "dx": of_dx, "dw": error * size + of_dz, "db": of_dz}

    def luck(self) -> Gradients:
        """What roundings of f', of dz and of xhat make of the gradients that are one number. Where all of z is the
        same, all terms are wrong in the same direction."""
        is_flat = self.z.std(1) < 0.05
        term = self.dy.abs() + self.dz.abs()
        terms = {"dw": term * self.xhat.abs().clamp_min(1.0), "db": term}
        return {name: torch.where(is_flat, t.abs().sum(1), t.norm(dim=1)) for name, t in terms.items()}


def _assert_good(
    layer: Any, eager: Eager, x: Tensor, dy: Tensor, *, found: InverseError | None, kept: list[int] | None = None
) -> None:
    """As near to float64 as twice torch and twice what is accepted; with the channels that are ``kept``, of which no
    error is, in each channel."""
    ours, theirs = _run(layer, x, dy), _run(eager, x, dy)
    truths = _run(_doubled(eager), x.double(), dy.double())
    exact = Exact(eager, x, dy)
    nothing = {name: torch.zeros(CHANNELS, dtype=torch.float64) for name in truths}
    accepted = nothing if found is None else exact.accepted(found)
    # The gain and the mean of a single channel are one number each, and torch's error in these is luck.
    roundings = 1 if kept is None else 4
    eps = torch.finfo(layer.weight.dtype).eps
    for name, truth in truths.items():
        accepted[name][kept or []] = 0.0
        errors = [(t[name].double() - truth).norm(dim=1) for t in (ours, theirs)]
        limits = 2 * errors[1] + 2 * accepted[name] + roundings * eps * truth.norm(dim=1)
        if kept is None:
            assert float(errors[0].norm()) <= float(limits.norm()), name
            continue
        assert torch.equal(ours[name].isnan(), theirs[name].isnan()), name
        limits += 4 * torch.finfo(x.dtype).eps * exact.luck().get(name, 0.0)
        wrong = (errors[0] > limits) & errors[1].isfinite()
        assert not wrong.any(), (name, wrong.nonzero().flatten().tolist(), errors[0][wrong], limits[wrong])


def _assert_near(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], tolerance: float = 3e-5) -> None:
    """To what torch computes in the same dtype, by a few of the errors of a folded derivative."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or reference.relative(one, other) <= tolerance


def _node(y: Tensor) -> Any:
    """The node of a layer that keeps its output, or None."""
    return y.grad_fn if type(y.grad_fn).__name__ == "NormActBackward" else None


def _saved(y: Tensor) -> tuple[Any, ...]:
    """What that node saves. In torch 2.11 it cannot be read once ``y`` is gone."""
    saved: tuple[Any, ...] = _node(y).saved_tensors
    return saved


# --- what outputs tell ------------------------------------------------------------------------------------------------


@every_served
def test_the_error_is_foretold(activation: Activation, dtype: torch.dtype) -> None:
    found = measure_inverse_error(activation, dtype)
    assert found is not None
    fold = activation.fold.position if activation.fold is not None else -1.0
    for mean, std in ((0, 1), (0.3, 0.5), (-1, 0.7), (2, 0.7), (0, 0.05), (fold, 0.5), (fold, 0.1), (0.5, -1)):
        mean_, std_ = torch.tensor([float(mean)]), torch.tensor([float(std)])
        xhat = torch.randn(200_000, dtype=torch.float64)
        z = mean + std * xhat[xhat.abs() < 3.29]  # what one in a thousand does is not foretold
        y = activation.encoded(upcast(z.to(dtype)), dtype).to(dtype)
        again = activation.input_given_output(upcast(y), dtype)
        measured = float((again.double() - z).square().mean().sqrt()) / abs(std)
        if bool(found.is_acceptable(mean_, std_)):
            # The outer parts of a distribution, which is cut into a few, count a fold that lies in them too much.
            assert 0.125 <= measured / float(found.rms(mean_, std_)) <= 2.0, (mean, std)


@every_served
def test_a_channel_is_told_only_where_the_error_is_small(activation: Activation, dtype: torch.dtype) -> None:
    found = measure_inverse_error(activation, dtype)
    assert found is not None
    std = torch.exp2(torch.rand(40_000, dtype=torch.float64) * 26 - 13)
    std *= torch.where(torch.rand(len(std)) < 0.5, 1, -1)
    for mean in (40 * torch.rand(len(std)) - 20, std * (40 * torch.rand(len(std)) - 20)):
        mean = mean.double()
        says, error = found.is_acceptable(mean, std), found.rms(mean, std)
        # By the corners of a cell of an eighth of an octave.
        assert float(error[says].max()) <= 1.25 * found.limit
        assert not says[(mean.abs() > 16 * std.abs()) | (std.abs() < 2**-12) | (std.abs() > 2**12)].any()
        # And not much less often.
        common = (mean.abs() < 8 * std.abs()) & (std.abs() > max(2**-7, 1.1 * found.min_std)) & (std.abs() < 2**7)
        common &= error < found.limit / 2
        assert float(says[common].double().mean()) > 0.85
    odd = torch.tensor([0.0, math.nan, math.inf, -math.inf, 1e-300])
    assert not found.is_acceptable(torch.zeros(5), odd).any() and not found.is_acceptable(odd[1:4], torch.ones(3)).any()


@every_served
def test_no_input_is_farther_off_than_the_worst(activation: Activation, dtype: torch.dtype) -> None:
    found = measure_inverse_error(activation, dtype)
    assert found is not None
    z = torch.cat([torch.linspace(-200, 200, 200_001), 10.0 ** torch.linspace(-3, 25, 101)]).to(dtype)
    z = torch.cat([z, -z])
    if activation.fold is not None:
        z = z[(z - activation.fold.position).abs() > 2 * CELL]
    y = activation.encoded(upcast(z), dtype).to(dtype)
    error = (activation.input_given_output(upcast(y), dtype).double() - z.double()).abs().nan_to_num(math.inf)
    worst = found.worst(z)
    # A cell has a few samples, and torch's functions jump by a unit here and there.
    assert bool((error <= 4.0 * worst).all())
    assert bool((worst[z > 0].sort().values == found.worst(z[z > 0].sort().values)).all())
    # Of common values none is far off.
    assert float(found.worst(torch.tensor([-4.0, 4.0])).max()) <= 256 * torch.finfo(dtype).eps
    assert found.worst(torch.tensor([math.nan, math.inf, -math.inf])).isinf().all()


def test_what_is_told() -> None:
    # And not tanh, sigmoid and selu, which flatten too soon.
    invertible = {"identity", "leaky_relu", "elu", "celu", "softplus", "logsigmoid", "softsign", "cbrt"}
    names = {dtype: {a.name for a, d in SERVED if d is dtype} for dtype in DTYPES}
    assert names[torch.float32] == invertible | {"silu", "gelu", "gelu_tanh", "quick_gelu", "mish"}
    # Of 16 bits none: the gradient of the weight would err a hundred times as much as torch's.
    assert names[torch.float16] == names[torch.bfloat16] == set()


@pytest.mark.parametrize(
    "activation",
    [
        nn.LeakyReLU(-0.5),
        nn.LeakyReLU(0.0),
        nn.LeakyReLU(1e-40),
        nn.ELU(-1.0),
        nn.ELU(0.0),
    ],
    ids=str,
)
def test_parameters_for_which_outputs_tell_nothing(activation: nn.Module) -> None:
    layer = fl.FusedBatchNormAct2d(CHANNELS, activation)
    assert "determines the input" not in repr(layer)
    assert _node(layer(_x().requires_grad_())) is None


# --- gradients --------------------------------------------------------------------------------------------------------


@every_served
@training_or_not
def test_gradients_are_as_good_as_torchs(activation: Activation, dtype: torch.dtype, training: bool) -> None:
    found = measure_inverse_error(activation, dtype)
    assert found is not None
    layer, eager = _pair(activation)
    layer.train(training), eager.train(training)
    # Of one sign with xhat, dy makes the statistics matter most.
    for weight in (0.0, 1.0):
        x = _x(dtype=dtype)
        dy = (torch.randn(PLANE) + weight * (x.float() - 0.5)).to(dtype)
        assert _node(layer(x.clone().requires_grad_())) is not None
        # Twice torch's error and no more, but for a fit.
        _assert_good(layer, eager, x, dy, found=found if activation.is_folded else None)


@pytest.mark.parametrize("activation", ["elu", "silu", "leaky_relu"])
@pytest.mark.parametrize("scale", [1e-4, 1e-6])
def test_variances_far_below_epsilon(activation: str, scale: float) -> None:
    """z then differ little from the bias, and an output rounds away by how much."""
    layer, eager = _pair(resolve(activation))
    for norm in (layer, eager.norm):
        with torch.no_grad():
            norm.weight.fill_(0.3)
            norm.bias.fill_(1.0)
    _assert_good(layer, eager, _x() * scale, torch.randn(PLANE), found=None)


# Next to 0 the derivative of the cube root, and with it every error, has no bound.
@pytest.mark.parametrize(("activation", "dtype"), [(a, d) for a, d in SERVED if a.name != "cbrt"], ids=str)
@training_or_not
@pytest.mark.parametrize("bias", [-2.0, -0.75, 0.0, 0.5])
def test_no_weight_and_bias_make_them_worse(
    activation: Activation, dtype: torch.dtype, training: bool, bias: float
) -> None:
    layer, eager = _pair(activation)
    x = _x((16, CHANNELS, 16, 16), dtype)
    for norm in (layer, eager.norm):
        norm.train(training)
        with torch.no_grad():
            norm.weight.copy_(torch.logspace(-2, 0.5, CHANNELS))
            norm.bias.fill_(bias)
    saved = _saved(layer(x.clone().requires_grad_()))
    kept = range(CHANNELS) if saved[0] is None else [] if saved[2] is None else saved[2].tolist()
    dy = torch.randn(x.shape).to(dtype) + (x - 0.5)
    _assert_good(layer, eager, x, dy, found=measure_inverse_error(activation, dtype), kept=list(kept))


@training_or_not
@pytest.mark.parametrize(
    "activation", [a for a in TABLE if a.is_folded and measure_inverse_error(a, torch.float32)], ids=str
)
def test_gradients_from_a_fold_have_the_error_of_the_derivative(activation: Activation, training: bool) -> None:
    layer, eager = _pair(activation)
    layer.train(training), eager.train(training)
    x, dy = _x(), torch.randn(PLANE)
    ours, theirs = _run(layer, x, dy), _run(eager, x, dy)
    exact = _run(_doubled(eager), x.double(), dy.double())
    for name, truth in exact.items():
        limit = 2 * reference.relative(theirs[name], truth) + reference.FOLDED_TOLERANCE[torch.float32]
        assert reference.relative(ours[name], truth) <= limit, name


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("name", ["leaky_relu", "softplus", "elu", "gelu", "silu"])
def test_every_dimension_and_format(name: str, shape: tuple[int, ...], channels_last: bool) -> None:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if channels_last and len(shape) not in layouts:
        return
    layer, eager = _pair(_named(name), len(shape))
    x = _x(shape)
    x = x.contiguous(memory_format=layouts[len(shape)]) if channels_last else x
    for training in (True, False):
        layer.train(training), eager.train(training)
        y = copy.deepcopy(layer)(x.clone().requires_grad_())
        assert _node(y) is not None and y.stride() == x.stride()
        _assert_good(layer, eager, x, torch.randn_like(x), found=_served(name))


@both_kinds
@training_or_not
def test_unusual_strides(name: str, training: bool) -> None:
    layer, eager = _pair(_named(name))
    layer.train(training), eager.train(training)
    batch, channels, height, width = PLANE
    bases = {
        "transposed": _x((batch, channels, width, height)).transpose(2, 3),
        "sliced": _x((batch, 2 * channels, height, 2 * width))[:, ::2, :, ::2],
        "expanded": _x((1, channels, height, width)).expand(PLANE),
        "turned": _x((channels, batch, height, width)).transpose(0, 1),
    }
    for x, expanded in itertools.product(bases.values(), (False, True)):
        dy = torch.ones(()).expand(PLANE) if expanded else torch.randn(PLANE)
        results = []
        for module in (layer, eager):
            leaf = x.detach().requires_grad_()
            results.append(torch.autograd.grad(module(leaf), [leaf, *module.parameters()], dy))
        # Of ones the gradient is what rounding leaves of it.
        torch.testing.assert_close(*results, rtol=1e-4, atol=2e-4)


@training_or_not
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
@both_kinds
def test_hyperparameters(name: str, training: bool, options: dict[str, Any]) -> None:
    norm = nn.BatchNorm2d(CHANNELS, **options)
    layer, eager = fl.FusedBatchNormAct2d.from_modules(copy.deepcopy(norm), name), Eager(norm, _named(name))
    for _ in range(2):
        results = []
        x, dy = _x().requires_grad_(), torch.randn(PLANE)
        for module in (layer.train(training), eager.train(training)):
            y = module(x)
            results.append([y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)])
            results[-1] += [b.double() for b in module.buffers()]
        _assert_near(*results)


@training_or_not
@both_kinds
def test_without_a_bias(name: str, training: bool) -> None:
    layer, eager = _pair(_named(name))
    layer.bias = eager.norm.bias = None
    results = []
    x, dy = _x().requires_grad_(), torch.randn(PLANE)
    for module in (layer.train(training), eager.train(training)):
        results.append(torch.autograd.grad(module(x), [x, *module.parameters()], dy))
    _assert_near(*results)


def _nets(names: tuple[str, ...]) -> tuple[nn.Sequential, nn.Sequential]:
    """Convolution, batch norm and activation again and again, and by torch."""
    fused, plain = nn.Sequential(), nn.Sequential()
    channels = 3
    for name in names:
        conv, (norm, eager) = nn.Conv2d(channels, CHANNELS, 3), _pair(_named(name))
        fused.extend([conv, norm])
        plain.extend([copy.deepcopy(conv), eager])
        channels = CHANNELS
    last = nn.Conv2d(channels, 3, 1)
    return fused.append(last), plain.append(copy.deepcopy(last))


@training_or_not
@pytest.mark.parametrize("names", [("elu",) * 3, ("silu",) * 3, ("gelu", "softplus", "leaky_relu")], ids=str)
def test_a_deeper_network(names: tuple[str, ...], training: bool) -> None:
    fused, plain = (net.train(training) for net in _nets(names))
    draws: list[list[list[Tensor]]] = []
    for _ in range(4):  # the error of one gradient of 16 numbers is luck
        images, dy = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 10, 10)
        draws.append([])
        for net, x in ((fused, images), (plain, images), (copy.deepcopy(plain).double(), images.double())):
            x = x.clone().requires_grad_()
            y = net(x)
            draws[-1].append([y.detach(), *torch.autograd.grad(y, [x, *net.parameters()], dy.to(y.dtype))])
    results = [[torch.stack(parts) for parts in zip(*found, strict=True)] for found in zip(*draws, strict=True)]
    # A convolution's bias has no gradient in training, but what rounding leaves of it: that is measured in whole.
    whole = max(float(truth.norm()) for truth in results[2][2:])
    for i, (ours, theirs, truth) in enumerate(zip(*results, strict=True)):
        errors = [float((t.double() - truth).norm()) for t in (ours, theirs)]
        fits = sum(_named(name).is_folded for name in names) * reference.FOLDED_TOLERANCE[torch.float32]
        size = float(truth.norm()) if i < 2 else max(float(truth.norm()), 1e-2 * whole)
        assert errors[0] <= 2 * errors[1] + (fits + 4 * torch.finfo(torch.float32).eps) * size, i


# --- channels that are not told ---------------------------------------------------------------------------------------


def _odd(activation: Activation, dtype: torch.dtype, training: bool) -> tuple[Any, Eager, Tensor, list[int]]:
    """A layer, torch's, an input, and of which of its channels outputs do not determine the input."""
    found = measure_inverse_error(activation, dtype)
    assert found is not None
    layer, eager = _pair(activation)
    layer.train(training), eager.train(training)
    x = torch.randn(4, CHANNELS, 32, 32).double()
    x -= x.mean((0, 2, 3), keepdim=True)
    for norm in (layer, eager.norm):
        with torch.no_grad():
            norm.weight.copy_(norm.weight.sign() * torch.linspace(0.6, 1.0, CHANNELS))
            norm.bias.fill_(0.05)
            values = {1: (0.0, 0.3), 2: (1e-6, 0.1), 3: (-1e-3, 20.0)}
            if activation.fold is not None:
                values[4] = 0.02, activation.fold.position
                norm.weight[5] = 2.0
            for channel, (w, b) in values.items():
                norm.weight[channel], norm.bias[channel] = w, b
            norm.running_mean.zero_()
            norm.running_var.copy_(x.var((0, 2, 3)))
            norm.running_mean[7], norm.running_var[7] = 1e4, 1e-2
    expected = {*values, *((6,) if training else ()), 8, 9}  # of 6 the variance is far below eps
    x[1, 5, 3, 4] = -60.0 * 60  # of 60 standard deviations at once: with it the others have one of 56
    x[:, 6] = 0.0
    x[:, 7] = 1e4 + 0.1 * x[:, 7]
    x[2, 8, 1, 1], x[0, 9, 30, 2] = math.nan, math.inf
    x = x.to(dtype)
    if cpu.norm_passes(x, activation) is None:
        expected.add(7)  # torch's ``x scale + shift`` cancels
    with torch.no_grad():
        z = _doubled(eager).norm(x.double())
    allowed = found.limit * (4 * 32 * 32) ** 0.5 * eager.norm.weight.detach().double().abs()
    for end in (z.amin((0, 2, 3)), z.amax((0, 2, 3))):
        expected |= set((found.worst(end) > allowed).nonzero().flatten().tolist())
    return layer, eager, x, sorted(expected)


@training_or_not
@every_served
def test_channels_that_are_not_told_are_kept(activation: Activation, dtype: torch.dtype, training: bool) -> None:
    layer, eager, x, expected = _odd(activation, dtype, training)
    y = layer(x.clone().requires_grad_())
    saved_y, kept, channels, *_ = _saved(y)
    kept_channels = channels.tolist()
    assert kept_channels == expected
    assert torch.equal(kept.nan_to_num(), x[:, channels].nan_to_num()) and saved_y.data_ptr() == y.data_ptr()
    _assert_good(
        layer,
        eager,
        x,
        torch.randn(x.shape).to(dtype),
        found=measure_inverse_error(activation, dtype),
        kept=kept_channels,
    )


@training_or_not
@both_kinds
def test_what_is_kept_of_them_is_no_more(name: str, training: bool) -> None:
    layer, eager = _pair(_named(name))
    x = _x((4, CHANNELS, 32, 32)).requires_grad_()
    hidden, statistics = x.numel() * 4, 2 * CHANNELS * 4
    for count in range(CHANNELS + 1):
        for norm in (layer, eager.norm):
            nn.init.ones_(norm.weight), nn.init.zeros_(norm.bias)
            with torch.no_grad():
                norm.weight[CHANNELS - count :] = 0.0
        kept = saved_bytes(lambda: layer.train(training)(x * 1), exclude=list(layer.buffers()))
        if count == 0:
            assert kept == hidden + statistics
        elif count <= CHANNELS // 2:
            assert kept == hidden + count * hidden // CHANNELS + 8 * count + statistics
        else:
            saved = _saved(layer(x))
            assert kept == hidden + statistics and saved[0] is None and saved[1].data_ptr() == x.data_ptr()
        _assert_good(layer, eager.train(training), x.detach(), torch.randn(x.shape), found=_served(name))


@both_kinds
def test_where_none_is_told(name: str) -> None:
    layer, eager = _pair(_named(name))
    x = _x()
    for norm in (layer, eager.norm):
        nn.init.zeros_(norm.weight)
    for training in (True, False):
        layer.train(training), eager.train(training)
        _assert_good(layer, eager, x, torch.randn(PLANE), found=None)
    leaf = x.requires_grad_()
    results = []
    for module in (layer, eager):  # and its second derivative
        (dx,) = torch.autograd.grad(module(leaf).square().sum(), module.parameters(), create_graph=True)[:1]
        results.append(torch.autograd.grad(dx.square().sum(), [leaf, *module.parameters()], allow_unused=True))
    _assert_near(*results)


@pytest.mark.parametrize("bias", [0.0, -0.5])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["elu", "celu", "leaky_relu", "softplus"])
def test_values_far_out_do_not_spoil_the_others(name: str, training: bool, bias: float) -> None:
    layer, eager = _pair(_named(name))
    x = torch.distributions.StudentT(3.0).sample((8, CHANNELS, 24, 24))
    x[0, :, 0, 0] = -11.0
    for norm in (layer, eager.norm):
        norm.train(training)
        nn.init.ones_(norm.weight), nn.init.constant_(norm.bias, bias)
        norm.running_mean.zero_(), norm.running_var.fill_(3.0)
    saved = _saved(layer(x.clone().requires_grad_()))
    kept = range(CHANNELS) if saved[0] is None else [] if saved[2] is None else saved[2].tolist()
    _assert_good(layer, eager, x, x + torch.randn_like(x), found=_served(name), kept=list(kept))


@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("offset", [0.0, 3.0, 25.0])
@training_or_not
def test_what_torch_rounds_once_for_a_channel_does_not_add_up(
    training: bool, offset: float, channels_last: bool
) -> None:
    layer, eager = _pair(_named("leaky_relu"))
    x = torch.randn(8, CHANNELS, 32, 32) + offset
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    for norm in (layer, eager.norm):
        norm.train(training)
        nn.init.ones_(norm.weight), nn.init.constant_(norm.bias, 2.0)
        norm.running_mean.copy_(x.mean((0, 2, 3))), norm.running_var.copy_(x.var((0, 2, 3)))
    assert _saved(layer(x.clone().requires_grad_()))[1] is None
    dy = torch.randn_like(x) + 1.0  # whose mean the roundings meet
    ours, theirs = _run(layer, x, dy)["dw"], _run(eager, x, dy)["dw"]
    truth = _run(_doubled(eager), x.double(), dy.double())["dw"]
    assert float((ours.double() - truth).norm()) <= 3 * float((theirs.double() - truth).norm())


# --- bytes, and who holds them ----------------------------------------------------------------------------------------


def _network(norm: list[nn.Module], dtype: torch.dtype) -> nn.Sequential:
    """Batch norms keep parameters of float32 beside 16 bits."""
    convolutions = [nn.Conv2d(3, CHANNELS, 3).to(dtype), nn.Conv2d(CHANNELS, 3, 3).to(dtype)]
    return nn.Sequential(convolutions[0], *norm, convolutions[1])


def _buffers(norm: list[nn.Module], dtype: torch.dtype, training: bool) -> int:
    """How many of the hidden size are kept."""
    network, images = _network(norm, dtype).train(training), torch.randn(2, 3, 18, 18, dtype=dtype)
    hidden = 2 * CHANNELS * 16 * 16 * dtype.itemsize
    kept = saved_bytes(network, images, exclude=[images, *network.buffers()])
    statistics = 2 * CHANNELS * max(dtype.itemsize, 4)
    assert kept % hidden <= statistics + 8
    return kept // hidden


@training_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_buffer_where_the_output_tells_the_input_and_two_elsewhere(dtype: torch.dtype, training: bool) -> None:
    for activation in TABLE:
        buffers = _buffers([fl.FusedBatchNormAct2d(CHANNELS, activation)], dtype, training)
        assert buffers == (1 if measure_inverse_error(activation, dtype) is not None else 2), activation


@training_or_not
@pytest.mark.parametrize(
    ("activation", "buffers"),
    [(nn.SiLU(), 3), (nn.GELU(), 3), (nn.LeakyReLU(inplace=True), 2), (nn.ELU(inplace=True), 2), (nn.Identity(), 2)],
    ids=str,
)
def test_torch_keeps_more(activation: nn.Module, buffers: int, training: bool) -> None:
    assert _buffers([nn.BatchNorm2d(CHANNELS), activation], torch.float32, training) == buffers
    assert _buffers([fl.FusedBatchNormAct2d(CHANNELS, activation)], torch.float32, training) == 1


@pytest.mark.parametrize(("save", "buffers"), [("auto", 1), ("output", 1), ("recompute", 2), ("input", 3)])
def test_save_says_what_is_kept(save: str, buffers: int) -> None:
    assert _buffers([fl.FusedBatchNormAct2d(CHANNELS, "silu", save=save)], torch.float32, True) == buffers


def test_small_inputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert batch_norm.WORTH_IT == 16384
    layer = fl.FusedBatchNormAct2d(CHANNELS, "silu")
    assert _node(layer(torch.randn(1, CHANNELS, 32, 31, requires_grad=True))) is None
    assert _node(layer(torch.randn(1, CHANNELS, 32, 32, requires_grad=True))) is not None
    assert _node(layer(torch.randn(0, CHANNELS, 32, 32, requires_grad=True))) is None


@both_kinds
@training_or_not
def test_the_input_is_gone_after_forward(name: str, training: bool) -> None:
    storages = []

    class Watched(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            x = super().forward(input)
            storages.append(StorageWeakRef(x.untyped_storage()))
            return x

    layer, _ = _pair(_named(name))
    y = layer.train(training)(Watched(3, CHANNELS, 3)(torch.randn(2, 3, 18, 18)))
    assert storages[0].expired()
    y.sum().backward()


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each input that was had from an output, whether it was over that."""
    notes: list[bool] = []
    inverse, gradient = cpu.inverse, NormPasses.gradient

    def noting(y: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
        assert out is None or out is y
        notes.append(out is not None)
        return inverse(y, activation, out)

    def noting_too(self: NormPasses, dy: Tensor, y: Tensor, center: Tensor, overwrite: bool) -> Any:
        notes.append(overwrite)
        return gradient(self, dy, y, center, overwrite)

    monkeypatch.setattr(cpu, "inverse", noting)
    monkeypatch.setattr(NormPasses, "gradient", noting_too)
    return notes


@both_kinds
@training_or_not
def test_the_output_is_overwritten_where_nobody_holds_it(name: str, training: bool, overwritten: list[bool]) -> None:
    layer, _ = _pair(_named(name))
    layer.train(training)
    x, dy = _x().requires_grad_(), torch.randn(PLANE)
    wanted = [x, *layer.parameters()]

    def step(keep: Callable[[Tensor], Any] = lambda y: None, **options: Any) -> Any:
        y = layer(x)
        kept = keep(y)
        loss = F.conv2d(y, torch.ones(1, CHANNELS, 1, 1)).sum() * 0 + (y * dy).sum()
        del y
        grads = torch.autograd.grad(loss, wanted, **options)
        return grads, kept, loss

    grads, *_ = step()
    assert overwritten == [True]
    overwritten.clear()
    for keep in (lambda y: y, lambda y: y.detach(), lambda y: y[1:], lambda y: y.numpy(force=True)):
        before = layer(x).detach()
        again, kept, _ = step(keep)
        torch.testing.assert_close(again, grads, rtol=0, atol=0)
        kept = torch.as_tensor(kept)
        assert torch.equal(kept, before[-len(kept) :])
    first, _, loss = step(retain_graph=True)
    second = torch.autograd.grad(loss, wanted)
    torch.testing.assert_close([*first, *second], [*grads, *grads], rtol=0, atol=0)
    assert overwritten == [False] * 5 + [True]
    overwritten.clear()
    for pack in (lambda t: t, lambda t: t.clone()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            hooked, *_ = step()
        torch.testing.assert_close(hooked, grads, rtol=0, atol=0)
    assert overwritten == [False, False]


@both_kinds
@training_or_not
def test_what_was_saved_must_not_be_edited(name: str, training: bool) -> None:
    layer, _ = _pair(_named(name))
    for edit in (lambda y: y, lambda y: layer.weight, lambda y: layer.bias):
        y = layer.train(training)(_x().requires_grad_())
        with torch.no_grad():
            edit(y).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@both_kinds
@training_or_not
def test_the_input_and_the_running_statistics_may_be_edited(name: str, training: bool) -> None:
    layer, _ = _pair(_named(name))
    x, dy = _x().requires_grad_(), torch.randn(PLANE)
    expected = torch.autograd.grad(layer.train(training)(x), [x, *layer.parameters()], dy)
    y = layer(x)
    with torch.no_grad():
        x.add_(1.0)
        layer.train()(10 * _x())
        layer.running_mean.fill_(7.0)
    layer.running_var = torch.full_like(layer.running_var, 5.0)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *layer.parameters()], dy), expected, rtol=0, atol=0)


# --- second derivatives, contexts -------------------------------------------------------------------------------------


@training_or_not
@pytest.mark.parametrize("activation", [a for a, _ in SERVED if a.name != "cbrt"], ids=str)
def test_first_and_second_derivatives(activation: Activation, training: bool) -> None:
    # Not the cube root, whose slope at 0 is infinite. (leaky_relu's kink at 0 is met by no number here.)
    layers = [module.train(training) for module in _pair(activation)]
    params = [p.detach().requires_grad_() for p in layers[0].parameters()]
    with torch.no_grad():
        params[0][3] = 0.0  # its input is kept
    x = torch.randn(4, CHANNELS, 2, 3, requires_grad=True)

    def call(layer: nn.Module, x: Tensor, *values: Tensor) -> Tensor:
        buffers = {name: b.to(x.dtype, copy=True) for name, b in layer.named_buffers()}
        y: Tensor = functional_call(
            layer, {**dict(zip(dict(layer.named_parameters()), values, strict=True)), **buffers}, (x,)
        )
        assert (_node(y) is not None) == (layer is layers[0])
        return y

    reference.check_orders(*(functools.partial(call, layer) for layer in layers), (x, *params), 1e-4)


@training_or_not
@both_kinds
@pytest.mark.parametrize("odd", [0, 3, 12], ids=["all told", "some told", "few told"])
def test_a_gradient_penalty_is_torchs(name: str, training: bool, odd: int) -> None:
    layer, eager = _pair(_named(name))
    for norm in (layer, eager.norm):
        with torch.no_grad():
            norm.weight[:odd] = 0.0
    x, results = _x().requires_grad_(), []
    before = nn.Conv2d(CHANNELS, CHANNELS, 1)
    for module in (layer.train(training), eager.train(training)):
        wanted = [x, before.weight, *module.parameters()]
        y = module(before(x))
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().mean() for g in first), wanted)
        results.append([*first, *second])
    eps = torch.finfo(torch.float32).eps
    for ours, theirs in zip(*results, strict=True):
        assert reference.relative(ours, theirs) <= 200 * eps


@both_kinds
@training_or_not
def test_a_layer_that_is_used_twice_has_a_gradient_penalty_too(name: str, training: bool) -> None:
    layer, eager = _pair(_named(name))
    x = _x().requires_grad_()
    results = []
    for module in (layer.train(training), eager.train(training)):
        y = module(module(x))
        results.append(torch.autograd.grad(y.square().sum(), [x, *module.parameters()], create_graph=True))
    _assert_near(*results, tolerance=1e-4)


@training_or_not
@both_kinds
@pytest.mark.parametrize("odd", [0, 3])
def test_gradients_come_in_batches(name: str, training: bool, odd: int) -> None:
    layer, eager = _pair(_named(name))
    for norm in (layer, eager.norm):
        nn.init.zeros_(norm.weight[:odd])
    x, dys, results = _x().requires_grad_(), torch.randn(3, *PLANE), []
    for module in (layer.train(training), eager.train(training)):
        results.append(torch.autograd.grad(module(x), [x, *module.parameters()], dys, is_grads_batched=True))
    _assert_near(*results)


@both_kinds
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "hooks", "save_on_cpu"])
def test_contexts_give_the_same_gradients(name: str, how: str) -> None:
    fused, _ = _nets((name, name))
    images = torch.randn(4, 3, 16, 16, requires_grad=True)
    wanted = [images, *fused.parameters()]
    expected = torch.autograd.grad(fused(images).square().sum(), wanted)
    if how in ("reentrant", "not reentrant"):
        for norm in fused[1], fused[3]:
            norm.momentum = 0.0  # each is called twice
        images.grad = None
        fused.zero_grad()
        checkpoint(fused, images, use_reentrant=how == "reentrant").square().sum().backward()
        found = tuple(t.grad for t in wanted)
    else:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        with torch.autograd.graph.save_on_cpu() if how == "save_on_cpu" else hooks:
            y = fused(images)
        found = torch.autograd.grad(y.square().sum(), wanted)
    # A reentrant checkpoint's forward pass is without gradients, and its outputs without branches.
    close = {"rtol": 1e-4, "atol": 1e-4} if how == "reentrant" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, expected, **close)


def test_hooks_are_handed_no_more_than_is_kept() -> None:
    # Hooks copy what they are handed, at its full size.
    handed: list[Tensor] = []
    layer, _ = _pair(_named("silu"))
    x = _x().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: handed.append(t) or t, lambda t: t):
        layer(x * 1)
    assert sum(t.numel() == x.numel() for t in handed) == 1


@training_or_not
@both_kinds
@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3))[:-1], ids=str)
def test_what_is_frozen_gets_no_gradient(name: str, needs: tuple[bool, ...], training: bool) -> None:
    layer, eager = _pair(_named(name))
    x, dy, results = _x().requires_grad_(needs[0]), torch.randn(PLANE), []
    for module in (layer.train(training), eager.train(training)):
        w, b = module.parameters()
        w.requires_grad_(needs[1]), b.requires_grad_(needs[2])
        x.grad = None
        y = module(x)
        assert module is eager or _node(y) is not None
        y.backward(dy)
        assert [t.grad is not None for t in (x, w, b)] == list(needs)
        results.append([t.grad for t in (x, w, b) if t.grad is not None])
    _assert_near(*results)
    again = []
    for module in (layer, eager):  # and those of gradients
        wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
        first = torch.autograd.grad(module(x).square().sum(), wanted, create_graph=True)
        again.append(torch.autograd.grad(sum(g.square().mean() for g in first), wanted, allow_unused=True))
    _assert_near(*again)
