"""``torch.jit.script`` refuses models that ``fuse`` or ``fit`` has changed, and says what to do."""

from collections.abc import Callable

import pytest
import torch
from copies import COPIES
from torch import nn

import fusedlayers as fl

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")

UNFUSE = r"^torch\.jit\.script: {} was changed by fusedlayers\.fuse or .*; call fusedlayers\.unfuse\(model\) first$"


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def _fused(model: nn.Module) -> nn.Module:
    fl.fuse(model)
    return model


def _fitted() -> nn.Module:
    model = nn.Sequential(*(_block() for _ in range(3)))
    fl.fit(model, torch.randn(256, 32), fraction=0.5)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fused": (lambda: _fused(_block()), "Sequential"),
    "fused below": (lambda: nn.Sequential(nn.Linear(32, 32), _fused(_block())), "Sequential"),
    "fitted": (_fitted, ".*"),
}


@pytest.mark.parametrize("name", MODELS)
def test_changed_models_are_unfused_first(name: str) -> None:
    make, said = MODELS[name]
    model, x = make(), torch.randn(4, 32)
    for changed in (model, *(copied(model) for copied in COPIES.values())):
        y, own = changed(x), {path: dict(vars(module)) for path, module in changed.named_modules()}
        with pytest.raises(RuntimeError, match=UNFUSE.format(said)):
            torch.jit.script(changed)
        assert {path: vars(module) for path, module in changed.named_modules()} == own
        fl.unfuse(changed)
        assert not any(name.startswith("__") for module in changed.modules() for name in vars(module))
        torch.testing.assert_close(torch.jit.script(changed)(x), y)
