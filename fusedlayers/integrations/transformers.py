"""``FuseCallback`` for transformers' ``Trainer`` and its subclasses, which TRL and sentence-transformers have."""

from typing import Any

from transformers import TrainerCallback

from .fused_training import FusedTraining


class FuseCallback(TrainerCallback):
    """Fuses the model while it is trained: ``Trainer(model, ..., callbacks=[FuseCallback()])``.

    The model is fused after the trainer has wrapped it, and switched its checkpoints on. Losses and checkpoints are
    those of the plain model. ``on_train_end`` undoes it. After an error in the training the model stays fused, until
    ``fusedlayers.unfuse(model)`` or the next training.

    Args:
        report, fit_budget: as for ``FusedTraining``: whether the first step prints a report, and the budget that it
            fits the model to: bytes, a size such as "8GiB", or a fraction such as 0.3.

    Raises:
        TypeError: an unknown option, or one of the wrong type; when the training begins: a compiled model.
        ValueError: ``fit_budget`` is no budget; when the training begins: no model, two callbacks, a trainer that
            compiles the model; at the first step: a budget that no plan meets.
    """

    def __init__(self, *, report: bool = False, fit_budget: float | str | None = None) -> None:
        self._training = FusedTraining(report=report, fit_budget=fit_budget)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if args.torch_compile:
            raise ValueError(
                "FuseCallback: got torch_compile=True, and torch.compile decides itself what to save; pass "
                "torch_compile=False, or leave out this callback"
            )
        self._training.begin(model, state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self._training.end(model)
