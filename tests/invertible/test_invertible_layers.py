"""Gradients from computed inputs against plain autograd's, for every layer, and what is kept meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from inverting import EXACT, Scale, assert_exact, error, linears, net, plain, randn, steps, worst
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.invertible.inversion import InvertibleCall
from fusedlayers.memory import peak_bytes, saved_bytes
from fusedlayers.utils.autograd_graph import nodes_of

# --- layers -----------------------------------------------------------------------------------------------------------


def _conv(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


#: Networks of a coupling, from 4 channels to as many as are asked for, and whether they take images.
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "dense": (lambda out: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, out)), False),
    "batch norm": (lambda out: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, out)), False),
    "dropout": (lambda out: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, out), nn.Dropout(0.2)), False),
    "spectral norm": (lambda out: nn.utils.parametrizations.spectral_norm(nn.Linear(4, out)), False),
    "FusedMLP": (lambda out: nn.Sequential(fl.FusedMLP(4, 8), nn.Linear(4, out)), False),
    "conv": (lambda out: nn.Sequential(_conv(4, 6), nn.BatchNorm2d(6), nn.ReLU(), _conv(6, out)), True),
    "FusedConvAct2d": (
        lambda out: nn.Sequential(fl.FusedConvAct2d(4, 6, 3, activation="mish"), nn.ZeroPad2d(1), _conv(6, out)),
        True,
    ),
}


def coupling(kind: str, network: str, with_g: bool) -> tuple[Any, bool]:
    make, is_image = NETWORKS[network]
    cls, out = (fl.AdditiveCoupling, 4) if kind == "additive" else (fl.AffineCoupling, 8)
    return cls(make(out), make(out) if with_g else None), is_image


@pytest.mark.parametrize("network", NETWORKS)
def test_couplings(network: str) -> None:
    """In float64 as plain autograd; two of them in a chain, so that one is told by the other."""
    for kind, with_g, is_split, is_reversed in product(
        ("additive", "affine"), (True, False), (True, False), (False, True)
    ):
        first, is_image = coupling(kind, network, with_g)
        second, _ = coupling(kind, network, with_g)
        module = fl.InvertibleSequential(first, second).double()
        size = (4, 8, 5, 5) if is_image else (6, 8)
        x = randn(*size)
        inputs = (x,) if is_split else x.chunk(2, 1)
        assert_exact(module.reverse(is_reversed), *inputs)


def _layers() -> dict[str, tuple[Any, tuple[Tensor, ...]]]:
    rows, images = randn(6, 4), randn(4, 4, 6, 6)
    return {
        "linear": (fl.InvertibleLinear(4, 4), (rows,)),
        "linear, wide, no bias": (fl.InvertibleLinear(4, 9, bias=False), (rows,)),
        "linear, one row": (fl.InvertibleLinear(4, 4), (randn(4),)),
        "linear, orthogonal": (fl.orthogonal(fl.InvertibleLinear(4, 4)), (rows,)),
        "conv1d": (fl.InvertibleConv1d(4, 4, 1), (randn(3, 4, 5),)),
        "conv2d": (fl.InvertibleConv2d(4, 4, 1), (images,)),
        "conv2d, patches": (fl.InvertibleConv2d(4, 16, 2, bias=False), (images,)),
        "conv2d, groups": (fl.InvertibleConv2d(4, 16, 2, groups=2), (images,)),
        "conv2d, one image": (fl.InvertibleConv2d(4, 4, 1), (images[0],)),
        "conv2d, orthogonal": (fl.orthogonal(fl.InvertibleConv2d(4, 16, 2)), (images,)),
        "conv3d": (fl.InvertibleConv3d(2, 16, 2), (randn(2, 2, 4, 4, 4),)),
        "batch norm": (fl.InvertibleBatchNorm2d(4), (images,)),
        "batch norm, eval": (fl.InvertibleBatchNorm2d(4).eval(), (images,)),
        "batch norm, no statistics": (fl.InvertibleBatchNorm2d(4, track_running_stats=False), (images,)),
        "batch norm, no weight": (fl.InvertibleBatchNorm1d(4, affine=False, momentum=None), (rows,)),
        "identity": (fl.InvertibleIdentity(), (rows,)),
        "flatten": (fl.InvertibleFlatten(), (images,)),
        "shuffle": (fl.InvertiblePixelShuffle(2), (images,)),
        "unshuffle": (fl.InvertiblePixelShuffle(2).reverse(), (images,)),
        "pad": (fl.InvertiblePad((1, 2)), (images,)),
        "split": (fl.InvertibleSplit(), (rows,)),
        "join": (fl.InvertibleSplit().reverse(), (rows, rows + 1)),
        "split, odd": (fl.InvertibleSplit(-1), (randn(2, 5),)),
        "additive": (net(4), (randn(3, 8),)),
        "affine": (fl.InvertibleSequential(*(coupling("affine", "dense", True)[0] for _ in range(3))), (randn(3, 8),)),
        "revnet": (_revnet(), (randn(2, 3, 8, 8),)),
    }


def _revnet() -> fl.InvertibleSequential:
    """One that is as a user would build it: pixels into channels, couplings, and lower resolutions."""
    blocks = [coupling("additive", "conv", True)[0] for _ in range(2)]
    wide = [
        fl.AdditiveCoupling(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU()),
        )
        for _ in range(2)
    ]
    return fl.InvertibleSequential(
        fl.InvertibleConv2d(3, 8, 1),
        fl.InvertibleBatchNorm2d(8),
        *blocks,
        fl.InvertibleActivation("leaky_relu"),
        fl.InvertiblePixelShuffle(2).reverse(),
        fl.InvertibleConv2d(32, 32, 1),
        fl.InvertibleSequential(*wide),
        fl.InvertibleFlatten(),
    )


LAYERS = list(_layers())


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_float64(name: str) -> None:
    module, inputs = _layers()[name]
    assert_exact(module.double(), *inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_float32_err_as_check_predicts(name: str) -> None:
    module, inputs = _layers()[name]
    inputs = tuple(x.float() for x in inputs)
    report = module.check(*inputs, atol=1e-3)
    assert report.is_within
    # The loss here is another one than check's, and plain autograd rounds as well.
    assert error(*steps(module, *inputs)) <= 4 * report.gradient_error + 8 * torch.finfo(torch.float32).eps


# --- activations ------------------------------------------------------------------------------------------------------


def _can_be_inverted(name: str) -> bool:
    try:
        fl.InvertibleActivation(name)
    except ValueError:
        return False
    return True


ACTIVATIONS = [name for name in fl.activations() if _can_be_inverted(name)]


def test_which_activations_can_be_inverted() -> None:
    flat = {"relu", "relu6", "hardtanh", "trelu", "softshrink", "hardsigmoid", "squared_relu", "hardswish"}
    assert set(fl.activations()) - set(ACTIVATIONS) == flat


def activation(name: str) -> Any:
    """Its output is what the module behind it tells, and no more the one that it returned."""
    return fl.InvertibleSequential(Scale(), fl.InvertibleActivation(name), Scale(-0.2))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_float64(name: str) -> None:
    """Folded ones are left to autograd."""
    x = randn(500)
    x = x[x.abs() > 1e-2]  # the derivative of cbrt has a pole at zero
    module = activation(name).double()
    found, wanted = steps(module, x)
    assert worst(found, wanted) <= EXACT
    saved = saved_bytes(module, (1 * x).requires_grad_())
    if fl.InvertibleActivation(name).activation.is_folded:
        assert x.nbytes < saved <= saved_bytes(plain(module), (1 * x).requires_grad_())
    else:
        assert saved == x.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_err_as_check_predicts(name: str, dtype: torch.dtype) -> None:
    module = activation(name).to(dtype)
    x = randn(500, dtype=dtype)
    report = module.check(x, rtol=1, atol=1)
    found, wanted = steps(module, x)
    eps = torch.finfo(dtype).eps
    assert error(found[:1], wanted[:1]) <= eps
    assert error(found[1:], wanted[1:]) <= 4 * report.gradient_error + 8 * eps
    assert report.gradient_error < 1e-2 or dtype is not torch.float32  # as large as what it predicts it proves nothing
    bits = -(-len(x) // 8) if module[1].activation.is_folded else 0
    assert saved_bytes(module, (1 * x).requires_grad_()) == x.nbytes + bits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_outputs_that_are_rounded_to_a_limit(name: str, dtype: torch.dtype) -> None:
    """A formula has an infinite input for them, and none beyond; gradients would be NaN."""
    x = torch.cat([sign * torch.logspace(0, 2, 9) for sign in (1, -1)]).to(dtype)
    for scale in (-0.3, -0.2, 0.1, 0.2, 0.3):  # some tell a little more than 1 for the tanh of 10
        module = activation(name)
        module.append(Scale(scale)).to(dtype)
        found, wanted = steps(module, x)
        assert all(t is not None and t.isfinite().all() for t in (*found, *wanted))


def test_check_warns_of_gradients_behind_a_kink() -> None:
    """Rounding moves inputs to its other side."""
    parts = [fl.AdditiveCoupling(nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for _ in range(24)]
    net = fl.InvertibleSequential(fl.InvertibleActivation("leaky_relu"), *parts)
    x = torch.randn(4096, 128) * 1e-4
    with pytest.warns(UserWarning, match=r"gradients by .* Behind a kink"):
        report = net.check(x, atol=1e-2)
    assert not report and report.gradient_error > 1e-3


@pytest.mark.filterwarnings("error")
def test_check_says_nothing_of_gradients_that_are_almost_0() -> None:
    """Of two examples a batch norm's input has no gradient but for rounding."""
    for scale in (1, 10, 100):
        assert fl.InvertibleSequential(fl.InvertibleBatchNorm1d(16)).check(scale * torch.randn(2, 16))
    linear = fl.InvertibleSequential(fl.InvertibleLinear(8, 8), fl.InvertibleActivation("leaky_relu"))
    assert linear.check(torch.randn(64, 8), rtol=0.0, atol=1e-3)


def test_flattened_sizes_are_needed_for_the_inverse() -> None:
    with pytest.raises(ValueError, match=r"InvertibleFlatten: the inverse needs the sizes .* pass unflattened="):
        fl.InvertibleFlatten().inverse(torch.randn(2, 48))


# --- what is kept -----------------------------------------------------------------------------------------------------

CHAINS: dict[str, Callable[[int], Any]] = {
    "additive": lambda depth: net(depth, 64),
    "affine": lambda depth: fl.InvertibleSequential(
        *(fl.AffineCoupling(nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 128))) for _ in range(depth))
    ),
    "linear": lambda depth: linears(depth, 128),
}


@pytest.mark.parametrize("name", CHAINS)
def test_saved_bytes_do_not_grow_with_depth(name: str) -> None:
    def kept(chain: Any) -> int:
        x = randn(512, 128, dtype=torch.float32).requires_grad_()
        return saved_bytes(lambda: chain(1 * x), exclude=list(chain.parameters()))

    shallow, deep = (CHAINS[name](depth) for depth in (8, 128))
    assert kept(shallow) >= 512 * 128 * 4
    assert kept(deep) <= 1.02 * kept(shallow)
    assert kept(plain(deep)) > 2 * kept(plain(shallow))


def test_peak_memory_does_not_grow_with_depth() -> None:
    """But for the gradients of parameters."""

    def peak(chain: Any) -> int:
        x = randn(2048, 128, dtype=torch.float32).requires_grad_()

        def both() -> None:
            chain(1 * x).sum().backward()

        both()  # gradients are there afterwards
        return peak_bytes(both, device="cpu")

    shallow, deep = (CHAINS["additive"](depth) for depth in (8, 128))
    assert peak(deep) <= 1.02 * peak(shallow)


@pytest.mark.parametrize("with_backward", [True, False])
def test_graphs_go_when_nobody_holds_them(with_backward: bool) -> None:
    """Without the garbage collector, that is without circles."""
    module, inputs = _layers()["revnet"]
    gc.collect()
    gc.disable()
    try:
        y = module(*(x.float() for x in inputs))
        calls = [weakref.ref(y.grad_fn.call)]
        for node in nodes_of([y]):
            if isinstance(call := getattr(node, "call", None), InvertibleCall):
                calls.append(weakref.ref(call))
        del node, call
        assert len(set(calls)) > 8
        if with_backward:
            y.sum().backward()
        del y
        assert not [call() for call in calls if call() is not None]
    finally:
        gc.enable()


def test_batch_norms_refuse_what_torchs_refuse() -> None:
    module = fl.InvertibleBatchNorm1d(3)
    with pytest.raises(ValueError, match="InvertibleBatchNorm1d: one value per channel has no variance"):
        module(torch.randn(1, 3))
    assert torch.equal(module.running_var, torch.ones(3))  # nothing was written
    with pytest.raises(ValueError, match="eps must be"):
        fl.InvertibleBatchNorm1d(3, eps=-1e-3).eval()(torch.randn(4, 3))


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}], ids=str
)
def test_batch_norms_keep_torchs_statistics(options: dict[str, Any]) -> None:
    ours, torchs = (kind(6, **options) for kind in (fl.InvertibleBatchNorm1d, nn.BatchNorm1d))
    for training in (True, True, False):
        x = 3 * torch.randn(40, 6) + 1
        assert torch.equal(ours.train(training)(x), torchs.train(training)(x))
        assert all(map(torch.equal, ours.buffers(), torchs.buffers()))
