"""The eager backend's short cuts hold to what they cut short: tables, in-place bit tricks."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from entering import entered
from reference import all_values, check_gates, derivative, ulp
from torch import Tensor

from fusedlayers import kernels
from fusedlayers.activations import Activation, definitions, resolve
from fusedlayers.derivative import branch_bit
from fusedlayers.kernels import GradientRequest, cpu
from fusedlayers.kernels.cpu import loops

TABLE = [row.bind() for row in definitions()]
FOLDED = [a for a in TABLE if a.is_folded]
CURVES = [a for a in TABLE if not a.is_identity]
every_curve = pytest.mark.parametrize("activation", CURVES, ids=str)
every_folded = pytest.mark.parametrize("activation", FOLDED, ids=str)
every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def _inputs() -> Tensor:
    """float32 numbers of every size, all around the folds, and the special ones."""
    near = [a.fold.position + torch.linspace(-1e-3, 1e-3, 5001) for a in FOLDED if a.fold is not None]
    sizes = torch.logspace(-44.8, 38.5, 40_001, dtype=torch.float64).float()
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    return torch.cat([torch.linspace(-16, 16, 200_001), *near, sizes, -sizes, special])


# --- the backend as autograd uses it ----------------------------------------------------------------------------------


def test_it_is_chosen_for_cpus_and_for_float64_anywhere() -> None:
    assert kernels.choose(torch.zeros(3)) is cpu
    assert kernels.choose(torch.zeros(3, dtype=torch.float64)) is cpu


def _gradient(
    dy: Tensor,
    saved: Tensor,
    activation: Activation,
    given: Any,
    *,
    overwrite: bool = False,
    bias_dim: int | None = None,
) -> tuple[Any, Tensor | None]:
    wanted = GradientRequest(given, overwrite, bias_dim is not None)
    dz, db = cpu.gradient(dy, saved, activation, (), wanted, dim=-1 if bias_dim is None else bias_dim)
    return dz, db


@pytest.mark.parametrize(
    ("activation", "dtype", "given"),
    [(a, t, given) for a in CURVES for t in DTYPES for given in ("output", "input")
     if given == "input" or a.output_refusal(t) is None],
    ids=str,
)  # fmt: skip
def test_gradient_writes_where_it_is_told(activation: Activation, dtype: torch.dtype, given: Any) -> None:
    z, dy = torch.randn(30, 40).to(dtype), torch.randn(30, 40).to(dtype)
    saved = cpu.bias_act(z, None, activation, dim=-1, encode=True, out=None) if given == "output" else z
    before, dy_before = saved.clone(), dy.clone()
    gradient = functools.partial(_gradient, dy, saved, activation, given)
    dz, db = gradient(bias_dim=1)
    assert torch.equal(saved, before) and torch.equal(dy, dy_before)
    # Sums of 16-bit numbers are taken before these are rounded.
    unit = 2 * torch.finfo(dtype).eps
    assert db is not None and bool(((db - dz.sum(0)).abs() <= unit * dz.abs().sum(0)).all())
    assert gradient()[1] is None
    over, rows_sum = gradient(overwrite=True, bias_dim=0)
    assert over is saved and torch.equal(over, dz)
    assert rows_sum is not None and bool(((rows_sum - dz.sum(1)).abs() <= unit * dz.abs().sum(1)).all())
    assert torch.equal(dy, dy_before)


# --- what a short call costs ------------------------------------------------------------------------------------------


#: Of the forward pass with the branch bit, and of the gradient from the output.
MOST_FUNCTIONS = {
    **dict.fromkeys(["gelu", "silu", "mish", "quick_gelu", "gelu_tanh"], (7, 8)),
    **dict.fromkeys(["relu", "tanh", "sigmoid", "elu", "leaky_relu"], (6, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MOST_FUNCTIONS)
def test_a_short_call_decides_little(name: str, dtype: torch.dtype) -> None:
    activation = resolve(name)
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((128, 64), (256, 64), (256,)))
    z = F.linear(x, w)
    assert z.numel() == loops.GRAIN
    y = cpu.bias_act(z, b, activation, dim=-1, encode=True, out=None)
    calls = (
        lambda: cpu.bias_act(z, b, activation, dim=-1, encode=True, out=z),
        lambda: _gradient(z, y, activation, "output", bias_dim=-1),
    )
    for call, most in zip(calls, MOST_FUNCTIONS[name], strict=True):
        call()
        names = entered(call)
        assert 1 <= len(names) <= most, names


# --- tables -----------------------------------------------------------------------------------------------------------


@every_half
@every_curve
@pytest.mark.parametrize("given", ["output", "input"])
def test_tables_hold_the_derivative(activation: Activation, dtype: torch.dtype, given: Any) -> None:
    saved = all_values(dtype)
    dz, _ = _gradient(torch.ones_like(saved), saved, activation, given)
    if given == "output":
        fitted = activation.fitted_derivative(closest=True)
        if fitted is None:
            expected = activation.derivative_given_output(saved.double(), dtype)
        else:
            expected = fitted(saved.double(), activation.marked(saved, dtype))
    else:
        expected = derivative(activation.plain, saved)
    # Outputs that the function does not have may have any derivative.
    reached = activation.function(_inputs().double())
    reached = reached[~reached.isnan()]
    told = (saved >= reached.min()) & (saved <= reached.max()) if given == "output" else saved.isfinite()
    told &= expected.isfinite() & (expected.abs() < torch.finfo(dtype).max)
    error = (dz.double() - expected.double()).abs()[told]
    unit = torch.finfo(dtype).eps * expected.double().abs()[told] + torch.finfo(dtype).smallest_normal
    # ATen's sigmoid_backward computes in float16.
    assert bool((error <= (1.0 if activation.name == "sigmoid" else 0.51) * unit + 1e-6).all())


# --- folded activations in float32 ------------------------------------------------------------------------------------


@every_folded
def test_the_forward_pass_sets_the_bits_that_encode_sets(activation: Activation) -> None:
    z = _inputs()
    y = cpu.bias_act(z, None, activation, dim=-1, encode=True, out=None)
    expected = activation.encoded(z, torch.float32)
    fold = activation.fold
    assert fold is not None and torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(branch_bit.decode(y, torch.float32), branch_bit.decode(expected, torch.float32))
    # As exact as torch's operations, and the bit moves an output by a unit.
    truth = activation.function(z.double())
    real = truth.isfinite() & expected.isfinite()
    errors = [(found.double() - truth).abs()[real] / ulp(truth, torch.float32)[real] for found in (y, expected)]
    moderate = (z.abs() < 8)[real]
    assert float(errors[0][moderate].max()) <= 2 * float(errors[1][moderate].max()) + 1
    assert float(errors[0].max()) <= 2 * float(errors[1].max()) + 1


@every_folded
def test_outputs_below_the_minimum_have_a_small_derivative(activation: Activation) -> None:
    # Rounding takes outputs there; a square root would make NaN of them.
    assert activation.fold is not None
    y = torch.full((9,), activation.fold.extremum)
    y = y.view(torch.int32).add(torch.arange(-4, 5).int()).view(torch.float32)
    slope, _ = _gradient(torch.ones_like(y), y, activation, "output")
    assert bool(slope.isfinite().all()) and float(slope.abs().max()) < 4e-4
    left = branch_bit.decode(y, torch.float32)
    assert bool((slope[left] < 0).all()) and bool((slope[~left] > 0).all())


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 53), (600, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", TABLE, ids=str)
def test_gates(activation: Activation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_gates(cpu, activation, *(3 * torch.randn(shape).to(dtype) for _ in range(3)))
