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
from conftest import Switch
from gpu import DEVICE, INTERPRETER_WARNINGS
from reference import FOLDED_TOLERANCE, compare, gradients, leaves, relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlayers as fl
from fusedlayers import sizes
from fusedlayers.activations import Activation, resolve, rows
from fusedlayers.derivative import branch_bit
from fusedlayers.memory import peak_bytes, saved_bytes

TABLE = [row.bind() for row in rows()]
OUTPUT_ONLY = [a for a in TABLE if a.output_refusal(torch.float32) is None and not a.is_identity]
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
    monkeypatch.setattr(sizes, "SMALL_BYTES", 0)


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
                with torch.autocast("cpu", torch.bfloat16):
                    y = fl.conv_bias_act(x, w, bias, activation, **options)
                assert y.dtype is torch.bfloat16 and relative(y, exact) < 2e-2


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


@pytest.mark.usefixtures("no_small_route")
@pytest.mark.parametrize(("name", "save"), ORDERS)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", SMALL)
def test_first_and_second_derivatives(case: str, name: str, save: str, last: bool) -> None:
    x_shape, w_shape, options = SMALL[case]
    x, w, b = leaves(x_shape, w_shape, (w_shape[0],))
    if last and x.dim() not in FORMATS:
        return
    x = x.detach().to(memory_format=FORMATS[x.dim()]).requires_grad_() if last else x
    ours, eager = _calls(save, **options)
    calls = (lambda *t: ours(*t, name)), (lambda *t: eager(*t, resolve(name).plain))
    reference.check_orders(*calls, (x, w, b), reference.added(resolve(name), save))


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
            assert relative(a, e.double()) < FOLDED_TOLERANCE[dtype]


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


def test_the_peak_is_lower_by_a_tensor() -> None:
    """Than eager's three, or what more the convolutions take for themselves where several threads compute them."""
    x, w, v = leaves((8, 2, 256, 256), (16, 2, 1, 1), (2, 16, 1, 1))

    def step(hidden: Callable[[Tensor], Tensor]) -> None:
        F.conv2d(hidden(x.detach()), v).sum().backward()

    peaks = []
    for hidden in (lambda x: fl.conv_bias_act(x, w, None, "gelu"), lambda x: F.gelu(F.conv2d(x, w))):
        step(hidden)
        peaks.append(peak_bytes(functools.partial(step, hidden), device="cpu"))
    assert peaks[1] - peaks[0] > 0.99 * 4 * 8 * 16 * 256**2


# --- residuals --------------------------------------------------------------------------------------------------------

#: A product with a residual of its result's size: ours, eager PyTorch's, and the shapes of x, w, b and r.
PRODUCTS: dict[str, tuple[Call, Call, list[Shape]]] = {
    "dense": (fl.dense_bias_act, reference.dense_bias_act, [(30, 12), (40, 12), (40,), (30, 40)]),
    "dense, three dimensions": (
        fl.dense_bias_act,
        reference.dense_bias_act,
        [(3, 10, 12), (40, 12), (40,), (3, 10, 40)],
    ),
    "dense, one dimension": (fl.dense_bias_act, reference.dense_bias_act, [(12,), (400, 12), (400,), (400,)]),
    "conv": (*_calls(padding=1), [(2, 4, 9, 7), (8, 4, 3, 3), (8,), (2, 8, 9, 7)]),
    "conv, unbatched": (*_calls(padding=1), [(4, 9, 7), (8, 4, 3, 3), (8,), (8, 9, 7)]),
}
every_product = pytest.mark.parametrize("product", PRODUCTS)


@every_product
@every_float
@every_save
@pytest.mark.parametrize("name", ["gelu", "relu", "softsign"])
def test_residuals_match_float64(product: str, name: str, save: str, dtype: torch.dtype) -> None:
    ours, eager, shapes = PRODUCTS[product]
    x, w, b, r = leaves(*shapes, dtype=dtype)

    def with_residual(call: Call, **options: Any) -> Call:
        return lambda x, w, b, r, act: call(x, w, b, act, residual=r, **options)

    for bias in (b, None):
        calls = with_residual(ours, save=save), with_residual(eager)
        compare(*calls, resolve(name), x, w, bias, r, folded=save == "output")


@every_product
@pytest.mark.parametrize("name", ["gelu", "tanh", "softplus"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_residuals_without_gradients_are_exact(product: str, name: str, mode: Any) -> None:
    ours, eager, shapes = PRODUCTS[product]
    x, w, b, r = leaves(*shapes)
    before = r.detach().clone()
    with mode():
        y = ours(x, w, b, name, residual=r)
        assert torch.equal(y, fl.bias_act(eager(x, w, b, lambda z: z, residual=r), None, name))
    assert torch.equal(r.detach(), before)


@pytest.mark.usefixtures("no_small_route")
@pytest.mark.parametrize("product", ["dense, three dimensions", "conv", "conv, unbatched"])
@pytest.mark.parametrize("needed", ["xwbr", "r", "xr", "wr", "br", "xw"])
@pytest.mark.parametrize(("name", "save"), [("tanh", "output"), ("gelu", "input"), ("silu", "recompute")])
def test_residuals_have_first_and_second_derivatives(product: str, needed: str, name: str, save: str) -> None:
    small = {"dense, three dimensions": [(2, 1, 3), (4, 3), (4,), (2, 1, 4)]}
    small["conv"] = [(2, 2, 3, 2), (2, 2, 3, 3), (2,), (2, 2, 3, 2)]
    small["conv, unbatched"] = [
        shape[1:] if len(shape) == 4 and i != 1 else shape for i, shape in enumerate(small["conv"])
    ]
    arguments = leaves(*small[product])
    for key, t in zip("xwbr", arguments, strict=True):
        t.requires_grad_(key in needed)
    ours, eager, _ = PRODUCTS[product]
    calls = (
        lambda x, w, b, r: ours(x, w, b, name, residual=r, save=save),
        lambda x, w, b, r: eager(x, w, b, resolve(name).plain, residual=r),
    )
    reference.check_orders(*calls, arguments, reference.added(resolve(name), save))


@every_product
@pytest.mark.parametrize("name", ["gelu", "relu", "tanh"])
def test_a_residual_costs_no_buffer(product: str, name: str) -> None:
    ours, _, shapes = PRODUCTS[product]
    x, w, b, r = leaves(*shapes)
    r_bytes = r.nbytes

    def step(save: str) -> Tensor:
        return ours(x, w, b, name, residual=r * 1, save=save).exp()  # which keeps its own output

    assert saved_bytes(step, "output") == saved_bytes(step, "input") == 2 * r_bytes
    assert saved_bytes(step, "recompute") == 2 * r_bytes  # the residual


@pytest.mark.parametrize("save", ["auto", *SAVES])
def test_residuals_may_have_any_layout(save: str) -> None:
    (x, w, b), options = _layer("2d")
    r = torch.randn(2, 8, 9, 7)
    for residual in (
        r.to(memory_format=torch.channels_last),
        r[:1].expand(2, 8, 9, 7),
        torch.cat([r, r], 1)[:, ::2],
        r.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        residual = residual.detach().requires_grad_()
        ours, eagers = _both((x, w, b), "silu", save, residual=residual, **options)
        torch.testing.assert_close(ours, eagers)
        assert ours.stride() == F.conv2d(x, w, b, **options).stride()
        _assert_same_gradients(ours, eagers, x, w, b, residual)


@every_product
@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("save", ["auto", *SAVES])
def test_residuals_under_autocast_are_added_as_torch_adds_them(
    product: str, residual_dtype: torch.dtype, save: str
) -> None:
    ours, eager, shapes = PRODUCTS[product]
    x, w, b, r = leaves(*shapes)
    r = r.detach().to(residual_dtype).requires_grad_()
    for grad in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            y, expected = ours(x, w, b, "gelu", residual=r, save=save), eager(x, w, b, F.gelu, residual=r)
        assert y.dtype is expected.dtype
        assert relative(y, expected.double()) < 1e-2
        if grad:
            dy = torch.randn_like(expected)
            for a, e in zip(gradients(y, dy, x, w, b, r), gradients(expected, dy, x, w, b, r), strict=True):
                assert a.dtype is e.dtype and relative(a, e.double()) < 2e-2


@every_product
def test_residuals_that_do_not_fit_are_refused(product: str) -> None:
    ours, _, shapes = PRODUCTS[product]
    x, w, b, r = (t.detach() for t in leaves(*shapes))
    function = "conv_bias_act" if "conv" in product else "dense_bias_act"
    for residual, said in (
        (r[..., :-1], rf"expected residual \({', '.join(map(str, shapes[3]))},?\), like the result, got"),
        (r[None], "expected residual .*, like the result, got"),
        (r.sum(), r"expected residual .*, got \(\)"),
        (r.double(), "all tensors must have one dtype, got .* residual torch.float64"),
        (r.bfloat16(), "all tensors must have one dtype, got .* residual torch.bfloat16"),
        (r.to("meta"), "residual is on meta but input is on cpu"),
    ):
        with pytest.raises(ValueError, match=f"^{function}: {said}"):
            ours(x, w, b, "gelu", residual=residual)
    for bad in (1.0, [1.0], True):
        with pytest.raises(
            TypeError, match=f"^{function}: residual must be a tensor, got .*; pass None for no residual"
        ):
            ours(x, w, b, "gelu", residual=bad)
    with pytest.raises(TypeError, match=f"^{function}: residual must have a floating dtype"):
        ours(x, w, b, "gelu", residual=r.long())


# --- modules ----------------------------------------------------------------------------------------------------------

MODULES: list[tuple[Any, Any]] = [
    (fl.FusedConvAct1d, nn.Conv1d),
    (fl.FusedConvAct2d, nn.Conv2d),
    (fl.FusedConvAct3d, nn.Conv3d),
]
every_module = pytest.mark.parametrize(("ours", "torchs"), MODULES, ids=["1d", "2d", "3d"])


def _image(torchs: Any, channels: int = 4, batch: int = 2) -> Tensor:
    return torch.randn(batch, channels, *(6, 7, 8)[: int(torchs.__name__[4])])


@every_module
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, (2,), "same", "valid"], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_modules_compute_what_torchs_and_the_activation_do(
    ours: Any, torchs: Any, padding_mode: str, padding: Any, bias: bool
) -> None:
    x = _image(torchs)
    padding = padding * (x.dim() - 2) if padding == (2,) else padding
    options = {"padding": padding, "groups": 2, "bias": bias, "padding_mode": padding_mode}
    layer, conv = ours(4, 8, 3, "silu", **options), torchs(4, 8, 3, **options)
    conv.load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == list(conv.state_dict())
    for image in (x, x[0], x.to(memory_format=FORMATS.get(x.dim(), torch.contiguous_format))):
        image = image.detach().requires_grad_()
        y, expected = layer(image), F.silu(conv(image))
        torch.testing.assert_close(y, expected)
        assert y.stride() == conv(image).stride()
        dy = torch.randn_like(y)
        got = gradients(y, dy, image, *layer.parameters())
        torch.testing.assert_close(got, gradients(expected, dy, image, *conv.parameters()), rtol=1e-4, atol=1e-3)


# --- contexts ---------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize(("save", "dynamic"), [("input", True), ("recompute", True), ("auto", False)], ids=str)
def test_compiled(save: str, dynamic: bool) -> None:
    torch.compiler.reset()
    net = nn.Sequential(
        fl.FusedConvAct2d(4, 8, 3, "gelu", padding=1, padding_mode="reflect", save=save),
        fl.FusedConvAct2d(8, 8, 3, "tanh", padding="same", groups=4, save=save),
    )
    block = fl.FusedConvAct1d(8, 8, 3, nn.PReLU(8), padding=1)

    def step(x: Tensor) -> Tensor:
        y = net(x)
        y = fl.conv_bias_act(y, net[1].weight, None, "silu", padding=1, groups=4, residual=y, save=save)
        return block(y.flatten(2))

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (9, 12):
        x = torch.randn(2, 4, size, 7, requires_grad=True)
        y, expected = compiled(x), step(x)
        torch.testing.assert_close(y, expected)
        _assert_same_gradients(y, expected, x, *net.parameters(), *block.parameters(), rtol=1e-4, atol=5e-3)


def test_symbolic_traces_hold_the_layer() -> None:
    net = nn.Sequential(
        fl.FusedConvAct2d(4, 8, 3, "gelu", padding=1, padding_mode="circular"),
        fl.FusedConvAct2d(8, 8, 3, nn.LeakyReLU(0.2), padding="same"),
        fl.FusedConvAct2d(8, 8, 3, torch.sin),
    )
    traced, x = torch.fx.symbolic_trace(net), torch.randn(2, 4, 9, 9)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called.count(fl.conv_bias_act) == 3 and called[-1] is torch.sin
    assert torch.equal(traced(x), net(x))

    def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return fl.conv_bias_act(x, w, None, "gelu", residual=r)

    (x, w, _), _ = _layer("2d")
    r = torch.randn(2, 8, 7, 5)
    assert torch.equal(torch.fx.symbolic_trace(residual)(x, w, r), residual(x, w, r))


class _Tagged(Tensor):
    """A subclass that travels through torch functions."""


def test_subclasses_and_meta_tensors_are_left_to_torch() -> None:
    (x, w, b), options = _layer("2d")
    for activation in ("gelu", torch.sin):
        y = fl.conv_bias_act(x.detach().as_subclass(_Tagged), w, b, activation, **options)
        assert type(y) is _Tagged
        torch.testing.assert_close(y.as_subclass(Tensor), resolve(activation).plain(_conv(x, w, b, **options)))
    y = fl.conv_bias_act(*(t.to("meta") for t in (x, w, b)), "gelu", **options)
    assert y.is_meta and y.shape == (2, 8, 9, 7)


#: What an edit between the passes does: backward raises where the tensor is read again, and else is right.
RAISES = {"x": {*SAVES}, "w": {*SAVES}, "b": {"recompute"}, "r": {"recompute"}, "y": {"output"}}


@pytest.mark.parametrize("edited", RAISES)
@every_save
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_edits_between_the_passes(edited: str, save: str, name: str) -> None:
    (x, w, b), options = _layer("2d")
    r = torch.randn(2, 8, 9, 7, requires_grad=True)
    y, eagers = _both((x, w, b), name, save, residual=r, **options)
    expected = gradients(eagers, torch.ones_like(y), x, w, b, r)
    with torch.no_grad():
        {"x": x, "w": w, "b": b, "r": r, "y": y}[edited].add_(1)
    if save in RAISES[edited]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        got = gradients(y, torch.ones_like(y), x, w, b, r)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize("save", ["output", "input"])
def test_what_is_not_kept_may_be_edited(save: str) -> None:
    for frozen, edited in (("w", 0), ("x", 1)):
        arguments, options = _layer("2d")
        arguments["xw".index(frozen)].requires_grad_(False)
        y, eagers = _both(arguments, "gelu", save, **options)
        dy = torch.randn_like(y)
        expected = gradients(eagers, dy, *arguments)
        with torch.no_grad():
            arguments[edited].zero_()
        torch.testing.assert_close(gradients(y, dy, *arguments), expected, rtol=1e-4, atol=1e-3)


# --- Triton -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("activation", ["gelu", "tanh", nn.PReLU(8), None], ids=reference.label)
@pytest.mark.parametrize(("case", "last"), [("1d", False), ("2d", False), ("2d", True), ("3d", False), ("3d", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton(activation: Any, case: str, last: bool, dtype: torch.dtype, on_triton: Switch) -> None:
    pytest.importorskip("triton")
    on_triton(True)
    (x, w, b), options = _layer(case, dtype)
    activation = activation.to(DEVICE, dtype) if isinstance(activation, nn.Module) else activation
    layout = FORMATS[x.dim()] if last else torch.contiguous_format
    x = x.detach().to(DEVICE, memory_format=layout).requires_grad_()
    w, b = (t.detach().to(DEVICE).requires_grad_() for t in (w, b))
    r = torch.randn_like(_conv(x, w, b, **options)).detach().requires_grad_()
    for residual in (None, r):
        y, eagers = _both((x, w, b), activation, residual=residual, **options)
        # Without bfloat16 instructions PyTorch's convolution of three dimensions returns a contiguous result.
        assert y.is_contiguous(memory_format=layout) or y.stride() == eagers.stride()
        assert relative(y, eagers.double()) < 4 * torch.finfo(dtype).eps
        dy = torch.randn_like(eagers)
        sources = (x, w, b, residual, *(activation.parameters() if isinstance(activation, nn.Module) else ()))
        for a, e in zip(gradients(y, dy, *sources), gradients(eagers, dy, *sources), strict=True):
            assert relative(a, e.double()) < (1e-4 if dtype is torch.float32 else 3e-2)
        with torch.no_grad():
            exact = fl.conv_bias_act(x, w, b, activation, residual=residual, **options)
            assert exact.is_contiguous(memory_format=layout) or exact.stride() == eagers.stride()
            assert relative(exact, eagers.double()) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)
@pytest.mark.usefixtures("interpreter_converts")
def test_negative_outputs_carry_their_branch(triton: bool, last: bool, on_triton: Switch) -> None:
    pytest.importorskip("triton")
    if not triton and DEVICE.type == "cuda":
        pytest.skip("PyTorch computes what saves its input")
    on_triton(triton)
    (x, w, b), options = _layer("2d")
    layout = torch.channels_last if last else torch.contiguous_format
    x, w, b = (t.detach().to(DEVICE) for t in (x, w, b))
    x = x.to(memory_format=layout).requires_grad_()
    y, z = fl.conv_bias_act(x, w, b, "gelu", **options), F.conv2d(x, w, b, **options)
    fold = resolve("gelu").folded_derivative()
    assert fold is not None
    negative = z < -1e-3
    told = branch_bit.decode(y.detach(), torch.float32)
    assert torch.equal(told[negative], (z < fold.fold.position)[negative])


# --- bad input --------------------------------------------------------------------------------------------------------

X, W, B = torch.randn(2, 4, 9, 7), torch.randn(8, 4, 3, 3), torch.randn(8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input": X[0, 0]}, r"expected input \(batch, in, ...\) or \(in, ...\) with 2 spatial .* \(8, 4, 3, 3\), got"),
        ({"input": X[None]}, r"expected input .* got \(1, 2, 4, 9, 7\)"),
        ({"weight": W[0, 0]}, r"expected weight .* one to three spatial dimensions, got a weight with 2"),
        ({"weight": W[None, None]}, "expected weight .* one to three spatial dimensions, got"),
        ({"weight": W.double()}, "all tensors must have one dtype, got input torch.float32, weight torch.float64"),
        ({"weight": W.to("meta")}, "weight is on meta but input is on cpu"),
        ({"bias": B[:7]}, r"expected bias \(8,\) for weight \(8, 4, 3, 3\), got \(7,\)"),
        ({"bias": B[:, None]}, r"expected bias \(8,\) .*, got \(8, 1\)"),
        ({"stride": 0}, "stride must be 2 numbers, or one, of at least 1, got 0"),
        ({"stride": (1, -1)}, r"stride must be 2 numbers, or one, of at least 1, got \(1, -1\)"),
        ({"stride": (1, 1, 1)}, "stride must be 2 numbers"),
        ({"stride": ()}, "stride must be 2 numbers"),
        ({"padding": -1}, "padding must be 'same', 'valid', 2 numbers, or one, of at least 0, got -1"),
        ({"dilation": 0}, "dilation must be 2 numbers"),
        ({"padding": "full"}, "padding must be 'same', 'valid', 2 numbers, or one, of at least 0, got 'full'"),
        ({"stride": "2"}, "stride must be 2 numbers, or one, of at least 1, got '2'"),
        ({"stride": 1.5}, "stride must be 2 numbers"),
        ({"stride": True}, "stride must be 2 numbers"),
        ({"dilation": (1, None)}, "dilation must be 2 numbers"),
        ({"padding": None}, "padding must be .* 2 numbers"),
        ({"padding": ["1", "1"]}, "padding must be .* 2 numbers"),
        ({"activation": "gelo"}, "unknown activation 'gelo'"),
        ({"save": "all"}, "save must be one of auto, output, input, recompute, got 'all'"),
        ({"activation": nn.PReLU(), "save": "output"}, "save='output' is not possible for"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_together(arguments: dict[str, Any], said: str) -> None:
    given = {"input": X, "weight": W, "bias": B, "activation": "gelu", **arguments}
    before = [t.clone() for t in (X, W, B)]
    for grad in (True, False):
        with pytest.raises(ValueError, match=f"^conv_bias_act: {said}"), torch.set_grad_enabled(grad):
            fl.conv_bias_act(**given)
    assert all(torch.equal(a, b) for a, b in zip((X, W, B), before, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        {"input": X[:, :3]},
        {"weight": W[:0], "bias": None},
        {"weight": W[..., :0]},
        {"weight": W[:, :2]},
        {"padding": "same", "stride": 2},
        {"groups": 0},
        {"groups": 3},
        {"groups": 1.0},
        {"groups": True},
        {"dilation": 5},
        {"input": X[:, :, :2]},
        {"input": X[:, :, :0]},
    ],
    ids=lambda arguments: ", ".join(arguments),
)
def test_what_pytorch_refuses(arguments: dict[str, Any]) -> None:
    """Its convolution is computed before anything is written."""
    given = {"input": X, "weight": W, "bias": B, **arguments}
    with pytest.raises((RuntimeError, TypeError)):
        fl.conv_bias_act(**given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"input": 1.0}, "input must be a tensor, got float"),
        ({"weight": None}, "weight must be a tensor, got NoneType"),
        ({"bias": True}, "bias must be a tensor, got bool; pass None for no bias"),
        ({"input": X.long()}, "input must have a floating dtype"),
        ({"weight": W.cfloat()}, "weight must have a floating dtype"),
        ({"activation": nn.GELU}, "activation must be an instance"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_has_the_wrong_type(arguments: dict[str, Any], said: str) -> None:
    given = {"input": X, "weight": W, "bias": B, "activation": "gelu", **arguments}
    with pytest.raises(TypeError, match=f"^conv_bias_act: {said}"):
        fl.conv_bias_act(**given)
