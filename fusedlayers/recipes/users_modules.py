"""Modules of a user's without children, which may spell out one operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is one, and its tensors have one dimension at most. Nothing is run."""
    kind = type(module)
    is_plain = not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers.")) and "forward" not in vars(module)
    tensors = (*module.parameters(), *module.buffers())
    return is_plain and is_users and all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


def has_parameters(module: nn.Module) -> bool:
    """Whether there is any."""
    return any(True for _ in module.parameters())


def twin(module: nn.Module) -> Any:
    """The module as it would be without its patch, and without hooks: who calls the module runs these."""
    found: Any = object.__new__(type(module))
    found.__dict__ = {**vars(module), **_NO_HOOKS}
    for name in ("forward", "extra_repr", "__prepare_scriptable__"):
        found.__dict__.pop(name, None)
    return found
