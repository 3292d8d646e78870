"""The table of activations, the branch bit, the fits; then every number through every activation."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import all_values, derivative, encoding_error, second_derivative, steps, ulp
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import DTYPES, Activation, Definition, activations, definitions, resolve, table
from fusedlayers.calls.decide import describe
from fusedlayers.derivative import branch_bit
from fusedlayers.derivative.analysis import GELU_ERRORS
from fusedlayers.derivative.features import Fold

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
TABLE = [row.bind() for row in definitions()]
FOLDED = [a for a in TABLE if a.is_folded]
MONOTONE = [a for a in TABLE if not a.is_folded]

every_activation = pytest.mark.parametrize("activation", TABLE, ids=str)
every_folded = pytest.mark.parametrize("activation", FOLDED, ids=str)
every_monotone = pytest.mark.parametrize("activation", MONOTONE, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)


# --- the table --------------------------------------------------------------------------------------------------------

EXPECTED = {
    *("identity", "relu", "leaky_relu", "relu6", "hardtanh", "trelu", "squared_relu", "tanh", "sigmoid", "hardsigmoid"),
    *("elu", "selu", "celu", "softplus", "logsigmoid", "softsign", "softshrink", "cbrt"),
    *("gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "hardswish"),
}

#: What the three rows without a torch function compute.
FORMULAS = {
    "identity": lambda z: z,
    "squared_relu": lambda z: z.clamp_min(0) ** 2,
    "quick_gelu": lambda z: z / (1 + torch.exp(-1.702 * z)),
    "cbrt": lambda z: torch.copysign(torch.exp(torch.log(z.abs()) / 3), z),
}


def test_the_table_holds_what_was_promised() -> None:
    assert set(activations()) >= EXPECTED
    assert fl.activations() == activations() == tuple(row.name for row in definitions())


@every_activation
def test_each_row_computes_what_torch_computes(activation: Activation) -> None:
    z = torch.cat([torch.linspace(-30, 30, 20_001), torch.logspace(-6, 1, 1000), -torch.logspace(-6, 1, 1000)]).double()
    torchs = FORMULAS.get(activation.name, activation.plain)
    if activation.name not in FORMULAS:
        assert activation.definition is not None and activation.definition.stands_for
    torch.testing.assert_close(activation.function(z), torchs(z), rtol=1e-12, atol=4e-15, equal_nan=True)


@every_monotone
def test_the_derivative_given_the_output_is_the_derivative(activation: Activation) -> None:
    small = torch.logspace(-6, 1, 500, dtype=torch.float64)
    z = torch.cat([torch.linspace(-9, 9, 4_001, dtype=torch.float64) + 1e-3, small, -small])
    slope = activation.derivative_given_output(activation.function(z), torch.float64)
    torch.testing.assert_close(slope.double(), derivative(activation.function, z), rtol=1e-9, atol=1e-8)


@every_activation
def test_every_row_is_output_only_at_its_default_parameters(activation: Activation) -> None:
    assert activation.needs_input_reason is None
    for dtype in DTYPES:
        refused = activation.output_refusal(dtype)
        assert (refused is not None) == (dtype is torch.float64)
    assert describe(activation, "auto", torch.float32).startswith("saves ")


# --- resolve ----------------------------------------------------------------------------------------------------------

#: Arguments that modules without defaults need.
_ARGUMENTS = {nn.Threshold: (1.0, 0.0)}


@pytest.mark.parametrize(
    ("row", "target", "arguments"),
    # A ReLU6 is one of hardtanh's if its limits have been changed (test_fuse.py).
    [
        pytest.param(r, t, a, id=f"{r.name}-{t.__name__}")
        for r in definitions()
        for t, a in r.stands_for
        if (r.name, t) != ("hardtanh", nn.ReLU6)
    ],
)
def test_what_a_row_stands_for_resolves_to_it(row: Definition, target: object, arguments: dict[str, object]) -> None:
    if target is nn.ReLU6:  # whose constructor has no limits
        arguments = {}
    if isinstance(target, type):
        made = target(*_ARGUMENTS.get(target, ()), **arguments)
    else:
        made = functools.partial(target, **arguments) if arguments else target
    assert resolve(made) is row.bind()
    if row.parameters and target is not nn.ReLU6:  # whose constructor has no limits
        values = {name: value + 2.0 for name, value in row.parameters.items()}
        changed = target(**values, **arguments) if isinstance(target, type) else functools.partial(target, **values)
        assert resolve(changed) is row.bind(**values)


@pytest.mark.parametrize(
    ("given", "row", "parameters"),
    [
        (None, "identity", {}),
        (resolve("mish"), "mish", {}),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh", {}),
        (nn.ReLU(inplace=True), "relu", {}),
        (functools.partial(F.leaky_relu, negative_slope=0.2, inplace=True), "leaky_relu", {"negative_slope": 0.2}),
        (fl.GELU("tanh"), "gelu_tanh", {}),
        (fl.ELU(0.5), "elu", {"alpha": 0.5}),
        (fl.silu, "silu", {}),
        ("swish", "silu", {}),
        ("GELU-PyTorch-tanh", "gelu_tanh", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_resolves_to_a_row(given: object, row: str, parameters: dict[str, float]) -> None:
    assert resolve(given) is table.bound(row, parameters)


SLOPE = torch.tensor([0.5])


@pytest.mark.parametrize(
    "given",
    [functools.partial(F.elu, alpha=SLOPE), nn.LeakyReLU(SLOPE), functools.partial(torch.mul, 0.5)],  # type: ignore[arg-type]
    ids=["tensor", "tensor of a module", "positional"],
)
def test_what_is_no_number_of_a_row_is_traced(given: object) -> None:
    assert resolve(given).needs_tracing


def _replaced(module: nn.Module) -> None:
    module.forward = lambda z: F.gelu(z)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [nn.GELU, fl.GELU])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda module: module.register_forward_hook(lambda *_: None), "it has hooks"),
        (lambda module: module.register_forward_pre_hook(lambda *_: None), "it has hooks"),
        (_replaced, "forward has been replaced"),
    ],
)
def test_modules_that_were_changed_are_called(kind: type[nn.Module], change: Callable[..., Any], words: str) -> None:
    module, z, calls = kind(), torch.randn(300, requires_grad=True), []
    change(module)
    assert words in (resolve(module).fallback_reason or "")
    module.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(fl.bias_act(z, None, module), F.gelu(z))
    torch.testing.assert_close(fl.dense_bias_act(z, torch.eye(300), None, module), F.gelu(z))
    assert len(calls) == 2


SEVENFOLD = [type("Sevenfold", (base,), {"forward": lambda self, z: 7 * z})() for base in (nn.GELU, fl.GELU)]


@pytest.mark.parametrize("module", [*SEVENFOLD, nn.PReLU(), nn.Softmax(-1)], ids=str)
def test_modules_that_compute_something_else_stay_themselves(module: nn.Module) -> None:
    assert resolve(module).needs_tracing
    z = torch.randn(4, 5)
    assert torch.equal(fl.bias_act(z, None, module), module(z))
    assert torch.equal(fl.dense_bias_act(z, torch.eye(5), None, module), module(z))


def test_a_function_without_the_arguments_that_it_must_have_fails_as_in_torch() -> None:
    # The row has defaults of its own, which are not torch's: it has none.
    for incomplete in (F.threshold, functools.partial(F.threshold, threshold=0.1)):
        with pytest.raises(TypeError, match="missing"):
            fl.bias_act(torch.ones(300), None, incomplete)


def test_spellings_are_names_everywhere() -> None:
    x, w = torch.randn(40, 8), torch.randn(30, 8)
    expected = F.leaky_relu(F.linear(x, w))
    for name in ("LeakyReLU", "leakyrelu", "LEAKY_RELU", "leaky-relu"):
        torch.testing.assert_close(fl.dense_bias_act(x, w, None, name), expected)
        layer = fl.FusedDenseAct(8, 30, name)
        assert layer.activation == name and "activation=leaky_relu" in repr(layer)
    compiled = torch.compile(lambda x: fl.dense_bias_act(x, w, None, "LeakyReLU"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x.requires_grad_()), expected)


# --- every number -----------------------------------------------------------------------------------------------------


@functools.cache
def _numbers(dtype: torch.dtype) -> Tensor:
    """All numbers of a 16-bit dtype; for float32 a dense sweep that meets every exponent, the folds and the kinks."""
    if dtype.itemsize == 2:
        return all_values(dtype)
    subnormals = torch.arange(1, 2049, dtype=torch.int32).view(torch.float32)
    magnitudes = torch.cat([torch.logspace(-44.8, 38.5, 150_001, dtype=torch.float64).float(), subnormals])
    folds = [_fold(a).position + torch.linspace(-2e-3, 2e-3, 20_001) for a in FOLDED]
    kinks = [torch.tensor(k).view(torch.int32).add(torch.arange(-50, 50)).int().view(torch.float32) for k in _KINKS]
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    return torch.cat([magnitudes, -magnitudes, torch.linspace(-20, 20, 200_001), *folds, *kinks, special])


_KINKS = (-3.0, -1.0, -0.5, 0.5, 1.0, 3.0, 6.0, 20.0)


def _fold(activation: Activation) -> Fold:
    assert activation.fold is not None
    return activation.fold


Function = Callable[[Tensor], Tensor]


def _with_gradient(z: Tensor, function: Activation | Function, dy: float = 1.0) -> tuple[Tensor, Tensor]:
    """The output as it is saved for the backward pass, and ``dy`` times the derivative."""
    z = z.clone().requires_grad_()
    y = fl.bias_act(z, None, function, save="output") if isinstance(function, Activation) else function(z)
    (dz,) = torch.autograd.grad(y, z, torch.full_like(y, dy))
    return y.detach(), dz


@every_half
@every_activation
def test_every_16_bit_number_forward(activation: Activation, dtype: torch.dtype) -> None:
    z = _numbers(dtype)
    truth = activation.function(z.double())
    rounded = truth.to(dtype)
    with torch.no_grad():
        exact = fl.bias_act(z, None, activation)
    saved, _ = _with_gradient(z, activation)

    assert exact.dtype is saved.dtype is dtype
    for y in (exact, saved):
        assert torch.equal(y.isnan(), truth.isnan())
    real = ~truth.isnan()
    eager = activation.plain(z)
    # As near as eager, whose kernels serve some rows, or rounded correctly.
    wrong = real & (exact != rounded)
    assert bool((steps(exact, rounded)[wrong] <= steps(eager, rounded)[wrong]).all())
    if not activation.is_folded:
        assert torch.equal(saved[real], exact[real])
        return
    left = z.double() < _fold(activation).position
    finite = real & rounded.isfinite()
    assert bool(((saved.double() - rounded.double()).abs() <= encoding_error(rounded, dtype))[finite].all())
    assert torch.equal(saved[real & (truth >= 0) & ~left], rounded[real & (truth >= 0) & ~left])
    assert torch.equal(branch_bit.decode(saved.float(), dtype)[real], left[real])


@every_activation
def test_float32_forward(activation: Activation) -> None:
    z = _numbers(torch.float32)
    truth = activation.function(z.double())
    with torch.no_grad():
        exact = fl.bias_act(z, None, activation)
    saved, _ = _with_gradient(z, activation)
    for y in (exact, saved):
        assert torch.equal(y.isnan(), truth.isnan())

    # Against torch's own error, within each factor of two in |z|: far out all evaluations lose relative accuracy.
    real = truth.isfinite()
    errors = [((y.double() - truth).abs() / encoding_error(truth, torch.float32))[real] for y in (exact, saved)]
    eager_error = ((activation.plain(z).double() - truth).abs() / ulp(truth, torch.float32))[real]
    decade = torch.frexp(z[real])[1].long() * 2 + (z[real] < 0)
    decade -= decade.min()
    zeros = torch.zeros(int(decade.max()) + 1, dtype=torch.float64)
    eagers = zeros.scatter_reduce(0, decade, eager_error, "amax")
    for error, moved in zip(errors, (0, 1), strict=True):  # the branch moves an output by a unit
        ours = zeros.scatter_reduce(0, decade, error, "amax")
        assert bool((ours <= 2 * eagers + 1 + moved).all()), (ours - 2 * eagers).max()

    if not activation.is_folded:
        assert torch.equal(saved[~truth.isnan()], exact[~truth.isnan()])
        return
    left = z < _fold(activation).position
    assert torch.equal(branch_bit.decode(saved, torch.float32)[real], left[real])


def _invert(activation: Activation, y: Tensor, left: Tensor) -> Tensor:
    """The float64 input with output ``y`` on the given side of the fold, by bisection, independent of the library's."""
    near = torch.full_like(y, _fold(activation).position)
    far = torch.where(left, -800.0, y.clamp(min=0) + 40.0).double()
    for _ in range(80):
        middle = (near + far) / 2
        above = activation.function(middle) > y
        near, far = torch.where(above, near, middle), torch.where(above, middle, far)
    return near


@every_half
@every_folded
def test_every_16_bit_output_tells_the_derivative(activation: Activation, dtype: torch.dtype) -> None:
    z = _numbers(dtype)
    z = z[(z.abs() < 300) & (z > (-3 if activation.name == "hardswish" else -math.inf))]  # below it is flat
    saved, slope = _with_gradient(z, activation)
    best = derivative(activation.function, _invert(activation, saved.double(), z.double() < _fold(activation).position))
    # What the output tells, rounded once; next to the minimum half a float32 unit of y matters, by 1e-4.
    assert bool(((slope.double() - best).abs() <= 0.51 * ulp(best, dtype) + 2e-4).all())


@every_folded
def test_float32_derivatives_of_folded_activations(activation: Activation) -> None:
    z = _numbers(torch.float32)
    z = z[z.isfinite()]
    if activation.name == "hardswish":  # within two units of its upper kink either side is right
        z = z[(z - 3).abs() > 2**-21]
    error = (_with_gradient(z, activation)[1].double() - derivative(activation.function, z)).abs()
    # y is stored with an error of up to five units (gelu_tanh's four and the branch), which near the minimum leaves f'
    # uncertain by 5 sqrt(f'' unit / 2 distance).
    fold = _fold(activation)
    unit = ulp(torch.tensor(fold.extremum, dtype=torch.float64), torch.float32)
    distance = (activation.function(z.double()) - fold.extremum).clamp_min(0) / unit
    curvature = second_derivative(activation.function, torch.tensor([fold.position]))
    bound = 5 * (curvature * unit / (2 * distance.clamp_min(2))).sqrt() + 1e-6
    assert bool((error <= bound).all()), (error - bound).max()


@every_monotone
def test_float32_derivatives_of_monotone_activations(activation: Activation) -> None:
    z = _numbers(torch.float32)
    truth = derivative(activation.function, z)
    y, slope = _with_gradient(z, activation)
    error = (slope.double() - truth).abs() / truth.abs().clamp_min(1.0)
    # Left out: where the truth is undefined (cbrt at 0), where y is infinite, and numbers within two units of a kink.
    told = z.isfinite() & truth.isfinite() & y.isfinite()
    for side in (1 - 2**-22, 1 + 2**-22):
        told &= (truth - derivative(activation.function, z.double() * side)).abs() < 0.1 * truth.abs().clamp_min(1.0)
    tolerance = 1e-6
    if activation.name == "cbrt":  # torch's float32 power errs by 16 units far out
        eager_error = (_with_gradient(z, activation.plain)[1].double() - truth).abs() / truth.abs().clamp_min(1.0)
        tolerance = 2 * float(eager_error[told].max())
    assert float(error[told].max()) <= tolerance
    assert int((~told & z.isfinite() & y.isfinite()).sum()) <= 20


@every_float
@every_activation
@pytest.mark.parametrize("dy", [1.0, 0.0])
def test_nan_where_eager_has_it_and_nowhere_else(activation: Activation, dtype: torch.dtype, dy: float) -> None:
    z = _numbers(dtype)
    y, dz = _with_gradient(z, activation, dy)
    eager_y, eager_dz = _with_gradient(z, activation.plain, dy)
    assert bool(y.isnan()[z.isnan()].all())
    assert bool(dz.isnan()[z.isnan() & eager_dz.isnan()].all())
    assert not bool((y.isnan() & ~eager_y.isnan()).any())
    assert not bool((dz.isnan() & ~eager_dz.isnan() & ~eager_y.isnan()).any())


@every_float
@pytest.mark.parametrize("activation", [*TABLE, *(table.bound(n, {"alpha": 0.3}) for n in ("elu", "celu"))], ids=str)
def test_second_derivatives_where_outputs_are_at_their_limit(activation: Activation, dtype: torch.dtype) -> None:
    """0.3 is rounded up to 16 bits."""
    ends = torch.logspace(1.5, 4, 50)
    z, found = torch.cat([ends, -ends, torch.linspace(-24, 24, 1001)]).to(dtype).requires_grad_(), []
    for call in (lambda: fl.bias_act(z, None, activation, save="output"), lambda: activation.plain(z)):
        (slope,) = torch.autograd.grad(call().float().sum(), z, create_graph=True)
        second = torch.autograd.grad(slope.float().sum(), z)[0] if slope.requires_grad else torch.zeros_like(z)
        found.append(torch.where(second.isfinite(), second, torch.nan))
    ours, eager = (torch.where(found[1].isnan(), 0.0, second) for second in found)
    assert bool(ours.isfinite().all())
    torch.testing.assert_close(ours[:100], eager[:100], rtol=torch.finfo(dtype).eps, atol=1e-3)


@every_float
@every_folded
def test_the_tail_is_flat(activation: Activation, dtype: torch.dtype) -> None:
    z = torch.tensor([-100.0, -200.0, -1e4], dtype=dtype)
    y, slope = _with_gradient(z, activation)
    assert bool((y == 0).all()) and bool(y.signbit().all())
    assert not slope.any()


@every_float
def test_zeros_of_hardswish_stay_zeros(dtype: torch.dtype) -> None:
    """Others would slow the matmul behind it, as subnormal numbers would."""
    z = (3 * torch.randn(256, 512)).to(dtype)
    (y, slope), (eager, expected) = _with_gradient(z, resolve("hardswish")), _with_gradient(z, F.hardswish)
    assert 0.1 < float((eager == 0).float().mean()) < 0.9
    assert torch.equal(y == 0, eager == 0)
    assert not bool((y.abs() < branch_bit.LEAST[dtype])[y != 0].any())
    assert not slope[z <= -3].any()
    assert float((slope - expected).float().norm()) <= 2 * GELU_ERRORS[dtype].rms * float(expected.float().norm())


@every_float
@every_folded
def test_both_zeros_lie_on_the_right_branch(activation: Activation, dtype: torch.dtype) -> None:
    _, slope = _with_gradient(torch.tensor([0.0, -0.0], dtype=dtype), activation)
    expected = float(derivative(activation.function, torch.zeros(1)))
    assert slope.tolist() == pytest.approx([expected] * 2, abs=1e-6 + torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("name", ["hardsigmoid", "hardswish", "hardtanh", "relu6", "leaky_relu", "softshrink"])
def test_from_inputs_the_derivative_next_to_a_kink_is_torchs(name: str) -> None:
    function = FORMULAS.get(name) or getattr(F, name)
    kinks = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0])
    z = torch.cat([kinks, *(kinks.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))])
    z = z.repeat(64).requires_grad_()
    found, expected = (
        torch.autograd.grad(y.sum(), z)[0] for y in (fl.bias_act(z, None, name, save="input"), function(z))
    )
    torch.testing.assert_close(found, expected, rtol=2e-7, atol=0.0)
