"""Whole models of the transformers package after ``fuse``: losses and gradients stay what they were, and ``unfuse``
undoes it."""

import copy
from typing import Any

import pytest
import torch
from models import CASES, Case
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fusedlayers as fl

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:transformers")


every_case = pytest.mark.parametrize("case", CASES, ids=str)


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


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@every_case
def test_losses_and_gradients(case: Case) -> None:
    model, inputs = case.make().train(), case.inputs()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fl.fuse(model, inputs)
    found, torchs, wanted = step(model, inputs), step(eager, inputs), step(exact, double(inputs))
    rounding = torch.finfo(torch.float32).eps
    for ours, theirs, reference in zip(found, torchs, wanted, strict=True):
        assert relative(ours, reference) <= 2 * relative(theirs, reference) + 4 * rounding


@every_case
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
