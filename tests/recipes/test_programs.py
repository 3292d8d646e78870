"""``fuse`` on random programs (``programs.py``): a fused model computes and trains as the plain one."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import programs
import pytest
import torch
from reference import are_equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

EACH = 50
#: What a training step computes, by name.
Found = dict[str, Tensor]


pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


@pytest.fixture(autouse=True)
def warnings_are_torchs() -> Iterator[None]:
    """Programs do what PyTorch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("start", range(0, 600, EACH))
def test_programs(start: int) -> None:
    for seed in range(start, start + EACH):
        check(seed)


def check(seed: int) -> None:
    """The same bits, by ``fuse`` and by ``save_once`` around a model that is not fused."""
    program = programs.Program(seed)
    try:
        theirs = _trained(program)
    except Exception:  # nothing to compare with
        return
    for enter in (fl.fuse, save_once):
        ours, say = _trained(program, enter=enter), f"program {seed}, {enter.__name__}"
        assert theirs.keys() == ours.keys(), f"{say}: {theirs.keys() ^ ours.keys()}"
        wrong = [name for name in theirs if not are_equal(ours[name], theirs[name])]
        assert not wrong or not _is_right(program), f"{say}: {wrong}"
        _saves_no_more(program, enter)


def save_once(model: nn.Module) -> None:
    model.forward = fl.save_once()(model.forward)  # type: ignore[method-assign]


def _trained(program: programs.Program, enter: Callable[..., Any] = id) -> Found:
    """What a training step computes, of the model that ``enter`` has changed."""
    model = program.build()
    enter(model)
    return _step(program, model)


def _saves_no_more(program: programs.Program, enter: Callable[..., Any]) -> None:
    if program.outside != "plain":
        return
    kept = []
    for change in (id, enter):
        model, x = program.build(), program.inputs()
        change(model)
        torch.manual_seed(program.seed)
        kept.append(saved_bytes(model, x, exclude=[*model.buffers(), x]))
    assert kept[1] <= kept[0], f"program {program.seed}: saves {kept[1]} bytes, eager {kept[0]}"


def _is_right(program: programs.Program) -> bool:
    """Whether PyTorch finds the same without checkpoints in the program. These do not notice that a tensor that is kept
    has been written over."""
    found = _step(program, program.build().double())
    with pytest.MonkeyPatch.context() as patch:
        for module in (programs, sys.modules[__name__]):
            patch.setattr(module, "checkpoint", lambda function, x, use_reentrant: function(x))
        try:
            wanted = _step(program, program.build().double())
        except RuntimeError:
            return False
    leaves = [name for name in wanted if name.startswith("gradient")]
    return all(torch.allclose(found[name], wanted[name]) for name in leaves)


def _step(program: programs.Program, model: nn.Module) -> Found:
    """What a training step computes, by name."""
    dtype = next(model.parameters()).dtype
    x = program.inputs().to(dtype).requires_grad_(program.x_needs_gradient or program.is_second)
    torch.manual_seed(program.seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=program.outside == "autocast"):
        y = model(x) if "checkpoint" not in program.outside and program.outside != "reentrant" else None
        if y is None:
            y = checkpoint(model, x, use_reentrant=program.outside == "reentrant")
        if program.outside == "twice":
            y = y + model(x * 0.5)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)).sum()
    found = {"y": y.detach()}
    if program.is_second:
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found["g"] = g.detach()
        loss = loss + g.pow(2).sum()
    loss.backward()
    found["generator"] = torch.get_rng_state()
    found |= {f"buffer {name}": value for name, value in model.named_buffers()}
    leaves = itertools.chain([("x", x)], model.named_parameters())
    found |= {f"gradient of {name}": leaf.grad for name, leaf in leaves if leaf.grad is not None}
    return found
