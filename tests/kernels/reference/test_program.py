"""The CPU program of a traced function: its operations, buffers and blocks give what plain torch gives."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from reference import same_bits
from torch import Tensor

from fusedlayers import kernels
from fusedlayers.activations import Activation
from fusedlayers.activations.tracing import aten_graph, simplified, slow_kernels
from fusedlayers.kernels import GradientRequest
from fusedlayers.kernels.reference import traced
from fusedlayers.kernels.reference.traced import Program

Function = Callable[..., Any]

DTYPES = (torch.float32, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

NAN, INF = math.nan, math.inf
#: Every pair of these meets in two blocks.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-42, -1e-42, 1e30, INF, -INF, NAN, -NAN)


def _program(function: Function, inputs: int, blocks: int, dtype: torch.dtype) -> Program:
    examples = [torch.zeros(4, 6, dtype=dtype) for _ in range(inputs)]
    return Program(simplified(aten_graph(function, examples, slow_kernels())), blocks)


def _pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    edges = torch.tensor(EDGES, dtype=dtype)
    return edges.repeat_interleave(len(EDGES)).clone(), edges.repeat(len(EDGES))


# --- choices ----------------------------------------------------------------------------------------------------------

#: Of two blocks x and y, and a number that serves all, p.
CHOICES: dict[str, Function] = {
    "blocks": lambda x, y, p: torch.where(x > 0, x, y),
    "a block and 0": lambda x, y, p: torch.where(x >= y, x, 0.0),
    "0 and a block": lambda x, y, p: torch.where(x < 0, 0.0, y),
    "0 and 0": lambda x, y, p: x * torch.where(y <= 0, 0.0, 0.0),
    "numbers": lambda x, y, p: x * torch.where(y == 1, 1.0, 0.25),
    "a whole number": lambda x, y, p: torch.where(y != 1, x, 2),
    "a block and what serves all": lambda x, y, p: torch.where(x > y, y, p),
    "what serves all, twice": lambda x, y, p: x * torch.where(x > y, p, p * 2),
    "by what serves all": lambda x, y, p: torch.where(p > 0, x, y),
    "by both": lambda x, y, p: torch.where((x > 0).logical_and(p > 0), x, y),
    "nan": lambda x, y, p: torch.where(x > 0, math.nan, y),
    "inf": lambda x, y, p: torch.where(x > 0, math.inf, -math.inf) * y,
    "truth values": lambda x, y, p: torch.where(x > 0, y > 0, y),
    "twice by one": lambda x, y, p: torch.where(x > 0, x, y) * torch.where(x > 0, y, x),
    "nested": lambda x, y, p: torch.where(x > 1, x, torch.where(x < -1, y, torch.where(y > x, p, x * y))),
    "and": lambda x, y, p: torch.where(torch.logical_and(x > 0, y > 0), x, y),
    "bitwise": lambda x, y, p: torch.where((x > 0) & ~(y > 0) | (x == y), x, y),
    "isnan": lambda x, y, p: torch.where(x.isnan(), y, x),
    "isinf": lambda x, y, p: torch.where(x.isinf() | y.isinf(), p * x, x + y),
    "masked_fill": lambda x, y, p: x.masked_fill(y > 0, -1.0),
    "times a truth value": lambda x, y, p: x * (y > 0),
    "truth as a number": lambda x, y, p: (x > 0).to(x.dtype) + (y >= x).to(x.dtype),
    "sum of truth values": lambda x, y, p: ((x > 0).int() + (y > 0).int()) * y,
    "minus": lambda x, y, p: (1 - (x > 0).to(x.dtype)) * y,
    **{
        name: functools.partial(lambda compare, x, y, p: torch.where(compare(x, y), x, p * y), getattr(torch, name))
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
    },
    **{
        f"{name} of a number": functools.partial(
            lambda compare, x, y, p: torch.where(compare(x, 0.5), x, y), getattr(torch, name)
        )
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
    },
}


@every_dtype
@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_torchs_to_the_bit(name: str, dtype: torch.dtype) -> None:
    function = CHOICES[name]
    made = _program(function, 3, 2, dtype)
    x, y = _pairs(dtype)
    for p in (2.0, -1.0, -0.0, NAN):
        number = torch.tensor(p, dtype=dtype)
        expected = function(x, y, number)
        given = [x.clone(), y.clone()]
        (ours,) = made([*given, number], defaultdict(list))
        assert same_bits(ours.expand_as(expected).clone(), expected)
        for after, before in zip(given, (x, y), strict=True):  # an operation may write over a buffer, not over these
            assert same_bits(after, before)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _long(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    """Many intermediates alive at once, then one after the other."""
    alive = [torch.sin(x * k) + y for k in range(1, 9)]
    total = alive[0]
    for a, b in zip(alive[1:], reversed(alive), strict=False):
        total = total * p + torch.where(a > b, a, b) * torch.exp(-a.abs())
    return total


ARITHMETIC: dict[str, Function] = {
    "what serves all": lambda x, y, p: p + 0 * 2.0,
    "constant": lambda x, y, p: torch.full_like(x, 3.0),
    "one operation": lambda x, y, p: x + y,
    "in place": lambda x, y, p: x.clone().mul_(y).add_(p).clamp_(-1, 1),
    "polynomial": lambda x, y, p: ((x * p + 1) * x + y) * x - p,
    "power of p": lambda x, y, p: x.abs() ** p + p ** (y * 0.1),
    "clamp": lambda x, y, p: x.clamp(-0.5, 0.5) + torch.clamp(y, min=x),
    "maximum": lambda x, y, p: torch.maximum(x, y) - torch.minimum(x, p * y),
    "prelu": lambda x, y, p: torch.where(x > 0, x, p * x) + F.leaky_relu(y, 0.2),
    "softplus": lambda x, y, p: F.softplus(x, beta=2.0, threshold=3.0) + F.logsigmoid(y),
    "gelu": lambda x, y, p: F.gelu(x) + F.gelu(y, approximate="tanh") + F.mish(x) + F.silu(y) + F.elu(x, 0.5),
    "shared": lambda x, y, p: torch.sigmoid(x) * (1 - torch.sigmoid(x)) + torch.sigmoid(x),
    "once": lambda x, y, p: x * torch.exp(p).reciprocal() + y * torch.lgamma(p + 3),
    "long": _long,
    "addcmul": lambda x, y, p: torch.addcmul(x, y, p, value=2.0) + torch.addcdiv(x, y, 1 + x * x) + torch.lerp(x, y, p),
    "halves": lambda x, y, p: x.to(torch.float16).to(x.dtype) + y.to(torch.bfloat16).to(x.dtype),
    "double": lambda x, y, p: (x.double() * y.double() + p).to(x.dtype),
}  # fmt: skip


@every_dtype
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name: str, dtype: torch.dtype) -> None:
    function = ARITHMETIC[name]
    made = _program(function, 3, 2, dtype)
    channels = torch.rand(8, 1, dtype=dtype) + 0.5
    for p in (channels, channels[:1, 0].reshape(())):
        free: traced.Buffers = defaultdict(list)
        for shape in ((5, 8, 3), (5, 8, 1), (1, 8, 3), (5, 8, 3)):  # blocks of several shapes
            x, y = (torch.randn(shape, dtype=dtype) for _ in range(2))
            (ours,) = made([x, y, p], free)
            expected = function(x, y, p).expand_as(x)
            torch.testing.assert_close(ours.expand_as(x), expected)


@every_dtype
def test_several_results(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        shared = torch.sin(x) * y
        return shared, x, p, shared * p, shared, torch.where(x > 0, shared, y)

    made = _program(function, 3, 2, dtype)
    x, y, p = torch.randn(3, 4, 5, dtype=dtype), torch.randn(3, 4, 5, dtype=dtype), torch.randn(4, 1, dtype=dtype)
    free: traced.Buffers = defaultdict(list)
    made_buffers = []
    for _ in range(2):
        for i, (ours, theirs) in enumerate(zip(made([x, y, p], free), function(x, y, p), strict=True)):
            torch.testing.assert_close(ours.expand_as(x), theirs.expand_as(x), msg=f"result {i}")
        made_buffers.append({buffer.data_ptr() for buffers in free.values() for buffer in buffers})
    assert made_buffers[0] == made_buffers[1]  # the second block makes none


# --- whole tensors ----------------------------------------------------------------------------------------------------


@functools.cache
def _activation(function: Function, operands: int) -> Activation:
    return Activation("mine", function, operand_dims=(None,) * operands, is_traced=True)


def _kinked(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(z > 0, z + torch.sin(a * z).square() / a, torch.where(z < -1, b * z, b * z * z))


def _operands(z: Tensor, dim: int, per_channel: tuple[bool, bool]) -> list[Tensor]:
    channels = z.shape[dim] if z.dim() else 1
    shape = [1] * z.dim()
    if z.dim():
        shape[dim] = channels
    return [torch.rand(shape if vector else ()).to(z.dtype) + 0.5 for vector in per_channel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("per_channel", [(True, False), (False, False), (True, True)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, per_channel: tuple[bool, bool], dtype: torch.dtype) -> None:
    make, dim = LAYOUTS[layout]
    z = make()
    z = z.to(dtype) if z.dtype is not dtype else z
    operands = _operands(z, dim, per_channel)
    activation = _activation(_kinked, 2)
    eager = kernels.choose(z)
    wide = [t.detach().double().requires_grad_() for t in (z, *operands)]
    truth = _kinked(*wide)
    dy = torch.randn(z.shape).to(dtype)
    true_gradients = torch.autograd.grad(truth, wide, dy.double())

    y = eager.bias_act(z, None, activation, operands, dim=dim, encode=False, out=None)
    assert y.stride() == torch.empty_like(z).stride() and y.dtype is dtype
    close = functools.partial(torch.testing.assert_close, check_dtype=False)
    rounding = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-6}
    close(y, truth.detach(), **rounding)
    into = torch.empty_like(z).copy_(z)
    assert eager.bias_act(into, None, activation, operands, dim=dim, encode=False, out=into) is into
    assert torch.equal(into, y)

    for needs in ((True, True), (False, True), (True, False), (False, False)):
        wanted = GradientRequest("input", False, True, needs)
        dz, db, *shares = eager.gradient(dy, z, activation, operands, wanted, dim=dim)
        assert dz is not None and db is not None
        close(dz, true_gradients[0], **rounding)
        if z.dim():
            reduced = [i for i in range(z.dim()) if i != dim % z.dim()]
            expected = true_gradients[0].sum(reduced) if reduced else true_gradients[0]
            close(
                db,
                expected,
                rtol=30 * torch.finfo(dtype).eps,
                atol=float(dz.double().abs().sum()) * torch.finfo(dtype).eps,
            )
        for share, need, truth_, p in zip(shares, needs, true_gradients[1:], operands, strict=True):
            assert (share is not None) == need
            if share is not None:
                scale = float(truth_.abs().max()) if truth_.numel() else 0.0
                close(share.reshape(p.shape), truth_, rtol=rounding["rtol"], atol=1e-5 * scale + 1e-6)
    dense = torch.empty_like(z).copy_(z)
    dz, *_ = eager.gradient(
        dy, dense, activation, operands, GradientRequest("input", True, False, (True, True)), dim=dim
    )
    assert dz is dense
    close(dz, true_gradients[0], **rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_operands_of_another_dtype(dtype: torch.dtype) -> None:
    # A single number may have any: torch's rules for 0-d tensors.
    z = torch.randn(50, 8).to(dtype)
    for other in (torch.float32, torch.float64, torch.float16):
        p = torch.tensor(0.3, dtype=other)
        activation = _activation(lambda z, p: torch.where(z > 0, z, p), 1)
        y = kernels.choose(z).bias_act(z, None, activation, [p], dim=-1, encode=False, out=None)
        torch.testing.assert_close(y, torch.where(z > 0, z, p.to(dtype)))
        wanted = GradientRequest("input", False, False, (True,))
        _, _, dp = kernels.choose(z).gradient(torch.ones_like(z), z, activation, [p], wanted, dim=-1)
        assert dp is not None and dp.dtype is other and float(dp) == float((z <= 0).sum())


def test_sums_are_taken_in_float64() -> None:
    # The gradient of one number is the sum of two million: in float32 one after the other, it would lose four digits.
    z = torch.full((1 << 21,), 0.1)
    activation = _activation(lambda z, p: z * p, 1)
    p = torch.tensor(1.0)
    wanted = GradientRequest("input", False, False, (True,))
    _, _, dp = kernels.choose(z).gradient(torch.ones_like(z), z, activation, [p], wanted, dim=-1)
    torch.testing.assert_close(dp, (z.double().sum()).float().reshape(1), rtol=1e-6, atol=0)
