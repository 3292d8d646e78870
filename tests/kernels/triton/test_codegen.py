"""Printed device functions: every row prints, the text is readable, and each operation computes what ATen's does."""

import ast
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu import ACTIVATIONS, DEVICE, DTYPES, INTERPRETED, INTERPRETER_WARNINGS
from torch import Tensor

from fusedlayers.activations import Activation, resolve
from fusedlayers.activations.tracing import NotPointwise, trace

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  # after the line that skips without it

from fusedlayers.kernels.triton import codegen, device  # noqa: E402  # only with Triton

pytestmark = pytest.mark.filterwarnings(*INTERPRETER_WARNINGS)

LONGEST_LINE = 140
UNIT = 2.0**-24  # half a float32 unit in the last place, relative

Function = Callable[[Tensor], Tensor]


@triton.jit
def apply_kernel(x_ptr, y_ptr, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    tl.store(y_ptr + i, FUNCTION(x), mask=i < count)


@triton.jit
def forward_kernel(x_ptr, operand_ptr, y_ptr, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < count, other=1.0)
    tl.store(y_ptr + i, FUNCTION(x, operand_ptr, 0, 1), mask=i < count)


def apply(function: Any, x: Tensor) -> Tensor:
    """A device function of every element of a float32 vector."""
    x = x.to(DEVICE)
    y = torch.empty_like(x)
    grid = (triton.cdiv(len(x), 4096),)
    if "operand_ptr" in function.arg_names:
        forward_kernel[grid](x, x, y, len(x), function, 4096)
    else:
        apply_kernel[grid](x, y, len(x), function, 4096)
    return y.cpu()


def printed(function: Function) -> Any:
    return codegen.compile_function(codegen.print_function("printed", trace(function)))


# --- text -------------------------------------------------------------------------------------------------------------


def sources(activation: Activation) -> list[str]:
    cases = [("forward", "input"), ("forward", "output"), ("gradient", "input"), ("gradient", "output")]
    return [
        codegen.source(activation, role, given=given, dtype=dtype)  # type: ignore[arg-type]  # a literal
        for role, given in cases
        if (role, given) != ("gradient", "output") or activation.needs_input_reason is None
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_every_row_prints_a_readable_function(activation: Activation) -> None:
    known = {f"tl.{name}" for name in dir(tl)} | {*device.FUNCTIONS, "float"}
    for text in sources(activation):
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name.startswith(activation.name)
        assert max(map(len, text.splitlines())) <= LONGEST_LINE
        called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        assert {name for name in called if not name.endswith(".to")} <= known
        # One assignment a name, each of them used.
        targets = [node.targets[0].id for node in ast.walk(function) if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        assert len(set(targets)) == len(targets) and set(targets) <= used
        codegen.compile_function(text)


# --- operations -------------------------------------------------------------------------------------------------------


#: Exponents for which torch has a formula of its own.
POWERS: dict[str, Function] = {f"pow({p})": lambda z, p=p: z**p for p in (-2, -1, -0.5, 0.5, 1, 2, 3)}


def _ints(z: Tensor) -> Tensor:
    return z.view(torch.int32) & 0xFFFF


#: A function for each operation that can be printed, in which ATen has that operation.
OPERATIONS: dict[str, Function] = {
    "abs": torch.abs,
    "add": lambda z: z + 0.3,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "bitwise_and": lambda z: (z.view(torch.int32) & -65536).view(torch.float32),
    "bitwise_left_shift": lambda z: torch.bitwise_left_shift(_ints(z), 3).to(torch.float32),
    "bitwise_not": lambda z: (~_ints(z)).to(torch.float32),
    "bitwise_or": lambda z: (_ints(z) | 0x10001).to(torch.float32),
    "bitwise_right_shift": lambda z: torch.bitwise_right_shift(z.view(torch.int32), 9).to(torch.float32),
    "bitwise_xor": lambda z: (_ints(z) ^ 0x5555).to(torch.float32),
    "ceil": torch.ceil,
    "copysign": lambda z: torch.copysign(torch.exp(z), z) + torch.copysign(z, -2.0),
    "cos": torch.cos,
    "div": lambda z: z / (1 + z * z),
    "eq": lambda z: (z == 1.5).to(torch.float32),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "ge": lambda z: (z >= 1.5).to(torch.float32),
    "gt": lambda z: (z > 1.5).to(torch.float32),
    "isinf": lambda z: torch.where(torch.isinf(z), 7.0, z),
    "isnan": lambda z: torch.where(torch.isnan(z), 7.0, z),
    "le": lambda z: (z <= 1.5).to(torch.float32),
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "lt": lambda z: (z < 1.5).to(torch.float32),
    "maximum": lambda z: torch.maximum(z, torch.log(z)),
    "minimum": lambda z: torch.minimum(z, torch.log(z)),
    "mul": lambda z: z * 0.3,
    "ne": lambda z: (z != 1.5).to(torch.float32),
    "neg": torch.neg,
    "pow": lambda z: torch.where(z > 0, z**2.7 + 2.5**z, z**3 + z**-2 + z**5 + (-3.0) ** torch.round(z)),
    "reciprocal": torch.reciprocal,
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "signbit": lambda z: torch.where(torch.signbit(z), 7.0, z),
    "sin": torch.sin,
    "softshrink_backward": lambda z: torch.ops.aten.softshrink_backward(torch.exp(z), z, 1.5),
    "sqrt": torch.sqrt,
    "sub": lambda z: 0.3 - z,
    "tanh": torch.tanh,
    "where": lambda z: torch.where(z > 0, torch.exp(-z), -torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_results_err_by_their_rounding(dtype: torch.dtype) -> None:
    """A coarser erfc adds less than a two hundredth to the error of rounding; infinities and NaN are GELU's."""
    z = torch.randn(1 << 20)
    exact = F.gelu(z.double())
    gelu = codegen.device_function(resolve("gelu"), "forward", given="input", dtype=dtype)
    errors = [(y.to(dtype).double() - exact).square().mean().sqrt() for y in (apply(gelu, z), exact)]
    assert errors[0] <= 1.005 * errors[1]
    assert "_erfc_coarse(" in codegen.source(resolve("gelu"), "forward", given="input", dtype=dtype)
    inf, nan = float("inf"), float("nan")
    odd = torch.tensor([inf, -inf, nan, 0.0, -0.0, -1e-40, 1e-40, -200.0, 200.0, 3e38, -3e38])
    # torch's float32 kernel for AVX-512 makes NaN of infinity, and infinity of 3e38.
    torch.testing.assert_close(apply(gelu, odd), F.gelu(odd.double()).float(), rtol=0, atol=1e-38, equal_nan=True)
    # Far out too an output has the digits that its dtype has.
    tail = -torch.linspace(0, 13 if dtype is torch.bfloat16 else 4, 100_001)
    truth = tail.double() * torch.special.erfc(-tail.double() / math.sqrt(2)) / 2
    normal = truth.abs() > torch.finfo(dtype).smallest_normal
    assert float((apply(gelu, tail).double() / truth - 1).abs()[normal].max()) <= torch.finfo(dtype).eps / 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tanh_in_16_bits_errs_by_its_rounding(dtype: torch.dtype) -> None:
    tanh = codegen.device_function(resolve("tanh"), "forward", given="output", dtype=dtype)
    z = torch.cat([torch.logspace(-30, 1.5, 100_001), torch.linspace(0.01, 0.1, 100_001), torch.tensor([3e38])])
    for x in (z, -z):
        assert float((apply(tanh, x).double() / torch.tanh(x.double()) - 1).abs().max()) <= torch.finfo(dtype).eps / 64
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    torch.testing.assert_close(1 / apply(tanh, odd), 1 / torch.tanh(odd), rtol=0, atol=0, equal_nan=True)


def test_every_operation_has_a_case() -> None:
    assert set(OPERATIONS) == set(codegen._TEMPLATES)


def test_constants_are_printed_as_what_they_are() -> None:
    x = torch.tensor([-1.0, 2.0, float("nan")])
    for function in (
        lambda z: torch.where(z > 0, float("inf"), z),
        lambda z: torch.where(z > 0, -float("inf"), z * 1e-30),
        lambda z: torch.full_like(z, -2.5),
    ):
        torch.testing.assert_close(apply(printed(function), x), function(x), equal_nan=True)


# --- torch's functions ------------------------------------------------------------------------------------------------

#: Functions of torch that are no single operation of core ATen, or whose derivatives are not.
COMPOSED: dict[str, Function] = {
    "alpha": lambda z: torch.sub(z, 3.0, alpha=2.5) + torch.rsub(z, torch.exp(z.clamp(max=9.0)), alpha=2.5),
    "addcdiv": lambda z: torch.addcdiv(z, z, torch.exp(z), value=0.5),
    "addcmul": lambda z: torch.addcmul(z, z, torch.sin(z), value=0.5),
    "bool product": lambda z: (z > 0) * z + ((z > -1) * (z < 1)).float() + ((z > 2) + (z < -2)) * 1.0,
    "bool to int": lambda z: ((z > 0).int() + (z > 1).int()) * z,
    "clamp": lambda z: torch.clamp(z, -1.1, 2.1),
    "entr": torch.special.entr,
    "hardshrink": lambda z: F.hardshrink(z, 1.1),
    "heaviside": lambda z: torch.heaviside(z, torch.full_like(z, 0.5)),
    "huber": lambda z: F.huber_loss(z, torch.zeros_like(z), reduction="none"),
    "int": lambda z: (z.clamp(-1e6, 1e6).nan_to_num().int() * 2 + 1).float() * z,
    "int to float": lambda z: (
        torch.exp(z.clamp(-9, 9).nan_to_num().to(torch.int8)) / z.clamp(-9, 9).nan_to_num().long()
    ),
    "isfinite": lambda z: torch.where(torch.isfinite(z), z, 0.0),
    "lerp": lambda z: torch.lerp(z, torch.sin(z), 0.3) + torch.lerp(z, torch.sin(z), torch.sigmoid(z)),
    "logaddexp": lambda z: torch.logaddexp(z, 1 - z),
    "logaddexp2": lambda z: torch.logaddexp2(z, 1 - z),
    "logical": lambda z: torch.where(torch.logical_xor(z > 0, z < 1), z, torch.logical_and(z, z - 1) * 0.5),
    "logit": torch.logit,
    "masked_fill": lambda z: z.masked_fill(z < 0, 0.1),
    "mixed types": lambda z: z.int().clamp(-99, 99) + (z > 0) * z - z.clamp(-99, 99).long() * 1.5,
    "nan_to_num": lambda z: torch.nan_to_num(z, 1.0, 2.0, -3.0),
    "ndtr": torch.special.ndtr,
    "not": lambda z: torch.where(torch.logical_not(torch.relu(z)), z, torch.logical_or(z, z) * 0.5),
    "power of itself": lambda z: z.abs() ** torch.sin(z),
    "powers of a number": lambda z: 2**z + 0.5**z + 0.0**z,
    "sgn": torch.sgn,
    "sigmoid in place": lambda z: z.clone().sigmoid_(),
    "sinc": torch.sinc,
    "smooth_l1": lambda z: F.smooth_l1_loss(z, torch.zeros_like(z), reduction="none"),
    "xlog1py": lambda z: torch.special.xlog1py(z, z) + torch.special.xlog1py(2.0, z),
    "xlogy": lambda z: torch.xlogy(z, z) + torch.xlogy(2.0, z) + torch.xlogy(z, 2.0),
}


def derivative(function: Function) -> Function:
    return lambda z: torch.func.vjp(function, z)[1](torch.ones_like(z))[0]


@pytest.mark.parametrize("role", ["forward", "derivative"])
@pytest.mark.parametrize("name", [*COMPOSED, *OPERATIONS, *POWERS])
def test_functions_of_torch_and_their_derivatives(name: str, role: str) -> None:
    function = {**COMPOSED, **OPERATIONS, **POWERS}[name]
    if role == "derivative":
        if name == "heaviside":
            with pytest.raises(NotPointwise, match=r"derivative for .* is not implemented"):
                printed(derivative(function))
            return
        try:
            derivative(function)(torch.ones(3))
        except RuntimeError:  # of integers
            pytest.skip("has no derivative")
        function = derivative(function)
    x = torch.linspace(-5.993, 6.01, 1999)
    if name == "logit":
        x = torch.linspace(-1.1, 1.1, 1999)
    y, torchs = apply(printed(function), x).double(), function(x).double()
    exact = torchs if name.startswith("bitwise") else function(x.double()).double()
    # torch's own float32 is not always right: its error, at its worst nearby, is allowed in addition to a few units.
    finite = exact.isfinite() & torchs.isfinite()
    own = torch.where(finite, (torchs - exact).abs(), 0.0)
    nearby = F.max_pool1d(own[None], 41, 1, 20)[0]
    allowed = 2e-6 * exact.abs() + 1e-6 + 2 * nearby
    assert torch.equal(y.isnan(), torchs.isnan())
    assert bool(((y == torchs) | ((y - exact).abs() <= allowed) | torchs.isnan()).all())


UNSUPPORTED: dict[str, Function] = {
    "lgamma has no": torch.lgamma,
    "cosh has no": torch.cosh,
    "div with rounding_mode has no": lambda z: torch.div(z, 0.7, rounding_mode="floor"),
    "cast to torch.float64 has no": lambda z: torch.exp(z.double()).float(),
    "pow in torch.int32 has no": lambda z: torch.pow(z.int(), 3).float(),
    "div with rounding_mode has no decomposition": lambda z: (z.int() // 3).float(),
    "complex": lambda z: torch.complex(z, z).abs(),
    "frexp is not pointwise": lambda z: torch.frexp(z)[0],
    "rrelu_with_noise": lambda z: F.rrelu(z, training=True),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_stays_unsupported_is_refused_by_name(message: str) -> None:
    with pytest.raises(NotPointwise, match=message):
        printed(UNSUPPORTED[message])


@pytest.mark.usefixtures("interpreter_converts")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inside_a_function(dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 6, 1999)
    # A GPU's exp errs by two float32 units, which now and then is a unit of the dtype.
    unit = 2e-6 if INTERPRETED else 2 * torch.finfo(dtype).eps
    for function in (lambda z: (torch.exp(z.to(dtype)) * 0.3).float(), lambda z: torch.tanh(z.to(dtype)) * z):
        # The interpreter has no constants in bfloat16, which derivatives multiply by.
        for traced in (function, derivative(function))[: 2 if dtype is torch.float16 else 1]:
            torch.testing.assert_close(apply(printed(traced), x), traced(x), rtol=unit, atol=unit / 10)


# --- elementary and special functions ---------------------------------------------------------------------------------


def without_subnormals(x: Tensor) -> Tensor:
    return x[(x == 0) | ~(x.abs() < torch.finfo(torch.float32).tiny)]


def _magnitudes(low: float, high: float) -> Tensor:
    return torch.logspace(*torch.tensor([low, high], dtype=torch.float64).log10().tolist(), 50_000).to(torch.float32)


TINY, HUGE = 1e-44, 3.4e38

#: By name: a function, and the magnitudes of negative and positive arguments for which it is checked.
ACCURATE: dict[str, tuple[Function, tuple[float, float] | None, tuple[float, float]]] = {
    "asinh": (torch.asinh, (TINY, HUGE), (TINY, HUGE)),
    "atan": (torch.atan, (TINY, HUGE), (TINY, HUGE)),
    "erfc": (torch.special.erfc, (1e-30, 20.0), (1e-30, 10.05)),
    "expm1": (torch.expm1, (TINY, HUGE), (TINY, 88.7)),
    "log1p": (torch.log1p, (TINY, 1 - 2.0**-23), (TINY, HUGE)),
    "log10": (torch.log10, None, (TINY, HUGE)),
    "tanh": (torch.tanh, (TINY, HUGE), (TINY, HUGE)),
    **{f"power {p}": (lambda z, p=p: z**p, None, (TINY, HUGE)) for p in (-1.75, 0.125, 1.5, 2.75, 100.5)},
    **{f"power {p}": (lambda z, p=p: z**p, (TINY, HUGE), (TINY, HUGE)) for p in (-101, 1, 4, 5, 17)},
    **{f"{b} to a power": (lambda z, b=b: b**z, (TINY, 500.0), (TINY, 500.0)) for b in (0.5, 1.125, 2.0, 10.0)},
}


@pytest.mark.parametrize("name", ACCURATE)
def test_functions_are_accurate_everywhere(name: str) -> None:
    function, negative, positive = ACCURATE[name]
    x = _magnitudes(*positive) if negative is None else torch.cat([-_magnitudes(*negative), _magnitudes(*positive)])
    y = apply(printed(function), x).double()
    z = x.double().requires_grad_()
    truth = function(z)
    (slope,) = torch.autograd.grad(truth.sum(), z)
    truth = truth.detach()
    # Eight units of the result, what one unit of the argument changes, and one of the smallest subnormals.
    allowed = 16 * UNIT * truth.abs() + 2 * UNIT * (x * slope).nan_to_num().abs() + 2.0**-149
    overflows = truth.float().isinf() | (y.isinf() & (truth.abs() > 0.99999 * torch.finfo(torch.float32).max))
    assert bool((((y - truth).abs() <= allowed) | (overflows & (y.sign() == truth.sign()))).all())


EDGES = torch.tensor(
    [
        *(sign * x for x in (0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 2.5, 1e-40, 8388607.5, 3e38, math.inf) for sign in (1, -1)),
        math.nan,
    ]
)


#: What GPUs have instructions for that take subnormal numbers for 0 (sqrt.approx.ftz, rsqrt.approx.ftz, cvt.rpi.ftz).
FLUSHING = ("ceil", "floor", "rsqrt", "sqrt", "pow(-0.5)", "pow(0.5)")


@pytest.mark.parametrize("name", [*ACCURATE, *OPERATIONS, *POWERS])
def test_functions_at_the_edges(name: str) -> None:
    function = ACCURATE[name][0] if name in ACCURATE else {**OPERATIONS, **POWERS}[name]
    x = EDGES
    if name == "log1p":
        x = x[x != -1.5]
    if name in ("sign", "softshrink_backward"):
        x = x[~x.isnan()]
    if name in FLUSHING and not INTERPRETED:
        x = without_subnormals(x)
    y, expected = apply(printed(function), x), function(x)
    torch.testing.assert_close(y, expected, rtol=4e-6, atol=2e-7, equal_nan=True)
    zero = (x == 0) & (expected == 0)
    assert torch.equal(torch.signbit(y[zero]), torch.signbit(expected[zero]))


POWER_EDGES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 16777215.0, 16777216.0, 1e30, math.inf]
POWER_EDGES = [*POWER_EDGES, *(-p for p in POWER_EDGES if p), math.nan]


@pytest.mark.parametrize("p", POWER_EDGES)
def test_powers_of_any_sign(p: float) -> None:
    x = torch.tensor([*POWER_EDGES, -0.0, 1e-40, -1e-40, 1 + 2.0**-23, 1 - 2.0**-24, -1 - 2.0**-23])
    # With a constant exponent roots are those instructions of a GPU.
    flushes = abs(p) == 0.5 and not INTERPRETED
    for function, given in (
        (lambda z: torch.pow(z, p), without_subnormals(x) if flushes else x),
        (lambda z: torch.pow(p, z), x),
        (lambda z: torch.pow(z, 0 * z.nan_to_num() + p), x),
    ):
        exact = function(given.double()).float()
        torch.testing.assert_close(apply(printed(function), given), exact, rtol=4e-7, atol=2e-45, equal_nan=True)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_and_its_derivative_fall_to_zero_without_cancelling(name: str) -> None:
    """1 + erf(z) would be 0 from z = -4 on; exp amplifies the rounding of its argument."""
    function = resolve(name).function
    z = torch.linspace(-9, -3, 1000)
    wide = z.double().requires_grad_()
    exact = function(wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    for found, truth in ((function, exact.detach()), (derivative(resolve(name).plain), slope)):
        real = truth.abs() > 1e-30
        error = (apply(printed(found), z).double() - truth).abs()[real] / truth.abs()[real]
        assert float(error.max()) < 1e-4
