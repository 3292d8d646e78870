"""Random activations (``functions.py``): values and slopes as exact as the README says, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import functions
import pytest
import torch
from plans import plans_of
from torch import Tensor

import fusedlayers as fl
from fusedlayers.derivative.analysis import FLOAT32_ALLOWANCE, GELU_ERRORS
from fusedlayers.derivative.branch_bit import LEAST
from fusedlayers.derivative.features import find_features
from fusedlayers.kernels.cpu import value_tables as table

EACH = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1.0, 0.1, 0.01, 10.0)
SHAPE = (64, 512)


@pytest.mark.parametrize("start", range(0, 24, EACH))
def test_functions(start: int) -> None:
    for seed in range(start, start + EACH):
        check(functions.source(seed), seed)


def check(text: str, seed: int) -> None:
    """Compare the function with float64, in each dtype and for inputs of several sizes."""
    function = functions.made(text)
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(seed)
        z = torch.randn(SHAPE, generator=generator)
        (plan,) = plans_of(fl.bias_act, z.to(dtype, copy=True).requires_grad_(), None, function)
        if plan.path != "fused":
            continue
        for scale in SCALES:
            say = f"function {seed}, {text}, {dtype}, scale {scale}"
            _compare(say, function, (scale * z).to(dtype), plan.saved, is_normal=scale == 1)
        say = f"function {seed}, {text}, {dtype}, round numbers"
        _compare(say, function, (4 * z).round().to(dtype) / 4, plan.saved, is_normal=False, is_round=True)


class _Result(NamedTuple):
    value: Tensor
    slope: Tensor


def _step(function: Callable[[Tensor], Tensor], z: Tensor) -> _Result:
    z = z.detach().requires_grad_()
    y = function(z)
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y)) if y.requires_grad else (torch.zeros_like(z),)
    return _Result(y.detach(), slope)


def _compare(
    say: str, function: Callable[[Tensor], Tensor], z: Tensor, saved: str, *, is_normal: bool, is_round: bool = False
) -> None:
    """``is_normal``: whether z is of N(0, 1), for which slopes are exact in the mean too; ``is_round``: whether kinks
    may be at its numbers, where slopes are eager's."""
    ours, eager = _step(lambda z: fl.bias_act(z, None, function), z), _step(function, z)
    wide = z.double()
    exact = _step(function, wide)
    eps = torch.finfo(z.dtype).eps
    # Next to a kink either side's slope will do: the inputs' own rounding may lie across it.
    reach = 2.1 * eps * wide.abs().clamp_min(1.0)
    around = torch.stack([_step(function, wide + step * reach).slope for step in (-1.0, 0.0, 1.0)])
    sides = around.amin(0), around.amax(0)
    if is_round:
        own = _step(function, z.float()).slope.double()  # in which layers compute
        sides = torch.minimum(own, exact.slope), torch.maximum(own, exact.slope)
    # What the dtype has no numbers for is another matter.
    is_sane = torch.stack([eager.value.isfinite(), eager.slope.isfinite(), *(side.isfinite() for side in sides)]).all(0)
    for numbers in (exact.value, *sides):
        is_sane &= numbers.abs() < 0.9 * torch.finfo(z.dtype).max
    steepest = (
        float(find_features(function).steepest)
        if saved == "output"
        else float(torch.where(is_sane, exact.slope, 0.0).abs().max())
    )

    def slope_errors(found: Tensor) -> Tensor:
        error = torch.maximum(sides[0] - found.double(), found.double() - sides[1]).clamp_min(0)
        return torch.where(is_sane, error, 0.0)

    def value_errors(found: Tensor) -> Tensor:
        return torch.where(is_sane, (found.double() - exact.value).abs(), 0.0)

    def rms(errors: Tensor) -> float:
        return float(errors.square().mean().sqrt())

    # The branch bit costs a unit.
    unit = eps * torch.where(is_sane, exact.value, 0.0).abs()
    over = value_errors(ours.value) - 2 * value_errors(eager.value).max() - 1.5 * unit - LEAST[z.dtype]
    worst = float(value_errors(ours.value).flatten()[over.argmax()])
    assert float(over.max()) <= 0, f"{say}: the value errs by {worst:.3g}"
    limit = GELU_ERRORS[z.dtype]
    of_ours, of_eager = slope_errors(ours.slope), slope_errors(eager.slope)
    assert ours.slope[is_sane].isfinite().all(), f"{say}: slopes are not finite"
    allowed = 2 * float(of_eager.max()) + (FLOAT32_ALLOWANCE * limit.largest + table.ADDED) * steepest
    at = int(of_ours.argmax())
    z_at, wanted, found, eagers = (float(t.flatten()[at]) for t in (z, exact.slope, ours.slope, eager.slope))
    assert float(of_ours.max()) <= allowed, (
        f"{say}: at {z_at:.9g} the slope {wanted:.6g} is {found:.6g}, by eager {eagers:.6g}; steepest {steepest:.3g}"
    )
    size = rms(torch.where(is_sane, exact.slope, 0.0))
    allowed = 2 * rms(of_eager) + FLOAT32_ALLOWANCE * limit.rms * size + table.ADDED_RMS * steepest
    assert not is_normal or rms(of_ours) <= allowed, (
        f"{say}: slopes err by {rms(of_ours) / size:.3g} (rms), by eager {rms(of_eager) / size:.3g}"
    )
