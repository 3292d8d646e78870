"""Functions as lists of pointwise operations: what is tidied away, what is refused, and that nothing is lost."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from settings import ROOT
from torch import Tensor

from fusedlayers.activations.tracing import NotPointwise, trace

Function = Callable[[Tensor], Tensor]


# --- what is tidied ---------------------------------------------------------------------------------------------------


def test_constants_are_folded_into_their_users() -> None:
    def function(z: Tensor) -> Tensor:
        return z * torch.full_like(z, 3.0) + torch.ones_like(z) * 1 - torch.zeros_like(z)

    pointwise = trace(function)
    assert all(operation.op in ("mul", "add", "sub") for operation in pointwise.operations)
    arguments = [a for operation in pointwise.operations for a in operation.arguments]
    assert [a for a in arguments if not isinstance(a, str)] == [3.0, 1, 0]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda z: z, []),
        (lambda z: (z.clone() * 1).to(torch.float32, copy=True), []),
        (lambda z: 1 * z, []),
        (torch.ones_like, []),
        (lambda z: torch.exp(z) / (1 + torch.exp(z)), ["exp", "add", "div"]),
        (lambda z: (z + 0.0) * (z + -0.0), ["add", "add", "mul"]),
        (lambda z: (torch.tanh(z) + torch.erf(z), torch.relu(z))[1], ["le", "where"]),
    ],
    ids=["identity", "copies", "times 1", "constant", "repeated", "zeros", "dead"],
)
def test_nothing_needless_is_left(function: Function, found: list[str]) -> None:
    assert [operation.op for operation in trace(function).operations] == found


def test_names_and_types_are_kept() -> None:
    pointwise = trace(lambda y: torch.where(y.view(torch.int32) < 0, y, torch.exp(y)), ["y"])
    assert pointwise.inputs == ("y",) and pointwise.outputs == (pointwise.operations[-1].name,)
    assert [(o.op, o.dtype) for o in pointwise.operations] == [
        ("bitcast", torch.int32),
        ("lt", torch.bool),
        ("exp", torch.float32),
        ("where", torch.float32),
    ]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_the_trace_does_not_depend_on_what_the_caller_has_switched_on(context: Callable[[], object]) -> None:
    expected = trace(F.silu)
    with context():  # type: ignore[attr-defined]
        assert trace(F.silu) == expected
    z = torch.randn(3)
    assert torch.vmap(lambda z: z if trace(F.silu) == expected else z + 1)(z).equal(z)


# --- what is refused --------------------------------------------------------------------------------------------------

OUTSIDE = torch.randn(5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda z: z[0], r"select is not pointwise"),
        (lambda z: z * OUTSIDE, "reads a tensor that could not be found"),
        (lambda z: z * torch.tensor(0.5), "reads a tensor from outside"),
        (lambda z: (z, 1), "does not return a tensor"),
        (lambda z: None, "does not return a tensor"),
    ],
    ids=["row", "outside", "inside", "two", "none"],
)
def test_what_is_not_pointwise_is_refused(function: Function, message: str) -> None:
    with pytest.raises(NotPointwise, match=message):
        trace(function)


def test_in_place_operations_that_torch_cannot_trace_are_named() -> None:
    with pytest.raises(NotPointwise, match="torch cannot trace selu_, which works in place; use inplace=False"):
        trace(lambda z: F.selu(z * 1, inplace=True))


def test_tracing_again_and_again_in_a_fresh_process() -> None:
    # Without a GPU torch 2.11 frees what the first trace made together with the thread that traced; then it crashes.
    # (conftest.py hides that from the other tests.)
    script = """
import torch, fusedlayers as fl
b = torch.tensor(0.5, requires_grad=True)
x = torch.randn(64, 64, requires_grad=True)
for f in (torch.tanh, torch.sin, torch.atan):
    fl.bias_act(x, None, lambda z: f(b * z)).sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
