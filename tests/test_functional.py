"""``dense_bias_act`` and ``bias_act``: values, gradients of every order, shapes, writing in place, bad input."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from plans import plans_of
from reference import assert_near, compare, gradients, leaves, relative
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, definitions, resolve
from fusedlayers.calls import sizes
from fusedlayers.derivative import branch_bit

TABLE = [row.bind() for row in definitions()]
SAVES = ("output", "input", "recompute")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

every_activation = pytest.mark.parametrize("activation", TABLE, ids=str)
every_save = pytest.mark.parametrize("save", SAVES)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)

Call = Callable[..., Tensor]


# --- values and gradients ---------------------------------------------------------------------------------------------


@every_float
@every_activation
@every_save
def test_dense_matches_float64(activation: Activation, save: str, dtype: torch.dtype) -> None:
    x, w, b = leaves((33, 24), (40, 24), (40,), dtype=dtype)
    call = functools.partial(fl.dense_bias_act, save=save)
    compare(call, reference.dense_bias_act, activation, x, w, b, folded=save == "output")
    compare(call, reference.dense_bias_act, activation, x, w, None, folded=save == "output")


@every_float
@every_activation
@every_save
def test_bias_act_matches_float64(activation: Activation, save: str, dtype: torch.dtype) -> None:
    z, b = leaves((33, 40), (40,), dtype=dtype)
    with torch.no_grad():
        z += z + b == 0  # where cbrt has no slope
    call = functools.partial(fl.bias_act, save=save)
    compare(call, reference.bias_act, activation, z, b, folded=save == "output")
    compare(lambda z, act: call(z, None, act), lambda z, f: f(z), activation, z, folded=save == "output")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("leaky_relu", {"negative_slope": -0.5}),
        ("elu", {"alpha": -1.5}),
        ("celu", {"alpha": -5.0}),
        ("trelu", {"threshold": -1.0, "value": 2.0}),
        ("trelu", {"threshold": 0.5, "value": -2.0}),
        ("softplus", {"beta": -1.0, "threshold": 20.0}),
        ("softplus", {"beta": 3.0, "threshold": 1.0}),
        ("hardtanh", {"min_val": -0.2, "max_val": 3.0}),
        ("softshrink", {"lambd": 0.0}),
    ],
    ids=str,
)
@every_float
def test_parameters(name: str, parameters: dict[str, float], dtype: torch.dtype) -> None:
    # Those whose output does not suffice fall back to the input by themselves.
    activation = {row.name: row for row in definitions()}[name].bind(**parameters)
    x, w, b = leaves((33, 24), (40, 24), (40,), dtype=dtype)
    compare(fl.dense_bias_act, reference.dense_bias_act, activation, x, w, b)
    z, b = leaves((33, 40), (40,), dtype=dtype)
    compare(fl.bias_act, reference.bias_act, activation, z, b)


def test_identity_is_the_matmul() -> None:
    x, w, b = leaves((20, 6), (30, 6), (30,))
    assert torch.equal(fl.dense_bias_act(x, w, b, None), F.linear(x, w, b))
    assert torch.equal(fl.bias_act(x, w[0], None), x + w[0])
    assert fl.bias_act(x, None, None) is x
    assert fl.bias_act(x, None, "identity") is x


# --- derivatives of first and second order ----------------------------------------------------------------------------

KINKS = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0])


@pytest.fixture
def no_small_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers take the route of large ones."""
    monkeypatch.setattr(sizes, "SMALL_BYTES", 0)


@functools.cache
def _smooth_arguments(dense: bool) -> list[Tensor]:
    """float64 arguments whose pre-activations reach far to both sides and keep away from every kink."""
    generator = torch.Generator()  # not the test's: others find what is cached
    while True:
        x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (4, 3), (4,)))
        arguments = [1.4 * x, 1.4 * w, b] if dense else [3 * x @ w.t(), b]
        z = F.linear(*arguments) if dense else arguments[0] + b
        if (z.unsqueeze(-1) - KINKS).abs().min() > 0.05 and z.min() < -4 and z.max() > 4:
            return arguments


@pytest.mark.usefixtures("no_small_route")
@pytest.mark.parametrize(
    ("activation", "save", "dense"),
    # Each in one of both functions, so that neighbours of one activation and of one ``save`` are in another.
    [(a, save, (i + j) % 2 == 0) for i, a in enumerate(TABLE) for j, save in enumerate(("auto", *SAVES))],
    ids=str,
)
def test_first_and_second_derivatives(activation: Activation, save: str, dense: bool) -> None:
    arguments = [a.clone().requires_grad_() for a in _smooth_arguments(dense)]
    function, eager = (fl.dense_bias_act, reference.dense_bias_act) if dense else (fl.bias_act, reference.bias_act)
    ours: Call = lambda *tensors: function(*tensors, activation, save=save)
    plain: Call = lambda *tensors: eager(*tensors, activation.function)
    reference.check_orders(ours, plain, arguments, reference.added(activation, save))


# --- shapes and memory formats ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "relu", "softsign"])
@pytest.mark.parametrize("save", ["auto", *SAVES])
@pytest.mark.parametrize(
    ("x_shape", "out"),
    [
        *[((7,), 5), ((7,), 301), ((1, 7), 301), ((0, 7), 5), ((3, 0, 7), 5), ((2, 3, 4, 7), 31)],
        *[((4, 0), 5), ((2, 3, 0), 5), ((0,), 5), ((4, 7), 0), ((2, 3, 7), 0), ((0, 0), 0), ((2, 0, 0), 0)],
    ],
    ids=str,
)
def test_dense_shapes(x_shape: tuple[int, ...], out: int, save: str, name: str) -> None:
    x, w, b = leaves(x_shape, (out, x_shape[-1]), (out,))
    y = fl.dense_bias_act(x, w, b, name, save=save)
    eager = reference.dense_bias_act(x, w, b, resolve(name).plain)
    torch.testing.assert_close(y, eager)
    dy = torch.ones_like(eager)
    near = 4 * torch.finfo(x.dtype).eps ** 0.5  # next to a fold a derivative errs by the root of a unit; times a weight
    torch.testing.assert_close(gradients(y, dy, x, w, b), gradients(eager, dy, x, w, b), rtol=near, atol=near)
    with torch.no_grad():
        torch.testing.assert_close(fl.dense_bias_act(x, w, None, name), resolve(name).plain(F.linear(x, w)))


@pytest.mark.parametrize("name", ["gelu", "relu", "softsign"])
@pytest.mark.parametrize("save", ["auto", *SAVES])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0), (1, 5), (3, 0, 2), (2, 3, 4, 5)], ids=str)
@every_float
def test_bias_act_shapes(shape: tuple[int, ...], save: str, name: str, dtype: torch.dtype) -> None:
    (z,) = leaves(shape, dtype=dtype)
    eager = resolve(name).plain(z)
    dy = torch.ones_like(eager)
    expected = gradients(eager, dy, z)
    tolerance = torch.finfo(dtype).eps ** 0.5  # as a derivative errs next to a fold
    for bias in (None, torch.zeros(shape[-1:], dtype=dtype)) if shape else (None,):
        y = fl.bias_act(z, bias, name, save=save)
        torch.testing.assert_close(y, eager)
        torch.testing.assert_close(gradients(y, dy, z), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gelu", "silu", "hardswish", "tanh", "softplus", "squared_relu"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes_that_no_chunk_divides(name: str, save: str, dtype: torch.dtype) -> None:
    rows, columns = 1021, 1031  # primes, over a million elements
    z, b = leaves((rows, columns), (columns,), dtype=dtype)
    dy = torch.randn(rows, columns).to(dtype)

    def run(z: Tensor, dy: Tensor) -> list[Tensor]:
        y = fl.bias_act(z, b, name, save=save)
        return [y, *gradients(y, dy, z)]

    whole = run(z, dy)
    parts = [run(z[i : i + 100].detach().requires_grad_(), dy[i : i + 100]) for i in range(0, rows, 100)]
    for a, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        # A vectorised kernel's last few elements may be rounded otherwise.
        torch.testing.assert_close(a, torch.cat(pieces), rtol=4 * torch.finfo(dtype).eps, atol=3e-4)
    with torch.no_grad():
        torch.testing.assert_close(fl.bias_act(z, b, name), resolve(name).function(z + b), rtol=1e-2, atol=1e-2)


# --- without gradients ------------------------------------------------------------------------------------------------


@every_activation
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_without_gradients_the_output_is_exact(activation: Activation, mode: Any, dtype: torch.dtype) -> None:
    x, w, b = (t.detach().requires_grad_(mode is not None) for t in leaves((40, 8), (50, 8), (50,), dtype=dtype))
    with mode() if mode is not None else torch.enable_grad():
        y, z = fl.dense_bias_act(x, w, b, activation), F.linear(x, w, b)
        same = fl.bias_act(z, None, activation)
        unencoded = activation.function(z.double() if dtype.itemsize == 2 else z).to(dtype)
        eager, truth = activation.plain(z), activation.function(z.double())
    assert y.grad_fn is None and not y.requires_grad
    assert torch.equal(y, same)
    # ATen's kernel serves some rows, the row's own function or a compiled loop the others.
    assert torch.equal(y, unencoded) or torch.equal(y, eager) or relative(y, truth) <= 2 * relative(eager, truth)
    fold = activation.fold
    if fold is not None and dtype in FLOATS:
        negative = y < 0
        assert not torch.equal(branch_bit.decode(y.float(), dtype)[negative], fold.marks(z)[negative])


# --- in place ---------------------------------------------------------------------------------------------------------


@every_activation
@pytest.mark.parametrize("save", ["auto", "input"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("numel", [40, 1200])
def test_in_place_is_like_relu_in_place(activation: Activation, save: str, with_bias: bool, numel: int) -> None:
    leaf, b = leaves((numel // 40, 40), (40,))
    b = b if with_bias else None
    eager = activation.plain(2 * leaf + (0 if b is None else b))
    z = 2 * leaf
    version = z._version
    y = fl.bias_act(z, b, activation, inplace=True, save=save)
    assert y is z
    assert z._version > version or (activation.is_identity and b is None)
    torch.testing.assert_close(y, eager)
    dy = torch.randn_like(eager)
    torch.testing.assert_close(gradients(y, dy, leaf, b), gradients(eager, dy, leaf, b), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["gelu", "tanh", "softsign"])
def test_in_place_on_an_expanded_tensor_is_refused_before_anything_is_written(name: str, grad: bool) -> None:
    row = torch.randn(1, 40, requires_grad=grad) * 1
    before = row.detach().clone()
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        fl.bias_act(row.expand(30, 40), None, name, inplace=True)
    assert torch.equal(row, before)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["gelu", "tanh", "softsign"])
@pytest.mark.parametrize("save", ["auto", "input"])
@pytest.mark.parametrize("cut", ["columns", "rows", "transposed", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_on_a_view_writes_the_view_only(
    grad: bool, name: str, save: str, cut: str, dtype: torch.dtype
) -> None:
    def view(base: Tensor) -> Tensor:
        cuts = {"columns": base[:, ::2], "rows": base[::2], "transposed": base.t(), "block": base[3:, 5:20]}
        return cuts[cut]

    leaf = torch.randn(40, 50, dtype=torch.float32).to(dtype).requires_grad_(grad)
    base = leaf * 1
    expected = base.detach().clone()
    view(expected).copy_(resolve(name).plain(view(expected)))
    z = view(base)
    assert fl.bias_act(z, None, name, inplace=True, save=save) is z
    torch.testing.assert_close(base.detach(), expected)
    if grad:
        eager, mask = leaf * 1, torch.zeros_like(leaf, dtype=torch.bool)
        view(mask).fill_(True)
        eager = torch.where(mask, resolve(name).plain(eager), eager)
        assert_near(*(gradients(t, torch.ones_like(t), leaf) for t in (base, eager)))


@pytest.mark.parametrize("name", ["gelu", "tanh", "softsign"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_in_place_makes_a_stale_backward_raise(name: str, mode: Any) -> None:
    x = torch.randn(30, 40, requires_grad=True)
    y = x.exp()  # saves its output
    with mode():
        fl.bias_act(y if mode is torch.enable_grad else y.detach(), None, name, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_on_a_view_that_autograd_refuses_writes_nothing() -> None:
    base = torch.randn(40, 40, requires_grad=True) * 1
    view = base.chunk(2, dim=1)[0]  # one of several outputs of one operation
    before = view.detach().clone()
    with pytest.raises(RuntimeError, match="view"):
        fl.bias_act(view, None, "relu", inplace=True)
    assert torch.equal(view.detach(), before)


@pytest.mark.parametrize("save", SAVES)
def test_gradients_are_no_results_themselves(save: str) -> None:
    # The saved output is overwritten by the gradient; it would bring its node, and numpy() would refuse it.
    z = torch.randn(40, 30, requires_grad=True)
    (dz,) = torch.autograd.grad(fl.bias_act(z, None, "gelu", save=save).sum(), z)
    assert not dz.requires_grad and dz.grad_fn is None


def test_what_a_transform_has_left_behind_is_left_to_pytorch() -> None:
    left: list[torch.Tensor] = []
    torch.func.grad(lambda x: (left.append(x * 2), x.sum())[1])(torch.randn(40, 40))  # type: ignore[func-returns-value]
    w = torch.randn(30, 40, requires_grad=True)
    (plan,) = plans_of(fl.bias_act, left[0])
    assert plan.path == "composite" and "torch.func" in str(plan)
    torch.testing.assert_close(fl.dense_bias_act(left[0], w), F.gelu(F.linear(left[0], w)))


@pytest.mark.parametrize("name", ["gelu", "tanh", "softsign"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_incoming_gradients_of_any_layout(name: str, dtype: torch.dtype) -> None:
    z, b = leaves((33, 40), (40,), dtype=dtype)
    for dy in (torch.ones(()).expand(33, 40), torch.randn(40, 33).t(), torch.randn(33, 80)[:, ::2]):
        given = dy.to(dtype)
        before = given.clone()
        ours = gradients(fl.bias_act(z, b, name), given, z, b)
        torch.testing.assert_close(ours, gradients(fl.bias_act(z, b, name), given.contiguous(), z, b))
        assert torch.equal(given, before)  # never written
