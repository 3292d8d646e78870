"""Fused models whose ``forward`` others replace, wrap and put back: no error in any order, PyTorch's bits, and a second
``fuse`` finds what is there."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from copies import COPIES
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

pytestmark = pytest.mark.usefixtures("small_values_are_replayed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(32), nn.GELU()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


# --- what others do ---------------------------------------------------------------------------------------------------


class Kernel(nn.Module):
    """A layer of the hub, which has nothing but a forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.GELU | nn.LayerNorm)]


def _by_kernels(model: nn.Module) -> nn.Module:
    """As ``kernels`` does at each ``train()``: where it has no kernel it puts the class's own forward there."""
    for module in _layers(model):
        layer = Kernel if isinstance(module, nn.GELU) else type(module)
        module.forward = MethodType(layer.forward, module)
    return model


def _without_kernels(model: nn.Module) -> nn.Module:
    for module in _layers(model):
        module.forward = MethodType(type(module).forward, module)
    return model


def _by_liger(model: nn.Module) -> nn.Module:
    """As ``liger_kernel``'s ``_bind_method_to_module`` does."""
    for module in model.modules():
        if isinstance(module, nn.GELU):
            vars(module)["forward"] = Kernel.forward.__get__(module, type(module))
    return model


def _deleted(model: nn.Module) -> nn.Module:
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


def _hooked(model: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    return model


def _unhooked(model: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    return hooks.remove_hook_from_module(model, recurse=True)  # type: ignore[no-any-return]


def _prepared(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    try:
        return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)  # type: ignore[no-any-return]
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def _unwrapped(model: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)  # type: ignore[no-any-return]


Change = Callable[[nn.Module], nn.Module]
#: What a library does, and how it is undone.
OTHERS: dict[str, tuple[Change, Change]] = {
    "kernels": (_by_kernels, _without_kernels),
    "liger": (_by_liger, _by_liger),
    "del": (_deleted, _deleted),
    "hooks of accelerate": (_hooked, _unhooked),
    "precision of accelerate": (_prepared, _unwrapped),
}

ORDERS = [
    *("fuse do", "fuse do undo", "fuse do undo fuse", "fuse do unfuse", "fuse do unfuse undo", "fuse do unfuse fuse"),
    *("fuse do unfuse undo fuse", "fuse do unfuse undo fuse unfuse", "fuse do fuse", "fuse do fuse undo"),
    *("fuse do fuse undo fuse", "fuse do fuse undo unfuse", "fuse do fuse unfuse undo", "fuse do undo unfuse"),
    *("do fuse", "do fuse undo", "do fuse undo fuse", "do fuse undo unfuse", "do fuse unfuse undo"),
]


def _after(name: str, order: str) -> nn.Module:
    changes: dict[str, Any] = dict(zip(("do", "undo"), OTHERS[name], strict=True))
    model = _model()
    for word in order.split():
        if word in changes:
            model = changes[word](model)
        else:
            fl.fuse(model) if word == "fuse" else fl.unfuse(model)
    return model


def _others(order: str) -> str:
    return " ".join(word for word in order.split() if "do" in word)


def _step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def _are_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 15 and all(map(torch.equal, ours, theirs))


def _kept(model: nn.Module) -> int:
    x = torch.randn(64, 32)
    return saved_bytes(model, x, exclude=[x, *model.parameters()])


@pytest.mark.parametrize(("name", "order"), [*product(OTHERS, ORDERS)])
def test_any_order(name: str, order: str) -> None:
    theirs, model = _after(name, _others(order)), _after(name, order)
    expected, kept = _step(theirs), _kept(model)
    assert _are_equal(_step(model), expected)
    signatures = [[inspect.signature(module.forward) for module in each.modules()] for each in (model, theirs)]
    assert signatures[0] == signatures[1]
    if order.endswith(" fuse"):  # as if the others had come first
        assert kept == _kept(_after(name, f"{_others(order)} fuse")) < _kept(theirs)
    elif "unfuse" in order and "fuse" not in order.split("unfuse")[-1]:
        assert kept == _kept(theirs)
    elif order in ("fuse do", "fuse do undo") and name != "del":  # the rest stays fused
        assert kept < _kept(theirs)
    # Local functions of accelerate cannot be pickled, and a patch may have replaced one.
    for copied in (copy.deepcopy,) if name == "hooks of accelerate" else COPIES.values():
        reference = copied(theirs)
        ours, expected_of_copy = copied(model), _step(reference)
        assert _are_equal(_step(ours), expected_of_copy)
        fl.unfuse(ours)
        assert _are_equal(_step(ours), expected_of_copy) and _kept(ours) == _kept(reference)
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.zero_()
        x = torch.randn(64, 32)
        assert torch.equal(ours(x), x) and _are_equal(_step(model), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_what_fails_leaves_a_model_as_it_was(name: str) -> None:
    theirs, model = _after(name, "do"), _after(name, "fuse do")
    expected, kept = _step(theirs), _kept(model)
    with pytest.raises(ValueError, match="fuse: the model does not run"):
        fl.fuse(model, torch.randn(64, 5))
    assert _are_equal(_step(model), expected) and _kept(model) <= kept


@pytest.mark.parametrize("name", ["kernels", "hooks of accelerate"])
def test_fit_within_wrappers(name: str) -> None:
    theirs, model = _after(name, "do"), _after(name, "fuse do")
    expected, kept = _step(theirs), _kept(model)
    fl.fit(model, torch.randn(64, 32), fraction=0.4, plan_only=True)
    assert _are_equal(_step(model), expected) and _kept(model) <= kept
    assert fl.fit(model, torch.randn(64, 32), fraction=0.4).recomputed
    assert _are_equal(_step(model), expected) and _kept(model) <= 0.4 * _kept(theirs)
    fl.unfuse(model)
    assert _are_equal(_step(model), expected) and _kept(model) == _kept(theirs)
