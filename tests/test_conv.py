"""Convolutions and residuals: values, gradients of every order, formats, what is kept, modules, contexts, bad input."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import compare, gradients, leaves, relative
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlayers as fl
from fusedlayers import routes
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.memory import peak_bytes, saved_bytes

TABLE = [row.bind() for row in rows()]
OUTPUT_ONLY = [a for a in TABLE if a.output_refused_because(torch.float32) is None and not a.is_identity]
SAVES = ("output", "input", "recompute")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

every_activation = pytest.mark.parametrize("activation", TABLE, ids=str)
every_save = pytest.mark.parametrize("save", SAVES)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)

# torch's compiler uses deprecated parts of torch itself, and instantiates autograd Functions that it traces.
compiles = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\..*")
# Of an even kernel torch says that it copies its input to pad it.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

Call = Callable[..., Tensor]
Shape = tuple[int, ...]

#: Shapes of input and weight, and options: every option in every number of dimensions, and some at once.
CASES: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "1d": ((3, 4, 29), (8, 4, 3), {}),
    "1d strided": ((3, 4, 29), (8, 4, 5), {"stride": 3, "padding": (2,)}),
    "1d grouped and dilated": ((3, 4, 29), (8, 2, 3), {"padding": "same", "dilation": 2, "groups": 2}),
    "1d unbatched": ((4, 49), (8, 4, 4), {"padding": "same"}),
    "2d": ((2, 4, 9, 7), (8, 4, 3, 3), {"padding": 1}),
    "2d strided": ((2, 4, 9, 11), (8, 4, 3, 2), {"stride": [2, 1], "padding": (0, 2)}),
    "2d dilated": ((2, 4, 9, 11), (8, 4, 3, 3), {"dilation": (2, 1), "padding": "valid"}),
    "2d even kernel": ((2, 4, 7, 9), (8, 4, 2, 4), {"padding": "same"}),
    "2d grouped": ((2, 4, 9, 7), (6, 2, 3, 3), {"groups": 2, "padding": "same"}),
    "2d depthwise": ((2, 8, 9, 7), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
    "2d multiplied": ((2, 4, 9, 7), (12, 1, 3, 3), {"groups": 4}),
    "2d pointwise": ((2, 4, 9, 7), (8, 4, 1, 1), {}),
    "2d unbatched": ((4, 9, 7), (8, 4, 3, 3), {"padding": 1}),
    "3d": ((2, 4, 4, 5, 6), (8, 4, 3, 3, 3), {"padding": 1}),
    "3d strided and dilated": ((2, 4, 6, 7, 8), (8, 4, 2, 3, 3), {"stride": (1, 2, 1), "dilation": (2, 1, 1)}),
    "3d depthwise": ((2, 4, 4, 5, 6), (4, 1, 3, 1, 3), {"groups": 4, "padding": "same"}),
    "3d unbatched": ((4, 4, 5, 6), (8, 4, 1, 2, 3), {"padding": (0, 1, 2)}),
}
every_case = pytest.mark.parametrize("case", CASES)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_small_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny layers take the route of large ones."""
    monkeypatch.setattr(routes, "SMALL", 0)


def _layer(case: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    """x, w and b, and the options."""
    x_shape, w_shape, options = CASES[case]
    return leaves(x_shape, w_shape, (w_shape[0],), dtype=dtype), options


def _calls(save: str = "auto", **options: Any) -> tuple[Call, Call]:
    ours = functools.partial(fl.conv_bias_act, save=save, **options)
    return ours, functools.partial(reference.conv_bias_act, **options)


def _conv(x: Tensor, w: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    return reference.conv_bias_act(x, w, b, lambda z: z, **options)


def _both(arguments: Sequence[Tensor | None], activation: Any, save: str = "auto", **options: Any) -> list[Tensor]:
    """What we and what eager PyTorch make of x, w and b."""
    ours, eager = _calls(save, **options)
    return [ours(*arguments, activation), eager(*arguments, resolve(activation).plain)]


def _assert_same_gradients(ours: Tensor, eagers: Tensor, *sources: Tensor | None, **tolerance: float) -> None:
    dy = torch.randn(eagers.shape).to(eagers.dtype)
    got, expected = (gradients(y, dy, *sources) for y in (ours, eagers))
    torch.testing.assert_close(got, expected, **(tolerance or {"rtol": 1e-4, "atol": 1e-3}))


# --- values and gradients ---------------------------------------------------------------------------------------------


@every_float
@every_case
@every_save
def test_every_geometry_matches_float64(case: str, save: str, dtype: torch.dtype) -> None:
    (x, w, b), options = _layer(case, dtype)
    for bias in (b, None):
        compare(*_calls(save, **options), resolve("gelu"), x, w, bias, folded=save == "output")


@every_float
@every_activation
@every_save
def test_every_activation_matches_float64(activation: Activation, save: str, dtype: torch.dtype) -> None:
    (x, w, b), options = _layer("2d", dtype)
    compare(*_calls(save, **options), activation, x, w, b, folded=save == "output")


@every_case
@pytest.mark.parametrize(("name", "save"), [("tanh", "output"), ("gelu", "auto"), ("silu", "recompute")])
def test_float64_is_computed_in_float64(case: str, name: str, save: str) -> None:
    (x, w, b), options = _layer(case, torch.float64)
    ours, eagers = _both((x, w, b), name, save, **options)
    torch.testing.assert_close(ours, eagers)
    _assert_same_gradients(ours, eagers, x, w, b, rtol=1e-9, atol=1e-11)


@every_case
@pytest.mark.parametrize("save", ["auto", *SAVES])
@pytest.mark.parametrize("name", ["gelu", "relu", "softsign"])
def test_an_empty_batch_is_one(case: str, save: str, name: str) -> None:
    x_shape, w_shape, options = CASES[case]
    if "unbatched" in case:
        return
    x, w, b = leaves((0, *x_shape[1:]), w_shape, (w_shape[0],))
    ours, eagers = _both((x, w, b), name, save, **options)
    assert ours.shape == eagers.shape and len(ours) == 0
    _assert_same_gradients(ours, eagers, x, w, b)
    with torch.no_grad():
        assert fl.conv_bias_act(x, w, b, name, save=save, **options).shape == eagers.shape


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 300), (2, 1, 1, 1), (1, 3, 1, 300), (300, 1, 1), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("save", ["auto", *SAVES])
def test_sizes_of_one(shape: Shape, save: str) -> None:
    dims = len(shape) - 2
    x, w, b = leaves(shape, (1, shape[1], *(1,) * dims), (1,))
    ours, eagers = _both((x, w, b), "silu", save)
    torch.testing.assert_close(ours, eagers)
    _assert_same_gradients(ours, eagers, x, w, b)


def test_identity_is_the_convolution() -> None:
    (x, w, b), options = _layer("2d")
    assert torch.equal(fl.conv_bias_act(x, w, b, None, **options), F.conv2d(x, w, b, **options))


def test_sizes_may_be_numpys() -> None:
    import numpy as np

    (x, w, b), _ = _layer("2d grouped")
    ours = fl.conv_bias_act(x, w, b, "gelu", np.int64(2), (np.int32(1), 1), np.int64(1), np.int64(2))
    torch.testing.assert_close(ours, F.gelu(F.conv2d(x, w, b, 2, 1, 1, 2)))
    _assert_same_gradients(ours, F.gelu(F.conv2d(x, w, b, 2, 1, 1, 2)), x, w, b)
    x.requires_grad_(False)
    _assert_same_gradients(
        fl.conv_bias_act(x, w, b, "gelu", padding=(np.int64(1),), groups=np.int64(2)),
        F.gelu(F.conv2d(x, w, b, padding=1, groups=2)),
        w,
    )


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "tanh", "softplus", "hardswish"])
@every_save
def test_infinities_and_nan_stay_where_torch_has_them(name: str, save: str) -> None:
    (x, w, b), _ = _layer("2d")
    with torch.no_grad():
        x[0, :, 2, 2], x[0, 1, 6, 2], x[1, 1, 6, 4] = math.inf, -math.inf, math.nan
    y, z = fl.conv_bias_act(x, w, b, name, save=save), F.conv2d(x, w, b)
    # On vectors, torch's gelu makes NaN of infinity.
    torch.testing.assert_close(y, resolve(name).function(z.double()).float(), equal_nan=True, rtol=1e-5, atol=1e-6)
    (dz,) = torch.autograd.grad(resolve(name).function(z), z, torch.ones_like(z), retain_graph=True)
    got, expected = torch.autograd.grad(y.sum(), (w, b)), torch.autograd.grad(z, (w, b), dz)
    for a, e in zip(got, expected, strict=True):
        assert torch.equal(a.isfinite(), e.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_activation
def test_large_calls_without_gradients_are_as_good_as_torchs(activation: Activation, dtype: torch.dtype) -> None:
    # From a million on, oneDNN may apply the activation while it writes the result.
    for x_shape, w_shape, groups in (((2, 24, 20, 20), (64, 24, 3, 3), 1), ((2, 64, 20, 20), (64, 1, 3, 3), 64)):
        x, w, b = (t.detach() for t in leaves(x_shape, w_shape, (64,), dtype=dtype))
        for layout in (torch.contiguous_format, torch.channels_last):
            x = x.to(memory_format=layout)
            for bias in (b, None):
                options: dict[str, Any] = {"padding": 1, "groups": groups}
                y = fl.conv_bias_act(x, w, bias, activation, **options)
                eager = reference.conv_bias_act(x, w, bias, activation.plain, **options)
                double = None if bias is None else bias.double()
                exact = reference.conv_bias_act(x.double(), w.double(), double, activation.function, **options)
                assert y.stride() == _conv(x, w, bias, **options).stride() and y.dtype is dtype
                assert relative(y, exact) <= 2 * relative(eager, exact) + torch.finfo(dtype).eps


@every_activation
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_without_gradients_the_output_is_exact(activation: Activation, mode: Any, dtype: torch.dtype) -> None:
    (x, w, b), options = _layer("2d", dtype)
    with mode():
        y, z = fl.conv_bias_act(x, w, b, activation, **options), F.conv2d(x, w, b, **options)
        assert torch.equal(y, fl.bias_act(z, None, activation))
    assert y.grad_fn is None and not y.requires_grad


# --- users' activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
@pytest.mark.parametrize("case", ["1d", "1d unbatched", "2d", "2d unbatched", "3d", "3d unbatched"])
def test_functions_with_a_parameter_for_each_channel(case: str, save: str) -> None:
    (x, w, b), options = _layer(case)
    beta = torch.rand(8, *(1,) * (w.dim() - 2)).requires_grad_()

    def swish(z: Tensor) -> Tensor:
        return z * torch.sigmoid(beta * z)

    ours, eagers = _both((x, w, b), swish, save, **options)
    torch.testing.assert_close(ours, eagers)
    _assert_same_gradients(ours, eagers, x, w, b, beta)
    with torch.no_grad():
        torch.testing.assert_close(fl.conv_bias_act(x, w, b, swish, **options), swish(_conv(x, w, b, **options)))


@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
@pytest.mark.parametrize("shape", [(2, 8, 9, 7), (8, 8, 7), (2, 8, 31)], ids=str)
def test_prelu_has_its_slopes_where_torch_has_them(shape: Shape, save: str) -> None:
    # Those of an unbatched image run along its height.
    dims = 2 if shape[-1] == 7 else 1
    x, w, b = leaves(shape, (8, 8, *(3,) * dims), (8,))
    prelu = nn.PReLU(8)
    ours, eagers = _both((x, w, b), prelu, save, padding="same")
    assert "PreluKernel" not in str(ours.grad_fn)
    torch.testing.assert_close(ours, eagers)
    _assert_same_gradients(ours, eagers, x, w, b, prelu.weight)


@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
def test_parameters_along_another_dimension(save: str) -> None:
    (x, w, b), options = _layer("2d")
    scale, r = torch.rand(7).requires_grad_(), torch.randn(2, 8, 9, 7, requires_grad=True)
    for residual in (None, r):
        ours, eagers = _both((x, w, b), lambda z: torch.sin(scale * z), save, residual=residual, **options)
        torch.testing.assert_close(ours, eagers)
        _assert_same_gradients(ours, eagers, x, w, b, scale, residual)


@pytest.mark.parametrize(
    "function", [torch.sin, nn.Softmax(1), lambda z: z.square().tanh()], ids=["sin", "softmax", "lambda"]
)
@pytest.mark.parametrize("save", ["auto", "input", "recompute"])
def test_any_callable_works(function: Callable[[Tensor], Tensor], save: str) -> None:
    (x, w, b), options = _layer("2d")
    ours, eagers = _both((x, w, b), function, save, **options)
    torch.testing.assert_close(ours, eagers)
    _assert_same_gradients(ours, eagers, x, w, b)


# --- derivatives of first and second order ----------------------------------------------------------------------------

SMALL: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "1d": ((2, 2, 6), (4, 1, 3), {"stride": 2, "padding": 1, "groups": 2}),
    "1d unbatched": ((2, 6), (3, 2, 2), {"dilation": 2, "padding": "same"}),
    "2d": ((2, 2, 4, 3), (2, 2, 3, 2), {"padding": (1, 0)}),
    "2d same": ((1, 2, 4, 3), (2, 2, 2, 3), {"padding": "same"}),
    "2d depthwise": ((1, 2, 5, 4), (2, 1, 3, 3), {"groups": 2, "stride": (2, 1), "padding": 1}),
    "2d dilated": ((1, 2, 5, 4), (2, 2, 3, 2), {"dilation": (2, 1), "padding": "valid"}),
    "3d": ((1, 2, 3, 3, 2), (2, 2, 2, 2, 1), {"padding": (1, 0, 0)}),
}
ORDERS = [("tanh", "output"), ("softplus", "output"), ("gelu", "input"), ("silu", "recompute"), ("mish", "auto")]


def _small(case: str, needed: str = "xwb") -> tuple[list[Tensor], dict[str, Any]]:
    x_shape, w_shape, options = SMALL[case]
    arguments = leaves(x_shape, w_shape, (w_shape[0],), dtype=torch.float64)
    return [t.requires_grad_(name in needed) for name, t in zip("xwb", arguments, strict=True)], options


@pytest.mark.usefixtures("no_small_route")
@pytest.mark.parametrize(("name", "save"), ORDERS)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", SMALL)
def test_first_and_second_derivatives(case: str, name: str, save: str, last: bool) -> None:
    (x, w, b), options = _small(case)
    if last and x.dim() not in FORMATS:
        return
    x = x.detach().to(memory_format=FORMATS[x.dim()]).requires_grad_() if last else x

    def call(*tensors: Tensor) -> Tensor:
        return fl.conv_bias_act(*tensors, name, save=save, **options)

    assert gradcheck(call, (x, w, b)) and gradgradcheck(call, (x, w, b), fast_mode=True)


@pytest.mark.usefixtures("no_small_route")
@every_save
@pytest.mark.parametrize("needed", ["x", "w", "b", "xb", "wb", "xw"])
@pytest.mark.parametrize("case", ["1d", "1d unbatched", "2d", "2d same", "2d depthwise", "3d"])
def test_derivatives_where_some_arguments_need_them(case: str, needed: str, save: str) -> None:
    arguments, options = _small(case, needed)

    def call(*tensors: Tensor) -> Tensor:
        return fl.conv_bias_act(*tensors, "tanh", save=save, **options)

    assert gradcheck(call, arguments) and gradgradcheck(call, arguments, fast_mode=True)
    call(*arguments).sum().backward()
    assert [t.grad is not None for t in arguments] == [name in needed for name in "xwb"]


@pytest.mark.parametrize("frozen", ["x", "w", "b", None])
def test_second_derivatives_in_float32(frozen: str | None) -> None:
    (x, w, b), options = _layer("2d")
    arguments = [t.requires_grad_(name != frozen) for name, t in zip("xwb", (x, w, b), strict=True)]

    def second(call: Call, *tensors: Tensor) -> list[Tensor]:
        needed = [t for t in tensors if t.requires_grad]
        first = torch.autograd.grad(call(*tensors, resolve("gelu").plain).square().sum(), needed, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), needed))  # type: ignore[arg-type]

    ours, eager = _calls(**options)
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in arguments]
    for a, e in zip(second(ours, *arguments), second(eager, *doubles), strict=True):
        assert relative(a, e) < (1e-4 if frozen in ("w", "x") else 1e-6)


@every_save
def test_gradients_of_many_outputs_at_once(save: str) -> None:
    for frozen in ("x", "w", None):
        arguments, options = _layer("2d grouped")
        for name, t in zip("xwb", arguments, strict=True):
            t.requires_grad_(name != frozen)
        y = fl.conv_bias_act(*arguments, "gelu", save=save, **options)
        needed, dys = [t for t in arguments if t.requires_grad], torch.randn(3, *y.shape)
        many = torch.autograd.grad(y, needed, dys, is_grads_batched=True, retain_graph=True)
        for i, dy in enumerate(dys):
            one = torch.autograd.grad(y, needed, dy, retain_graph=True)
            torch.testing.assert_close([m[i] for m in many], list(one), rtol=1e-4, atol=1e-3)


@every_save
@pytest.mark.parametrize("name", ["gelu", "tanh", "softplus"])
def test_backward_twice_with_retain_graph(name: str, save: str) -> None:
    arguments, options = _layer("2d")
    y = fl.conv_bias_act(*arguments, name, save=save, **options)
    before, dy = y.detach().clone(), torch.randn_like(y)
    first, second, third = (torch.autograd.grad(y, arguments, dy, retain_graph=again) for again in (True, True, False))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert torch.equal(y, before)


# --- memory formats ---------------------------------------------------------------------------------------------------


def _formats() -> Iterator[Any]:
    for shape in ((4, 16, 6, 5), (2, 8, 4, 5, 6)):
        last = FORMATS[len(shape)]
        x = torch.randn(shape)
        yield pytest.param(x.to(memory_format=last), id=f"{last}".removeprefix("torch."))
        yield pytest.param(x.transpose(0, 1).contiguous().transpose(0, 1), id=f"{len(shape)}d permuted")
        yield pytest.param(torch.cat([x, x], 1)[:, ::2], id=f"{len(shape)}d with gaps")
        yield pytest.param(x[:, :1].expand(shape), id=f"{len(shape)}d expanded")
    yield pytest.param(torch.randn(4, 30, 16).transpose(1, 2), id="1d transposed")


@pytest.mark.parametrize("last_weight", [False, True], ids=["weight", "channels_last weight"])
@pytest.mark.parametrize("x", list(_formats()))
@pytest.mark.parametrize("name", ["gelu", "relu", "softsign"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_are_torchs(x: Tensor, name: str, dtype: torch.dtype, last_weight: bool) -> None:
    # Of y, and of the gradients, of which some only may be needed.
    dims = x.dim() - 2
    for channels, kernel, frozen in itertools.product((x.shape[1], 1), (3, 1), ("w", None)):
        w, b = leaves((x.shape[1], channels, *(kernel,) * dims), x.shape[1:2], dtype=dtype)
        if last_weight and dims > 1:
            w = w.detach().to(memory_format=FORMATS[x.dim()])
        w.requires_grad_(frozen is None)
        x = x.detach().to(dtype).requires_grad_()
        for mode, save in ((torch.no_grad, "auto"), *((torch.enable_grad, save) for save in SAVES)):
            with mode():
                ours, eager = _calls(save, groups=x.shape[1] // channels, padding=1)
                y, expected = ours(x, w, b, name), eager(x, w, b, resolve(name).plain)
            assert y.stride() == expected.stride()
        dy = torch.randn_like(expected)
        for a, e in zip(gradients(y, dy, x, w), gradients(expected, dy, x, w), strict=True):
            assert a.stride() == e.stride()
            assert relative(a, e.double()) < 4 * torch.finfo(dtype).eps


class _Copies(TorchDispatchMode):
    """Notes copies of so many elements from one format to another."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = {"copy_": 1, "clone": 0, "_to_copy": 0}.get(func.overloadpacket.__name__)
        if source is not None and result.numel() == self.numel and result.stride() != args[source].stride():
            self.seen.append(str(func))
        return result


@pytest.mark.parametrize("shape", [(4, 16, 9, 7), (2, 16, 4, 5, 6), (4, 16, 31)], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize(
    ("activation", "save"),
    [("relu", "auto"), ("gelu", "auto"), ("softplus", "output"), ("gelu", "input"), (nn.PReLU(16), "auto")],
    ids=reference.label,
)
def test_no_format_is_copied(shape: Shape, last: bool, activation: Any, save: str) -> None:
    if last and len(shape) not in FORMATS:
        return
    layout = FORMATS[len(shape)] if last else torch.contiguous_format
    x, w, b = leaves(shape, (16, 16, *(3,) * (len(shape) - 2)), (16,))
    x = x.detach().to(memory_format=layout).requires_grad_()
    fl.conv_bias_act(x, w, b, activation, padding=1, save=save).sum().backward()  # what is made once is made here
    with _Copies(x.numel()) as copies:
        y = fl.conv_bias_act(x, w, b, activation, padding=1, save=save)
        dy = torch.randn_like(y)
        torch.autograd.grad(y, (x, w, b), dy)
    assert y.is_contiguous(memory_format=layout) and copies.seen == []


# --- what is kept -----------------------------------------------------------------------------------------------------


def _chain(activation: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Call, Call, Tensor, int]:
    """conv, activation, conv: ours and eager PyTorch's, their input, and the bytes of a tensor between them."""
    x, w, b, v = leaves((2, 4, 12, 12), (8, 4, 3, 3), (8,), (4, 8, 3, 3), dtype=dtype)
    plain = resolve(activation).plain

    def ours(x: Tensor) -> Tensor:
        return F.conv2d(fl.conv_bias_act(x, w, b, activation, padding=1, **options), v)

    def eager(x: Tensor) -> Tensor:
        return F.conv2d(plain(F.conv2d(x, w, b, padding=1)), v)

    return ours, eager, x.detach(), dtype.itemsize * 2 * 8 * 12 * 12


@pytest.mark.parametrize("activation", OUTPUT_ONLY, ids=str)
@every_float
def test_between_two_convolutions_one_tensor_is_kept(activation: Activation, dtype: torch.dtype) -> None:
    ours, eager, x, one = _chain(activation, dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = x.to(memory_format=layout)
        assert saved_bytes(ours, x, exclude=x) == one
        expected = saved_bytes(eager, x, exclude=x)
        assert expected == 2 * one if activation.name in ("gelu", "silu", "mish", "hardswish") else expected >= one


@pytest.mark.parametrize("save, kept", [("auto", 1), ("output", 1), ("input", 2), ("recompute", 1)])
def test_what_each_way_of_saving_keeps(save: str, kept: int) -> None:
    ours, _, x, one = _chain("gelu", save=save)
    assert saved_bytes(ours, x, exclude=x) == kept * one


@pytest.mark.parametrize("size", [(40,), (4, 5, 8)], ids=["1d", "3d"])
def test_other_dimensions_are_no_dearer(size: Shape) -> None:
    x, w, b, v = leaves((2, 4, *size), (8, 4, *(3,) * len(size)), (8,), (4, 8, *(1,) * len(size)))
    x.requires_grad_(False)

    def step(x: Tensor) -> Tensor:
        return _conv(fl.conv_bias_act(x, w, b, "gelu", padding=1), v, None)

    assert saved_bytes(step, x, exclude=x) == 4 * 2 * 8 * math.prod(size)
    assert saved_bytes(step, x[0], exclude=x) == 4 * 8 * math.prod(size)


@every_save
@pytest.mark.parametrize("frozen", ["", "w", "x", "b", "wb", "xb", "xw"])
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_only_what_a_needed_gradient_needs_is_kept(frozen: str, save: str, padding: Any) -> None:
    # Not leaves, so that each counts where it is kept.
    given = {name: torch.randn(s) for name, s in (("x", (4, 8, 9, 9)), ("w", (16, 8, 3, 3)), ("b", (16,)))}
    given = {name: t if name in frozen else t.requires_grad_() * 1 for name, t in given.items()}
    x, w, b = given.values()
    kept = saved_bytes(lambda: fl.conv_bias_act(x, w, b, "gelu", padding=padding, save=save), exclude=b)
    if save == "recompute":
        assert kept == x.nbytes + w.nbytes
        return
    y_bytes = 4 * 4 * 16 * (7 if padding == "valid" else 9) ** 2
    assert kept == x.nbytes * ("w" not in frozen) + w.nbytes * ("x" not in frozen) + y_bytes


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "xb", "wb", "xwb"])
@every_save
def test_only_needed_gradients_are_computed(needed: str, save: str) -> None:
    masks: list[list[bool]] = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution_backward.default:
                masks.append(list(args[-1]))
            return func(*args, **(kwargs or {}))

    arguments, options = _layer("2d")
    for name, t in zip("xwb", arguments, strict=True):
        t.requires_grad_(name in needed)
    y = fl.conv_bias_act(*arguments, "gelu", save=save, **options)
    with Asked():
        y.sum().backward()
    assert masks == [[name in needed for name in "xwb"]]


def test_nothing_is_kept_without_gradients() -> None:
    ours, _, x, _ = _chain("gelu")
    with torch.no_grad():
        assert saved_bytes(ours, x) == 0
    layer = fl.FusedConvAct2d(4, 8, 3).requires_grad_(False)
    assert saved_bytes(layer, x) == 0 and layer(x).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_one_tensor_is_kept(dtype: torch.dtype) -> None:
    kept = []
    for activation in ("gelu", "relu"):
        ours, eager, x, one = _chain(activation)
        for step in (ours, eager):
            with torch.autocast("cpu", dtype):
                kept.append(saved_bytes(step, x))
    gelu, eager_gelu, relu, eager_relu = kept
    assert gelu == relu == eager_relu == eager_gelu - one // 2


@compiles
def test_compiled_one_tensor_is_kept() -> None:
    torch.compiler.reset()
    ours, _, x, one = _chain("gelu")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(x)
    assert saved_bytes(compiled, x, exclude=x) == one


def test_the_peak_is_two_tensors() -> None:
    x, w, v = leaves((8, 2, 256, 256), (16, 2, 1, 1), (2, 16, 1, 1))

    def step() -> None:
        F.conv2d(fl.conv_bias_act(x.detach(), w, None, "gelu"), v).sum().backward()

    step()
    assert peak_bytes(step) <= 2.6 * 4 * 8 * 16 * 256**2
