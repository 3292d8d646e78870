"""Dropout behind an activation on Triton, beside the reference."""

import pytest
import torch
from gpu import DEVICE, INTERPRETED, INTERPRETER_WARNINGS
from reference import second_derivative, ulp

from fusedlayers.activations import Activation, resolve
from fusedlayers.kernels import reference
from fusedlayers.ops.dropout_node import tells_scaled

triton = pytest.importorskip("fusedlayers.kernels.triton")

pytestmark = [
    pytest.mark.usefixtures("interpreter_converts"),
    pytest.mark.filterwarnings(*INTERPRETER_WARNINGS),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("relu", "gelu", "silu", "tanh", "elu", "leaky_relu", "mish", "sigmoid")
SERVED = [(resolve(name), dtype) for name in NAMES for dtype in DTYPES]
SERVED = [(activation, dtype) for activation, dtype in SERVED if tells_scaled(activation, dtype)]
COUNT = 2500 if INTERPRETED else 100_003


def _mask(count: int) -> torch.Tensor:
    return (torch.rand(count) < 0.7).to(DEVICE)


def _uncertainty(activation: Activation, dy: torch.Tensor, dz: torch.Tensor, rest: float) -> torch.Tensor:
    """How far gradients of float32 may lie apart on a GPU, where ``y rest`` and the subtraction of the minimum m may be
    one operation (FMA): y is then another by up to a unit. Next to the minimum f' is the root of 2 f'' (y - m), which
    changes by 2 f'' unit over the sum of both roots: by the root of that at the minimum, and by less away from it."""
    if INTERPRETED or not activation.is_folded or dy.dtype is not torch.float32:
        return torch.zeros_like(dy)
    assert activation.fold is not None
    minimum = torch.tensor([activation.fold.position], dtype=torch.float64)
    square = float(2 * second_derivative(activation.function, minimum) * ulp(activation.function(minimum), dy.dtype))
    slope = (dz * rest / dy).abs()
    return (dy.abs() / rest * (square / slope).clamp_max(square**0.5)).nan_to_num()


@pytest.mark.parametrize(("activation", "dtype"), SERVED, ids=str)
def test_behind_an_activation(activation: Activation, dtype: torch.dtype) -> None:
    z, dy = (torch.randn(2, COUNT) * 2).to(DEVICE)
    z[:4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    y, dy, keep = activation.encoded(z.to(dtype).float(), dtype).to(dtype), dy.to(dtype), _mask(COUNT)
    unit = torch.finfo(dtype).eps
    expected = reference.drop_marked(y, keep, activation, 0.3, torch.empty_like(y))
    for out in (torch.empty_like(y), y.clone()):
        given = out if torch.equal(out, y) else y
        stored = triton.drop_marked(given, keep, activation, 0.3, out)
        assert stored is out
        torch.testing.assert_close(stored, expected, rtol=2 * unit, atol=1e-7)
        zero = activation.is_folded & (y == 0) & y.signbit()
        assert torch.equal((stored == 0) & stored.signbit(), ~keep | zero)
    truth = reference.drop_marked_gradient(dy, expected, activation, 0.3, torch.empty_like(y))
    for out in (torch.empty_like(y), expected.clone()):
        given = out if torch.equal(out, expected) else expected
        dz = triton.drop_marked_gradient(dy, given, activation, 0.3, out)
        allowed = 8 * unit * truth.double().abs() + 8 * unit + 1e-5 + _uncertainty(activation, dy, truth, 0.7)
        assert bool(((dz.double() - truth.double()).abs() <= allowed).all())
    assert not dz[~keep].any()


def test_nothing_is_the_references() -> None:
    empty = torch.empty(0, device=DEVICE)
    relu = resolve("relu")
    assert triton.drop_marked(empty, _mask(0), relu, 0.5, empty).shape == (0,)
