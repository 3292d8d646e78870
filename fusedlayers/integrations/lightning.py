"""For Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from ..fusion.report import FuseReport
from . import fuse_on_first_batch


class FuseCallback(Callback):
    """Fuses the module when training begins: ``Trainer(..., callbacks=[FuseCallback()])``.

    The module's ``forward`` is run on the first batch; of a batch that is a tuple or a list, on its first element.

    Args:
        save: as for ``fusedlayers.fuse``.

    Attributes:
        report: what was fused; None before training.
    """

    def __init__(self, save: str = "auto") -> None:
        self.save = save
        self.report: FuseReport | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Fuse the module."""
        batches = (batch[0] if isinstance(batch, tuple | list) else batch for batch in trainer.train_dataloader)
        self.report = fuse_on_first_batch(pl_module, batches, self.save)
