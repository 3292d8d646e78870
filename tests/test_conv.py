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
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlayers as fl
from fusedlayers.activations import Activation, resolve
from fusedlayers.memory import peak_bytes, saved_bytes

SAVES = ("output", "input", "recompute")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

every_save = pytest.mark.parametrize("save", SAVES)
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)

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
    "2d pointwise": ((2, 4, 9, 7), (8, 4, 1, 1), {}),
    "3d": ((2, 4, 4, 5, 6), (8, 4, 3, 3, 3), {"padding": 1}),
    "3d strided and dilated": ((2, 4, 6, 7, 8), (8, 4, 2, 3, 3), {"stride": (1, 2, 1), "dilation": (2, 1, 1)}),
    "3d depthwise": ((2, 4, 4, 5, 6), (4, 1, 3, 1, 3), {"groups": 4, "padding": "same"}),
}
every_case = pytest.mark.parametrize("case", CASES)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _layer(case: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], dict[str, Any]]:
    """x, w and b, and the options."""
    x_shape, w_shape, options = CASES[case]
    return leaves(x_shape, w_shape, (w_shape[0],), dtype=dtype), options


def _calls(save: str = "auto", **options: Any) -> tuple[Call, Call]:
    ours = functools.partial(fl.conv_bias_act, save=save, **options)
    return ours, functools.partial(reference.conv_bias_act, **options)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [resolve(name) for name in ("gelu", "relu", "softsign")], ids=str)
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
                assert y.stride() == reference.conv_bias_act(x, w, bias, lambda z: z, **options).stride()
                assert y.dtype is dtype
                assert relative(y, exact) <= 2 * relative(eager, exact) + torch.finfo(dtype).eps
                with torch.autocast("cpu", torch.bfloat16):
                    y = fl.conv_bias_act(x, w, bias, activation, **options)
                assert y.dtype is torch.bfloat16 and relative(y, exact) < 2e-2


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
    # A few sums of so many products, whose roundings may cancel in eager's.
    luck = math.sqrt(x[:, 0].numel()) / 2 * torch.finfo(dtype).eps
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
        doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, w, b)]
        truths = gradients(eager(*doubles, resolve(name).function), dy.double(), *doubles[:2])
        for a, e, truth in zip(gradients(y, dy, x, w), gradients(expected, dy, x, w), truths, strict=True):
            assert a.stride() == e.stride()
            assert relative(a, truth) <= 2 * relative(e, truth) + luck


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


@pytest.mark.parametrize(
    ("shape", "layout"),
    [(shape, layout) for shape in ((4, 16, 9, 7), (2, 16, 4, 5, 6), (4, 16, 31))
     for layout in (torch.contiguous_format, FORMATS.get(len(shape))) if layout],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("activation", "save"),
    [("relu", "auto"), ("gelu", "auto"), ("softplus", "output"), ("gelu", "input"), (nn.PReLU(16), "auto")],
    ids=reference.label,
)
def test_no_format_is_copied(shape: Shape, layout: torch.memory_format, activation: Any, save: str) -> None:
    x, w, b = leaves(shape, (16, 16, *(3,) * (len(shape) - 2)), (16,))
    x = x.detach().to(memory_format=layout).requires_grad_()
    fl.conv_bias_act(x, w, b, activation, padding=1, save=save).sum().backward()  # what is made once is made here
    with _Copies(x.numel()) as copies:
        y = fl.conv_bias_act(x, w, b, activation, padding=1, save=save)
        dy = torch.randn_like(y)
        torch.autograd.grad(y, (x, w, b), dy)
    assert y.is_contiguous(memory_format=layout) and copies.seen == []


# --- what is kept -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("name", ["gelu", "relu", "tanh"])
def test_a_residual_costs_no_buffer(product: str, name: str) -> None:
    ours, _, shapes = PRODUCTS[product]
    x, w, b, r = leaves(*shapes)
    r_bytes = r.nbytes

    def step(save: str) -> Tensor:
        return ours(x, w, b, name, residual=r * 1, save=save).exp()  # which keeps its own output

    assert saved_bytes(step, "output") == saved_bytes(step, "input") == 2 * r_bytes
    assert saved_bytes(step, "recompute") == 2 * r_bytes  # the residual


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
