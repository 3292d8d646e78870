"""``FuseCallback`` for the ``Trainer`` of Lightning, under both of its names."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from .fused_training import FusedTraining


class FuseCallback(Callback):
    """Fuses the module while it is fitted: ``Trainer(..., callbacks=[FuseCallback()]).fit(module)``.

    ``on_fit_start`` comes after the strategy has wrapped the module. ``on_fit_end`` undoes it, and so does an error.

    Args:
        report, fit_budget: as for ``FusedTraining``: whether the first step prints a report, and the budget that it
            fits the model to: bytes, a size such as "8GiB", or a fraction such as 0.3.

    Raises:
        TypeError: an unknown option, or one of the wrong type; when the training begins: a compiled module.
        ValueError: ``fit_budget`` is no budget; when the training begins: two callbacks; at the first step: a budget
            that no plan meets, or a module that has not all trained parameters.
    """

    def __init__(self, *, report: bool = False, fit_budget: float | str | None = None) -> None:
        self._training = FusedTraining(report=report, fit_budget=fit_budget)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if vars(pl_module).get("_compiler_ctx") is not None:  # Lightning took it out of torch.compile's module
            raise TypeError(
                "FuseCallback: got a compiled module, and torch.compile decides itself what to save; pass the module "
                "as it is, or leave out this callback"
            )
        self._training.begin(pl_module, trainer.fit_loop)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        vars(trainer.fit_loop).pop("_fused_training", None)
        self._training.end(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if vars(trainer.fit_loop).pop("_fused_training", None) is not None:
            self._training.undo(pl_module)
