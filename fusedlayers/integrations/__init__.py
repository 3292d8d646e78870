"""Callbacks that fuse a model when training begins; each module needs the library that it is named after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..fusion.fuse import fuse
from ..fusion.report import FuseReport
from ..utils.module_state import random_state


def fuse_on_first_batch(model: nn.Module, batches: Iterable[Any], save: str = "auto") -> FuseReport:
    """``fuse`` on the first of the batches, moved to where the model's parameters are. The random generators go on as
    if nobody had asked for a batch.

    Raises:
        ValueError: there is no batch.
    """
    restore = random_state()
    try:
        for batch in batches:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            return fuse(model, _moved(batch, device), save=save)
    finally:
        restore()
    raise ValueError("fuse: there is no batch to look at")


class FusesOnce:
    """What the callbacks share.

    Args:
        save: as for ``fusedlayers.fuse``.

    Attributes:
        report: what was fused; None before training.
    """

    def __init__(self, save: str = "auto") -> None:
        self.save = save
        self.report: FuseReport | None = None

    def fuse(self, model: nn.Module, batches: Iterable[Any]) -> None:
        """Fuse the model on the first batch."""
        self.report = fuse_on_first_batch(model, batches, self.save)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    return type(batch)(_moved(value, device) for value in batch) if isinstance(batch, tuple | list) else batch
