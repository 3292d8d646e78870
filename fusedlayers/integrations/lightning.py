"""For Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from . import FusesOnce


class FuseCallback(FusesOnce, Callback):
    """Fuses the module when training begins: ``Trainer(..., callbacks=[FuseCallback()])``.

    The module's ``forward`` is run on the first batch; of a batch that is a tuple or a list, on its first element.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fuse the module."""
        batches = (batch[0] if isinstance(batch, tuple | list) else batch for batch in trainer.train_dataloader)
        self.fuse(pl_module, batches)
