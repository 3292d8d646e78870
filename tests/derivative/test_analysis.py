"""What ``analyse`` decides about any function, and how well an output then determines the derivative."""

import functools
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu import DEVICE, INTERPRETER_WARNINGS
from literature import FIXED, Published
from reference import all_values, derivative, second_derivative, ulp
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, Definition
from fusedlayers.derivative import branch_bit
from fusedlayers.derivative.analysis import FLOAT32_ALLOWANCE, GELU_ERRORS, Analysis, analyse
from fusedlayers.derivative.features import find_features
from fusedlayers.derivative.input_of import input_of
from fusedlayers.kernels import GradientRequest
from fusedlayers.kernels.cpu import value_tables as table

Function = Callable[[Tensor], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@functools.cache
def _analysis(published: Published) -> Analysis:
    return analyse(published.function)


@functools.cache
def _activation(published: Published) -> Activation:
    return Definition(published.name, published.function, derivative_given_output=_analysis(published)).bind()


def _of(name: str, function: Function) -> Activation:
    return Definition(name, function, derivative_given_output=analyse(function)).bind()


TOLD = [published for published in FIXED if published.kind != "input"]
every_told = pytest.mark.parametrize("published", TOLD, ids=str)
#: Told by float32 alone.
COARSE = "flatten_t_swish"
every_told_in = pytest.mark.parametrize(
    ("published", "dtype"), [(p, t) for p in TOLD for t in FLOATS if p.name != COARSE or t is torch.float32], ids=str
)


# --- what is decided --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", FIXED, ids=str)
def test_each_is_what_it_was_expected_to_be(published: Published) -> None:
    analysis = _analysis(published)
    refused = analysis.output_refusal(torch.float32)
    assert (analysis.kind if refused is None else "input") == published.kind, analysis.reason
    assert (refused or analysis.reason).startswith("the function ")
    assert (analysis.fold is not None) == (analysis.kind == "folded")


def _stairs(z: Tensor) -> Tensor:
    return sum((torch.relu(z - k) * (-1) ** k for k in range(-14, 14)), start=0.01 * z)


_CLAMP_HAS_KINKS = torch.__version__ < "2.14"

REFUSALS: dict[str, tuple[Function, str]] = {
    "turns twice": (lambda z: z**3 / (1 + z * z) - 0.5 * z, r"turns 2 times \(z = -0\.\d+, 0\.\d+\)"),
    "falls by a jump": (lambda z: torch.where(z > 0.5, z - 1, 2 * z), r"turns 2 times"),
    "step": (lambda z: torch.sign(z) + z * 0, "has the derivative 0 everywhere"),
    "square": (lambda z: z * z, "derivative that grows without bound as z goes to -inf"),
    "waves": (lambda z: 2 * z + torch.sin(z), "derivative that does not settle to a constant"),
    "logarithm": (torch.log, "is not finite at z = "),
    "hole": (lambda z: torch.where((z > 1) & (z < 1.1), math.nan, z), r"is not finite at z = 1"),
    "cube root": (lambda z: torch.sign(z) * z.abs() ** (1 / 3), "vertical tangent|not finite at a kink"),
    "flat as a cube": (lambda z: z**3 / (1 + z * z), "that no polynomial of degree 16 follows|10 polynomials do not"),
    "no round kink": (lambda z: torch.where(z > 1 / 3, z, 0.5 * z + 1 / 6), "no polynomial of degree|too coarsely"),
    "bell": (lambda z: torch.exp(-z * z), "has a maximum"),
    "well": (lambda z: z * torch.tanh(z), "has outputs that are not negative on both sides of its minimum"),
    "mirrored": (lambda z: F.gelu(-z), "has outputs that are not negative on both sides of its minimum"),
    "kink beside": (lambda z: torch.where(z > 0, 2 * z, F.silu(z)), "has a minimum, and a kink at z = 0"),
    "far": (lambda z: F.gelu(z + 9), "too far from 0"),
    "another's slope": (
        lambda z: torch.tanh(z) + (F.silu(z) - torch.tanh(z)).detach(),
        "does not return its derivative",
    ),
    "staircase": (_stairs, r"has at least \d+ kinks|turns \d+ times"),
    # 0.6 % of N(0, 1) have the output 5 in 16 bits, or lie next to the kink in float32.
    "far from 0": (lambda z: torch.relu(z) + 1000, "too coarsely: a float32 output determines the derivative to"),
    "capped": (lambda z: z.clamp(max=0.77), "kink at z = 0.77, which is no multiple"),
    # What autograd returns at a kink, of which an output knows nothing.
    # From torch 2.14 on clamp's derivative at its limits is 0, as beyond them, which the output tells.
    "clamp": (lambda z: torch.clamp(z, -0.125, 2.0) + 0.0 * torch.tanh(z), "derivative at its kink" * _CLAMP_HAS_KINKS),
    "maximum of two": (lambda z: torch.tanh(torch.maximum(z, torch.zeros_like(z))), "derivative at its kink"),
    "relu by abs": (lambda z: torch.tanh((z + z.abs()) / 2), "derivative at its kink"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_have_a_reason(name: str) -> None:
    function, reason = REFUSALS[name]
    refusal = analyse(function).output_refusal(torch.float32)
    assert re.search(reason, refusal or "") and bool(refusal) == bool(reason), refusal


def test_falling_outputs_may_settle_below_0() -> None:
    assert analyse(lambda z: F.silu(z) - 0.1).kind == "folded"


def test_16_bits_may_tell_less() -> None:
    """There inputs lie closer together than outputs."""
    analysis = analyse(lambda z: torch.relu(z) + 0.3)
    refusals = [analysis.output_refusal(dtype) for dtype in FLOATS]
    assert [refusal is None for refusal in refusals] == [dtype is torch.float32 for dtype in FLOATS], refusals


@pytest.mark.parametrize(("function", "factor"), [(F.silu, 0.1), (F.silu, 1e4), (F.mish, 1e-3)], ids=range(3))
def test_a_factor_changes_nothing(function: Function, factor: float) -> None:
    scaled, of_one = analyse(lambda z: factor * function(z)), analyse(function)
    assert all(found.output_refusal(dtype) is None for found in (scaled, of_one) for dtype in FLOATS)
    z = torch.randn(10_000)
    marked = (z < scaled.fold.position) if scaled.fold is not None else None
    slopes = [found.derivative()(size * function(z), marked) for found, size in ((scaled, factor), (of_one, 1.0))]
    torch.testing.assert_close(slopes[0] / factor, slopes[1], rtol=1e-4, atol=1e-4)


# --- what an output tells ---------------------------------------------------------------------------------------------


def _slopes(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The output as a layer saves it, and the derivative that its backward pass makes of it."""
    z = z.clone().requires_grad_()
    y = fl.bias_act(z, None, activation, save="output")
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y))
    return y.detach(), slope


def _error(published: Published, z: Tensor, y: Tensor, slope: Tensor) -> Tensor:
    """Of the derivative; within a unit of a kink's output the slopes of both its sides will do, and autograd's."""
    truth = derivative(published.function, z)
    error = (slope.double() - truth).abs()
    for kink in find_features(published.function).kinks:
        level = torch.tensor([kink.output], dtype=y.dtype).double()
        close = (y.double() - level).abs() <= float(ulp(level, y.dtype)) * bool(kink.output)
        for side in (kink.before, kink.slope, kink.after):
            error = torch.where(close, torch.minimum(error, (slope.double() - side).abs()), error)
    return torch.where(truth.isfinite() & y.isfinite(), error, 0.0)


@every_half
def test_what_16_bits_tell_too_coarsely_is_refused(dtype: torch.dtype) -> None:
    (published,) = (p for p in TOLD if p.name == COARSE)
    refusal = _analysis(published).output_refusal(dtype)
    assert refusal is not None and _activation(published).output_refusal(dtype) == refusal


@every_told_in
def test_the_derivative_is_as_accurate_as_gelus(published: Published, dtype: torch.dtype) -> None:
    z = torch.randn(200_000).to(dtype)
    truth = derivative(published.function, z)
    error = _error(published, z, *_slopes(z, _activation(published)))
    steepest = float(truth.abs().max())
    rms = float((error.square().mean() / truth.square().mean()).sqrt())
    # The result is rounded to the dtype once more.
    eps = torch.finfo(dtype).eps
    assert rms <= FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].rms
    assert float(error.max()) <= (FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].largest + eps) * steepest


#: Flat over some length, not only within rounding.
WITH_PLATEAUS = ("relu1", "nlrelu", "flatten_t_swish")


@every_told_in
def test_no_nan_but_eagers_and_0_where_it_is_flat(published: Published, dtype: torch.dtype) -> None:
    activation = _activation(published)
    sizes = torch.logspace(-44, 38, 40_001, dtype=torch.float64).float()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    z = torch.cat([torch.linspace(-20, 20, 100_001), sizes, -sizes, special]) if dtype is torch.float32 else None
    z = all_values(dtype) if z is None else z
    y, slope = _slopes(z, activation)
    own = published.function(z.float())
    # Tables for 16 bits are made in float64, and know the answer more often.
    assert not bool((y.isnan() & ~own.isnan()).any()) and bool(y.isnan()[z.isnan()].all())
    assert bool(slope.isnan()[y.isnan()].all()) and not bool(slope.isnan()[~y.isnan()].any())
    assert not bool(slope.isinf().any())
    if published.name in WITH_PLATEAUS:
        flat = (derivative(published.function, z) == 0) & (z != 0) & z.isfinite()
        assert int(flat.sum()) > 1000
        assert float(slope[flat].abs().max()) == 0


@every_told
def test_float32_outputs_tell_everywhere(published: Published) -> None:
    activation = _activation(published)
    z = torch.cat([torch.linspace(-30, 30, 200_001), torch.logspace(-30, 4, 20_001), -torch.logspace(-30, 4, 20_001)])
    error = _error(published, z, *_slopes(z, activation))
    truth = derivative(published.function, z)
    steepest = float(truth[truth.isfinite()].abs().max())
    assert float(error.max()) <= FLOAT32_ALLOWANCE * steepest * GELU_ERRORS[torch.float32].largest


@pytest.mark.parametrize(
    "function",
    [
        *(F.relu6, F.hardtanh, F.softshrink, lambda z: 0.7 * F.hardtanh(z)),
        lambda z: torch.where(z >= 1, torch.ones_like(z), torch.where(z > 0, z, torch.zeros_like(z))),
        lambda z: torch.sign(z) * torch.relu(z.abs() - 0.5),
        lambda z: torch.logit(F.hardtanh(z, 0.125, 0.875)),  # steep stretches that become flat
    ],
)
@every_float
def test_plateaus_at_any_level(function: Function, dtype: torch.dtype) -> None:
    activation = _of("flat", function)
    z = torch.linspace(-9, 9, 4001).to(dtype)
    truth = derivative(function, z)
    near = torch.zeros_like(z, dtype=torch.bool)
    for kink in (-1.0, -0.5, 0.0, 0.125, 0.5, 0.875, 1.0, 6.0):
        near |= (z.double() - kink).abs() <= 4 * float(ulp(torch.tensor(max(abs(kink), 0.3)), dtype))
    slope = _slopes(z, activation)[1]
    assert torch.equal((slope == 0)[~near], (truth == 0)[~near])
    assert float((slope - truth)[~near].abs().max()) <= 0.02 * float(truth.abs().max())


@pytest.mark.parametrize(
    ("function", "kink"),
    [
        *((function, 0.0) for function in (torch.abs, lambda z: torch.where(z > 0, z, -0.3 * z))),
        *((REFUSALS[name][0], 0.0) for name in ("maximum of two", "relu by abs")),
        (REFUSALS["clamp"][0], -0.125),
        (lambda z: torch.where(z >= 0, z, 0.25 * z), 0.0),
        (lambda z: -torch.where(z >= 0, torch.tanh(z), 0.5 * z), 0.0),
        # Their outputs at kinks are no float32 numbers.
        (lambda z: F.hardtanh(z) + 0.1 * z, 1.0),
        (lambda z: F.softshrink(z, 0.1) + 0.01 * z, 0.1),
        (lambda z: -(F.hardtanh(z, -0.5, 1.5) + 0.3 * z), 1.5),
        (lambda z: F.hardtanh(z + 1) + 0.3 * F.relu6(z + 1) + 0.1, 0.0),
        # On both sides of these slopes are the same, but not at them.
        (lambda z: F.relu(z - 1) - F.relu(1 - torch.exp(z - 1)), 1.0),
        (lambda z: F.softshrink(z, 0.5) + F.hardtanh(z, -0.5, 0.5), 0.5),
        (lambda z: F.silu(z.clamp(min=-1)) + F.silu(z.clamp(max=-1)), -1.0),
        (lambda z: F.gelu(torch.relu(z)) + F.gelu(-torch.relu(-z)), 0.0),
    ],
    ids=range(15),
)
def test_at_a_kink_itself_the_slope_is_autograds(function: Function, kink: float) -> None:
    """Inputs are often exactly there: what a dropout or a padding made 0, what was clamped before."""
    for dtype in FLOATS:
        z = torch.full((64, 64), kink, dtype=dtype)
        z[::2] = torch.randn(64, dtype=dtype)
        slopes = []
        for call, at in ((functools.partial(fl.bias_act, bias=None, activation=function), z), (function, z.float())):
            leaf = at.clone().requires_grad_()
            slopes += torch.autograd.grad(call(leaf).sum(), leaf)
        torch.testing.assert_close(slopes[0][1::2].float(), slopes[1][1::2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["isru", "smish", "tanhexp", "bent_identity", "gompertz", "penalized_tanh"])
def test_second_derivatives(name: str) -> None:
    """Of the fit in float32, which compiled code differentiates, and of the function at the input that is found."""
    (published,) = (p for p in FIXED if p.name == name)
    activation = _activation(published)
    z = torch.linspace(-4, 4, 2001) + 1e-3
    if activation.fold is not None:
        z = z[(z - activation.fold.position).abs() > 0.05]
    truth = second_derivative(published.function, z)
    y = activation.encoded(z, torch.float32).requires_grad_()
    slope = activation.derivative_given_output(y, torch.float32)
    (by_output,) = torch.autograd.grad(slope.sum(), y)
    assert float((by_output.double() * derivative(published.function, z) - truth).abs().max()) < 2e-3
    found = second_derivative(published.function, activation.input_given_output(y.detach(), torch.float32))
    assert float((found - truth).abs().max()) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_inputs_are_found_from_outputs(dtype: torch.dtype) -> None:
    z = torch.cat([torch.linspace(-12, 12, 4001, dtype=dtype), torch.logspace(-30, 30, 601, dtype=dtype)])
    for function in (lambda z: z + torch.tanh(z), lambda z: -torch.asinh(z)):
        y = function(z)
        found = input_of(function, y, None, None)
        torch.testing.assert_close(function(found), y, rtol=4 * torch.finfo(dtype).eps, atol=0.0)
        torch.testing.assert_close(found, z, rtol=128 * torch.finfo(dtype).eps, atol=0.0)  # asinh's logarithm
    # Where many inputs have an output, none at an end, which may be a kink; and what is not reached, and NaN.
    y = torch.tensor([0.0, 1.0, 2.0, -3.0, math.nan], dtype=dtype)
    inside = input_of(lambda z: F.hardtanh(z, 0, 1), y, None, None)
    assert inside[0] < 0 and 1 < inside[1] == inside[2] < 1.01 and inside[3] < 0 and bool(inside[4].isnan())


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_without_an_accurate_table_polynomials_are_evaluated() -> None:
    """Of three kinks a table has one."""
    activation = _of("kinks", lambda z: torch.tanh(z) + F.hardtanh(z, -0.5, 0.5))
    assert activation.output_refusal(torch.float32) is None and table.derivative_table(activation) is None
    z = torch.randn(10_000)
    assert float((_slopes(z, activation)[1] - derivative(activation.function, z)).abs().max()) < 1e-3


@pytest.fixture
def triton_backend() -> object:
    pytest.importorskip("triton")
    from fusedlayers.kernels import triton as backend

    return backend


@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("name", ["isru", "relu1", "smish", "nlrelu", "double_exponential"])
@every_float
def test_on_a_device(name: str, dtype: torch.dtype, triton_backend: object) -> None:
    (published,) = (p for p in FIXED if p.name == name)
    activation = _activation(published)
    backend = triton_backend
    z = torch.linspace(-6, 6, 4000).to(dtype).to(DEVICE)
    y = backend.bias_act(z, None, activation, dim=-1, encode=True, out=None)  # type: ignore[attr-defined]
    slope, _ = backend.gradient(  # type: ignore[attr-defined]
        torch.ones_like(y), y, activation, (), GradientRequest("output", False, False), dim=-1
    )
    expected = activation.derivative_given_output(y.float(), dtype)
    torch.testing.assert_close(slope.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    if activation.fold is not None:
        marked = branch_bit.decode(y.float(), dtype)
        assert torch.equal(marked, activation.fold.marks(z.float()))
