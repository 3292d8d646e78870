"""``@fl.activation``: functions with a name, and derivatives that are believed once they have been checked."""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import check_orders
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.activations import resolve, table


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it: other tests iterate over the table."""
    torch.manual_seed(0)
    stand_ins = {target: list(entries) for target, entries in table.stand_ins.items()}
    for name in ("_rows", "by_name", "by_spelling"):
        monkeypatch.setattr(table, name, dict(getattr(table, name)))
    monkeypatch.setattr(table, "stand_ins", stand_ins)
    return


def _laplace(z: Tensor) -> Tensor:
    return torch.sign(z) * -torch.expm1(-z.abs())


def _leaky(z: Tensor, slope: float = 0.25) -> Tensor:
    return torch.where(z >= 0, z, slope * z)


def _bump(z: Tensor, width: float = 2.0, height: float = 1) -> Tensor:
    return height * torch.exp(-((z / width) ** 2))


#: A function, and its derivative by y where that is known.
KNOWN: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor] | None]] = {
    "laplace": (_laplace, lambda y: 1 - y.abs()),
    "leaky": (_leaky, lambda y, slope: torch.where(y >= 0, 1.0, slope)),
    "bump": (_bump, None),
    "line": (lambda z: 3 * z, lambda y: torch.full_like(y, 3.0)),
    "logistic": (torch.sigmoid, lambda y: y * (1 - y)),
}


def _wrapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Another function that does the same, for a name of its own."""
    if function is torch.sigmoid:
        return lambda z: torch.sigmoid(z)
    return functools.wraps(function)(lambda *arguments, **keywords: function(*arguments, **keywords))


def _check(call: Callable[[Tensor], Tensor], eager: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    z = (3 * torch.randn(40, 16)).to(dtype).requires_grad_()
    dy = torch.randn(40, 16).to(dtype)
    tolerance = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    y, plain = call(z), eager(z.double())
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), plain, **tolerance)
    (dz,), (truth,) = torch.autograd.grad(y, z, dy), torch.autograd.grad(plain, z, dy.double())
    torch.testing.assert_close(dz, truth, check_dtype=False, **tolerance)


@pytest.mark.parametrize("is_stated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_registered_function_is_known_by_name_and_as_itself(name: str, dtype: torch.dtype, is_stated: bool) -> None:
    plain, given_output = KNOWN[name]
    function = _wrapped(plain)
    options: dict[str, Any] = {"name": f"my_{name}"}
    if is_stated:
        options["derivative_given_output"] = given_output
    assert fl.activation(**options)(function) is function
    assert f"my_{name}" in fl.activations()
    for activation in (f"my_{name}", function):
        _check(lambda z, a=activation: fl.bias_act(z, None, a), plain, dtype)
    x, w = torch.randn(40, 8).to(dtype), torch.randn(16, 8).to(dtype)
    y, eager = fl.dense_bias_act(x, w, None, f"my_{name}"), plain(F.linear(x, w))
    torch.testing.assert_close(y, eager, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    if options.get("derivative_given_output") is not None and name != "line":  # of which PyTorch keeps nothing
        z = torch.randn(40, 16, dtype=dtype).requires_grad_()
        y = fl.bias_act(z * 1, None, function)
        assert y.grad_fn is not None and torch.equal(y.grad_fn.saved_tensors[0], y)
        assert "saves the output" in repr(fl.FusedDenseAct(8, 16, f"my_{name}", dtype=dtype))


@pytest.mark.parametrize("how", ["name", "partial", "module"])
@pytest.mark.parametrize("slope", [0.5, 2.0])
def test_parameters(how: str, slope: float) -> None:
    fl.activation(_leaky, derivative_given_output=KNOWN["leaky"][1], name="my_leaky")
    activation = {
        "name": resolve("my_leaky").row.bind(slope=slope),  # type: ignore[union-attr]
        "partial": functools.partial(_leaky, slope=slope),
        "module": nn.LeakyReLU(slope),  # torch's own, for the same numbers
    }[how]
    _check(lambda z: fl.bias_act(z, None, activation), lambda z: _leaky(z, slope), torch.float32)
    with pytest.raises(ValueError, match=r"unknown parameters \['slop'\]"):
        resolve("my_leaky").row.bind(slop=1.0)  # type: ignore[union-attr]


def test_higher_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "SMALL_BYTES", 0)
    z = torch.tensor([-3.0, -1.2, -0.4, 0.3, 0.9, 2.5]).view(3, 2).requires_grad_()
    for i, (function, given_output) in enumerate(KNOWN.values()):
        fl.activation(_wrapped(function), derivative_given_output=given_output, name=f"higher_{i}")
        for save in ("auto", "input", "recompute"):
            call = functools.partial(fl.bias_act, activation=f"higher_{i}", save=save)
            check_orders(call, function, [z])


def test_a_stated_derivative_is_what_is_used() -> None:
    used: list[int] = []

    def given_output(y: Tensor) -> Tensor:
        used.append(1)
        return 1 - y.abs()

    fl.activation(_wrapped(_laplace), derivative_given_output=given_output, name="by_y")
    y = fl.bias_act(torch.randn(40, 16, requires_grad=True), None, "by_y")
    used.clear()
    y.sum().backward()
    assert used


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "stated", "words"),
    [
        (_laplace, lambda y: 1 - y, ("derivative_given_output of 'wrong'", "but the derivative is")),
        (_laplace, lambda y: (1 - y.abs()) * 1.001, ()),
        (_laplace, lambda y: torch.ones_like(y), ("it gives 1,",)),
        (_laplace, lambda y: torch.full_like(y, math.nan), ("it gives nan",)),
        (_leaky, lambda y, slope: torch.where(y >= 0, 1.0, 0.3), ("slope = 0.25", "it gives 0.3")),
        (_bump, lambda y, width, height: y * 0, ("width = 2", "height = 1")),
        (lambda z: torch.round(z), lambda y: torch.ones_like(y), ("but the derivative is 0",)),
    ],
    ids=range(7),
)
def test_wrong_derivatives_are_refused_with_a_counterexample(
    function: Callable[..., Tensor], stated: Callable[..., Tensor], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="is wrong: at z = ") as error:
        fl.activation(function, name="wrong", derivative_given_output=stated)
    assert all(word in str(error.value) for word in words)
    assert "wrong" not in fl.activations()
    with pytest.raises(ValueError, match="unknown activation 'wrong'"):
        fl.bias_act(torch.ones(3), None, "wrong")


def test_a_derivative_may_be_rounded_to_float32() -> None:
    fl.activation(_laplace, name="rounded", derivative_given_output=lambda y: (1 - y.abs()).float())


def test_registered_names_have_spellings() -> None:
    fl.activation(_laplace, name="Two_Sided")
    assert resolve("two-sided") is resolve("TwoSided") is resolve("Two_Sided")
    with pytest.raises(ValueError, match=r"unknown activation 'two_sidde'; did you mean 'Two_Sided'\?"):
        resolve("two_sidde")
    fl.activation(_laplace, name="Two_Sided")  # once more
    assert resolve("two-sided") is resolve("Two_Sided")


def test_a_spelling_that_names_share_is_refused() -> None:
    before = resolve("gelu")
    fl.activation(_laplace, name="Gelu")
    assert resolve("gelu") is before and resolve("Gelu").function is _laplace
    said = "bias_act: activation 'GELU' may be any of gelu, Gelu; write it as one of these"
    with pytest.raises(ValueError, match=f"^{said}$"):
        fl.bias_act(torch.ones(3), None, "GELU")


@pytest.mark.parametrize(
    ("value", "got"), [(1.0, "1.0"), (torch.ones(()), "()"), (torch.ones(2, 1), "(2, 1)"), (None, "None")]
)
def test_derivatives_must_be_tensors_like_their_argument(value: Any, got: str) -> None:
    with pytest.raises(ValueError, match="of 'wrong' must return a tensor of its argument's shape") as error:
        fl.activation(lambda z: z * 1, name="wrong", derivative_given_output=lambda _: value)
    assert str(error.value).endswith(f"got {got}")


def test_a_counterexample_is_true() -> None:
    with pytest.raises(ValueError, match="is wrong: at z = ") as error:
        fl.activation(_laplace, derivative_given_output=lambda y: 1 - y, name="wrong")
    z, y, claimed, true = map(float, re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", str(error.value)))
    assert z < 0 and math.isclose(y, math.expm1(-abs(z)) * (1 if z < 0 else -1), rel_tol=1e-4)
    assert math.isclose(claimed, 1 - y, rel_tol=1e-4) and math.isclose(true, math.exp(z), rel_tol=1e-4)


def test_a_derivative_that_is_wrong_for_other_parameters_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fusedlayers")
    # Right for the default only.
    fl.activation(_leaky, derivative_given_output=lambda y, slope: torch.where(y >= 0, 1.0, 0.25), name="half_right")
    _check(lambda z: fl.bias_act(z, None, _leaky), _leaky, torch.float32)
    other = functools.partial(_leaky, slope=0.5)
    _check(lambda z: fl.bias_act(z, None, other), other, torch.float32)
    text = repr(fl.FusedDenseAct(8, 16, other))
    assert "not fused: half_right is left to PyTorch because derivative_given_output of 'half_right' is wrong" in text
    assert "slope = 0.5" in text and any("slope = 0.5" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_outputs_leave_few_digits_for_the_derivative(dtype: torch.dtype) -> None:
    # The statement is right, but for outputs that are known to four or eight units.
    @fl.activation(derivative_given_output=lambda y: -torch.expm1(1000 - y))
    def high(z: Tensor) -> Tensor:
        return F.softplus(z) + 1000

    z = torch.randn(40, 50, dtype=dtype, requires_grad=True)
    y = fl.bias_act(z, None, high)
    (dz,) = torch.autograd.grad(y, z, torch.ones_like(y))
    reported = fl.FusedDenseAct(8, 8, high, dtype=dtype)
    is_kept = "saves the input: told outputs in" in repr(reported)
    assert is_kept is (dtype.itemsize == 2)
    tolerance = 2 * torch.finfo(dtype).eps * (1 if is_kept else 1024)
    torch.testing.assert_close(dz.double(), torch.sigmoid(z.detach().double()), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda z, p: z * p, "parameter 'p' of <lambda> must have a number as default"),
        (lambda z, p=None: z, "parameter 'p' of <lambda> must have a number as default"),
        (lambda z, p=torch.ones(()): z * p, "functools.partial or an nn.Module"),  # noqa: B008  # which is refused
        (lambda z, *rest: z, "parameter 'rest'"),
        (lambda z, **rest: z, "parameter 'rest'"),
        (lambda: torch.ones(3), "takes no argument"),
        (7, "expected a function, got int"),
        ("gelu", "expected a function, got str; write @activation(name='gelu')"),
        (nn.Tanhshrink(), "pass it to a layer as it is"),
    ],
    ids=range(9),
)
def test_what_cannot_be_registered(function: Any, words: str) -> None:
    with pytest.raises(TypeError) as error:
        fl.activation(function, name="impossible")
    assert words in str(error.value)
    assert "impossible" not in fl.activations()


@pytest.mark.parametrize("name", ["gelu", "identity", "relu"])
def test_names_that_are_taken(name: str) -> None:
    before = resolve(name)
    with pytest.raises(ValueError, match=f"activation '{name}' is already registered"):
        fl.activation(lambda z: z * 2, name=name)
    assert resolve(name) is before

    def mine(z: Tensor) -> Tensor:
        return z * 2

    fl.activation(mine)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        fl.activation(_laplace, name="mine")


def test_callables_without_a_name_or_signature() -> None:
    z = torch.randn(40, 16)
    for i, function in enumerate((torch.sinh, functools.partial(_leaky, slope=0.5), lambda z: z - z.sin())):
        assert fl.activation(name=f"odd_{i}")(function) is function
        torch.testing.assert_close(fl.bias_act(z, None, f"odd_{i}"), function(z))
    for function in (functools.partial(_leaky, slope=0.7), lambda z: z):
        with pytest.raises(TypeError, match="pass name="):
            fl.activation(function)


def test_derivatives_are_functions() -> None:
    with pytest.raises(TypeError, match=r"^activation: derivative_given_output must be a function, got int: 5$"):
        fl.activation(derivative_given_output=5, name="impossible")(torch.sin)  # type: ignore[call-overload]


def test_a_cell_that_is_run_again_replaces_what_it_registered() -> None:
    def cell(scale: float) -> Callable[[Tensor], Tensor]:
        @fl.activation(derivative_given_output=lambda y: scale - y * y / scale)
        def my_wave(z: Tensor) -> Tensor:
            return scale * torch.tanh(z)

        return my_wave

    z = torch.randn(40, 16, requires_grad=True)
    for scale in (1.0, 2.0, 1.0):
        function = cell(scale)
        for activation in ("my_wave", function):
            y = fl.bias_act(z, None, activation)
            torch.testing.assert_close(y, scale * torch.tanh(z))
            torch.testing.assert_close(torch.autograd.grad(y.sum(), z)[0], scale * torch.cosh(z) ** -2)
    assert fl.activations().count("my_wave") == 1
