"""Every Triton kernel in the interpreter, its programs in random orders: no races, nothing out of bounds, nothing that
nobody has written, and the same bits in each order."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu import INTERPRETED, INTERPRETER_WARNINGS
from torch import Tensor, nn

pytest.importorskip("triton")
import triton
import triton.language as tl
from interpreting import examined
from pairs import covering

from fusedlayers.activations import resolve
from fusedlayers.calls.tracers import with_operands
from fusedlayers.kernels import GradientRequest
from fusedlayers.kernels import triton as backend
from fusedlayers.kernels.triton import tiles

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="a GPU runs programs in an order of its own, and says no addresses"),
    pytest.mark.filterwarnings(*INTERPRETER_WARNINGS),
    pytest.mark.usefixtures("interpreter_converts"),
]

DTYPES = (torch.float32, torch.bfloat16)
Results = Sequence[Tensor | None]


class Swish(nn.Module):
    """Reads one tensor of one element, and one of one per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.beta, self.scale = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.linspace(1, 2, channels))

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * z * torch.sigmoid(self.beta * z)


def _normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _bias_act(dtype: torch.dtype) -> Results:
    z, b, residual = (_normal(*s, dtype=dtype, seed=i) for i, s in enumerate(((37, 53), (53,), (37, 53))))
    gelu = resolve("gelu")
    y = backend.bias_act(z, b, gelu, residual=residual, dim=-1, encode=True, out=None)
    images, channels = _normal(3, 11, 60, dtype=dtype), _normal(11, dtype=dtype)
    of_rows = backend.bias_act(images, channels, gelu, dim=1, encode=False, out=images)
    sliced = _normal(37, 106, dtype=dtype)[:, ::2]
    return y, of_rows, backend.bias_act(sliced, b, gelu, dim=-1, encode=False, out=None)


def _operands(dtype: torch.dtype) -> Results:
    found = with_operands(resolve(Swish(53).to(dtype)), (37, 53), dtype)
    z, dy = _normal(37, 53, dtype=dtype), _normal(37, 53, dtype=dtype, seed=1)
    request = GradientRequest("input", False, True, (True, True))
    y = backend.bias_act(z, None, found.activation, found.operands, dim=-1, encode=False, out=None)
    return y, *backend.gradient(dy, z, found.activation, found.operands, request, dim=-1)


def _gradient(dtype: torch.dtype) -> Results:
    results: list[Tensor | None] = []
    for shape, dim in (((37, 53), -1), ((3, 11, 60), 1)):
        for overwrite in (False, True):
            dy, y = _normal(*shape, dtype=dtype), _normal(*shape, dtype=dtype, seed=1)
            request = GradientRequest("output", overwrite, True)
            results += backend.gradient(dy, y, resolve("gelu"), (), request, dim=dim)
    return results


def _gate(dtype: torch.dtype) -> Results:
    z, up, dy = (_normal(37, 53, dtype=dtype, seed=i) for i in range(3))
    hidden = backend.gate(z, up, resolve("silu"), (), None)
    backend.gate_gradient(dy, z, up, resolve("silu"), (), ())
    return hidden, z, up, dy


SPLITS: dict[str, dict[str, Any]] = {"many programs": {"TILE": 64, "PROGRAMS": 7}, "one program": {"PROGRAMS": 1}}
KERNELS = {"bias and activation": _bias_act, "operands": _operands, "gradient": _gradient, "gate": _gate}


def _the_same_in_each_order(run: Callable[[], Results]) -> None:
    expected = run()
    for seed in range(2):
        with examined(seed) as found:
            results = run()
        assert found == [] and found.launches > 0
        for got, wanted in zip(results, expected, strict=True):
            if wanted is not None:
                assert got is not None and torch.equal(got, wanted)  # no NaN equals another


@pytest.mark.parametrize(("kernel", "dtype", "split"), covering(KERNELS, DTYPES, SPLITS), ids=str)
def test_elementwise(kernel: str, dtype: torch.dtype, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SPLITS[split].items():
        monkeypatch.setattr(tiles, name, value)
    _the_same_in_each_order(lambda: KERNELS[kernel](dtype))


# --- what is examined is found ----------------------------------------------------------------------------------------


@triton.jit
def _copy(x, y, size, BLOCK: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    mask = i < (size if MASKED else size + BLOCK)
    tl.store(y + i, tl.load(x + i, mask=mask), mask=mask)


@triton.jit
def _shift(x, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i + 1, mask=i + 1 < size), mask=i < size)


@triton.jit
def _same_place(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK) // 2, tl.arange(0, BLOCK).to(tl.float32))


def test_what_is_wrong_is_found() -> None:
    def findings(run: Callable[[], Any]) -> str:
        with examined(0) as found:
            run()
        return "; ".join(found)

    x, y = torch.randn(64), torch.zeros(64)
    assert findings(lambda: _copy[(4,)](x, y, 64, BLOCK=16, STEP=16, MASKED=True)) == "" and torch.equal(x, y)
    overlapping = findings(lambda: _copy[(4,)](x, y, 64, BLOCK=16, STEP=8, MASKED=True))
    assert overlapping == "_copy: 24 places are written by several programs"
    room = torch.zeros(128)  # where the interpreter may write
    outside = findings(lambda: _copy[(1,)](x, room[:60], 60, BLOCK=64, STEP=64, MASKED=False))
    assert outside == "_copy: 4 places are written out of bounds"
    # Each program reads the first number of the next one.
    assert "3 places are read by another program" in findings(lambda: _shift[(4,)](x, 64, BLOCK=16))
    assert findings(lambda: _same_place[(1,)](x, BLOCK=16)) == "_same_place: one store writes a place twice"
    with examined(0):
        assert torch.empty(100).isnan().all()
        assert not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_orders_differ() -> None:
    @triton.jit
    def last(x):
        tl.store(x, tl.program_id(0))

    winners = set()
    for seed in range(8):
        x = torch.zeros(1, dtype=torch.int32)
        with examined(seed):
            last[(4,)](x)
        winners.add(int(x))
    assert len(winners) > 1
