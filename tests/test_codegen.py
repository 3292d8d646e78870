"""Printed device functions: every row prints, the text is readable, and each operation computes what ATen's does."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import ACTIVATIONS, DEVICE, DTYPES, INTERPRETER_WARNINGS
from torch import Tensor

from fusedlayers.activations import Activation, resolve
from fusedlayers.activations.trace import NotPointwise, trace

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  # after the line that skips without it

from fusedlayers.backends.triton import codegen, device  # noqa: E402

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
        if (role, given) != ("gradient", "output") or activation.needs_input_because is None
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_every_row_prints_a_readable_function(activation: Activation) -> None:
    known = {f"tl.{name}" for name in dir(tl)} | set(device.FUNCTIONS) | {"_erfc", "float"}
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


def test_short_functions_look_as_one_would_write_them() -> None:
    def text(name: str, role: Any, given: str) -> list[str]:
        return codegen.source(resolve(name), role, given=given, dtype=torch.float32).splitlines()

    assert text("softsign", "forward", "input") == [
        "def softsign_forward(z, operand_ptr, channel, channels):",
        "    t2 = z / (tl.abs(z) + 1)",
        "    return t2",
    ]
    assert text("tanh", "gradient", "output") == [
        "def tanh_gradient(dy, y, operand_ptr, channel, channels):",
        "    t2 = dy * (1 - (y * y))",
        "    return (t2,)",
    ]
    assert text("identity", "gradient", "input") == [
        "def identity_gradient(dy, z, operand_ptr, channel, channels):",
        "    return (dy,)",
    ]


def test_functions_are_shared_where_the_dtype_does_not_show() -> None:
    def function(name: str, role: Any, given: str, dtype: torch.dtype) -> Any:
        return codegen.device_function(resolve(name), role, given=given, dtype=dtype)

    half, single = torch.bfloat16, torch.float32
    assert function("tanh", "forward", "output", half) is function("tanh", "forward", "output", single)
    assert function("gelu", "forward", "input", half) is function("gelu", "forward", "input", single)
    assert function("gelu", "forward", "output", half) is not function("gelu", "forward", "output", single)
    assert function("gelu", "forward", "output", half) is not function("gelu", "forward", "input", half)


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (torch.lgamma, "lgamma"),
        (lambda z: torch.exp(z) + torch.fmod(z, 2.0), "fmod"),
        (lambda z: torch.softmax(z, -1), "softmax"),
        (lambda z: z - z.mean(), "mean"),
        (lambda z: z.cumsum(0), "cumsum"),
    ],
    ids=["lgamma", "fmod", "softmax", "mean", "cumsum"],
)
def test_what_cannot_be_printed_is_refused_by_name(function: Function, operation: str) -> None:
    with pytest.raises(NotPointwise, match=operation):
        printed(function)


def test_tracing_again_and_again_in_a_fresh_process() -> None:
    # Without a GPU torch 2.11 frees what the first trace made together with the thread that traced; then it crashes.
    script = """
import torch
from fusedlayers.activations import resolve
from fusedlayers.backends.triton.codegen import source
for name in ("relu", "tanh", "silu"):
    source(resolve(name), "forward", given="output", dtype=torch.float32)
"""
    root = os.path.dirname(os.path.dirname(__file__))
    assert subprocess.run([sys.executable, "-c", script], cwd=root).returncode == 0


# --- operations -------------------------------------------------------------------------------------------------------


def _ints(z: Tensor) -> Tensor:
    return z.view(torch.int32) & 0xFFFF


#: A function for each operation that can be printed, in which ATen has that operation.
OPERATIONS: dict[str, Function] = {
    "abs": torch.abs,
    "add": lambda z: z + 0.3,
    "bitwise_and": lambda z: (z.view(torch.int32) & -65536).view(torch.float32),
    "bitwise_left_shift": lambda z: torch.bitwise_left_shift(_ints(z), 3).to(torch.float32),
    "bitwise_not": lambda z: (~_ints(z)).to(torch.float32),
    "bitwise_or": lambda z: (_ints(z) | 0x10001).to(torch.float32),
    "bitwise_right_shift": lambda z: torch.bitwise_right_shift(z.view(torch.int32), 9).to(torch.float32),
    "bitwise_xor": lambda z: (_ints(z) ^ 0x5555).to(torch.float32),
    "ceil": torch.ceil,
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
    "isnan": lambda z: torch.where(torch.isnan(z), 7.0, z),
    "le": lambda z: (z <= 1.5).to(torch.float32),
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logical_and": lambda z: torch.logical_and(z > -1, z < 1.5).to(torch.float32),
    "logical_not": lambda z: torch.logical_not(z < 1.5).to(torch.float32),
    "logical_or": lambda z: torch.logical_or(z < -1, z > 1.5).to(torch.float32),
    "lt": lambda z: (z < 1.5).to(torch.float32),
    "maximum": lambda z: torch.maximum(z, torch.log(z)),
    "minimum": lambda z: torch.minimum(z, torch.log(z)),
    "mul": lambda z: z * 0.3,
    "ne": lambda z: (z != 1.5).to(torch.float32),
    "neg": torch.neg,
    "pow": lambda z: z.abs() ** 2.7 + z**2,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "sin": torch.sin,
    "softshrink_backward": lambda z: torch.ops.aten.softshrink_backward(torch.exp(z), z, 1.5),
    "sqrt": torch.sqrt,
    "sub": lambda z: 0.3 - z,
    "tanh": torch.tanh,
    "where": lambda z: torch.where(z > 0, torch.exp(-z), -torch.inf),
}


def test_every_operation_has_a_case() -> None:
    assert set(OPERATIONS) == set(codegen._TEMPLATES)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_compute_what_atens_do(name: str) -> None:
    function = OPERATIONS[name]
    assert name in {operation.op for operation in trace(function).operations}
    inf = float("inf")
    x = torch.cat([torch.linspace(-6, 6, 2001), torch.tensor([1.5, -1.5, 0.0, -0.0, 1e-30, -1e-30, inf, -inf])])
    if name not in ("sign", "softshrink_backward"):  # which torch's own kernels take for 0, or for the gradient
        x = torch.cat([x, torch.tensor([float("nan")])])
    torch.testing.assert_close(apply(printed(function), x), function(x), rtol=2e-6, atol=2e-7, equal_nan=True)


def test_constants_are_printed_as_what_they_are() -> None:
    x = torch.tensor([-1.0, 2.0, float("nan")])
    for function in (
        lambda z: torch.where(z > 0, float("inf"), z),
        lambda z: torch.where(z > 0, -float("inf"), z * 1e-30),
        lambda z: torch.full_like(z, -2.5),
    ):
        torch.testing.assert_close(apply(printed(function), x), function(x), equal_nan=True)


# --- elementary functions ---------------------------------------------------------------------------------------------


def _magnitudes(low: float, high: float) -> Tensor:
    return torch.logspace(*torch.tensor([low, high], dtype=torch.float64).log10().tolist(), 50_000).to(torch.float32)


@pytest.mark.parametrize(
    ("name", "exact", "negative", "positive"),
    [
        ("_erfc", torch.special.erfc, (1e-30, 20.0), (1e-30, 10.05)),
        ("_log1p", torch.log1p, (1e-44, 1 - 2.0**-23), (1e-44, 3.4e38)),
        ("_expm1", torch.expm1, (1e-44, 3.4e38), (1e-44, 88.7)),
        ("_tanh", torch.tanh, (1e-44, 3.4e38), (1e-44, 3.4e38)),
    ],
)
def test_elementary_functions_are_accurate_everywhere(
    name: str, exact: Function, negative: tuple[float, float], positive: tuple[float, float]
) -> None:
    x = torch.cat([-_magnitudes(*negative), _magnitudes(*positive)])
    y = apply(codegen._erfc() if name == "_erfc" else device.FUNCTIONS[name], x).double()
    z = x.double().requires_grad_()
    truth = exact(z)
    (slope,) = torch.autograd.grad(truth.sum(), z)
    truth = truth.detach()
    # Eight units of the result, what one unit of the argument changes, and one of the smallest subnormals.
    allowed = 16 * UNIT * truth.abs() + 2 * UNIT * (x * slope).nan_to_num().abs() + 2.0**-149
    assert bool(((y - truth).abs() <= allowed).all())


def test_elementary_functions_at_the_edges() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan])
    for name, exact in (("_log1p", torch.log1p), ("_expm1", torch.expm1), ("_tanh", torch.tanh), ("_erfc", torch.erfc)):
        function = codegen._erfc() if name == "_erfc" else device.FUNCTIONS[name]
        torch.testing.assert_close(apply(function, x), exact(x), equal_nan=True)
    assert apply(device._log1p, torch.tensor([-1.0, -2.0])).isinf().tolist() == [True, False]


def test_the_degrees_of_erfc_are_the_first_that_no_longer_show() -> None:
    near = codegen._ERFC_NEAR
    t = torch.linspace(1 / (1 + 10.1 / 2), 1 / (1 + near / 2), 20_001, dtype=torch.float64)
    x = torch.linspace(1e-3, near, 20_001, dtype=torch.float64)
    far_truth, near_truth = torch.special.erfcx(2 / t - 2) / t, torch.special.erf(x) / x - 1

    def errors(lower: int) -> list[float]:
        far_piece, near_piece = codegen.erfc_pieces(tuple(degree - lower for degree in codegen._ERFC_DEGREES))
        far_error, near_error = far_piece(t) / far_truth - 1, near_piece(x * x) - near_truth
        return [float(error.abs().max()) for error in (far_error, near_error)]

    assert max(errors(0)) <= UNIT / 5 < min(errors(1))


def test_gelu_falls_to_zero_without_cancelling() -> None:
    # 1 + erf(x) would be 0 from x = -4 on.
    z = torch.tensor([-4.0, -5.0, -8.0, -12.0])
    exact = 0.5 * z.double() * torch.special.erfc(-z.double() / 2**0.5)
    torch.testing.assert_close(apply(printed(resolve("gelu").function), z).double(), exact, rtol=2e-5, atol=0)
