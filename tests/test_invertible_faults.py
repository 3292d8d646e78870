"""The faults of invtorch: each a naive implementation has, and this one has not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from inverting import EXACT, Scale, error, linears, loss_of, naive, net, plain, randn, step, worst
from torch import Tensor, nn

import fusedlayers as fl


def scale_of(x: Tensor) -> Tensor:
    return 2 * x + 1


def back(y: Tensor) -> Tensor:
    return (y - 1) / 2


def ours(function: Any, inverse: Any, x: Tensor) -> Any:
    return fl.invertible_checkpoint(function, x, inverse=inverse)


def is_right(call: Any, use: Any, *, x: Tensor | None = None) -> bool:
    """Whether ``use(f, x)`` has the value and the gradient that it has with plain functions in f's place."""
    x = randn(4) if x is None else x
    wanted = step(lambda x: use(lambda function, inverse, z: function(z), 1 * x), (x,))
    try:
        found = step(lambda x: use(call, 1 * x), (x,))
    except RuntimeError:
        return False
    return worst(found, wanted) <= EXACT


USES: dict[str, Any] = {
    "x + f(x)": lambda f, x: f(scale_of, back, x) + x,
    "f(x) * x": lambda f, x: f(scale_of, back, x) * x,
    "x + f(x) and x between f and f": lambda f, x: x * f(scale_of, back, (y := f(scale_of, back, x))) + y.sin() * x,
    "relu before": lambda f, x: f(scale_of, back, x.relu()),
    "tanh before": lambda f, x: f(scale_of, back, x.tanh()),
    "exp before": lambda f, x: f(scale_of, back, x.exp()),
    "square before": lambda f, x: f(scale_of, back, (1 * x).square()) * x,
    "seed": lambda f, x: f(
        lambda x: x * torch.rand_like(x).sin().add(1), lambda y: y / torch.rand_like(y).sin().add(1), x
    ),
}


@pytest.mark.parametrize("name", USES)
def test_faults_of_reading_inputs_and_of_seeds(name: str) -> None:
    assert is_right(ours, USES[name])
    if name != "square before":  # whose input the naive one leaves alone
        assert not is_right(naive, USES[name])


def test_fault_reading_an_input_after_the_call() -> None:
    for call, is_whole in ((ours, True), (naive, False)):
        x = 1 * randn(4).requires_grad_()
        call(scale_of, back, x)
        assert torch.equal(x, randn(4)) == is_whole
    x = randn(4).requires_grad_()
    chain = fl.InvertibleSequential(Scale(), Scale())
    y = chain(z := 1 * x)
    loss_of(y + z).backward()
    assert x.grad is not None and worst([x.grad], torch.autograd.grad(loss_of(plain(chain)(x) + x), x)) <= EXACT


def test_fault_gradient_of_a_batch_norm_s_input() -> None:
    """Naive is to take the statistics, which the inverse needs, for constants."""
    x = 3 + 2 * randn(8, 3)
    mean, std = x.mean(0), x.std(0, correction=0)
    norm = lambda x: (x - x.mean(0)) / x.std(0, correction=0)
    constant = lambda x: (x - mean) / std
    wanted = step(norm, (x,))
    assert worst(step(lambda x: naive(constant, lambda y: y * std + mean, 1 * x), (x,)), wanted) > 0.1
    module = fl.InvertibleBatchNorm1d(3, eps=1e-30, affine=False).double()
    assert worst(step(module, (x,)), wanted) <= EXACT


def test_fault_editing_an_output_in_place() -> None:
    """It raises, of the last output and of one that has been let go, also where it is edited without gradients."""

    def edited(call: Any, place: int, no_grad: bool) -> list[Tensor | None]:
        def function(x: Tensor) -> Tensor:
            y = call(scale_of, back, 1 * x)
            if place == 0:
                z = call(torch.exp, torch.log, y)
                out = y
            else:
                out = z = call(torch.exp, torch.log, y)
            with torch.set_grad_enabled(not no_grad):
                out.mul_(3)
            return z

        return step(function, (randn(4),))

    for no_grad in (False, True):
        with pytest.raises(RuntimeError, match="modified inplace"):  # what torch says of what a Function returned
            edited(ours, 1, no_grad)
        with pytest.raises(RuntimeError, match="modified inplace") if not no_grad else nullcontext():
            # Of an output that another call tells, edits do not matter.
            wanted = edited(lambda function, inverse, x: function(1 * x), 0, True)
            assert worst(edited(ours, 0, no_grad), wanted) <= EXACT
    wanted = edited(lambda function, inverse, x: 1 * function(x), 1, True)
    assert worst(edited(naive, 1, True), wanted) > EXACT

    module = net()
    y = module(randn(2, 8, dtype=torch.float32))
    loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"AdditiveCoupling: output 0 was modified by an in-place operation.*clone"):
        loss.backward()


def test_fault_a_second_backward_pass() -> None:
    for call, works in ((ours, True), (naive, False)):
        x = randn(4).requires_grad_()
        y = call(scale_of, back, 1 * x)
        (first,) = torch.autograd.grad(loss_of(y), x, retain_graph=True)
        if not works:
            with pytest.raises(AttributeError):
                torch.autograd.grad(loss_of(y), x)
        else:
            assert torch.equal(first, torch.autograd.grad(loss_of(y), x)[0])
    module = net().double()
    x = randn(2, 8).requires_grad_()
    loss = loss_of(module(x))
    found = [torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=again) for again in (True, True, False)]
    assert all(error(found[0], other) == 0 for other in found[1:])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)


def test_fault_autocast_is_replayed() -> None:
    weight = randn(4, 4, dtype=torch.float32)

    def gradient(call: Any) -> Tensor:
        x = randn(2, 4, dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(lambda x: (x @ weight).float().exp(), lambda y: y.log() @ weight.inverse(), 1 * x)
        return torch.autograd.grad(y.sum(), x)[0]

    wanted = gradient(lambda function, inverse, x: function(x))
    inputs = 2**-9 * float(torch.linalg.cond(weight))  # log gives what was rounded to bfloat16
    assert error([gradient(ours)], [wanted]) <= 8 * inputs
    kinds: dict[Any, list[bool]] = {ours: [], naive: []}
    for call, kind in kinds.items():

        def noting(x: Tensor, kind: Any = kind) -> Tensor:
            kind.append(torch.is_autocast_enabled("cpu"))
            return x.exp()

        with torch.autocast("cpu", torch.bfloat16):
            y = call(noting, torch.log, 1 * randn(4).requires_grad_())
        y.sum().backward()
    assert kinds == {ours: [True, True], naive: [True, False]}


DRIFTS = {torch.float32: 1e-3, torch.float64: 1e-11}


@pytest.mark.parametrize("dtype", DRIFTS, ids=str)
def test_fault_drift_of_50_linears(dtype: torch.dtype) -> None:
    """Weights as nn.Linear begins with amplify what is lost by 1e5 and more; orthogonal ones, which stay so while
    they are trained, by less than their number."""
    eps = torch.finfo(dtype).eps
    x = randn(32, 16, dtype=dtype)
    assert linears(50).to(dtype).check(x).drift < 50 * eps

    usual = linears(50).to(dtype)
    for layer in usual:
        nn.init.kaiming_uniform_(layer.weight, a=5**0.5)
        nn.init.uniform_(layer.bias, -0.25, 0.25)
    with pytest.warns(UserWarning, match=r"over 50 modules, computed inputs drift by .*Orthogonal weights"):
        report = usual.check(x, rtol=0, atol=0)
    assert report.drift > 1e5 * eps

    trained = linears(50).to(dtype)
    for layer in trained:
        fl.orthogonal(layer)
    before = [layer.weight.detach().clone() for layer in trained]
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (trained(x) - x.flip(0)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert max(float((a - b.weight.detach()).norm()) for a, b in zip(before, trained, strict=True)) > 1e-3
    assert trained.check(x).drift < 50 * eps * 4
