"""The Triton kernels: on the GPU where there is one, else in Triton's interpreter, on the CPU.

Errors are measured against float64 and compared with torch's own in the same dtype.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from gpu import ACTIVATIONS, DEVICE, DTYPES, INTERPRETED, INTERPRETER_WARNINGS
from layouts import TRITONS, along, integers, normal, sum_along, way
from reference import all_values, assert_as_good_as_torch, check_gates, derivative, encoding_error, steps, ulp
from torch import Tensor

from fusedlayers import kernels
from fusedlayers.activations import Activation, resolve
from fusedlayers.derivative import branch_bit

pytest.importorskip("triton")
import triton.language as tl  # after the line that skips without it

from fusedlayers.kernels import GradientRequest
from fusedlayers.kernels import triton as backend
from fusedlayers.kernels.triton import launch, tiles

pytestmark = [pytest.mark.filterwarnings(*INTERPRETER_WARNINGS), pytest.mark.usefixtures("interpreter_converts")]

Given = Literal["output", "input"]

HALVES = (torch.bfloat16, torch.float16)
EPSILON = torch.finfo(torch.float32).eps
#: The least that float32 formulas resolve: from here down an intermediate overflows or underflows.
LEAST = 2.0**-120

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
#: In float32, and in one of 16 bits.
every_activation_in_two = pytest.mark.parametrize(
    ("activation", "dtype"),
    [(a, dtype) for i, a in enumerate(ACTIVATIONS) for dtype in (DTYPES[0], HALVES[i // 2 % 2])],
    ids=str,
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def forward(z: Tensor, b: Tensor | None, activation: Activation, **options: Any) -> Tensor:
    return backend.bias_act(z, b, activation, **{"dim": -1, "encode": False, "out": None, **options})


def gradient(
    dy: Tensor, saved: Tensor, activation: Activation, given: Given, *, overwrite: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor | None]:
    wanted = GradientRequest(given, overwrite, dim is not None)
    dz, db = backend.gradient(dy, saved, activation, (), wanted, dim=-1 if dim is None else dim)
    assert dz is not None
    return dz, db


def position(activation: Activation) -> float:
    assert activation.fold is not None
    return activation.fold.position


def slope_of_output(activation: Activation, y: Tensor) -> Tensor:
    """The float64 derivative that an output tells: by the row's formula, for folds by torch operations in float32."""
    if activation.is_folded:
        return activation.derivative_given_output(y.cpu().float(), y.dtype).double().to(y.device)
    return activation.derivative_given_output(y.double(), y.dtype).double()


# --- every activation -------------------------------------------------------------------------------------------------

#: Shape and the dimension along which a bias runs: without, along the columns, and along the rows of the matrix.
BIASES: tuple[tuple[tuple[int, ...], int | None], ...] = (((37, 53), None), ((37, 53), -1), ((3, 11, 60), 1))


@every_activation_in_two
def test_forward(activation: Activation, dtype: torch.dtype) -> None:
    for shape, dim in BIASES:
        z = normal(*shape, dtype=dtype)
        b = None if dim is None else normal(shape[dim], dtype=dtype)
        biased = z if b is None or dim is None else z + along(b, dim, z)
        exact = z.double() if b is None or dim is None else z.double() + along(b.double(), dim, z)
        before = z.clone()

        y = forward(z, b, activation, dim=dim or 0)
        assert_as_good_as_torch(y, activation.plain(biased), activation.function(exact))
        saved = forward(z, b, activation, dim=dim or 0, encode=True)
        moved = encoding_error(y, dtype) if activation.is_folded else torch.zeros(1)
        assert bool(((saved.double() - y.double()).abs() <= moved.to(y.device)).all())
        assert torch.equal(z, before)

        for encode, expected in ((False, y), (True, saved)):
            buffer = z.clone()
            version = buffer._version
            assert forward(buffer, b, activation, dim=dim or 0, encode=encode, out=buffer) is buffer
            assert torch.equal(buffer, expected) and buffer._version > version


@every_activation_in_two
def test_gradient_given_the_input(activation: Activation, dtype: torch.dtype) -> None:
    for shape, dim in BIASES:
        z, dy = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
        leaf = z.detach().requires_grad_()
        (torchs,) = torch.autograd.grad(activation.plain(leaf), leaf, dy)
        exact = dy.double() * derivative(activation.function, z)

        # The kernel is made from the formula, whose own error in float32 is as large as torch's kernels', or larger.
        wide = z.detach().float().requires_grad_()
        (formulas,) = torch.autograd.grad(activation.function(wide), wide, dy.float())
        luck = float((formulas.double() - exact).abs().max())
        dz, db = gradient(dy, z, activation, "input", dim=dim)
        assert_as_good_as_torch(dz, torchs, exact, luck)
        if dim is None:
            assert db is None
        else:
            assert db is not None
            assert_as_good_as_torch(db, sum_along(torchs, dim), sum_along(exact, dim))


@every_activation_in_two
def test_gradient_given_the_output(activation: Activation, dtype: torch.dtype) -> None:
    if activation.needs_input_reason is not None:
        pytest.skip("its output does not tell its derivative")
    for shape, dim in BIASES:
        y, dy = forward(normal(*shape, dtype=dtype), None, activation, encode=True), normal(*shape, dtype=dtype)
        exact = dy.double() * slope_of_output(activation, y)
        before = y.clone(), dy.clone()

        dz, db = gradient(dy, y, activation, "output", dim=dim)
        # float32 arithmetic, in which 1 - y^2 loses what y^2 has; then one rounding.
        arithmetic = 8 * EPSILON * dy.double().abs() * max(1.0, float(slope_of_output(activation, y).abs().max()))
        assert bool(((dz.double() - exact).abs() <= ulp(exact, dtype) + arithmetic).all())
        assert torch.equal(y, before[0]) and torch.equal(dy, before[1])
        if dim is not None:
            assert db is not None and db.dtype is dtype
            total = sum_along(exact, dim)
            assert bool(((db.double() - total).abs() <= ulp(total, dtype) + sum_along(arithmetic, dim)).all())

        version = y._version
        over, db_over = gradient(dy, y, activation, "output", overwrite=True, dim=dim)
        assert over is y and torch.equal(over, dz) and y._version > version
        assert (db_over is None) if db is None else torch.equal(db_over, db)  # type: ignore[arg-type]


# --- every number -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger tiles for the interpreter, which takes as long for a small one."""
    if INTERPRETED:
        monkeypatch.setattr(tiles, "TILE", 1 << 14)


def counts(activation: Activation, z: Tensor) -> Tensor:
    """All numbers, but those that a GPU's pow takes for 0."""
    subnormal = (z.abs() < torch.finfo(torch.float32).tiny) & (z != 0)
    return ~subnormal if activation.name == "cbrt" else torch.ones_like(subnormal)


@every_half
@every_activation
@pytest.mark.usefixtures("few_programs")
def test_every_16_bit_number_forward(activation: Activation, dtype: torch.dtype) -> None:
    z = all_values(dtype).to(DEVICE)
    truth = activation.function(z.double())
    rounded = truth.to(dtype)
    overflows = activation.function(z.float()).isinf() & truth.isfinite()  # in float32, for eager too
    real = ~truth.isnan() & ~overflows & counts(activation, z)
    nothing = truth.abs() < LEAST

    exact, saved = forward(z, None, activation), forward(z, None, activation, encode=True)
    for y in (exact, saved):
        assert torch.equal(y.isnan(), truth.isnan())
        assert int(steps(y, rounded)[real & ~nothing].max()) <= 1
        assert float(y.double().abs()[real & nothing].max()) <= max(2 * LEAST, torch.finfo(dtype).tiny)
    # Without a branch bit float32 arithmetic decides, which now and then meets the middle between two numbers.
    assert float((exact != rounded)[real & ~nothing].double().mean()) < 0.02
    if not activation.is_folded:
        assert torch.equal(saved[real], exact[real])
        return
    left = z.double() < position(activation)
    assert torch.equal(branch_bit.decode(saved.float(), dtype)[real], left[real])
    assert not bool((saved.abs() < branch_bit.LEAST[dtype])[left & (saved != 0)].any())
    if activation.name == "hardswish":
        assert torch.equal((saved == 0)[left], (truth == 0)[left])
    nominal = branch_bit.encode(truth.float(), left, dtype).to(dtype)
    assert int(steps(saved, nominal)[real & ~nothing & (truth < 0)].max()) <= 2  # the next number of that branch
    assert torch.equal(saved[real & (truth >= 0) & ~left], exact[real & (truth >= 0) & ~left])


@every_half
@every_activation
@pytest.mark.usefixtures("few_programs")
def test_every_16_bit_number_backward(activation: Activation, dtype: torch.dtype) -> None:
    z = all_values(dtype).to(DEVICE)
    ones = torch.ones_like(z)
    truth = derivative(activation.function, z)
    leaf = z.float().requires_grad_()
    (torchs,) = torch.autograd.grad(activation.plain(leaf).sum(), leaf)
    usual = (z.abs() < 1e4) & counts(activation, z)

    slope, _ = gradient(ones, z, activation, "input")
    assert not bool((slope.isnan() & ~torchs.isnan()).any())
    near = usual & truth.isfinite()
    assert bool(((slope.double() - truth).abs() <= ulp(truth, dtype) + 8 * EPSILON)[near].all())

    if activation.needs_input_reason is not None:
        return
    saved = forward(z, None, activation, encode=True)
    slope, _ = gradient(ones, saved, activation, "output")
    told = slope_of_output(activation, saved)
    assert torch.equal(slope.isnan(), told.isnan())
    real = told.abs() < torch.finfo(dtype).max
    assert bool(((slope.double() - told).abs() <= ulp(told, dtype) + 4 * EPSILON)[real].all())


@every_activation
def test_special_float32_numbers(activation: Activation) -> None:
    inf, nan = math.inf, math.nan
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 2e-38, -2e-38, 1e18, -1e18, 3.4e38, -3.4e38, inf, -inf, nan]
    kinks = [float(k) for k in range(-6, 7)] + [0.5, -0.5, 20.0, -20.0, 90.0, -90.0, 103.0, -103.0]
    if activation.is_folded:
        fold = torch.tensor(position(activation))
        kinks += [float(fold), float(torch.nextafter(fold, fold + 1)), float(torch.nextafter(fold, fold - 1))]
    z = torch.tensor(special + kinks)
    z = z[counts(activation, z)]
    leaf = z.clone().requires_grad_()
    expected = activation.function(leaf)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    truth, truth_slope = activation.function(z.double()), derivative(activation.function, z)
    tolerance = {"rtol": 2e-5, "atol": 1e-6, "equal_nan": True}

    for encode in (False, True):
        y = forward(z.to(DEVICE), None, activation, encode=encode).cpu()
        torch.testing.assert_close(y, expected.detach(), **tolerance)
        assert torch.equal(y.isnan(), truth.isnan())
    if activation.is_folded:
        real = ~y.isnan()
        assert torch.equal(branch_bit.decode(y, torch.float32)[real], (z < position(activation))[real])

    dz, _ = gradient(torch.ones_like(z).to(DEVICE), z.to(DEVICE), activation, "input")
    torch.testing.assert_close(dz.cpu()[~z.isnan()], slope[~z.isnan()], **tolerance)
    if activation.needs_input_reason is None:
        dz, _ = gradient(torch.ones_like(z).to(DEVICE), y.to(DEVICE), activation, "output")
        told = activation.derivative_given_output(y, torch.float32)
        torch.testing.assert_close(dz.cpu(), told, **tolerance)
        assert not bool((dz.cpu().isnan() & ~truth_slope.isnan() & ~y.isnan()).any())


# --- gates ------------------------------------------------------------------------------------------------------------


@every_dtype
@every_activation
def test_gates(activation: Activation, dtype: torch.dtype) -> None:
    check_gates(backend, activation, *(normal(37, 53, dtype=dtype) for _ in range(3)))


# --- layouts ----------------------------------------------------------------------------------------------------------


GUARD = 4096  # elements before and after a tensor: what a kernel without its masks would hit
SENTINEL = 77.0


def guarded(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy with a guard before and behind it, and what tells whether the guards are untouched."""
    memory = torch.full((tensor.numel() + 2 * GUARD,), SENTINEL, dtype=tensor.dtype, device=tensor.device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), GUARD).copy_(tensor)
    untouched = torch.ones_like(memory, dtype=torch.bool)
    untouched[GUARD : GUARD + tensor.numel()] = False
    return copy, lambda: bool((memory[untouched] == SENTINEL).all())


@pytest.mark.parametrize("layout", TRITONS)
def test_layouts(layout: str, split: str) -> None:
    # With relu and small integers everything is exact, sums included.
    shape, dim, make = TRITONS[layout]
    relu = resolve("relu")
    z, b, dy = make(integers(*shape)), integers(shape[dim]), make(integers(*shape))
    y = torch.relu(z + along(b, dim, z))
    dz = dy * (y > 0)

    assert torch.equal(forward(z, None, relu), torch.relu(z))
    new = forward(z, b, relu, dim=dim)
    assert torch.equal(new, y) and new.stride() == z.stride()
    buffer, untouched = guarded(z)
    assert torch.equal(forward(buffer, b, relu, dim=dim, out=buffer), y) and untouched()

    overwrite, bias = way(layout, split)
    saved, untouched = guarded(new)
    new_dz, db = gradient(dy, saved, relu, "output", overwrite=overwrite, dim=dim if bias else None)
    assert torch.equal(new_dz, dz) and new_dz.stride() == z.stride()
    assert (new_dz is saved) == overwrite and torch.equal(saved, dz if overwrite else new) and untouched()
    assert (db is not None and torch.equal(db, sum_along(dz, dim))) if bias else db is None


@pytest.mark.parametrize(
    "dy",
    [
        lambda: normal(53, 37).t(),
        lambda: normal(1, 53).expand(37, 53),
        lambda: normal(37, 1).expand(37, 53),
        lambda: torch.ones((), device=DEVICE).expand(37, 53),
        lambda: normal(37, 106)[:, ::2],
        lambda: normal(74, 53)[::2],
    ],
    ids=["transposed", "same rows", "same columns", "one value", "gaps in rows", "gaps between rows"],
)
@pytest.mark.parametrize("given", ["output", "input"])
def test_incoming_gradients_of_any_layout(dy: Callable[[], Tensor], given: Given) -> None:
    incoming, saved = dy(), integers(37, 53)
    before = incoming.clone()
    dz, db = gradient(incoming, saved, resolve("relu"), given, dim=-1)
    expected, expected_db = gradient(incoming.contiguous(), saved, resolve("relu"), given, dim=-1)
    assert torch.equal(dz, expected) and torch.equal(db, expected_db)  # type: ignore[arg-type]
    assert torch.equal(incoming, before)


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, ::2], lambda t: t[::2], lambda t: t[:, 5:12], lambda t: t.t(), lambda t: t[:1].expand(9, -1)],
    ids=["gaps in rows", "gaps between rows", "slice", "transposed", "expanded"],
)
@pytest.mark.parametrize("given", ["output", "input"])
def test_inputs_of_any_layout(view: Callable[[Tensor], Tensor], given: Given) -> None:
    relu = resolve("relu")
    whole = integers(18, 20)
    z = view(whole)
    b, dy = integers(z.shape[-1]), integers(*z.shape)
    before = whole.clone()
    assert torch.equal(forward(z, b, relu), torch.relu(z + b))
    dz, db = gradient(dy, z, relu, given, dim=-1)
    assert torch.equal(dz, dy * (z > 0)) and torch.equal(db, sum_along(dz, -1))  # type: ignore[arg-type]
    assert torch.equal(whole, before)


def test_writing_over_a_view_leaves_its_gaps_alone() -> None:
    whole = integers(18, 20)
    expected = whole.clone()
    expected[:, ::2].relu_()
    view = whole[:, ::2]
    assert forward(view, None, resolve("relu"), out=view) is view
    assert torch.equal(whole, expected)
    dz, _ = gradient(torch.ones_like(view), view, resolve("relu"), "output", overwrite=True)
    assert torch.equal(dz, (view > 0).float()) and torch.equal(whole, expected)


# --- large tensors, repeated runs -------------------------------------------------------------------------------------


def test_offsets_have_64_bits_where_32_do_not_suffice() -> None:
    assert tiles.index_of(2**31) == tl.int64
    assert tiles.index_of(2**31 - 1) == tl.int64  # masked elements lie behind the last one
    assert tiles.index_of(2**30) == tl.int32


@pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.mem_get_info()[0] <= 20 << 30, reason="needs a GPU with 20 GiB of free memory"
)
@pytest.mark.parametrize("columns", [4096, None], ids=["bias", "no bias"])
def test_more_than_two_to_the_31_elements(columns: int | None) -> None:
    relu = resolve("relu")
    shape = (2**19 + 3, 4096)
    y = torch.full(shape, -1.0, dtype=torch.bfloat16, device=DEVICE)
    y[-1], y[0, 0] = 2.0, 3.0
    b = None if columns is None else torch.ones(columns, dtype=y.dtype, device=DEVICE)
    forward(y, b, relu, out=y)
    shift = 0 if b is None else 1
    assert bool((y[-1] == 2 + shift).all()) and float(y[0, 0]) == 3 + shift
    assert int(torch.count_nonzero(y[1:-1])) == 0
    dz, db = gradient(y, y, relu, "output", overwrite=True, dim=None if b is None else -1)
    assert bool((dz[-1] == 2 + shift).all()) and int(torch.count_nonzero(dz)) == 4096 + 1
    if db is not None:
        assert float(db[0]) == 3 + 4 and bool((db[1:] == 3).all())


# --- where no kernel runs ---------------------------------------------------------------------------------------------


class Broken:
    """A kernel that cannot be compiled here."""

    arg_names = ()

    def __getitem__(self, grid: object) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("Failed to find C compiler")

        return run


def test_a_gpu_on_which_none_runs_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "one_kernel", Broken())
    kernels._for_gpus.cache_clear()
    with caplog.at_level(logging.WARNING, "fusedlayers"):
        assert kernels._for_gpus() is kernels.reference
    kernels._for_gpus.cache_clear()
    assert "Triton does not run on this GPU, and torch operations compute in its place: RuntimeError" in caplog.text


def test_one_that_fails_says_what_helps() -> None:
    with pytest.raises(RuntimeError, match="C compiler") as caught:
        launch.Launch(Broken(), [1], [], {})(torch.empty(1, device=DEVICE))
    assert "FUSEDLAYERS_KERNELS=off" in caught.value.__notes__[0]
