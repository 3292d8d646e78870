"""An activation and the dropout behind it in one buffer: the numbers that F.dropout drops, gradients from the marks,
what is saved, and where PyTorch computes it."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import assert_near, derivative
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.activations import Activation, definitions, resolve
from fusedlayers.kernels import cpu, reference
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import dropout_node as dropout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE = [row.bind() for row in definitions()]
#: Their outputs do not tell the derivative after a factor.
NOT_SERVED = {"relu6", "hardtanh", "hardsigmoid", "cbrt", "hardswish", ("trelu", torch.bfloat16)}
TOLD = [(a, dtype) for a in TABLE for dtype in DTYPES if a.output_refusal(dtype) is None and not a.is_identity]
SERVED = [(a, dtype) for a, dtype in TOLD if not {a.name, (a.name, dtype)} & NOT_SERVED]
every_served = pytest.mark.parametrize(("activation", "dtype"), SERVED, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_p = pytest.mark.parametrize("p", [0.1, 0.5, 0.9])


def _ours(z: Tensor, activation: Any, p: float, **options: Any) -> Tensor:
    torch.manual_seed(7)
    return fl.bias_act(z, None, activation, dropout=p, **options)


def _eager(z: Tensor, activation: Any, p: float) -> Tensor:
    torch.manual_seed(7)
    return F.dropout(resolve(activation).plain(z), p)


def _dropped(z: Tensor, p: float) -> Tensor:
    """What of z the next dropout drops after a seed of 7."""
    torch.manual_seed(7)
    return ~torch.empty_like(z, dtype=torch.bool).bernoulli_(1 - p)


def _is_fused(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ in ("ActDropoutBackward", "ViewBackward0", "SqueezeBackward1")


def _z(dtype: torch.dtype, shape: tuple[int, ...] = (60, 300)) -> Tensor:
    return (torch.randn(shape) * 2).to(dtype)


@pytest.mark.parametrize(("activation", "dtype"), TOLD, ids=str)
def test_outputs_tell_the_derivative_after_a_factor_too(activation: Activation, dtype: torch.dtype) -> None:
    assert dropout.tells_scaled(activation, dtype) is ((activation, dtype) in SERVED)


# --- values -----------------------------------------------------------------------------------------------------------


@every_served
@each_p
def test_what_is_dropped_is_what_torch_drops(activation: Activation, dtype: torch.dtype, p: float) -> None:
    z = _z(dtype)
    y = _ours(z.clone().requires_grad_(), activation, p).detach()
    state = torch.get_rng_state()
    expected = _eager(z, activation, p)
    assert torch.equal(state, torch.get_rng_state()) and y.dtype is dtype
    # A branch takes a unit, and torch rounds 1 / (1 - p) to 16 bits.
    exact = activation.function(z.double()) / (1 - p) * ~_dropped(z, p)
    errors = [float((t.double() - exact).abs().max()) for t in (y, expected)]
    assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(dtype).eps * float(exact.abs().max())
    near = z > -4  # farther out torch's gelu cancels to 0
    assert torch.equal((y == 0)[near], (expected == 0)[near])
    zero = activation.encoded(z.float(), dtype).to(dtype) == 0
    assert torch.equal((y == 0) & y.signbit() & ~zero, _dropped(z, p) & ~zero)


@each_dtype
def test_zeros_infinities_and_nan(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, -200.0, -1.0, 1.0, math.inf, -math.inf, math.nan])
    for name in ("relu", "gelu", "silu", "tanh", "elu", "leaky_relu"):
        z = special[special != math.inf] if name == "gelu" else special  # of which torch's kernels make NaN
        z = z.repeat(400).to(dtype).requires_grad_()
        ours, eager, dropped = _ours(z, name, 0.5), _eager(z, name, 0.5), _dropped(z, 0.5)
        assert torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours.isinf(), eager.isinf())
        is_marked = resolve(name).is_folded & (z.detach() < -100)
        assert torch.equal(ours[~dropped & (ours == 0)].signbit(), is_marked[~dropped & (ours == 0)])
        found, expected = (torch.autograd.grad(y, z, torch.ones_like(y))[0] for y in (ours, eager))
        finite = z.detach().isfinite()
        torch.testing.assert_close(found[finite], expected[finite], rtol=2e-2, atol=2e-2)
        assert bool(found[finite & dropped].eq(0).all())


def test_marks_that_underflow_where_subnormal_numbers_are_flushed() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        for name, value in (("hardswish", -5.0), ("gelu", -50.0), ("silu", -200.0)):
            z = torch.full((1000,), value, requires_grad=True)
            _ours(z, name, 0.5).sum().backward()
            assert z.grad is not None and float(z.grad.abs().max()) < 1e-6
    finally:
        torch.set_flush_denormal(False)


# --- gradients --------------------------------------------------------------------------------------------------------


@every_served
@each_p
def test_gradients_are_nearly_as_good_as_without(activation: Activation, dtype: torch.dtype, p: float) -> None:
    """The factor and its inverse are two roundings more."""
    # Next to a fold few numbers have nearly all of the error.
    z = _z(dtype, (1000, 2000) if activation.is_folded and dtype is torch.float32 else (200, 300))
    dy = torch.randn(z.shape)
    leaf = z.clone().requires_grad_()
    y = fl.bias_act(leaf, None, activation, dropout=p)
    assert _is_fused(y)
    keep = ~((y == 0) & y.signbit())
    (dz,) = torch.autograd.grad(y, leaf, dy.to(dtype))
    exact = derivative(activation.function, z.double()) * dy.to(dtype).double() * keep / (1 - p)
    plain = z.clone().requires_grad_()
    (without,) = torch.autograd.grad(fl.bias_act(plain, None, activation, save="output"), plain, dy.to(dtype))
    error = float((dz.double() - exact).norm() / exact.norm())
    floor = float((without.double() * keep / (1 - p) - exact).norm() / exact.norm())
    assert error <= 2 * floor + 2 * torch.finfo(dtype).eps


@every_served
def test_the_loops_compute_what_the_reference_does(activation: Activation, dtype: torch.dtype) -> None:
    dy = _z(dtype)
    z = activation.encoded(_z(dtype).float(), dtype).to(dtype)  # what drops are outputs
    keep = torch.empty_like(z, dtype=torch.bool).bernoulli_(0.7)
    results = []
    for backend, overwrite in itertools.product((cpu, reference), (False, True)):
        given = z.clone()
        y = backend.drop_marked(given, keep, activation, 0.3, given if overwrite else torch.empty_like(z))
        assert (y is given) is overwrite and (overwrite or torch.equal(given, z))
        y = y if not results else results[0][1].clone()  # next to a fold the derivative magnifies a rounding
        dz = backend.drop_marked_gradient(dy, y.clone(), activation, 0.3, torch.empty_like(y))
        out = y.clone()
        assert torch.equal(backend.drop_marked_gradient(dy, out, activation, 0.3, out), dz)
        results.append((given if overwrite else y, y, dz))
    unit = torch.finfo(dtype).eps
    for found, _, dz in results:
        torch.testing.assert_close(found, results[0][0], rtol=16 * unit, atol=4 * unit)
        zero = (z == 0) & z.signbit() if activation.is_folded else torch.zeros_like(keep)
        assert torch.equal(found.signbit() & (found == 0), ~keep | zero)
        # The loops round y (1 - p), which next to a fold moves the derivative by the root of a unit.
        allowed = 4 * unit**0.5 if activation.is_folded and dtype is torch.float32 else max(4 * unit, 2e-5)
        torch.testing.assert_close(dz, results[0][2], rtol=16 * unit, atol=allowed)


@each_dtype
def test_a_derivative_that_is_infinite_at_zero_is_not_that_of_what_was_dropped(dtype: torch.dtype) -> None:
    y, cbrt = torch.tensor([-0.0, 1.0], dtype=dtype), resolve("cbrt")
    for backend in (cpu, reference):
        dz = backend.drop_marked_gradient(torch.ones_like(y), y.clone(), cbrt, 0.5, torch.empty_like(y))
        assert float(dz[0]) == 0.0 and 0.0 < float(dz[1]) < 10.0


# --- what is saved, and buffers ---------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("name", ["gelu", "relu", "silu"])
def test_one_buffer_is_saved_and_no_mask(name: str, dtype: torch.dtype) -> None:
    x, w, b = torch.randn(64, 32), torch.randn(256, 32), torch.randn(256)
    x, w, b = (t.to(dtype).requires_grad_() for t in (x, w, b))
    hidden = 64 * 256 * dtype.itemsize
    ours = saved_bytes(lambda: fl.dense_bias_act(x, w, b, name, dropout=0.1))
    eager = saved_bytes(lambda: F.dropout(resolve(name).plain(F.linear(x, w, b)), 0.1))
    assert ours == hidden and eager >= 2 * hidden
    last = torch.randn(8, 256).to(dtype).requires_grad_()
    assert saved_bytes(lambda: F.linear(fl.dense_bias_act(x, w, b, name, dropout=0.1), last)) == hidden


def test_an_input_is_not_overwritten() -> None:
    for x in (torch.randn(50, 60, requires_grad=True), torch.randn(50, 60, requires_grad=True) * 1):
        before = x.detach().clone()
        fl.bias_act(x, None, "gelu", dropout=0.3).sum().backward()
        assert torch.equal(x.detach(), before)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_a_residual_is_added_before() -> None:
    x, w, residual = torch.randn(30, 12), torch.randn(80, 12), torch.randn(30, 80)
    torch.manual_seed(7)
    ours = fl.dense_bias_act(x.requires_grad_(), w, None, "gelu", residual=residual, dropout=0.2)
    eager = _eager(F.linear(x, w) + residual, "gelu", 0.2)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


# --- contexts ---------------------------------------------------------------------------------------------------------


def test_checkpoints_hooks_and_autocast() -> None:
    layer, x = fl.FusedDenseAct(12, 80, "gelu", dropout=0.3), torch.randn(30, 12, requires_grad=True)

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        return [*torch.autograd.grad(call(x).float().square().sum(), [x, *layer.parameters()])]

    expected = step(layer)
    torch.testing.assert_close(step(lambda x: checkpoint(layer, x, use_reentrant=False)), expected)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(step(layer), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16 and _is_fused(y)
        torch.testing.assert_close(step(layer), expected, rtol=0.1, atol=0.3)


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
def test_compiled_layers_are_the_compilers() -> None:
    layer, x = fl.FusedDenseAct(12, 80, "gelu", dropout=0.3), torch.randn(30, 12, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert 0.2 < float((y == 0).float().mean()) < 0.4
    y.sum().backward()


def test_all_or_nothing() -> None:
    x = torch.randn(50, 60, requires_grad=True)
    assert torch.equal(fl.bias_act(x, None, "gelu", dropout=0.0), fl.bias_act(x, None, "gelu"))
    y = fl.bias_act(x, None, "gelu", dropout=1.0)
    assert bool((y == 0).all()) and bool((torch.autograd.grad(y.sum(), x)[0] == 0).all())


# --- a bit for each element, in blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 8), (5, 103)])
def test_bits_of_any_number_of_elements(shape: tuple[int, int]) -> None:
    keep = torch.rand(shape) < 0.5
    bits = reference.packed(keep)
    assert bits.dtype is torch.uint8 and bits.shape == ((keep.numel() + 7) // 8,)
    assert torch.equal(reference.unpacked(bits, keep.shape), keep)


# --- where an output does not tell the derivative ---------------------------------------------------------------------


def test_kinks_are_not_crossed() -> None:
    """A factor and its inverse move an output of 3, where hardswish has a kink, to the other side."""
    assert not any(dropout.tells_scaled(resolve("hardswish"), dtype) for dtype in DTYPES)
    for dtype in DTYPES:
        x = torch.full((40, 300), 3.0, dtype=dtype, requires_grad=True)
        calls = _ours(x, "hardswish", 0.1), _eager(x, "hardswish", 0.1)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in calls))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_function_of_which_only_16_bit_outputs_tell_the_derivative(dtype: torch.dtype) -> None:
    x = _z(dtype).requires_grad_()
    assert "saves the output" in repr(fl.FusedDenseAct(8, 8, nn.Tanhshrink(), dtype=dtype))
    calls = _ours(x, nn.Tanhshrink(), 0.1), _eager(x, nn.Tanhshrink(), 0.1)
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in calls)
    torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@each_dtype
def test_gradients_that_hold_no_values_of_their_own(dtype: torch.dtype) -> None:
    """A negative view holds the values before the sign is changed, and a zero tensor holds none."""
    x = torch.randn(40, 300, dtype=dtype, requires_grad=True)
    y = fl.bias_act(x, None, "gelu", dropout=0.3, save="output")
    assert type(y.grad_fn).__name__ == "ActDropoutBackward"
    dy = torch.randn(40, 300, dtype=dtype)
    for given, same in ((torch._neg_view(dy), -dy), (torch._efficientzerotensor(dy.shape, dtype=dtype), 0 * dy)):
        assert_near(*(torch.autograd.grad(y, x, t, retain_graph=True) for t in (given, same)))
