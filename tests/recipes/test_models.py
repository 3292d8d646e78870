"""Whole models of the transformers package after ``fuse``: losses and gradients stay what they were, and ``unfuse``
undoes it."""

import copy
from typing import Any

import pytest
import torch
from models import CASES, Case
from torch import Tensor, nn

import fusedlayers as fl

pytestmark = pytest.mark.filterwarnings("ignore")  # names of transformers change


every_case = pytest.mark.parametrize("case", CASES, ids=str)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    result = model(**inputs)
    return result.loss if getattr(result, "loss", None) is not None else result[0].pow(2).mean()


def step(model: nn.Module, inputs: dict[str, Any], autocast: bool) -> list[Tensor]:
    """The loss, and all gradients."""
    torch.manual_seed(0)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(model, inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
@every_case
def test_the_same_bits(case: Case, is_checkpointed: bool) -> None:
    """With autocast and without."""
    model, inputs = case.make().train(), case.inputs()
    if is_checkpointed and getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    eager = copy.deepcopy(model)
    fl.fuse(model, inputs)
    for autocast in (False, True):
        ours, theirs = (step(each, inputs, autocast) for each in (model, eager))
        assert len(ours) == len(theirs) > 5 and all(map(torch.equal, ours, theirs))
