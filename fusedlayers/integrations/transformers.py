"""For transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ..fusion.report import FuseReport
from . import fuse_on_first_batch


class FuseCallback(TrainerCallback):
    """Fuses the model on the first batch when training begins: ``Trainer(..., callbacks=[FuseCallback()])``.

    Args:
        save: as for ``fusedlayers.fuse``.

    Attributes:
        report: what was fused; None before training.
    """

    def __init__(self, save: str = "auto") -> None:
        self.save = save
        self.report: FuseReport | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fuse what the ``Trainer`` hands over."""
        self.report = fuse_on_first_batch(kwargs["model"], kwargs["train_dataloader"], self.save)
