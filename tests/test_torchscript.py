"""``torch.jit.script`` refuses what it cannot compile and says what to do; what else looks at a module sees none of it.

``torch.jit.trace`` of layers is in ``test_contexts.py``.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")

UNFUSE = r"^torch\.jit\.script: {} was changed by fusedlayers\.fuse or .*; call fusedlayers\.unfuse\(model\) first$"
OTHERS = r"^torch\.jit\.script: {} runs Python code .*; use torch\.compile or torch\.export, or torch\.jit\.trace$"

MODULES: list[Callable[[], nn.Module]] = [
    lambda: fl.FusedDenseAct(8, 16, "gelu"),
    lambda: fl.FusedConvAct2d(3, 4, 3),
    lambda: fl.FusedMLP(8, 16),
    lambda: fl.FusedGatedMLP(8, 16),
    fl.GELU,
    fl.LeakyReLU,
    lambda: fl.SublinearSequential(nn.Linear(8, 8)),
]


@pytest.mark.parametrize("make", MODULES, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("is_within", [False, True])
def test_modules_of_this_package_are_refused(make: Callable[[], nn.Module], is_within: bool) -> None:
    module = make()
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"layer": module})) if is_within else module
    with pytest.raises(RuntimeError, match=OTHERS.format(type(module).__name__)):
        torch.jit.script(model)


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _fused() -> tuple[nn.Module, str]:
    model = _block()
    fl.fuse(model)
    return model, "Sequential"


def _within() -> tuple[nn.Module, str]:
    """In which only modules below are changed."""
    model, name = _fused()
    return nn.Sequential(nn.Linear(32, 32), model), name


def _fitted() -> tuple[nn.Module, str]:
    model = nn.Sequential(*(_block() for _ in range(3)))
    fl.fit(model, torch.randn(256, 32), fraction=0.5)
    return model, ".*"


every_model = pytest.mark.parametrize("make", [_fused, _within, _fitted])


@every_model
def test_changed_models_are_unfused_first(make: Callable[[], tuple[nn.Module, str]]) -> None:
    model, name = make()
    x = torch.randn(4, 32)
    for changed in (model, copy.deepcopy(model), _pickled(model), _loaded(model)):
        y, own = changed(x), {path: dict(vars(module)) for path, module in changed.named_modules()}
        with pytest.raises(RuntimeError, match=UNFUSE.format(name)):
            torch.jit.script(changed)
        assert {path: vars(module) for path, module in changed.named_modules()} == own
        fl.unfuse(changed)
        assert not any(name.startswith("__") for module in changed.modules() for name in vars(module))
        torch.testing.assert_close(torch.jit.script(changed)(x), y)


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Own(nn.Module):
    """It says by itself what TorchScript should compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))

    def __prepare_scriptable__(self) -> Any:
        return nn.Sequential(self.up, nn.GELU(), self.down)


def test_what_a_class_says_counts_again_when_it_is_unfused() -> None:
    model = Own()
    fl.fuse(model)
    with pytest.raises(RuntimeError, match=UNFUSE.format("Own")):
        torch.jit.script(model)
    fl.unfuse(model)
    x = torch.randn(4, 32)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
