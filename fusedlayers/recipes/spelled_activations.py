"""Modules that spell an activation out in plain operations, as the models of transformers do.

Such a module has no children, and its free variables (``free_variables.py``) say what its code reads. It is traced, for
the shape that it is given: parameters may run along one of its dimensions (channels). At each call the free variables
are found anew: a module that reads something else by then, or whose class was given another forward pass, is looked at
again. One that is not recognised runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..activations import Activation
from ..call import with_operands


def may_be_recognised(module: nn.Module) -> bool:
    """Whether a module may spell an activation out: nothing is run."""
    kind = type(module)
    is_plain = not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers.")) and "forward" not in vars(module)
    tensors = (*module.parameters(), *module.buffers())
    return is_plain and is_users and all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


def is_recognised(module: nn.Module, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a module that may be one computes a folded activation, of inputs of a shape, and edits none."""
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    with without_logging():  # what is no activation is not worth a word
        found = with_operands(activation_of(module), shape, dtype).activation
        return found.is_fusible and found.is_folded and not found.writes_argument


def activation_of(module: nn.Module) -> Activation:
    """The module's function, which may be one."""
    return Activation(type(module).__name__, _twin(module), needs_tracing=True)


_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}


def _twin(module: nn.Module) -> Any:
    """The module as it would be without its patch, and without hooks: who calls the module runs these."""
    twin: Any = object.__new__(type(module))
    twin.__dict__ = {**vars(module), **_NO_HOOKS}
    for name in ("forward", "extra_repr", "__prepare_scriptable__"):
        twin.__dict__.pop(name, None)
    return twin
