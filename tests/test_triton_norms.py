"""Layer, RMS and group norm on Triton, beside the reference; and how they are launched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import DEVICE, INTERPRETED
from pairs import covering
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.backends import torch as reference
from fusedlayers.backends.norms import GroupNorm, Kept, RowNorm
from fusedlayers.utils.bounded_cache import BoundedCache

triton = pytest.importorskip("fusedlayers.backends.triton")
row_norm = pytest.importorskip("fusedlayers.backends.triton.row_norm")
group_norm = pytest.importorskip("fusedlayers.backends.triton.group_norm")
fallback = pytest.importorskip("fusedlayers.backends.triton.fallback")
Launch = pytest.importorskip("fusedlayers.backends.triton.launch").Launch
OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources

pytestmark = pytest.mark.usefixtures("interpreter_converts")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {
    "layer": {"is_centred": True},
    "rms": {"is_centred": False},
    "llama": {"is_centred": False, "rounds_first": True},
    "gemma": {"is_centred": False, "offset": 1.0},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _case(kind: str, dtype: torch.dtype, rows: int, columns: int) -> tuple[RowNorm, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    norm = RowNorm("norm", (columns,), 1e-6, **KINDS[kind])  # type: ignore[arg-type]
    w = (torch.rand(columns, generator=generator) + 0.5 - norm.offset).to(dtype).to(DEVICE)
    return norm, [
        randn(rows, columns) + 0.5,
        w,
        randn(columns) * 0.3 if kind == "layer" else None,
        randn(rows, columns),
    ]


def _close(a: Tensor, b: Tensor, dtype: torch.dtype, scale: float = 4, rest: float = 0.0) -> None:
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(
        a.float(), b.float(), rtol=scale * unit, atol=scale * unit * float(b.float().abs().max()) + rest
    )


def _rest(norm: RowNorm, dy: Tensor, w: Tensor, inverse_std: Tensor) -> float:
    """What rounding leaves of g - mean(g) - xhat mean(g xhat), times inverse_std, where all of it cancels, as in rows
    of one number. On a GPU the terms need not be rounded alike: the compiler makes one operation of a product and a sum
    (FMA), and xhat is a quotient within two units, whose square is within four."""
    if INTERPRETED:
        return 0.0
    g = dy.float() * norm.gain(w, torch.float32)
    return 4 * torch.finfo(torch.float32).eps * float(g.abs().max() * inverse_std.float().max())


@every_kind
@every_dtype
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 48), (7, 256), (600, 33)])
@pytest.mark.parametrize("keeps", [False, True])
def test_it_computes_what_the_reference_does(
    kind: str, dtype: torch.dtype, rows: int, columns: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_norm, "PROGRAMS", 3)  # several rows each, and the last program has fewer
    rows = min(rows, 17) if INTERPRETED else rows
    norm, (x, w, b, dy) = _case(kind, dtype, rows, columns)
    y, std, _ = triton.row_norm(norm, x, w, b)
    expected, of_rows, _ = reference.row_norm(norm, x, w, b)
    _close(y, expected, dtype)
    _close(std, of_rows, torch.float32, 64)
    kept = None
    if keeps and columns > 1:
        own = torch.tensor([0, columns - 1], device=DEVICE)
        kept = Kept(own, torch.randn(rows, 2, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE))
    arguments = (norm, dy, expected, w, b, of_rows, kept)
    truth = reference.row_norm_gradient(*arguments, needs_x=True, overwrite=False)
    for overwrite in (False, True):
        given = expected.clone()
        version = given._version
        found = triton.row_norm_gradient(norm, dy, given, w, b, of_rows, kept, needs_x=True, overwrite=overwrite)
        assert (found[0] is given) is overwrite and (given._version > version) is overwrite
        for a, r, there in zip(found, truth, (x, w, b), strict=True):
            assert (a is None) is (there is None)
            if a is None:
                continue
            assert a.dtype is dtype
            rest = _rest(norm, dy, w, of_rows) if a is found[0] else 0.0
            _close(a, r, a.dtype, 8 if a.dtype.itemsize == 2 else 64, rest)
    without = triton.row_norm_gradient(*arguments, needs_x=False, overwrite=False)
    assert without[0] is None and (w is None or torch.equal(without[1], found[1]))


def test_wide_rows_are_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_norm, "WIDEST", 32)
    for kind in ("rms", "layer"):
        norm, (x, w, b, dy) = _case(kind, torch.float32, 4, 48)
        y, std, _ = triton.row_norm(norm, x, w, b)
        expected, of_rows, _ = reference.row_norm(norm, x, w, b)
        assert torch.equal(y, expected) and torch.equal(std, of_rows)
        found = triton.row_norm_gradient(norm, dy, y, w, b, std, None, needs_x=True, overwrite=False)
        truth = reference.row_norm_gradient(norm, dy, y, w, b, std, None, needs_x=True, overwrite=False)
        assert all(torch.equal(a, r) for a, r in zip(found, truth, strict=True))


@pytest.mark.skipif(torch.version.hip is not None, reason="warps are wider")
@pytest.mark.parametrize(("columns", "width", "warps"), [(1, 1, 1), (768, 1024, 4), (4096, 4096, 16), (8192, 8192, 32)])
def test_rows_fit_registers(columns: int, width: int, warps: int) -> None:
    assert row_norm.options(columns) == {"COLUMNS": width, "num_warps": warps, "enable_fp_fusion": True}


def test_without_weights() -> None:
    norm, (x, _, _, dy) = _case("layer", torch.float32, 6, 40)
    y, std, _ = reference.row_norm(norm, x, None, None)
    truth = reference.row_norm_gradient(norm, dy, y, None, None, std, None, needs_x=True, overwrite=False)
    found = triton.row_norm_gradient(norm, dy, y, None, None, std, None, needs_x=True, overwrite=False)
    _close(found[0], truth[0], torch.float32, 64)
    assert found[1:] == (None, None)


# --- group norm -------------------------------------------------------------------------------------------------------

GROUPED = {
    "images": ((2, 12, 5, 7), torch.contiguous_format),
    "channels last": ((2, 12, 5, 7), torch.channels_last),
    "more channels than a tile has": ((2, 144, 3, 3), torch.channels_last),
    "vectors": ((3, 8), torch.contiguous_format),
    "pieces": ((1, 4, 3000), torch.contiguous_format),
}


@pytest.mark.parametrize(("name", "dtype", "keeps"), covering(GROUPED, DTYPES, (False, True)), ids=str)
def test_group_norm_computes_what_the_reference_does(
    name: str, dtype: torch.dtype, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_norm, "PIECE", 1024)
    shape, layout = GROUPED[name]
    generator = torch.Generator().manual_seed(0)
    randn = lambda *size: torch.randn(size, generator=generator).to(dtype).to(DEVICE)
    laid_out = lambda t: torch.empty(t.shape, dtype=dtype, device=DEVICE, memory_format=layout).copy_(t)
    x, dy = laid_out(randn(*shape) + 0.5), laid_out(randn(*shape))
    w, b = (torch.rand(shape[1], generator=generator) + 0.5).to(dtype).to(DEVICE), randn(shape[1]) * 0.3
    norm = GroupNorm(4, 1e-5)
    # On a GPU torch's own kernels read contiguous tensors only; layers give ours such.
    as_torch_reads = (lambda t: t) if DEVICE.type == "cpu" else Tensor.contiguous
    y, _, std = torch.native_group_norm(as_torch_reads(x), w, b, *norm.extents(x), 4, 1e-5)
    y = laid_out(y)
    kept = Kept(torch.tensor([1, 3], device=DEVICE), randn(shape[0], 2, *shape[2:])) if keeps else None
    for own_w, own_b in ((w, b), (w, None), (None, None)):
        arguments = (own_w, own_b, std, kept)
        truth = reference.group_norm_gradient(
            norm, as_torch_reads(dy), as_torch_reads(y), *arguments, needs_x=True, overwrite=False
        )
        for overwrite in (False, True):
            given = y.clone()
            version = given._version
            found = triton.group_norm_gradient(norm, dy, given, *arguments, needs_x=True, overwrite=overwrite)
            assert (found[0] is given) is overwrite and (given._version > version) is overwrite
            assert found[0].stride() == y.stride() and found[0].dtype is dtype
            for a, r in zip(found, truth, strict=True):
                if a is not None:  # sums of parameters that are not there
                    _close(a, r, dtype, 16 if dtype.itemsize == 2 else 128)
        only = triton.group_norm_gradient(norm, dy, y, *arguments, needs_x=False, overwrite=False)
        assert only[0] is None and (own_w is None or torch.equal(only[1], found[1]))


def test_group_norm_that_cannot_be_launched_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        arg_names = ()

        def __getitem__(self, grid: object) -> Any:
            raise OutOfResources(9, 1, "registers")

    monkeypatch.setattr(group_norm, "group_sums_kernel", Broken())
    monkeypatch.setattr(fallback, "_failed", set())
    norm, x, w = GroupNorm(2, 1e-5), torch.randn(3, 4, 5, device=DEVICE), torch.rand(4, device=DEVICE) + 0.5
    y, _, std = torch.native_group_norm(x, w, w, *norm.extents(x), 2, 1e-5)
    truth = reference.group_norm_gradient(norm, x, y, w, w, std, None, needs_x=True, overwrite=False)
    for _ in range(2):
        found = triton.group_norm_gradient(norm, x, y.clone(), w, w, std, None, needs_x=True, overwrite=True)
        assert all(torch.equal(a, r) for a, r in zip(found, truth, strict=True))
    assert fallback.has_failed("group_norm_gradient", (norm, x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_group_norm_and_its_activation(
    layout: torch.memory_format, on_triton: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_triton(True)
    calls: list[int] = []
    whole = group_norm.group_sums_kernel
    monkeypatch.setattr(
        group_norm, "Launch", lambda kernel, *rest: (calls.append(kernel is whole), Launch(kernel, *rest))[1]
    )
    monkeypatch.setattr(group_norm, "_launches", BoundedCache(8))
    torch.manual_seed(0)
    x = torch.randn(2, 16, 6, 5, device=DEVICE).contiguous(memory_format=layout).requires_grad_()
    ours = fl.FusedGroupNormAct(4, 16, "silu", save="output", device=DEVICE)
    theirs = nn.Sequential(nn.GroupNorm(4, 16, device=DEVICE), nn.SiLU())
    dy = torch.randn_like(x)
    found, truth = (torch.autograd.grad(net(x), [x, *net.parameters()], dy) for net in (ours, theirs))
    for a, r in zip(found, truth, strict=True):
        torch.testing.assert_close(a, r, rtol=1e-5, atol=1e-5)
    assert calls == [True, False, False]
