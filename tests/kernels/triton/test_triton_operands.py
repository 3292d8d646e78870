"""Kernels of users' activations: the tensors that they read, and the gradients of those; on the GPU or interpreted.

What is summed with small integers is exact, so that layouts and masks are compared to the last bit. Errors elsewhere
are measured against float64 and compared with torch's own in the same dtype.
"""

import itertools
import logging
import types
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from conftest import SPLITS, Switch
from gpu import DEVICE, DTYPES, INTERPRETED, INTERPRETER_WARNINGS
from layouts import TRITONS, along, integers, normal, sum_along, way
from literature import PUBLISHED, Published
from reference import assert_as_good_as_torch, ulp
from subjects import TrainedELU
from torch import Tensor

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.activations import Activation, WithOperands, resolve
from fusedlayers.activations.custom import _trace_counts
from fusedlayers.calls.tracers import with_operands
from fusedlayers.kernels import GradientRequest, reference

pytest.importorskip("triton")
from fusedlayers.kernels import triton as backend
from fusedlayers.kernels.triton import codegen

pytestmark = [pytest.mark.filterwarnings(*INTERPRETER_WARNINGS), pytest.mark.usefixtures("interpreter_converts")]

Function = Callable[..., Tensor]

TRAINED = tuple(published for published in PUBLISHED if published.trainable)
LONGEST_LINE = 140

#: A tensor of no channels is left to PyTorch, if its activation has a number for each.
WITH_CHANNELS = [name for name in TRITONS if name != "no channels"]
#: Interpreted, which takes a second, each layout meets one way to divide the work, in turn.
every_layout = pytest.mark.parametrize(
    ("layout", "split"),
    [*(zip(WITH_CHANNELS, itertools.cycle(SPLITS)) if INTERPRETED else itertools.product(WITH_CHANNELS, SPLITS))],
    indirect=["split"],
)


def activation_of(function: Function, operands: Sequence[Tensor], dim: int) -> Activation:
    """What ``trace_activation`` makes: a vector of one number is a number."""
    return Activation(
        "custom", function, operand_dims=tuple(dim if p.numel() > 1 else None for p in operands), is_traced=True
    )


def forward(z: Tensor, b: Tensor | None, activation: Activation, operands: Sequence[Tensor], dim: int) -> Tensor:
    return backend.bias_act(z, b, activation, operands, dim=dim, encode=False, out=None)


def gradient(
    dy: Tensor,
    z: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    dim: int,
    *,
    wanted: GradientRequest | None = None,
) -> list[Tensor | None]:
    wanted = wanted or GradientRequest("input", False, True, (True,) * len(operands))
    return list(backend.gradient(dy, z, activation, operands, wanted, dim=dim))


@pytest.fixture(autouse=True)
def forget() -> None:
    """The tests share a few lambdas, which are given up when they have read too many different numbers."""
    _trace_counts.clear()


# --- layouts ----------------------------------------------------------------------------------------------------------


def two_lines(z: Tensor, slope: Tensor, offset: Tensor, below: Tensor, shift: Tensor) -> Tensor:
    """Two numbers for all and two for each channel; with small integers it is exact, and so are its sums."""
    return torch.where(z > 0, slope * z + offset, below * z + shift)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=str)
def test_an_empty_gate(shape: tuple[int, int]) -> None:
    slope = torch.full((shape[1],), 0.5, device=DEVICE)
    activation = activation_of(lambda z, p: torch.where(z > 0, z, p * z), [slope], 1)
    dy, z, up = (torch.ones(shape, device=DEVICE) for _ in range(3))
    (of_slope,) = backend.gate_gradient(dy, z, up, activation, [slope], (True,))
    assert of_slope is not None
    assert torch.equal(of_slope, torch.zeros_like(slope))
    assert backend.gate_gradient(dy, z, up, resolve("silu"), [], ()) == []


def test_gates() -> None:
    tensors = [normal(19, 31) for _ in range(3)]
    slope = torch.linspace(0.1, 0.9, 31, device=DEVICE)
    activation = activation_of(lambda z, p: torch.where(z > 0, z, p * z), [slope], -1)
    *factors, p = [t.double().requires_grad_() for t in (*tensors[1:], slope)]
    exact = torch.where(factors[0] > 0, factors[0], p * factors[0]) * factors[1]
    dy, z, up = tensors
    torch.testing.assert_close(backend.gate(z, up, activation, [slope], None), exact.detach().float())
    shares = backend.gate_gradient(dy.clone(), z, up, activation, [slope], (True,))
    expected = [t.float() for t in torch.autograd.grad(exact, [*factors, p], dy.double())]
    torch.testing.assert_close([z, up, *shares], expected)


@every_layout
def test_layouts(layout: str, split: str) -> None:
    shape, dim, make = TRITONS[layout]
    z, dy = make(integers(*shape)), make(integers(*shape))
    b, below, shift = (integers(shape[dim]) for _ in range(3))
    operands = [torch.tensor(3.0, device=DEVICE), torch.tensor(-2.0, device=DEVICE), below, shift]
    activation = activation_of(two_lines, operands, dim - len(shape) if dim >= 0 else dim)

    spread = [along(p, dim, z) for p in operands]
    assert torch.equal(forward(z, None, activation, operands, dim), two_lines(z, *spread))
    y = forward(z, b, activation, operands, dim)
    assert torch.equal(y, two_lines(z + along(b, dim, z), *spread)) and y.stride() == z.stride()

    above = (z > 0).float()
    dz = dy * torch.where(z > 0, 3.0, spread[2].expand_as(z))
    shares = (dy * above * z, dy * above, dy * (1 - above) * z, dy * (1 - above))
    sums = [s.sum() if p.dim() == 0 else sum_along(s, dim) for s, p in zip(shares, operands, strict=True)]
    overwrite, bias = way(layout, split)
    saved = z.clone(memory_format=torch.preserve_format)
    wanted = GradientRequest("input", overwrite, bias, (True,) * 4)
    new_dz, db, *dp = gradient(dy, saved, activation, operands, dim, wanted=wanted)
    assert new_dz is not None and torch.equal(new_dz, dz) and new_dz.stride() == z.stride()
    assert (new_dz is saved) == overwrite
    assert (db is not None and torch.equal(db, sum_along(dz, dim))) if bias else db is None
    for ours, expected in zip(dp, sums, strict=True):
        assert ours is not None and torch.equal(ours.view_as(expected), expected)


@every_layout
def test_what_lies_outside_does_not_count(layout: str, split: str) -> None:
    # At the 0 that masked elements, and masked channels, read as, every derivative here is infinite or NaN.
    shape, dim, make = TRITONS[layout]
    z, dy = make(integers(*shape).abs() + 1), make(integers(*shape))
    operands = [torch.tensor(2.0, device=DEVICE), integers(shape[dim]).abs() + 1]

    def function(z: Tensor, p: Tensor, v: Tensor) -> Tensor:
        return p * torch.log(z) + 1 / (z * v)

    spread = [along(p, dim, z) for p in operands]
    dz, db, dp, dv = gradient(dy, z, activation_of(function, operands, dim), operands, dim)
    expected = dy * (spread[0] / z - 1 / (z * z * spread[1]))
    assert dz is not None and db is not None and dp is not None and dv is not None
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(dz, expected, **close)
    torch.testing.assert_close(db, sum_along(expected, dim), **close)
    torch.testing.assert_close(dp.view(()), (dy * torch.log(z)).sum(), **close)
    torch.testing.assert_close(dv.view(-1), sum_along(-dy / (z * spread[1] ** 2), dim), **close)


@pytest.mark.parametrize(("shape", "dim"), [((41, 67), -1), ((3, 5, 300), 1), ((2000,), -1)])
def test_gradients_that_nobody_needs_are_left_out(shape: tuple[int, ...], dim: int) -> None:
    z, dy = normal(*shape), normal(*shape)
    vector = normal(shape[dim]) if len(shape) > 1 else torch.tensor(0.3, device=DEVICE)
    operands = [torch.tensor(0.7, device=DEVICE), vector, torch.tensor(-0.2, device=DEVICE)]
    activation = activation_of(lambda z, a, v, c: a * torch.tanh(v * z) + torch.sin(c * z), operands, dim - len(shape))
    every = gradient(dy, z, activation, operands, dim, wanted=GradientRequest("input", False, False, (True,) * 3))
    # A GPU's compiler makes one operation (FMA) of a product and a sum, of which ones depending on who else reads the
    # product. Each such choice is half a unit of a term, and they add up as numbers of random sign do. Terms of the
    # sums are at most dy (1 + |z|), and those of dz at most dy (1 + |v|).
    one, many = (
        0.0 if INTERPRETED else torch.finfo(torch.float32).eps * scale
        for scale in (float(dy.abs().max() * (1 + vector.abs().max())), float((dy * (1 + z.abs())).double().norm()))
    )
    units = [one, 0.0, many, many, many]
    for needs in itertools.product((False, True), repeat=3):
        some = gradient(dy, z, activation, operands, dim, wanted=GradientRequest("input", False, False, needs))
        assert [p is not None for p in some] == [True, False, *needs]
        for ours, full, unit in zip(some, every, units, strict=True):
            if ours is not None and full is not None:
                assert torch.equal(ours, full) or bool(((ours - full).abs() <= unit).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [(), (31,)], ids=str)
def test_gradients_from_a_stated_derivative(on_triton: Switch, channels: tuple[int, ...], dtype: torch.dtype) -> None:
    module = TrainedELU(*channels).to(DEVICE, dtype)
    z, dy = normal(19, 31, dtype=dtype).requires_grad_(), normal(19, 31, dtype=dtype)
    found = []
    for is_on in (True, False):
        on_triton(is_on)
        y = fl.bias_act(z, None, module, save="output")
        found.append([y.detach(), *torch.autograd.grad(y, [z, module.alpha], dy)])
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(*found, rtol=4 * unit, atol=16 * unit)


# --- functions from the literature ------------------------------------------------------------------------------------


def traced(function: object, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> WithOperands:
    found = with_operands(resolve(function), shape, dtype)
    assert found.activation.is_fusible, found.activation.fallback_reason
    return found


def check_given_input(on_triton: Switch, function: Function, z: Tensor, *tensors: Tensor, dim: int = -1) -> None:
    """``function(z, *tensors)`` that keeps its input, all gradients included, is as good as torch's."""

    def run(call: Function, *arguments: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().clone().requires_grad_() for a in arguments]
        y = call(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))

    def fused(z: Tensor, *tensors: Tensor) -> Tensor:
        y = fl.bias_act(z, None, lambda z: function(z, *tensors), dim=dim, save="input")
        assert type(y.grad_fn).__name__ == "BiasActBackward", "it was left to PyTorch"
        return y

    dy = normal(*z.shape, dtype=z.dtype, scale=0.1)  # sums of others would not be float16's
    on_triton(True)
    ours, torchs = run(fused, z, *tensors), run(function, z, *tensors)
    exact = run(function, z.double(), *(t.double() for t in tensors))
    luck = [0.0, 0.0, *(_luck(function, dy, z, tensors, i) for i in range(len(tensors)))]
    for mine, theirs, truth, own in zip(ours, torchs, exact, luck, strict=True):
        assert_as_good_as_torch(mine, theirs, truth, own)


def _luck(function: Function, dy: Tensor, z: Tensor, tensors: Sequence[Tensor], i: int) -> float:
    """What a GPU's error of the gradient of ``tensors[i]`` may be if that is a single number. The gradient is a sum
    over all of z, of terms that cancel, and torch's error may be small because errors cancel too. So it is told from
    the errors of torch's terms, which add up as numbers of random sign do: twice these, as elsewhere, and as many units
    of the terms as elsewhere of the result."""
    if INTERPRETED or z.dtype is not torch.float32 or tensors[i].numel() != 1:
        return 0.0

    def terms(z: Tensor, dy: Tensor, *tensors: Tensor) -> Tensor:
        number = tensors[i].requires_grad_()
        y = function(z, *tensors[:i], number, *tensors[i + 1 :])
        weights = torch.ones_like(y, requires_grad=True)  # of which the gradient is the sum, so that theirs are terms
        (total,) = torch.autograd.grad(y, number, weights, create_graph=True)
        return dy * torch.autograd.grad(total.sum(), weights)[0]

    exact = terms(*(t.detach().double() for t in (z, dy, *tensors)))
    error = terms(*(t.detach().clone() for t in (z, dy, *tensors))) - exact
    return float(2 * error.norm() + 8 * torch.finfo(torch.float32).eps * exact.norm())


@pytest.mark.parametrize(
    ("published", "dtype"),
    [(p, dtype) for i, p in enumerate(TRAINED) for dtype in (DTYPES[0], DTYPES[1 + i % 2])],
    ids=str,
)
def test_trainable_functions(published: Published, dtype: torch.dtype, on_triton: Switch) -> None:
    for shape, channels in (((37, 53), ()), ((37, 53), (53,)), ((3, 11, 60), (11, 1))):
        tensors = [torch.full(channels, value, dtype=dtype, device=DEVICE) for _, value in published.trainable]
        tensors = [t + 0.1 * normal(*channels, dtype=dtype, scale=1.0) for t in tensors]
        check_given_input(on_triton, published.function, normal(*shape, dtype=dtype), *tensors, dim=1)
    if dtype is torch.float32:  # it prints for all dtypes
        check_that_it_prints(traced(published.with_tensors(), (64, 48)).activation)


def check_that_it_prints(found: Activation) -> None:
    kept = "input" if found.output_refusal(torch.float32) is not None else "output"
    for dtype in DTYPES:
        for role in ("forward", "gradient"):
            needs = (True,) * len(found.operand_dims)
            text = codegen.source(found, role, given=kept, dtype=dtype, needs=needs)  # type: ignore[arg-type]
            assert max(map(len, text.splitlines())) <= LONGEST_LINE
            codegen.compile_function(text)


@pytest.mark.parametrize("published", [p for p in PUBLISHED if not p.trainable][::4], ids=str)
def test_functions_without_parameters(published: Published, on_triton: Switch) -> None:
    z = torch.cat([torch.linspace(-9, 9, 1499), torch.tensor([0.0, -0.0, 1e-30, -1e-30])]).to(DEVICE)
    check_given_input(on_triton, published.function, z)
    activation = traced(published.function, (len(z),)).activation
    check_that_it_prints(activation)
    if activation.output_refusal(torch.float32) is not None:
        return
    y = backend.bias_act(z, None, activation, dim=-1, encode=True, out=None)
    dz, *_ = gradient(torch.ones_like(z), y, activation, (), -1, wanted=GradientRequest("output", False, False))
    told = activation.derivative_given_output(y.cpu().float(), y.dtype).double()
    assert dz is not None
    steepest = float(told.abs().max())
    assert float((dz.cpu().double() - told).abs().max()) <= 16 * torch.finfo(torch.float32).eps * max(1.0, steepest)


@pytest.mark.usefixtures("has_driver")
def test_functions_that_cannot_be_printed_fall_to_torch_operations(caplog: pytest.LogCaptureFixture) -> None:
    on_gpu = types.SimpleNamespace(is_cpu=False, is_cuda=True, dtype=torch.float32)
    unprintable = traced(lambda z: z * torch.special.airy_ai(z), (64, 48)).activation
    printable = traced(lambda z: torch.tanh(torch.exp(z)), (64, 48)).activation
    with caplog.at_level(logging.WARNING, "fusedlayers"):
        assert kernels.choose(on_gpu, unprintable) is reference  # type: ignore[arg-type]  # as much of a tensor as is asked
    assert "airy_ai has no Triton counterpart" in caplog.text
    assert kernels.choose(on_gpu, printable) is backend  # type: ignore[arg-type]
    on_gpu.dtype = torch.float64
    assert kernels.choose(on_gpu, printable) is reference  # type: ignore[arg-type]


@pytest.mark.parametrize("channels", [1, 53])
def test_prelu_inside_of_a_function(channels: int, on_triton: Switch) -> None:
    slopes = torch.linspace(0.1, 0.4, channels, device=DEVICE)
    check_given_input(on_triton, lambda z, slope: 1.5 * F.prelu(z, slope), normal(37, 53), slopes, dim=1)


# --- whole layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_computed_in_float32(dtype: torch.dtype) -> None:
    # sin(alpha z) of a product that was rounded would be another number altogether.
    alpha = torch.tensor(30.7, device=DEVICE)
    z = normal(5000, dtype=dtype)
    exact = torch.sin(alpha.double() * z.double())
    y = forward(z, None, activation_of(lambda z, a: torch.sin(a * z), [alpha], -1), [alpha], -1)
    assert bool(((y.double() - exact).abs() <= ulp(exact, dtype) + 1e-4).all())
