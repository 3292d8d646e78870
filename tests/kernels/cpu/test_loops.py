"""The compiled loops themselves: vectorised, the same bits whatever the layout and the threads, and good neighbours of
autograd. ``test_backend_cpu.py`` is about what they compute, ``test_build.py`` about how they are built."""

import ctypes
import functools
import itertools
import math
import platform
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from reference import all_values, same_bits
from settings import ROOT
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import Activation, definitions, resolve
from fusedlayers.calls.tracers import with_operands
from fusedlayers.derivative import branch_bit
from fusedlayers.kernels import GradientRequest, cpu, reference
from fusedlayers.kernels.cpu import build, elementwise, loops

pytestmark = pytest.mark.skipif(build.shared_object() is None, reason=str(build.missing_because()))

FOLDED = [row.bind() for row in definitions() if row.bind().is_folded]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- what the compiler made -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library as the package compiles it, and what GCC says about that."""
    compiler = build.find_compiler()
    assert compiler is not None
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version:
        pytest.skip("only GCC says which loops it has vectorised")
    if not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("without AVX2 there are no vectors of 32 bytes, and no gathers")
    folder = tmp_path_factory.mktemp("made")
    report = folder / "report"
    build._build([*compiler, f"-fopt-info-vec-optimized={report}"], folder / "loops.so")
    return folder / "loops.so", report.read_text()


def test_the_functions_hold_packed_arithmetic_alone(made: tuple[Path, str]) -> None:
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("reads x86 instructions")
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(made[0])], capture_output=True, text=True).stdout
    bodies = dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n(.*?)\n(?:\n|\Z)", text, re.MULTILINE | re.DOTALL))
    stems = ["tangent" if name == "tanh" else name for name in loops.FUNCTIONS]
    names = [f"{stem}_{kind}" for stem in stems for kind in ("output", "marked", "both", "slope")]
    arithmetic = r"\tv?(?:add|sub|mul|div|f(?:n?m)(?:add|sub)\d+)%s\b.*"
    for name in names:
        packed, scalar = (re.findall(arithmetic % suffix, bodies[name]) for suffix in ("ps", "ss"))
        assert not scalar, (name, scalar)
        only_chooses = name.startswith("relu") or name in ("leaky_relu_slope", "hardsigmoid_slope")
        assert only_chooses or (packed and all("ymm" in line or "zmm" in line for line in packed)), name


WRAPPER = """
{undefined}
#include "{source}"
void widen_all(int dtype, const uint16_t *h, float *x, int64_t n) {{
  for (int64_t i = 0; i < n; i += BLOCK) widen(dtype, h + i, x + i);
}}
void narrow_all(int dtype, const float *x, uint16_t *h, int64_t n) {{
  for (int64_t i = 0; i < n; i += BLOCK) narrow(dtype, x + i, h + i);
}}
"""
#: How 16-bit numbers are converted: by the processor's instructions, by the compiler, or by arithmetic.
CONVERSIONS = {"F16C": (), "_Float16": ("__F16C__",), "arithmetic": ("__F16C__", "__FLT16_MAX__")}


@pytest.fixture(scope="module", params=CONVERSIONS)
def conversions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("conversions")
    undefined = "\n".join(f"#undef {name}" for name in CONVERSIONS[request.param])
    (folder / "wrapper.c").write_text(WRAPPER.format(undefined=undefined, source=build.SOURCE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", folder / "wrapper.c")
        build._build(build.find_compiler() or [], folder / "wrapper.so")
    return ctypes.CDLL(str(folder / "wrapper.so"))


def _convert(library: ctypes.CDLL, name: str, dtype: torch.dtype, source: Tensor, result: Tensor) -> Tensor:
    assert source.numel() % loops.BLOCK == 0 and source.is_contiguous()
    function = getattr(library, name)
    function.argtypes = (ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function(loops.DTYPES[dtype], source.data_ptr(), result.data_ptr(), source.numel())
    return result


every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_half
def test_every_16_bit_number_is_widened_as_torch_does(conversions: ctypes.CDLL, dtype: torch.dtype) -> None:
    halves = all_values(dtype)
    found = _convert(conversions, "widen_all", dtype, halves, torch.full((1 << 16,), 7.0))
    assert same_bits(found, halves.float())


@every_half
def test_numbers_are_narrowed_as_torch_does(conversions: ctypes.CDLL, dtype: torch.dtype) -> None:
    halves = all_values(dtype).float()
    halves = halves[~halves.isnan()].sort().values
    ties = ((halves[1:].double() + halves[:-1].double()) / 2).float()
    ties = torch.cat([ties, ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(-math.inf))])
    largest = torch.finfo(dtype).max
    limits = torch.tensor(
        [largest, largest * (1 + torch.finfo(dtype).eps / 4), 3.4e38, 1e-45, 1e-40, math.inf, math.nan]
    )
    bits = torch.randint(-(2**31), 2**31, (1 << 20,)).int().view(torch.float32)  # of all sizes, subnormal ones too
    x = torch.cat([all_values(dtype).float(), ties, limits, -limits, bits, torch.randn(1 << 18)])
    x = F.pad(x, (0, -len(x) % loops.BLOCK))
    found = _convert(conversions, "narrow_all", dtype, x, torch.zeros(len(x), dtype=dtype))
    assert same_bits(found, x.to(dtype))


# --- the same bits ----------------------------------------------------------------------------------------------------

LONGEST = 600


def _numbers(dtype: torch.dtype, count: int) -> Tensor:
    """Numbers of ordinary size, and some of each other kind at irregular distances."""
    z = 2 * torch.randn(count)
    sizes = torch.logspace(-44, 38, 83, dtype=torch.float64).float()
    special = torch.cat([torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan]), sizes, -sizes])
    z[torch.randperm(count)[: len(special)]] = special[:count]
    return z.to(dtype)


def _forward(z: Tensor, activation: Activation, b: Tensor | None = None, dim: int = -1, **options: Any) -> Tensor:
    return cpu.bias_act(z, b, activation, dim=dim, encode=True, **{"out": None, **options})


def _gradient(dy: Tensor, y: Tensor, activation: Activation, bias_dim: int | None = None) -> tuple[Tensor, Tensor]:
    assert elementwise.gradient_kernel(activation, y.dtype, "output") is not None
    request = GradientRequest("output", False, bias_dim is not None)
    dz, db = cpu.gradient(dy, y, activation, (), request, dim=-1 if bias_dim is None else bias_dim)
    return dz, db  # type: ignore[return-value]


#: Each is another path through the loops: functions with and without the bit, functions that torch computes and one
#: pass marks, and derivatives by both kinds of tables.
ACTIVATIONS: dict[str, Any] = {
    **{name: name for name in ("gelu", "quick_gelu", "mish", "hardswish")},
    "users": lambda z: z * torch.sigmoid(2 * z),
    "users_monotone": lambda z: z + torch.tanh(z) / 2,
}


@functools.cache
def _activation(name: str, dtype: torch.dtype) -> Activation:
    return with_operands(resolve(ACTIVATIONS[name]), (32, 512), dtype).activation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_element_has_the_same_bits_wherever_it_stands(name: str) -> None:
    for dtype in DTYPES:
        activation = _activation(name, dtype)
        forward = elementwise.forward_kernel(activation, dtype, True)
        is_loops = forward is not None and forward.has_function  # torch's own round by the place in a vector
        assert is_loops or name.startswith("users")
        z, dy = _numbers(dtype, 2 * LONGEST), torch.randn(2 * LONGEST).to(dtype)
        y = _forward(z, activation)
        dz = _gradient(dy, y, activation)[0]
        for length, start in enumerate(torch.randint(LONGEST, (LONGEST,)).tolist(), 1):
            part = slice(start, start + length)
            assert same_bits(_gradient(dy[part], y[part], activation)[0], dz[part]), (dtype, length, start)
            if not is_loops:
                continue
            assert same_bits(_forward(z[part], activation), y[part]), (dtype, length, start)
            if length % 16 == 1:  # over itself, and between neighbours that stay what they are
                over = z.clone()
                _forward(over[part], activation, out=over[part])
                assert same_bits(over, torch.cat([z[:start], y[part], z[part.stop :]])), (dtype, length, start)


@every_dtype
@pytest.mark.parametrize("name", ["gelu", "users_monotone"])
def test_the_bits_do_not_depend_on_the_number_of_threads(
    name: str, dtype: torch.dtype, with_threads: Callable[[int], None]
) -> None:
    activation = _activation(name, dtype)
    #: Shape -> the dimension of the bias. Blocks, tiles, pieces and groups of rows that are not whole.
    shapes = {(100_003,): -1, (37, 3001): 1, (20_001, 3): 1, (3, 5, 111, 70): 1, (2, 3, 150, 301): 1, (1, 70_001): 0}
    for shape, dim in shapes.items():
        z, dy, residual = (torch.randn(shape).to(dtype) for _ in range(3))
        b = torch.randn(z.shape[dim]).to(dtype)
        assert z.numel() > loops.GRAIN
        results = []
        for threads in (1, 2, 3):
            with_threads(threads)
            y = _forward(z, activation, b, dim, residual=residual)
            if name != "gelu" and results:  # computed by torch, whose threads round differently
                y = results[0][0]
            results.append((y, *_gradient(dy, y, activation, dim)))
        for others in results[1:]:
            for one, other in zip(results[0], others, strict=True):
                assert same_bits(one, other), (shape, threads)


CHANNELS = [1, 3, 10, 255, 256, 257, 1000, 2049, 4500]
#: Groups of joined rows and of summed ones that are not whole.
ROWS = [1, 2, 31, 33, 103]


@pytest.mark.parametrize("channels", CHANNELS)
def test_a_bias_and_its_gradient_along_any_number_of_channels(channels: int) -> None:
    activation = resolve("gelu")
    counts = ROWS if channels < 2000 else ROWS[:4]
    for dtype in DTYPES:
        z, dy, residual = (torch.randn(max(counts), channels).to(dtype) for _ in range(3))
        b = torch.randn(channels).to(dtype)
        y = _forward((z.float() + b.float()).to(dtype), activation)
        both = _forward((z.float() + b.float() + residual.float()).to(dtype), activation)
        dz = _gradient(dy, y, activation)[0]
        # Of 16-bit numbers the products are summed before these are rounded, and then the sum is.
        slope = _gradient(torch.ones_like(y), y, activation)[0].double()
        unit = 2.0**-20 if dtype is torch.float32 else torch.finfo(dtype).eps
        for count in counts:
            rows = slice(count)
            assert same_bits(_forward(z[rows], activation, b), y[rows])
            assert same_bits(_forward(z[rows], activation, b, residual=residual[rows]), both[rows])
            found, db = _gradient(dy[rows], y[rows], activation, 1)
            assert same_bits(found, dz[rows]) and db.shape == b.shape and db.dtype is dtype
            terms = dz[rows].double() if dtype is torch.float32 else dy[rows].double() * slope[rows]
            error = (db.double() - terms.sum(0)).abs()
            assert bool((error <= unit * terms.abs().sum(0) + 1e-7).all()), (dtype, count)


@pytest.mark.parametrize(("shape", "dim"), [((400_000, 3), 1), ((2000, 700), 1), ((1, 1_200_000), 0)], ids=str)
def test_sums_of_many_numbers_are_exact(shape: tuple[int, ...], dim: int) -> None:
    # All of one sign, so that a sum in float32 would fall behind by more and more.
    y, dy = _forward(1 + torch.rand(shape), resolve("gelu")), torch.rand(shape)
    dz, db = _gradient(dy, y, resolve("gelu"), dim)
    exact = dz.double().sum(1 - dim)
    assert float(((db.double() - exact) / exact).abs().max()) < 2.0**-22


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    make, dim = LAYOUTS[layout]
    for dtype in DTYPES:
        base = make()
        dim = dim % base.dim() if base.dim() else dim
        z = base.to(dtype)
        if z.stride() != base.stride():  # which the conversion has made dense
            z = torch.randn(base.untyped_storage().nbytes() // 4).to(dtype).as_strided(base.shape, base.stride())
        _check_layout(z, None, None, dim)
        if z.dim():
            b, residual = torch.randn(z.shape[dim]).to(dtype), torch.randn(z.shape).to(dtype)
            _check_layout(z, b, None, dim)
            _check_layout(z, b, residual, dim)
            _check_layout(z, None, residual, dim)


def _check_layout(z: Tensor, b: Tensor | None, residual: Tensor | None, dim: int) -> None:
    activation, eps = resolve("silu"), torch.finfo(z.dtype).eps
    before = z.clone(memory_format=torch.preserve_format)
    y = _forward(z, activation, b, dim, residual=residual)
    assert torch.equal(z, before) and y.stride() == torch.empty_like(z).stride()
    summed = z.float()
    if b is not None:
        summed = summed + b.float().view([-1 if i == dim else 1 for i in range(z.dim())])
    if residual is not None:
        summed = summed + residual.float()
    exact = summed.to(z.dtype).double()
    torch.testing.assert_close(y.double(), F.silu(exact), rtol=2 * eps, atol=2 * eps)
    dy = torch.randn(z.shape).to(z.dtype)
    dz, db = _gradient(dy, y, activation, None if b is None else dim)
    assert dz.shape == z.shape and dz.stride() == y.stride() and (db is None) == (b is None)
    assert same_bits(dz, _gradient(dy.contiguous(), y.contiguous(), activation)[0])
    if b is not None:
        others = [i for i in range(z.dim()) if i != dim]
        total, sizes = (t.sum(others) if others else t for t in (dz.double(), dz.double().abs()))
        assert db.shape == b.shape and bool(((db.double() - total).abs() <= 2 * eps * sizes).all())


GUARDED = """
import ctypes, itertools, mmap, sys
import torch
from fusedlayers.activations import resolve
from fusedlayers.kernels import GradientRequest, cpu
from fusedlayers.kernels.cpu import loops

maps = []
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

def guarded(tensor):
    # A copy at the end of its pages; the next page can be neither read nor written.
    size = tensor.numel() * tensor.itemsize
    used = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    maps.append(mmap.mmap(-1, used + mmap.PAGESIZE))
    first = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1]))
    assert protect(first + used, mmap.PAGESIZE, mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
    memory = (ctypes.c_char * size).from_buffer(maps[-1], used - size)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

def make(*shape):
    return guarded(torch.randn(shape).to(dtype))

gelu, silu = map(resolve, ("gelu", "silu"))
for dtype, rows, columns in itertools.product(
    (torch.float32, torch.bfloat16, torch.float16), (1, 3), (1, 7, 255, 256, 257, 1000)
):
    case = str(dtype), rows, columns
    for dim, channels in ((1, columns), (0, rows)):
        print(*case, "bias_act", dim, flush=True)
        z = make(rows, columns)
        cpu.bias_act(z, make(channels), gelu, residual=make(rows, columns), dim=dim, encode=True, out=z)
        print(*case, "gradient", dim, flush=True)
        cpu.gradient(make(rows, columns), z, gelu, (), GradientRequest("output", True, True), dim=dim)
    print(*case, "gradient from the input", flush=True)
    cpu.gradient(make(rows, columns), make(rows, columns), gelu, (), GradientRequest("input", False, False), dim=1)
    print(*case, "gates", flush=True)
    z = make(rows, columns)
    cpu.gate(z, make(rows, columns), silu, (), z)
    cpu.gate_gradient(make(rows, columns), z, make(rows, columns), silu, (), ())
    if dtype is torch.float32:
        print(*case, "encode", flush=True)
        y = make(rows, columns)
        loops.encode(loops.Kernel(dtype, fold=gelu.fold), make(rows, columns), y, y)
"""


def test_nothing_behind_the_end_is_read_or_written() -> None:
    # Blocks are padded, and those of a bias are not: a weight may be the last thing in a mapped file.
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout.splitlines()[-1:], done.stderr)
    assert len(done.stdout.splitlines()) > 150


# --- the branch bit ---------------------------------------------------------------------------------------------------


def test_the_callers_default_dtype_and_device_do_not_matter() -> None:
    """What C writes to must be float32 and on the CPU, or it writes behind its end."""
    layers: list[tuple[Any, Tensor]] = [
        (fl.FusedDenseAct(16, 32, "gelu"), torch.randn(64, 16)),
        (fl.FusedDenseAct(16, 32, "mish").bfloat16(), torch.randn(64, 16).bfloat16()),
        (fl.FusedConvAct2d(16, 8, 3, activation="hardswish"), torch.randn(4, 16, 9, 9)),
        (fl.FusedGatedMLP(16, 32, activation="silu"), torch.randn(64, 16)),
        (fl.FusedMLP(16, 32, dropout=0.5), torch.randn(64, 16)),
    ]

    def steps() -> list[tuple[Tensor, ...]]:
        found = []
        for layer, x in layers:
            torch.manual_seed(1)
            x = x.detach().requires_grad_()
            y = layer(x)
            found.append(torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y) + y.detach()))
        return found

    def others() -> list[list[tuple[Tensor, ...]]]:  # first, so that tables are made here
        with torch.device("meta"):
            found = [steps()]
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                found.append(steps())
            finally:
                torch.set_default_dtype(torch.float32)
        return found

    for cached in (elementwise.forward_kernel, elementwise.gradient_kernel, elementwise.gate_kernel):
        cached.cache_clear()
    for found, expected in itertools.product(others(), [steps()]):
        for ours, theirs in zip(found, expected, strict=True):
            assert all(a.is_cpu and a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", [cpu, reference], ids=["loops", "reference"])
@pytest.mark.parametrize("name", [*map(str, FOLDED), "users"])
def test_a_marked_output_is_never_subnormal(name: str, backend: Any) -> None:
    # Matmuls of subnormal numbers take up to 20 times as long. float16 has too few others. Zeros carry the branch.
    sizes = torch.logspace(-44.8, 38, 20_001, dtype=torch.float64).float()
    numbers = torch.cat([torch.linspace(-200, 200, 200_001), sizes, -sizes])
    for dtype in DTYPES:
        activation = _activation(name, dtype) if name in ACTIVATIONS else resolve(name)
        fold = activation.fold
        assert fold is not None
        z = numbers.to(dtype)
        y = backend.bias_act(z, None, activation, dim=-1, encode=True, out=None)
        finite = y.isfinite()
        marked = branch_bit.decode(y.float(), dtype) & finite
        assert torch.equal(marked, fold.marks(z.float()) & finite)
        sizes = y[marked].double().abs()
        assert len(sizes) > 1000
        assert not bool((sizes[sizes > 0] < branch_bit.LEAST[dtype]).any())
        assert bool((sizes == 0).any())


# --- under autograd ---------------------------------------------------------------------------------------------------


def test_what_a_call_reads_lives_until_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter runs other threads meanwhile, whose calls may push this one's description out of the cache.
    made: list[Any] = []
    alive: list[bool] = []
    constructor = loops._Layout

    def make(*numbers: int) -> Any:
        layout = constructor(*numbers)
        made.append(weakref.ref(layout))
        return layout

    def forward(*addresses: Any) -> int:
        loops._matrix.cache_clear()
        alive.append(made[-1]() is not None)
        return 0

    loops._matrix.cache_clear()
    monkeypatch.setattr(loops, "_Layout", make)
    monkeypatch.setattr(loops, "functions", lambda: {"forward": forward})
    _forward(torch.randn(1000), resolve("gelu"))
    assert alive == [True]
