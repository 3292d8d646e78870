"""Modules that spell an activation out in plain operations, as the models of transformers do.

Such a module has no children, and its free variables (``free_variables.py``) say what its code reads. It is traced, for
the shape that it is given: parameters may run along one of its dimensions (channels). At each call the free variables
are found anew: a module that reads something else by then, or whose class was given another forward pass, is looked at
again. One that was not recognised at its first large call runs as it is from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..activations import Activation
from ..call import with_operands
from .users_modules import twin


def is_recognised(module: nn.Module, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a module that may be one computes a folded activation, of inputs of a shape, and edits none."""
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    with without_logging():  # what is no activation is not worth a word
        found = with_operands(activation_of(module), shape, dtype).activation
        return found.is_fusible and found.is_folded and not found.writes_argument


def activation_of(module: nn.Module) -> Activation:
    """The module's function, which may be one."""
    return Activation(type(module).__name__, twin(module), needs_tracing=True)
