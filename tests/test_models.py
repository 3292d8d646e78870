"""Whole models of the transformers package after ``fuse``: losses, gradients and training stay what they were, and
``unfuse`` undoes it."""

import copy
from typing import Any

import pytest
import torch
from models import CASES, Case
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fusedlayers as fl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:transformers")

STEPS = 20


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    result = model(**inputs)
    return result.loss if getattr(result, "loss", None) is not None else result[0].pow(2).mean()


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of all parameters in one."""
    loss = loss_of(model, inputs)
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().double(), torch.cat(gradients)


def curve(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses, dtype=torch.float64)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def largest(a: Tensor, b: Tensor) -> float:
    return float(((a - b) / b).abs().max())


def test_losses_and_gradients(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fl.fuse(model, inputs)
    found, torchs, wanted = step(model, inputs), step(eager, inputs), step(exact, double(inputs))
    rounding = torch.finfo(torch.float32).eps
    for ours, theirs, reference in zip(found, torchs, wanted, strict=True):
        assert relative(ours, reference) <= 2 * relative(theirs, reference) + 4 * rounding


def test_training_goes_the_same_way(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    eager, exact, other = copy.deepcopy(model), copy.deepcopy(model).double(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():  # by half a unit in the last place
            parameter.mul_(1 + torch.finfo(torch.float32).eps * (torch.rand_like(parameter) - 0.5))
    fl.fuse(model, inputs)
    found, torchs = curve(model, inputs), curve(eager, inputs)
    noise = max(largest(curve(other, inputs), torchs), largest(torchs, curve(exact, double(inputs))))
    assert largest(found, torchs) <= 4 * noise
    assert found[-1] < 0.95 * found[0]


def test_unfuse_restores_the_model(case: Case) -> None:
    model, inputs = case.make().eval(), case.inputs()
    classes = {name: type(module) for name, module in model.named_modules()}
    contents = {name: set(vars(module)) for name, module in model.named_modules()}
    with torch.no_grad():
        before = model(**inputs)[0]
        fl.fuse(model, inputs)
        fl.unfuse(model)
        assert {name: type(module) for name, module in model.named_modules()} == classes
        assert {name: set(vars(module)) for name, module in model.named_modules()} == contents
        assert torch.equal(model(**inputs)[0], before)
