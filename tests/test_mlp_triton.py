"""MLP blocks on Triton's kernels: on a GPU where there is one, else in the interpreter."""

from typing import Any

import pytest
import reference
import torch
from conftest import Switch
from gpu import DEVICE, INTERPRETER_WARNINGS
from pairs import covering
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.memory import saved_bytes
from fusedlayers.ops import mlp_forward

pytest.importorskip("triton")
from fusedlayers.backends import triton

pytestmark = [
    pytest.mark.filterwarnings(*INTERPRETER_WARNINGS),
    pytest.mark.usefixtures("interpreter_converts", "on_triton_alone", "seeded"),
]

ROWS, IN, HIDDEN, OUT = 37, 24, 40, 16
#: By function, how many first products it has, and how what is hidden is kept.
CASES = [
    *((fl.mlp, reference.mlp, 1, save) for save in ("output", "input", "recompute")),
    *((fl.gated_mlp, reference.gated_mlp, 2, save) for save in ("input", "recompute")),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[3]}")


@pytest.fixture
def on_triton_alone(on_triton: Switch) -> None:
    on_triton(True)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks are cut into chunks too."""
    torch.manual_seed(0)
    monkeypatch.setattr(mlp_forward, "LEAST_ROWS", 16)
    monkeypatch.setattr(triton, "CHUNK_BYTES", 0)


def leaves(first: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    shapes = [(ROWS, IN), *[(HIDDEN, IN), (HIDDEN,)] * first, (OUT, HIDDEN), (OUT,)]
    scales = [1.0, *[IN**-0.5, 1.0] * first, HIDDEN**-0.5, 1.0]
    made = zip(shapes, scales, strict=True)
    return [(torch.randn(shape) * scale).to(DEVICE, dtype).requires_grad_() for shape, scale in made]


def check(case: Any, activation: str, tensors: list[Tensor], dy: Tensor) -> None:
    function, eager, _, save = case
    asked = [t for t in tensors if t.requires_grad]
    y = function(*tensors, activation, save=save)
    found = torch.autograd.grad(y, asked, dy)
    plain = resolve(activation).plain
    torchs = eager(*tensors, plain)
    torchs_gradients = torch.autograd.grad(torchs, asked, dy)
    exact_tensors = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = eager(*exact_tensors, plain)
    exact_gradients = torch.autograd.grad(exact, [t for t in exact_tensors if t.requires_grad], dy.double())
    reference.assert_as_good_as_torch(y.detach(), torchs.detach(), exact.detach())
    told_by_output = save == "output" and resolve(activation).is_folded
    for ours, theirs, true in zip(found, torchs_gradients, exact_gradients, strict=True):
        if told_by_output:  # within what the branch and the output's rounding leave
            limit = {4: 2e-4, 2: 5e-2}[ours.dtype.itemsize]
            assert float((ours.double() - true).norm()) <= limit * float(true.norm())
        else:
            reference.assert_as_good_as_torch(ours, theirs, true)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("gelu", torch.float32), ("gelu", torch.bfloat16), ("tanh", torch.float16), ("relu", torch.bfloat16)],
    ids=str,
)
@every_case
def test_gradients(case: Any, activation: str, dtype: torch.dtype) -> None:
    tensors = leaves(case[2], dtype)
    check(case, activation, tensors, torch.randn(ROWS, OUT).to(DEVICE, dtype))


@every_case
def test_what_is_not_asked_for(case: Any) -> None:
    tensors = leaves(case[2])
    dy = torch.randn(ROWS, OUT).to(DEVICE)
    for asked in covering(*[(False, True)] * len(tensors), where=lambda *each: any(each)):
        for t, is_asked in zip(tensors, asked, strict=True):
            t.requires_grad_(is_asked)
        check(case, "tanh", tensors, dy)


@every_case
def test_twice_and_with_the_graph_kept(case: Any) -> None:
    function, _, first, save = case
    tensors = leaves(first)
    y = function(*tensors, "silu", save=save)
    dy = torch.randn_like(y)
    once = torch.autograd.grad(y, tensors, dy, retain_graph=True)
    again = torch.autograd.grad(y, tensors, dy)
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)


@every_case
def test_trainable_activations(case: Any) -> None:
    function, eager, first, save = case
    tensors = leaves(first)
    act = nn.PReLU(HIDDEN).to(DEVICE)
    if save == "output":
        save = "auto"
    dy = torch.randn(ROWS, OUT).to(DEVICE)
    asked = [*tensors, act.weight]
    found = torch.autograd.grad(function(*tensors, act, save=save), asked, dy)
    for ours, theirs in zip(found, torch.autograd.grad(eager(*tensors, act), asked, dy), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@every_case
def test_bytes(case: Any) -> None:
    function, _, first, save = case
    tensors = leaves(first)
    buffers = 0 if save == "recompute" else first
    kept = saved_bytes(lambda: function(*tensors, "gelu", save=save), exclude=tensors)
    assert kept == buffers * ROWS * HIDDEN * 4


@every_case
def test_without_gradients(case: Any) -> None:
    function, eager, first, save = case
    tensors = leaves(first)
    with torch.no_grad():
        y = function(*tensors, "gelu", save=save)
        torch.testing.assert_close(y, eager(*tensors, resolve("gelu").plain), atol=1e-5, rtol=1e-5)
