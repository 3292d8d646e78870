"""What ``analyse`` decides about any function, and how well an output then determines the derivative."""

import functools
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu import DEVICE, INTERPRETER_WARNINGS
from literature import FIXED, PUBLISHED, Published
from reference import all_values, derivative, encoding_error, second_derivative, ulp
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, Row
from fusedlayers.activations.tracing import trace
from fusedlayers.backends import GradientRequest, cpu
from fusedlayers.backends.cpu import table
from fusedlayers.derivative import branch_bit
from fusedlayers.derivative.analysis import (
    FLOAT32_ALLOWANCE,
    GELU_ERRORS,
    Analysis,
    MonotoneDerivative,
    analyse,
)
from fusedlayers.derivative.features import find_features
from fusedlayers.derivative.folded import FoldedDerivative, Polynomials
from fusedlayers.derivative.piecewise import Segments
from fusedlayers.derivative.polynomial import PRECISIONS

Function = Callable[[Tensor], Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_published = pytest.mark.parametrize("published", FIXED, ids=str)


@functools.cache
def _analysis(published: Published) -> Analysis:
    return analyse(published.function)


@functools.cache
def _activation(published: Published) -> Activation:
    return Row(published.name, published.function, derivative_given_output=_analysis(published)).bind()


def _of(name: str, function: Function) -> Activation:
    return Row(name, function, derivative_given_output=analyse(function)).bind()


TOLD = [published for published in FIXED if published.kind != "input"]
every_told = pytest.mark.parametrize("published", TOLD, ids=str)


# --- what is decided --------------------------------------------------------------------------------------------------


def test_there_is_something_to_decide() -> None:
    assert len(PUBLISHED) >= 60 and len({published.name for published in PUBLISHED}) == len(PUBLISHED)
    assert all(published.kind == "input" for published in PUBLISHED if published.trainable)
    assert {published.kind for published in FIXED} == {"monotone", "folded", "input"}


@every_published
def test_each_is_what_it_was_expected_to_be(published: Published) -> None:
    analysis = _analysis(published)
    refused = analysis.output_refusal(torch.float32)
    assert (analysis.kind if refused is None else "input") == published.kind, analysis.reason
    assert (refused or analysis.reason).startswith("the function ")
    assert (analysis.fold is not None) == (analysis.kind == "folded")


@pytest.mark.parametrize("published", [p for p in PUBLISHED if p.trainable], ids=str)
def test_parameters_at_their_initial_values_are_analysed_without_harm(published: Published) -> None:
    assert analyse(published.with_initial_values()).kind in ("monotone", "folded", "input")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, z: Tensor) -> Tensor:
        return torch.tanh(z)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _raises(z: Tensor) -> Tensor:
    raise RuntimeError("no\nthanks")


def _stairs(z: Tensor) -> Tensor:
    return sum((torch.relu(z - k) * (-1) ** k for k in range(30)), start=0.01 * z)


REFUSALS: dict[str, tuple[Function, str]] = {
    "turns twice": (lambda z: z**3 / (1 + z * z) - 0.5 * z, r"turns 2 times \(z = -0\.\d+, 0\.\d+\)"),
    "turns often": (lambda z: torch.sin(3 * z) * torch.exp(-z * z / 50), r"turns at least \d+ times .*\.\.\."),
    "jumps": (lambda z: torch.where(z > 0.5, z + 1, z), r"jumps at z = 0\.5, from 0\.5 to 1\.5"),
    "small jump": (lambda z: torch.where(z > 2, z + 1e-5, z), "jumps at z = 2"),
    "step": (lambda z: torch.sign(z) + z * 0, "has the derivative 0 everywhere"),
    "straight-through": (lambda z: z + (torch.round(z) - z).detach(), r"jumps at z = -?\d*\.5"),
    "rounding": (torch.round, "has the derivative 0 everywhere"),
    "another's backward pass": (_Backward.apply, "backward pass that does not return its derivative"),
    "constant": (lambda z: z * 0 + 1, "has the derivative 0 everywhere"),
    "square": (lambda z: z * z, "derivative that grows without bound as z goes to -inf"),
    "exponential": (torch.exp, r"derivative that grows without bound as z goes to \+inf"),
    "waves": (lambda z: 2 * z + torch.sin(z), "derivative that does not settle to a constant"),
    "logarithm": (torch.log, "is not finite at z = "),
    "pole": (lambda z: 1 / z, "(is not finite|vertical|jumps|turns)"),
    "hole": (lambda z: torch.where((z > 1) & (z < 1.1), math.nan, z), r"is not finite at z = 1"),
    "cube root": (lambda z: torch.sign(z) * z.abs() ** (1 / 3), "vertical tangent at z = 0"),
    "root elsewhere": (lambda z: torch.sign(z - 1) * (z - 1).abs().sqrt(), "vertical tangent at z = 1"),
    "flat as a cube": (lambda z: z**3 / (1 + z * z), "too flat to be inverted|more than 10 polynomials"),
    "bell": (lambda z: torch.exp(-z * z), "too coarsely: a float32 output determines the derivative to within"),
    "cancels": (lambda z: torch.log(torch.cosh(z)), "too coarsely: computed in float32"),
    "staircase": (_stairs, r"has at least \d+ kinks|needs more than|turns at least"),
    "softmax": (lambda z: torch.softmax(z.reshape(-1), 0).reshape(z.shape), "does not map each element by itself"),
    "random": (lambda z: z * torch.rand_like(z), "is random"),
    "sum": (lambda z: z.sum(), "does not map each element by itself"),
    "float32": (lambda z: torch.tanh(z.float()), "returns torch.float32"),
    "raises": (_raises, "cannot be analysed in float64: RuntimeError: no$"),
    "no tensor": (lambda z: 3.0, "does not map each element by itself"),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_have_a_reason(name: str) -> None:
    function, reason = REFUSALS[name]
    analysis = analyse(function)
    assert analysis.output_refusal(torch.float32) is not None
    assert re.search(reason, analysis.output_refusal(torch.float32) or ""), analysis


@pytest.mark.parametrize("published", [p for p in FIXED if p.name in ("elish", "isru", "modulus", "phish")], ids=str)
def test_the_decision_depends_on_nothing_but_the_function(published: Published) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), torch.device("meta"):
            again = analyse(published.function)
    finally:
        torch.set_default_dtype(before)
    analysis = _analysis(published)
    assert (again.kind, again.reason, again.fold) == (analysis.kind, analysis.reason, analysis.fold)
    assert again.measured == analysis.measured
    assert repr(again.derivatives) == repr(analysis.derivatives) if again.fold is None else True


def test_folds_say_what_is_ambiguous() -> None:
    def fold(function: Function) -> tuple[str, str, bool, bool]:
        found = analyse(function).fold
        assert found is not None
        return found.ambiguous, found.marked, found.is_maximum, found.bounded

    assert fold(F.gelu) == ("negative", "left", False, True)
    assert fold(lambda z: F.gelu(-z)) == ("negative", "right", False, True)
    assert fold(lambda z: -F.gelu(z)) == ("positive", "left", True, True)
    assert fold(lambda z: -F.gelu(-z)) == ("positive", "right", True, True)
    assert fold(torch.abs) == ("positive", "left", False, False)
    assert fold(lambda z: -z.abs()) == ("negative", "left", True, False)
    # Where the turn has the left branch's slope, the right one is marked.
    assert fold(lambda z: torch.where(z > 0, z, -z) - 1) == ("both", "right", False, False)
    assert fold(lambda z: torch.where(z >= 0, z, -z) - 1) == ("both", "left", False, False)


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
    features = find_features(published.function)
    for kink in features.kinks:
        level = torch.tensor([kink.output], dtype=y.dtype).double()
        unit = (
            float(encoding_error(level, y.dtype)) if features.fold else float(ulp(level, y.dtype)) * bool(kink.output)
        )
        close = (y.double() - level).abs() <= unit
        for side in (kink.before, kink.slope, kink.after):
            error = torch.where(close, torch.minimum(error, (slope.double() - side).abs()), error)
    return torch.where(truth.isfinite() & y.isfinite(), error, 0.0)


@every_told
@every_float
def test_the_derivative_is_as_accurate_as_gelus(published: Published, dtype: torch.dtype) -> None:
    activation, analysis = _activation(published), _analysis(published)
    if analysis.output_refusal(dtype) is not None:
        assert activation.output_refusal(dtype) == analysis.output_refusal(dtype)
        pytest.skip(str(analysis.output_refusal(dtype)))
    z = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = derivative(published.function, z)
    error = _error(published, z, *_slopes(z, activation))
    steepest = float(truth.abs().max())
    rms = float((error.square().mean() / truth.square().mean()).sqrt())
    # The result is rounded to the dtype once more.
    eps = torch.finfo(dtype).eps
    assert rms <= FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].rms
    assert float(error.max()) <= (FLOAT32_ALLOWANCE * GELU_ERRORS[dtype].largest + eps) * steepest


#: Flat over some length, not only within rounding.
WITH_PLATEAUS = ("relu1", "nlrelu", "flatten_t_swish")


@every_told
@every_float
def test_no_nan_but_eagers_and_0_where_it_is_flat(published: Published, dtype: torch.dtype) -> None:
    activation, analysis = _activation(published), _analysis(published)
    if analysis.output_refusal(dtype) is not None:
        return
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
    activation, analysis = _activation(published), _analysis(published)
    z = torch.cat([torch.linspace(-30, 30, 200_001), torch.logspace(-30, 4, 20_001), -torch.logspace(-30, 4, 20_001)])
    error = _error(published, z, *_slopes(z, activation))
    truth = derivative(published.function, z)
    steepest = float(truth[truth.isfinite()].abs().max())
    assert float(error.max()) <= FLOAT32_ALLOWANCE * steepest * GELU_ERRORS[torch.float32].largest
    assert analysis.measured[torch.float32].rounded.rms < 1e-7


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (lambda z: torch.where(z >= 0, z, 0.25 * z), 0.25, 1.0),
        (lambda z: -torch.where(z >= 0, z, 0.25 * z), -0.25, -1.0),
        (torch.abs, -1.0, 1.0),
        (lambda z: -z.abs(), 1.0, -1.0),
        (lambda z: torch.where(z >= 0, torch.tanh(z), 0.5 * z), 0.5, 1.0),
    ],
)
def test_a_kink_at_0_is_told_by_the_sign(function: Function, left: float, right: float) -> None:
    activation = _of("kinked", function)
    small = torch.logspace(-36, -4, 300)
    assert _slopes(-small, activation)[1].tolist() == pytest.approx([left] * 300, abs=1e-4)
    assert _slopes(small, activation)[1].tolist() == pytest.approx([right] * 300, abs=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        *(F.relu6, F.hardtanh, F.softshrink, lambda z: 0.7 * F.hardtanh(z)),
        lambda z: torch.where(z >= 1, torch.ones_like(z), torch.where(z > 0, z, torch.zeros_like(z))),
        lambda z: torch.sign(z) * torch.relu(z.abs() - 0.5),
    ],
)
@every_float
def test_plateaus_at_any_level(function: Function, dtype: torch.dtype) -> None:
    activation = _of("flat", function)
    z = torch.linspace(-9, 9, 4001).to(dtype)
    truth = derivative(function, z)
    near = torch.zeros_like(z, dtype=torch.bool)
    for kink in (-1.0, -0.5, 0.0, 0.5, 1.0, 6.0):
        near |= (z.double() - kink).abs() <= 4 * float(ulp(torch.tensor(max(abs(kink), 0.3)), dtype))
    slope = _slopes(z, activation)[1]
    assert torch.equal((slope == 0)[~near], (truth == 0)[~near])
    assert torch.allclose(slope[~near].double(), truth[~near], atol=torch.finfo(dtype).eps)


UNTOLD: dict[str, Function] = {
    "clamp": lambda z: torch.clamp(z, -0.125, 2.0) + 0.0 * torch.tanh(z),
    "masked_fill": lambda z: torch.tanh(z).masked_fill(z < -0.5, math.tanh(-0.5)),
    "maximum": lambda z: torch.tanh(torch.maximum(z, torch.zeros_like(z))),
    "relu by abs": lambda z: torch.tanh((z + z.abs()) / 2),
    "abs - 1": lambda z: z.abs() - 1,
    "falling elu": lambda z: F.elu(z, -0.5),
}


@pytest.mark.parametrize("name", UNTOLD)
@every_float
def test_an_output_may_not_tell_the_slope_at_a_kink(name: str, dtype: torch.dtype) -> None:
    assert "derivative at its kink" in (analyse(UNTOLD[name]).output_refusal(dtype) or "")


@pytest.mark.parametrize(
    ("function", "kink"),
    [
        *((function, 0.0) for function in (torch.abs, lambda z: torch.where(z > 0, z, -0.3 * z), *UNTOLD.values())),
        (lambda z: (z - 0.25).abs(), 0.25),
        (lambda z: 0.5 * torch.abs(2 * z - 2 / 3), 1 / 3),
        # Their outputs at kinks are no float32 numbers.
        (lambda z: F.hardtanh(z) + 0.1 * z, 1.0),
        (lambda z: F.softshrink(z, 0.1) + 0.01 * z, 0.1),
        (lambda z: -(F.hardtanh(z, -0.5, 1.5) + 0.3 * z), 1.5),
        (lambda z: torch.where(z < 0, -100 * z, -z * torch.exp(-z)) + 0.1, 0.0),  # with a fold
        (lambda z: F.hardtanh(z + 1) + 0.3 * F.relu6(z + 1) + 0.1, 0.0),
        # On both sides of these slopes are the same, but not at them.
        (lambda z: F.relu(z - 1) - F.relu(1 - torch.exp(z - 1)), 1.0),
        (lambda z: F.softshrink(z, 0.5) + F.hardtanh(z, -0.5, 0.5), 0.5),
        (lambda z: F.silu(z.clamp(min=-1)) + F.silu(z.clamp(max=-1)), -1.0),
        (lambda z: F.gelu(torch.relu(z)) + F.gelu(-torch.relu(-z)), 0.0),
    ],
    ids=range(19),
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


@pytest.mark.parametrize(
    "function",
    [
        lambda z: torch.relu(z) + 0.3,
        lambda z: F.leaky_relu(z, 0.1) + 5,
        lambda z: F.relu6(0.5 * z) + 0.1 * z - 3,
    ],
    ids=range(3),
)
def test_16_bits_do_not_tell_the_sides_of_a_kink_at_0_from_large_outputs(function: Function) -> None:
    """There inputs lie closer together than outputs: 0.6 % of N(0, 1) have the output 5 of the second."""
    analysis = analyse(function)
    refusals = [analysis.output_refusal(dtype) for dtype in FLOATS]
    assert [refusal is None for refusal in refusals] == [dtype is torch.float32 for dtype in FLOATS], refusals


@pytest.mark.parametrize(
    ("function", "factor"), [(F.silu, 0.1), (F.silu, 2.0), (F.silu, 1e4), (F.mish, 1e-3), (F.mish, 10.0)], ids=range(5)
)
def test_a_factor_changes_nothing(function: Function, factor: float) -> None:
    analysis = analyse(lambda z: factor * function(z))
    assert all(analysis.output_refusal(dtype) is None for dtype in (torch.float32, torch.bfloat16))
    errors, of_one = (found.measured[torch.float32].from_exact_output for found in (analysis, analyse(function)))
    assert 0.5 < errors.rms / of_one.rms < 2
    assert 0.5 < errors.largest / factor / of_one.largest < 2


@every_half
def test_where_a_steep_stretch_becomes_flat(dtype: torch.dtype) -> None:
    function: Function = lambda z: torch.logit(F.hardtanh(z, 0.125, 0.875))
    activation = _of("steep", function)
    assert activation.output_refusal(dtype) is None
    assert not _slopes(torch.tensor([-3.0, 0.0, 1.0, 3.0]).to(dtype), activation)[1].any()


@pytest.mark.parametrize(
    "function",
    [lambda z: torch.relu(z) + 1000, lambda z: torch.where(z > 1, 1 + 1e-3 * (z - 1), z)],
    ids=["far", "slow"],
)
def test_what_rounds_to_the_output_of_a_kink_is_not_at_the_kink(function: Function) -> None:
    analysis = analyse(function)
    assert all("too coarsely" in (analysis.output_refusal(dtype) or "") for dtype in FLOATS)


def test_a_slope_below_the_tolerance() -> None:
    assert analyse(lambda z: torch.where(z > 0, z, 1e-6 * z)).kind == "monotone"


@pytest.mark.parametrize("name", ["isru", "elish", "lisht", "log_cosh_stable", "bent_identity", "gompertz"])
def test_second_derivatives(name: str) -> None:
    (published,) = (p for p in FIXED if p.name == name)
    activation = _activation(published)
    z = torch.linspace(-4, 4, 2001) + 1e-3
    fold = activation.fold
    if fold is not None:
        z = z[(z - fold.position).abs() > 0.05]
    y = activation.encoded(z, torch.float32).requires_grad_()
    slope = activation.derivative_given_output(y, torch.float32, differentiable=True)
    (by_output,) = torch.autograd.grad(slope.sum(), y)
    told = by_output.double() * derivative(published.function, z)
    truth = second_derivative(published.function, z)
    kinked = (second_derivative(published.function, z + 4e-3) - truth).abs() > 0.1
    kinked |= (second_derivative(published.function, z - 4e-3) - truth).abs() > 0.1
    assert float((told - truth)[~kinked].abs().max()) < 2e-3


# --- the branch, for other signs --------------------------------------------------------------------------------------


def _magnitudes() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 0x7F80_0000, (300_000,), generator=generator, dtype=torch.int32)
    return torch.cat([random, torch.arange(4096, dtype=torch.int32)]).view(torch.float32)


@every_float
@pytest.mark.parametrize("ambiguous", ["negative", "positive", "both"])
@pytest.mark.parametrize("marked", [True, False])
def test_ambiguous_outputs_carry_the_branch(dtype: torch.dtype, ambiguous: branch_bit.Ambiguous, marked: bool) -> None:
    magnitudes = _magnitudes()[1:]
    magnitudes = magnitudes[(magnitudes > 0) & (magnitudes <= torch.finfo(dtype).max)]
    for sign in {"negative": (-1,), "positive": (1,), "both": (-1, 1)}[ambiguous]:
        y = sign * magnitudes
        encoded = branch_bit.encode(y, torch.full_like(y, marked, dtype=torch.bool), dtype, ambiguous, bounded=False)
        assert encoded.dtype is torch.float32
        assert torch.equal(encoded.to(dtype).float(), encoded) and bool(encoded.isfinite().all())
        assert bool((branch_bit.decode(encoded, dtype, ambiguous) == marked).all())
        assert bool(((encoded.double() - y.double()).abs() <= encoding_error(y, dtype)).all())


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("ambiguous", ["negative", "positive", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_numbers_stay_finite_and_carry_the_branch(
    dtype: torch.dtype, ambiguous: branch_bit.Ambiguous, marked: bool
) -> None:
    sign = -1.0 if ambiguous == "negative" else 1.0
    y = torch.full((1,), sign * torch.finfo(dtype).max)
    encoded = branch_bit.encode(y, torch.tensor([marked]), dtype, ambiguous, bounded=False)
    assert encoded.to(dtype).isfinite().all() and torch.equal(encoded.to(dtype).float(), encoded)
    assert bool(branch_bit.decode(encoded, dtype, ambiguous)) == marked


@every_float
@pytest.mark.parametrize("ambiguous", ["negative", "positive", "both"])
def test_overflow_zero_and_nan(dtype: torch.dtype, ambiguous: branch_bit.Ambiguous) -> None:
    def encode(*values: float, marked: bool) -> Tensor:
        y = torch.tensor(values)
        return branch_bit.encode(y, torch.full_like(y, marked, dtype=torch.bool), dtype, ambiguous, bounded=False).to(
            dtype
        )

    sign = -1.0 if ambiguous == "negative" else 1.0
    for marked in (True, False):
        assert encode(sign * math.inf, marked=marked).tolist() == [sign * math.inf]
        assert bool(encode(math.nan, -math.nan, marked=marked).isnan().all())
    assert not bool(branch_bit.decode(torch.tensor([0.0, sign * math.inf]), dtype, ambiguous).any())


@every_float
def test_certain_outputs_stay_exactly_as_they_are(dtype: torch.dtype) -> None:
    y = -_magnitudes().to(dtype).float()
    y = y[y.isfinite() & (y != 0)]
    right = torch.zeros_like(y, dtype=torch.bool)
    for bounded in (True, False):
        encoded = branch_bit.encode(y, right, dtype, "positive", bounded=bounded)
        assert torch.equal(encoded.view(torch.int32), y.view(torch.int32))
    assert not bool(branch_bit.decode(y, dtype, "positive").any())


@every_half
@pytest.mark.parametrize("published", [p for p in TOLD if p.kind == "folded"], ids=str)
def test_every_16_bit_number_knows_its_branch(published: Published, dtype: torch.dtype) -> None:
    activation = _activation(published)
    if activation.output_refusal(dtype) is not None:
        return
    fold = activation.fold
    assert fold is not None
    z = all_values(dtype)
    y, _ = _slopes(z, activation)
    truth = published.function(z.double())
    real = truth.isfinite() & y.isfinite()
    marked = fold.marks(z.double())
    assert torch.equal(branch_bit.decode(y.float(), dtype, fold.ambiguous)[real], marked[real])
    unit = encoding_error(torch.maximum(truth.abs(), y.double().abs()), dtype)
    assert bool(((y.double() - truth).abs()[real] <= 1.01 * unit[real]).all())
    certain = real & ~marked & {"negative": truth >= 0, "positive": truth <= 0}.get(fold.ambiguous, truth != truth)
    assert torch.equal(y[certain], truth.to(dtype)[certain])


# --- evaluation -------------------------------------------------------------------------------------------------------


@every_told
def test_there_are_few_segments(published: Published) -> None:
    for dtype in FLOATS:
        if _analysis(published).output_refusal(dtype) is not None:
            continue
        found = _analysis(published).derivative(dtype)
        formula = found.of_distance if isinstance(found, FoldedDerivative) else found.segments
        if isinstance(formula, Segments):
            assert 1 <= len(formula.segments) <= 10


@every_told
def test_cpu_tables_hold_the_derivative(published: Published) -> None:
    activation = _activation(published)
    fitted = activation.fitted_derivative()
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    y = activation.encoded(torch.cat([z, torch.linspace(-12, 12, 100_001) + 1e-4]), torch.float32)
    assert bool(y.isfinite().all())
    quick, _ = cpu.gradient(torch.ones_like(y), y, activation, (), GradientRequest("output", False, False), dim=-1)
    if isinstance(fitted, FoldedDerivative):
        slow = fitted(y.double(), branch_bit.decode(y, torch.float32, fitted.fold.ambiguous))
    else:
        assert isinstance(fitted, MonotoneDerivative)
        slow = fitted(y.double())
    steepest = float(slow.abs().max())
    error = (quick.double() - slow).abs() / steepest
    assert float(error.max()) <= 2 * table.ADDED
    assert float(error[: len(z)].square().mean().sqrt()) <= 2 * PRECISIONS[torch.float32].tolerance


def test_most_are_served_by_tables() -> None:
    segmented = [_activation(p) for p in TOLD if not _is_like_gelu(p)]
    without = {a.name for a in segmented if table.derivative_table(a) is None}
    # A constant between two plateaus is cheap; a kink at 0 of a folded function needs a sign that the root has lost.
    assert without <= {"relu1", "nipuna"}, without


def _is_like_gelu(published: Published) -> bool:
    found = _analysis(published).derivative()
    return isinstance(found, FoldedDerivative) and isinstance(found.of_distance, Polynomials)


@pytest.mark.parametrize("name", ["isru", "relu1", "modulus"])
def test_tables_leave_their_argument_alone_and_keep_nan(name: str) -> None:
    (activation,) = (_activation(p) for p in FIXED if p.name == name)
    y = torch.tensor([0.25, 0.5, math.nan, -0.0, 0.0])
    before = y.clone()
    slope, _ = cpu.gradient(torch.ones_like(y), y, activation, (), GradientRequest("output", False, False), dim=-1)
    assert torch.equal(y.view(torch.int32), before.view(torch.int32))
    assert slope.isnan().tolist() == [False, False, True, False, False]


@every_told
def test_derivatives_can_be_traced(published: Published) -> None:
    activation = _activation(published)
    for dtype in FLOATS:
        if activation.output_refusal(dtype) is None:
            traced = trace(functools.partial(activation.derivative_given_output, dtype=dtype), "y")
            assert 1 <= len(traced.operations) < 500
            trace(functools.partial(activation.encoded, dtype=dtype))


@pytest.fixture
def triton_backend() -> object:
    pytest.importorskip("triton")
    from fusedlayers.backends import triton as backend

    return backend


@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("name", ["isru", "relu1", "modulus", "lisht", "elish", "nlrelu", "double_exponential"])
@every_float
def test_on_a_device(name: str, dtype: torch.dtype, triton_backend: object) -> None:
    (published,) = (p for p in FIXED if p.name == name)
    activation = _activation(published)
    if activation.output_refusal(dtype) is not None:
        return
    backend = triton_backend
    z = torch.linspace(-6, 6, 4000).to(dtype).to(DEVICE)
    y = backend.bias_act(z, None, activation, dim=-1, encode=True, out=None)  # type: ignore[attr-defined]
    slope, _ = backend.gradient(  # type: ignore[attr-defined]
        torch.ones_like(y), y, activation, (), GradientRequest("output", False, False), dim=-1
    )
    expected = activation.derivative_given_output(y.float(), dtype)
    torch.testing.assert_close(slope.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    if activation.fold is not None:
        marked = branch_bit.decode(y.float(), dtype, activation.fold.ambiguous)
        assert torch.equal(marked, activation.fold.marks(z.float()))
