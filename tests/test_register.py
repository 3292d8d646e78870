"""``@fl.activation``: functions with a name."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve


def _laplace(z: Tensor) -> Tensor:
    return torch.sign(z) * -torch.expm1(-z.abs())


def _leaky(z: Tensor, slope: float = 0.25) -> Tensor:
    return torch.where(z >= 0, z, slope * z)


def _check(activation: object, plain: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
    z = (3 * torch.randn(40, 16)).to(dtype).requires_grad_()
    y, exact = fl.bias_act(z, None, activation), plain(z.double())
    dy = torch.randn(40, 16).to(dtype)
    tolerance = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps, "check_dtype": False}
    assert y.dtype is dtype
    torch.testing.assert_close(y, exact, **tolerance)
    torch.testing.assert_close(torch.autograd.grad(y, z, dy), torch.autograd.grad(exact, z, dy.double()), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_registered_function_is_known_by_its_name(dtype: torch.dtype) -> None:
    assert fl.activation(name="my_laplace")(_laplace) is _laplace
    assert fl.activations()[-1] == "my_laplace"
    for name in ("my_laplace", "MyLaplace", "my-laplace"):
        _check(name, _laplace, dtype)
    assert "saves the output" in repr(fl.FusedDenseAct(8, 16, "my_laplace", dtype=dtype))


def test_parameters_have_defaults_and_others_by_partial() -> None:
    fl.activation(_leaky, name="my_leaky")
    _check("my_leaky", _leaky)
    _check(functools.partial(_leaky, slope=0.5), lambda z: _leaky(z, 0.5))


@pytest.mark.parametrize("function", [torch.sinh, functools.partial(_leaky, slope=0.5), lambda z: z - z.sin()])
def test_callables_without_a_name_get_one(function: Callable[[Tensor], Tensor]) -> None:
    assert fl.activation(name="odd")(function) is function
    z = torch.randn(40, 16)
    torch.testing.assert_close(fl.bias_act(z, None, "odd"), function(z))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (7, "expected a function, got int"),
        ("gelu", "expected a function, got str; write @activation(name='gelu')"),
        (nn.Tanhshrink(), "pass it to a layer as it is"),
        (functools.partial(_leaky, slope=0.7), "pass name="),
        (lambda z: z, "pass name="),
    ],
    ids=range(5),
)
def test_what_cannot_be_registered(function: Any, words: str) -> None:
    before = fl.activations()
    with pytest.raises(TypeError, match=f"^activation: .*{re.escape(words)}"):
        fl.activation(function)
    assert fl.activations() == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gelu", "activation 'gelu' is already registered; name= gives this one another name"),
        ("Leaky-ReLU", "activation 'Leaky-ReLU' is already registered as 'leaky_relu'; name="),
        ("swish", "activation 'swish' is already registered as 'silu'; name="),
        ("mine", "activation 'mine' is already registered; name="),
    ],
)
def test_names_that_are_taken(name: str, said: str) -> None:
    def mine(z: Tensor) -> Tensor:
        return z * 2

    fl.activation(mine)
    before = resolve(name)
    with pytest.raises(ValueError, match=f"^{said}"):
        fl.activation(_laplace, name=name)
    assert resolve(name) is before


def test_names_are_suggested() -> None:
    fl.activation(_laplace, name="Two_Sided")
    with pytest.raises(ValueError, match=r"unknown activation 'two_sidde'; did you mean 'Two_Sided'\?"):
        resolve("two_sidde")


def test_a_cell_that_is_run_again_replaces_what_it_registered() -> None:
    def cell(scale: float) -> Callable[[Tensor], Tensor]:
        @fl.activation
        def my_wave(z: Tensor) -> Tensor:
            return scale * torch.tanh(z)

        return my_wave

    for scale in (1.0, 2.0, 1.0):
        function = cell(scale)
        for activation in ("my_wave", function):
            _check(activation, lambda z, scale=scale: scale * torch.tanh(z))
    assert fl.activations().count("my_wave") == 1
