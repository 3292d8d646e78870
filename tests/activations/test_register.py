"""``@fl.activation``: functions with a name, and those that state their derivatives in terms of their outputs."""

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from subjects import TrainedELU
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.calls.tracers import with_operands
from fusedlayers.memory import saved_bytes


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


# --- stated derivatives -----------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Function = Callable[[Tensor], Tensor]


def _elu(alpha: Tensor) -> tuple[Function, Function, Function]:
    """ELU, its derivative and its input in terms of its output."""
    return (
        lambda z: torch.where(z > 0, z, alpha * torch.expm1(z)),
        lambda y: torch.where(y > 0, 1.0, y + alpha),
        lambda y: torch.where(y > 0, y, torch.log1p(y.clamp(max=0) / alpha)),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_trained_function_that_states_its_derivative_saves_its_output(dtype: torch.dtype) -> None:
    alpha = nn.Parameter(torch.tensor(0.3))  # 16 bits round it up: outputs lie past the limit
    function, derivative, input_of = _elu(alpha)
    fl.activation(function, name="elu_3", derivative_given_output=derivative, input_given_output=input_of)
    torch.manual_seed(0)
    z, dy = ((8 * torch.randn(400, 16)).to(dtype) for _ in range(2))
    z.requires_grad_()
    for activation, factor in (("elu_3", 1.0), (function, 3.0)):
        with torch.no_grad():
            alpha *= factor  # as an optimizer edits it
        call = lambda activation=activation: fl.bias_act(z * 1, None, activation)
        assert saved_bytes(call, exclude=[z, alpha]) == dy.nbytes
        (found,) = torch.autograd.grad(call(), [alpha], dy)
        terms = dy.double() * torch.expm1(z.detach().double().clamp(max=0))
        # Each term errs by some units of the output, and the sum is rounded.
        allowed = torch.finfo(dtype).eps * (8 * float(terms.norm()) + abs(float(terms.sum())))
        assert abs(float(found.double() - terms.sum())) <= allowed


def test_a_function_without_tensors_may_state_its_derivative() -> None:
    function = lambda z: torch.sign(z) * -torch.expm1(-z.abs())
    fl.activation(function, name="stated", derivative_given_output=lambda y: 1 - y.abs())
    assert with_operands(resolve("stated"), (40, 16), torch.float32).activation.fitted_derivative() is None
    for dtype in DTYPES:
        _check("stated", _laplace, dtype)
        assert "saves the output" in repr(fl.FusedDenseAct(8, 16, "stated", dtype=dtype))


_ALPHA = nn.Parameter(torch.tensor(1.0))
_COPY = _ALPHA.detach().clone()
_ELU, _SLOPE, _INPUT = _elu(_ALPHA)
WRONG: dict[str, tuple[Function, dict[str, Any], str]] = {
    "derivative": (
        _ELU, {"derivative_given_output": lambda y: y + 1, "input_given_output": _INPUT},
        r"derivative_given_output is wrong: at z = 8, where the output is 8, the derivative is 9 by it, and 1 by "
        r"autograd, the largest difference of 4096 inputs from -8 to 8",
    ),
    "derivative of another number": (
        _ELU, {"derivative_given_output": _elu(_COPY)[1], "input_given_output": _INPUT},
        r"derivative_given_output is wrong, once training has changed a tensor: at z = -.*",
    ),
    "input": (
        _ELU, {"derivative_given_output": _SLOPE, "input_given_output": lambda y: torch.where(y > 0, y, y / _ALPHA)},
        r"input_given_output is wrong: at z = -8, .* a gradient of a tensor is -0\.63\d* by it, and -0\.999\d* by .*",
    ),
    "NaN": (_laplace, {"derivative_given_output": lambda y: torch.sqrt(y)}, r"derivative_given_output is wrong: .*"),
    "a missing input": (
        _ELU, {"derivative_given_output": _SLOPE},
        r"reads tensors, whose gradients need input_given_output as well; state it too",
    ),
    "a sum": (
        _laplace, {"derivative_given_output": lambda y: y - y.sum()},
        r"derivative_given_output cannot be used because sum is not pointwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_formulas_are_refused(case: str) -> None:
    function, stated, said = WRONG[case]
    given = types.FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    with pytest.raises(ValueError, match=f"^activation 'wrong':? {said}$"):
        fl.activation(given, name="wrong", **stated)
    assert "wrong" not in fl.activations()


def test_a_module_states_by_methods() -> None:
    class Wrong(TrainedELU):
        def derivative_given_output(self, y: Tensor) -> Tensor:
            return y + 1

    with pytest.raises(ValueError, match="activation 'Wrong': derivative_given_output is wrong: at z = "):
        fl.bias_act(torch.ones(40, 16, requires_grad=True), None, Wrong())
