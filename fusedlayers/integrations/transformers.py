"""For transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from . import FusesOnce


class FuseCallback(FusesOnce, TrainerCallback):
    """Fuses the model on the first batch when training begins: ``Trainer(..., callbacks=[FuseCallback()])``."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fuse what the ``Trainer`` hands over."""
        self.fuse(kwargs["model"], kwargs["train_dataloader"])
