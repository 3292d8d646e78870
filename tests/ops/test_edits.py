"""Edits in place of an output that is saved: the error says what to do, and what it says to do helps."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

TORCHS = "one of the variables needed for gradient computation has been modified by an inplace operation"


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


X, W, B = _leaf(64, 32), _leaf(48, 32), _leaf(48)
IMAGE, KERNEL = _leaf(2, 4, 16, 16), _leaf(4, 4, 3, 3)
SLOPED = nn.LeakyReLU(0.2)


#: Name -> a call that takes ``save``, and how the error begins if that is "output".
CALLS: dict[str, tuple[Callable[[str], Tensor], str]] = {
    "dense": (lambda save: fl.dense_bias_act(X, W, B, "gelu", save=save), "dense_bias_act: its gelu output"),
    "dense, three dimensions": (
        lambda save: fl.dense_bias_act(X.view(4, 16, 32), W, B, SLOPED, save=save),
        "dense_bias_act: its leaky_relu(negative_slope=0.2) output",
    ),
    "conv": (lambda save: fl.conv_bias_act(IMAGE, KERNEL, None, "silu", save=save), "conv_bias_act: its silu output"),
    "bias_act": (lambda save: fl.bias_act(X, None, "mish", save=save), "bias_act: its mish output"),
}


def _gradients(call: Callable[[], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    found = torch.autograd.grad(call().square().sum(), [X, IMAGE], allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("name", CALLS)
def test_the_error_says_what_to_do(name: str) -> None:
    call, begins = CALLS[name]
    y = call("output")
    y.mul_(2)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    said = str(caught.value)
    assert said.startswith(f"{begins} was edited in place after the forward pass, and backward reads it. ")
    assert all(part in said for part in ('save="input"', "Edit a copy", "fl.unfuse", TORCHS)), said
    assert isinstance(caught.value.__cause__, RuntimeError) and str(caught.value.__cause__) in said

    for edited, unedited in (
        (lambda: call("input").mul_(2), lambda: 2 * call("input")),
        (lambda: call("output").clone().mul_(2), lambda: 2 * call("output")),
    ):
        torch.testing.assert_close(_gradients(edited), _gradients(unedited))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _store() -> saved_tensors_hooks:
    """Hooks that give autograd numbers."""
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        held.append(tensor.detach())
        return len(held) - 1

    return saved_tensors_hooks(pack, lambda key: held[key].clone())


HOOKS: dict[str, Callable[[], Any]] = {
    "keep": lambda: saved_tensors_hooks(_itself, _itself),
    "keep on CPUs": save_on_cpu,
    "keep, and copy back": lambda: saved_tensors_hooks(_itself, Tensor.clone),
    "keep in a store, and copy back": _store,
    "copy": lambda: saved_tensors_hooks(Tensor.clone, _itself),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", CALLS)
def test_under_hooks_an_edit_is_an_error_too(name: str, hooks: str) -> None:
    """Autograd looks at no version of what hooks bring back."""
    call, begins = CALLS[name]
    expected = _gradients(lambda: call("input"))
    with HOOKS[hooks]():
        found = _gradients(lambda: call("output"))
        y = call("output")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    y.mul_(2)
    with pytest.raises(RuntimeError, match=rf"^{re.escape(begins)} was edited in place after the forward pass, and .*"):
        y.square().sum().backward()


@pytest.mark.parametrize("edited", ["input", "weight"])
@pytest.mark.parametrize("save", ["output", "input", "recompute"])
def test_of_other_edits_pytorch_says_what_it_says(edited: str, save: str) -> None:
    """Also where the input is what a node of the same kind has saved."""
    x, w = fl.bias_act(X, None, "gelu"), W.detach().clone().requires_grad_()
    y = fl.dense_bias_act(x, w, B, "gelu", save=save)
    with torch.no_grad():
        (x if edited == "input" else w).mul_(2)
    with pytest.raises(RuntimeError, match=f"^{TORCHS}"):
        y.sum().backward()


def _edited(x: Tensor) -> Tensor:
    return fl.dense_bias_act(x, W, B, "gelu").mul_(2).sin()


@pytest.mark.parametrize("under", ["checkpoint", "memory report"])
def test_under_saved_tensor_hooks(under: str) -> None:
    """Where autograd does not look at versions, but nodes and hooks of this package do."""
    results = []
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):  # it would end before the edit
        if under == "checkpoint":
            results.append(checkpoint(_edited, X, use_reentrant=False))
        else:
            saved_bytes(lambda: results.append(_edited(X)))
        with pytest.raises(RuntimeError, match=f"^dense_bias_act: its gelu output was edited .*{TORCHS}"):
            results[0].sum().backward()


def test_a_checkpoint_that_recomputes_something_else() -> None:
    runs = 0

    def changes(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return fl.dense_bias_act(x, W, B, "gelu") if runs == 1 else F.linear(x, W, B).sigmoid()

    y = checkpoint(changes, X, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"^dense_bias_act: its gelu .* checkpoint that computes something else"):
        y.sum().backward()


@pytest.mark.parametrize("edits", [False, True])
def test_hooks_that_copy_what_a_checkpoint_runs_with_again(edits: bool) -> None:
    """Copies begin at version 0; what they are copies of may have been written to."""

    def step(silu: Callable[..., Tensor]) -> Tensor:
        x = X.detach().clone().requires_grad_()
        z = F.linear(x, W, B).add_(1)

        def run(z: Tensor) -> Tensor:
            y = silu(z, inplace=True)
            return (y.add_(1) if edits else y).sin()

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = checkpoint(run, z, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(step(fl.silu), step(F.silu), rtol=1e-3, atol=1e-3)
