"""The Triton matmuls with epilogues: on the GPU where there is one, else in Triton's interpreter, on the CPU."""

import itertools
from typing import Any

import pytest
import torch
from gpu import ACTIVATIONS, DEVICE, DTYPES, INTERPRETER_WARNINGS
from pairs import covering
from reference import assert_as_good_as_torch, derivative
from torch import Tensor

from fusedlayers.activations import Activation, resolve, upcast
from fusedlayers.backends import GradientRequest, gpu_settings
from fusedlayers.backends.operations import MATMUL

pytest.importorskip("triton")
import triton.language as tl  # after the line that skips without it

from fusedlayers.backends import triton as backend
from fusedlayers.backends.triton import gemm
from fusedlayers.backends.triton.gemm import Tiling, linear_act, linear_gradient
from fusedlayers.call import with_operands

pytestmark = [pytest.mark.filterwarnings(*INTERPRETER_WARNINGS), pytest.mark.usefixtures("interpreter_converts")]

#: Small, so that a matrix has many: with one cut and none, through pointers and through descriptors.
TILINGS = {
    "pointers": Tiling(16, 32, 16, 1, 4, 2),
    "descriptors": Tiling(16, 32, 16, 1, 4, 2, described=True),
    "two cuts": Tiling(32, 64, 16, 2, 4, 2, programs=2, described=True, transposes=True),
}
#: rows, columns, inner: primes, one row, nothing to multiply, many tiles, and more strips than one.
SIZES = [(37, 53, 29), (1, 48, 32), (1, 1, 1), (19, 40, 0), (48, 64, 32), (150, 72, 40)]
GELU, SILU, RELU = resolve("gelu"), resolve("silu"), resolve("relu")

#: On a GPU all; interpreted, where a tile takes 20 ms, every pair of two.
COMBINATIONS = list((itertools.product if DEVICE.type == "cuda" else covering)(SIZES, DTYPES, TILINGS))

every_combination = pytest.mark.parametrize(
    ("sizes", "dtype", "tiling"), [(s, d, TILINGS[t]) for s, d, t in COMBINATIONS], ids=[str(c) for c in COMBINATIONS]
)
every_tiling = pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


def operands_of(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, inner = sizes
    scale = 2.0 * max(1, inner) ** -0.5
    x, w = normal(rows, inner, dtype=dtype, seed=1), normal(columns, inner, dtype=dtype, seed=2, scale=scale)
    return x, w, normal(columns, dtype=dtype, seed=3)


def check_forward(
    sizes: tuple[int, int, int], dtype: torch.dtype, activation: Activation, tiling: Tiling, bias: bool = True
) -> None:
    x, w, b = operands_of(sizes, dtype)
    kernel_b = b if bias else None
    y = linear_act(x, w, kernel_b, activation, (), encode=False, tiling=tiling)
    torchs = activation.plain(torch.nn.functional.linear(x, w, kernel_b))
    exact = activation.function(x.double() @ w.double().t() + (b.double() if bias else 0.0))
    assert y.shape == torchs.shape and y.dtype is dtype
    assert_as_good_as_torch(y, torchs, exact)


# --- forward ----------------------------------------------------------------------------------------------------------


@every_combination
def test_forward(sizes: tuple[int, int, int], dtype: torch.dtype, tiling: Tiling) -> None:
    check_forward(sizes, dtype, GELU, tiling)
    check_forward(sizes, dtype, RELU, tiling, bias=False)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_every_activation_forward(activation: Activation) -> None:
    check_forward((37, 56, 24), torch.float32, activation, TILINGS["descriptors"])


@every_dtype
def test_the_branch_is_in_the_output_as_the_elementwise_kernel_puts_it(dtype: torch.dtype) -> None:
    x, w, b = operands_of((64, 96, 1), dtype)  # one product, which both round alike
    x, w, b = x.sign(), w, torch.zeros_like(b)
    y = linear_act(x, w, b, GELU, (), encode=True, tiling=TILINGS["pointers"])
    z = x @ w.t()
    expected = backend.bias_act(z, None, GELU, dim=-1, encode=True, out=None)
    assert torch.equal(y, expected)
    exact = backend.bias_act(z, None, GELU, dim=-1, encode=False, out=None)
    assert not torch.equal(y, exact)


def test_accumulators_are_not_rounded_before_the_activation() -> None:
    # 256 + 1 is 256 in bfloat16, and so is a pre-activation that was rounded.
    x = torch.tensor([[256.0, 1.0, -256.0]], dtype=torch.bfloat16, device=DEVICE)
    w = torch.ones(16, 3, dtype=torch.bfloat16, device=DEVICE)
    b = torch.full((16,), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    y = linear_act(x, w, b, RELU, (), encode=False, tiling=TILINGS["pointers"])
    assert torch.equal(y, torch.full_like(y, 1 + 2.0**-9))  # rounded once: 1
    z = linear_act(256 * x[:, :2], w[:, :2], b, resolve("softsign"), (), encode=False, tiling=TILINGS["pointers"])
    assert float(z[0, 0]) == 1.0


# --- gradient ---------------------------------------------------------------------------------------------------------


def check_gradient(
    sizes: tuple[int, int, int], dtype: torch.dtype, activation: Activation, given: Any, tiling: Tiling
) -> None:
    """Against float64, beside the two kernels that it replaces."""
    rows, columns, inner = sizes
    dy = normal(rows, inner, dtype=dtype, seed=4)
    w = normal(inner, columns, dtype=dtype, seed=5, scale=max(1, inner) ** -0.5)
    z = normal(rows, columns, dtype=dtype, seed=6, scale=2.0)
    saved = backend.bias_act(z, None, activation, dim=-1, encode=True, out=None) if given == "output" else z
    if given == "output":
        slope = activation.derivative_given_output(upcast(saved), dtype).double()
    else:
        slope = derivative(activation.function, z)
    d = dy.double() @ w.double()

    wanted = GradientRequest(given, True, True)
    buffer = saved.clone()
    version = buffer._version
    hidden, db, shares = linear_gradient(
        dy, w, [buffer], activation, (), wanted, hidden=given == "input", tiling=tiling
    )
    assert shares == [] and buffer._version > version
    composed, composed_db = backend.gradient(dy @ w, saved, activation, (), wanted._replace(overwrite=False), dim=-1)
    assert composed is not None and composed_db is not None and db is not None
    assert_as_good_as_torch(buffer, composed, d * slope)
    assert_as_good_as_torch(db, composed_db, (d * slope).sum(0))
    if given == "input":
        assert hidden is not None
        assert_as_good_as_torch(hidden, activation.plain(z), activation.function(z.double()))
    else:
        assert hidden is None


@every_combination
def test_gradient(sizes: tuple[int, int, int], dtype: torch.dtype, tiling: Tiling) -> None:
    check_gradient(sizes, dtype, GELU, "output", tiling)
    check_gradient(sizes, dtype, SILU, "input", tiling)


@pytest.mark.parametrize("activation", ACTIVATIONS[::2], ids=repr)
def test_activations_gradients(activation: Activation) -> None:
    check_gradient((17, 40, 16), torch.float32, activation, "input", TILINGS["descriptors"])
    if activation.output_refusal(torch.float32) is None and not activation.is_identity:
        check_gradient((17, 40, 16), torch.float32, activation, "output", TILINGS["descriptors"])


@every_combination
def test_gradient_of_a_gate(sizes: tuple[int, int, int], dtype: torch.dtype, tiling: Tiling) -> None:
    rows, columns, inner = sizes
    dy = normal(rows, inner, dtype=dtype, seed=4)
    w = normal(inner, columns, dtype=dtype, seed=5, scale=max(1, inner) ** -0.5)
    z, up = (normal(rows, columns, dtype=dtype, seed=seed, scale=2.0) for seed in (6, 7))
    d = dy.double() @ w.double()
    f, slope = SILU.function(z.double()), derivative(SILU.function, z)

    wanted = GradientRequest("input", True, False)
    parts = [z.clone(), up.clone()]
    hidden, db, _ = linear_gradient(dy, w, parts, SILU, (), wanted, hidden=True, tiling=tiling)
    composed = [z.clone(), up.clone()]
    backend.gate_gradient(dy @ w, *composed, SILU, (), ())
    assert db is None and hidden is not None
    assert_as_good_as_torch(hidden, backend.gate(z, up, SILU, (), None), f * up.double())
    assert_as_good_as_torch(parts[0], composed[0], d * up.double() * slope)
    assert_as_good_as_torch(parts[1], composed[1], d * f)


def test_infinite_derivatives_outside_of_a_tile_do_not_reach_the_sums() -> None:
    root, _, _ = with_operands(resolve(lambda z: z.abs().sqrt()), (5, 7), torch.float32)
    z = torch.full((5, 7), 4.0, device=DEVICE)
    for tiling in TILINGS.values():
        _, db, _ = linear_gradient(
            torch.ones(5, 8, device=DEVICE), torch.full((8, 7), 0.125, device=DEVICE), [z.clone()], root, (),
            GradientRequest("input", True, True), hidden=False, tiling=tiling,
        )  # fmt: skip
        assert db is not None
        torch.testing.assert_close(db, torch.full((7,), 1.25, device=DEVICE))


@every_tiling
def test_operands(tiling: Tiling) -> None:
    """Of an activation with a number for each channel, and one for all."""
    rows, columns, inner = 37, 40, 24
    x, w, b = operands_of((rows, columns, inner), torch.float32)
    slope, scale = normal(columns, dtype=torch.float32, seed=8), normal(1, dtype=torch.float32, seed=9)

    def function(z: Tensor, slope: Tensor, scale: Tensor) -> Tensor:
        return torch.where(z > 0, z, slope * z) * scale

    activation, params, _ = with_operands(
        resolve(lambda z: function(z, slope, scale)), (rows, columns), torch.float32, x.device
    )
    assert len(params) == 2
    y = linear_act(x, w, b, activation, params, encode=False, tiling=tiling)
    z = (x.double() @ w.double().t() + b.double()).requires_grad_()
    exact_slope, exact_scale = (t.double().requires_grad_() for t in (slope, scale))
    exact = function(z, exact_slope, exact_scale)
    torch.testing.assert_close(y, exact.float())

    dy, w2 = normal(rows, inner, dtype=torch.float32, seed=4), normal(inner, columns, dtype=torch.float32, seed=5)
    kept = z.detach().float()
    hidden, db, shares = linear_gradient(
        dy,
        w2,
        [kept],
        activation,
        params,
        GradientRequest("input", True, True, (True, True)),
        hidden=True,
        tiling=tiling,
    )
    exact.backward(dy.double() @ w2.double())
    assert db is not None and hidden is not None
    torch.testing.assert_close(hidden, y)
    torch.testing.assert_close(kept, z.grad.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(db, z.grad.sum(0).float(), atol=1e-4, rtol=1e-5)
    by_size = {p.numel(): share for p, share in zip(params, shares, strict=True)}
    torch.testing.assert_close(by_size[columns], exact_slope.grad.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_size[1].view(1), exact_scale.grad.float(), atol=1e-4, rtol=1e-4)


@every_tiling
@pytest.mark.parametrize(("rows", "columns"), [(0, 16), (16, 0)])
def test_nothing(rows: int, columns: int, tiling: Tiling) -> None:
    x, w, b = operands_of((rows, columns, 16), torch.float32)
    assert linear_act(x, w, b, GELU, (), encode=True, tiling=tiling).shape == (rows, columns)
    parts = [x.new_empty(rows, columns), x.new_empty(rows, columns)]
    wanted = GradientRequest("input", True, True)
    hidden, db, _ = linear_gradient(x, w.t().contiguous(), parts, SILU, (), wanted, hidden=True, tiling=tiling)
    assert hidden is not None and hidden.shape == (rows, columns)
    assert db is not None and torch.equal(db, torch.zeros(columns, device=DEVICE))


def _real() -> dict[str, tuple[int, Tiling]]:
    """The tilings that layers choose from: on a GPU its own, without one all, interpreted."""
    by_device = {"": {n: tuple(gemm.tilings(DEVICE, n).values()) for n in (2, 4)}}
    found = by_device if DEVICE.type == "cuda" else gemm.TILINGS
    return {f"{name}-{n}-{t}": (n, t) for name, by_size in found.items() for n, group in by_size.items() for t in group}


# Interpreted, a tile takes a second.
@pytest.mark.parametrize("rows", [1, 129, 1000] if DEVICE.type == "cuda" else [129])
@pytest.mark.parametrize(("itemsize", "tiling"), _real().values(), ids=_real())
def test_tilings_of_devices(itemsize: int, tiling: Tiling, rows: int) -> None:
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    sizes = rows, 264, 72
    check_forward(sizes, dtype, GELU, tiling)
    check_gradient(sizes, dtype, *((GELU, "output") if itemsize == 2 else (SILU, "input")), tiling)


# --- launching --------------------------------------------------------------------------------------------------------


def test_few_programs_make_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_processors", lambda device: 1)
    monkeypatch.setattr(gemm, "GROUP", 2)
    check_forward((150, 72, 40), torch.float32, GELU, TILINGS["pointers"])
    check_gradient((150, 72, 40), torch.float32, GELU, "output", TILINGS["descriptors"])


@pytest.mark.parametrize(("margin", "programs"), [("", 4), ("0", 4), ("3", 1), ("9", 1)])
def test_multiprocessors_can_be_left_to_others(margin: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_SM_MARGIN", margin)
    for cached in (gemm._processors, gpu_settings.margin):
        cached.cache_clear()
    try:
        assert gemm._processors(torch.device("cpu")) == programs  # 4 where there is no GPU
    finally:
        for cached in (gemm._processors, gpu_settings.margin):
            cached.cache_clear()


@pytest.mark.parametrize("margin", ["-1", "2.5", "some"])
def test_a_margin_that_is_no_number_is_refused(margin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDLAYERS_SM_MARGIN", margin)
    gpu_settings.margin.cache_clear()
    with pytest.raises(ValueError, match=f"FUSEDLAYERS_SM_MARGIN: got '{margin}', expected a number of multiproc"):
        gpu_settings.margin()


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = gemm._Launch.__init__

    def with_64_bits(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(self, *args, **kwargs)
        launched.append(self.options["INDEX"])
        self.options["INDEX"] = tl.int64

    monkeypatch.setattr(gemm._Launch, "__init__", with_64_bits)
    check_forward((37, 53, 29), torch.float32, GELU, TILINGS["pointers"])
    check_gradient((37, 53, 29), torch.float32, GELU, "output", TILINGS["pointers"])
    assert launched and set(launched) == {tl.int32}


def test_large_matrices_have_offsets_of_64_bits() -> None:
    def index(rows: int, columns: int, inner: int) -> Any:
        x = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
        return gemm._Launch(TILINGS["pointers"], x.new_empty(rows, columns), inner, (x,), several=False).options[
            "INDEX"
        ]

    assert index(1024, 1024, 1024) is tl.int32
    assert index(1 << 21, 64, 1024) is tl.int64
    assert index((1 << 21) - 256, 64, 1024) is tl.int64  # the last block reaches over the end


@pytest.mark.parametrize(("sizes", "described"), [((8, 16), True), ((8, 12), False), ((8, 0), False)])
def test_rows_of_a_described_matrix_begin_at_multiples_of_16_bytes(sizes: tuple[int, int], described: bool) -> None:
    matrix = torch.empty(sizes, dtype=torch.bfloat16, device=DEVICE)
    assert gemm._can_be_described(matrix) is described
    assert not gemm._can_be_described(torch.empty(17, dtype=torch.bfloat16, device=DEVICE)[1:].view(1, 16))


def test_every_architecture_has_tilings() -> None:
    for by_size, itemsize in itertools.product(gemm.TILINGS.values(), (2, 4)):
        assert by_size[itemsize]
        for tiling in by_size[itemsize]:
            assert str(tiling).startswith(f"{tiling.block_m}x{tiling.block_n}x{tiling.block_k}")


def test_the_kernels_compute_what_operation_act_does() -> None:
    x, w, b = operands_of((64, 48, 32), torch.float32)
    y = linear_act(x, w, b, GELU, (), encode=False, tiling=TILINGS["descriptors"])
    torch.testing.assert_close(y, backend.operation_act(MATMUL, x, w, b, GELU), atol=1e-5, rtol=1e-5)
