"""A training with ``fuse``: what every callback does when it begins, at its first step, and when it ends.

``fit``, and the report of ``fuse``, need a batch. The arguments of the model at the first training step are one, so
that no batch is taken from the trainer's data, and that its autocast and casts hold. A pre-hook on each module finds
them, because a training step may call a part of the model; all are removed at that call.
"""

import inspect
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..fit.fit import fit
from ..recipes.fuse import fuse, restore
from ..recipes.patch import Patch, patches_of
from ..recompute.segments import budget_from
from ..utils.example import check_flag


class FusedTraining:
    """The options of a callback, and the hooks that wait for the first step.

    Args:
        report: whether the first step prints the report of ``fuse``, or of ``fit`` where there is a budget.
        fit_budget: the first step fits the model to this budget: bytes or a size such as "8GiB"
            (``memory_budget_bytes`` of ``fit``), or a float such as 0.3 (``fraction``).

    Raises:
        TypeError: ``report`` is neither True nor False.
        ValueError: ``fit_budget`` is no budget.
    """

    def __init__(self, *, report: bool = False, fit_budget: float | str | None = None) -> None:
        check_flag("FuseCallback", "report", report)
        is_part = isinstance(fit_budget, float) and 0 < fit_budget <= 1
        try:  # few bytes may be meant as percent
            is_right = fit_budget is None or is_part or budget_from("", fit_budget) > 100
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(
                f'FuseCallback: fit_budget must be bytes, a size such as "8GiB", or a fraction above 0.0 and at most '
                f"1.0 (30 % are 0.3), got {fit_budget!r}"
            )
        self.report, self.fit_budget = report, fit_budget
        self._hooks: list[Any] = []
        self._before: list[Patch] = []
        self._model: Any = object  # weakly the model that it has fused; called, it makes none yet

    def begin(self, model: Any, run: object) -> None:
        """Fuse the model, unless its user has, or has fitted it. ``run`` is an object that belongs to one training.
        Where it raises, now or at the first step, the model is what it was.

        Raises:
            TypeError: as for ``fuse``.
            ValueError: there is no model; another callback has fused it for this run; several processes and a report
                or a budget.
        """
        if model is None:
            raise ValueError(
                "FuseCallback: the trainer has no model (got None); pass a model to the trainer, or call "
                "fusedlayers.fuse(model) instead of this callback"
            )
        if "_fused_training" in vars(run):
            vars(run)["_fused_training"].undo(model)
            raise ValueError("FuseCallback: got two of them in one trainer; pass one, with the options of both")
        needs_a_step = self.report or self.fit_budget is not None
        processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if needs_a_step and processes > 1:
            raise ValueError(
                f"FuseCallback: report and fit_budget run a model that is not split, got {processes} processes; call "
                "fusedlayers.fit(model, inputs, ...) before the trainer, instead of this callback"
            )
        if self._model() is model:  # the training before ended by an error
            self.undo(model)
        self._before, self._model = patches_of(model), weakref.ref(model)
        if not self._before:
            fuse(model)
        vars(run)["_fused_training"] = self
        self._remove_hooks()
        if needs_a_step:
            modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
            trained = {parameter for parameter in model.parameters() if parameter.requires_grad}

            def at_first_step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.compiler.is_compiling():
                    return
                found = {parameter for parameter in module.parameters() if parameter.requires_grad}
                if torch.is_grad_enabled() and module.training and found:
                    self._remove_hooks()
                    try:
                        self._measure(module, args, kwargs, len(found), len(trained))
                    except BaseException as error:
                        if self.fit_budget is None and isinstance(error, TypeError | ValueError):  # it is no hindrance
                            warnings.warn(f"FuseCallback: there is no report. {error}", stacklevel=2)
                            return
                        self.undo(model)
                        raise

            self._hooks += [module.register_forward_pre_hook(at_first_step, with_kwargs=True) for module in modules]

    def end(self, model: nn.Module) -> None:
        """Undo it, and warn where no step was there to measure."""
        if self._hooks:
            warnings.warn(
                "FuseCallback: no training step has called the model, other than compiled, and there is no report or "
                "fit; call fusedlayers.fit(model, inputs, ...) before the trainer, instead of this callback",
                stacklevel=2,
            )
        self.undo(model)

    def undo(self, model: nn.Module) -> None:
        """Let the model be what it was."""
        self._remove_hooks()
        restore(model, self._before)
        self._before, self._model = [], object

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _measure(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trained_here: int, trained: int
    ) -> None:
        if trained_here < trained:
            raise ValueError(
                f"FuseCallback: report and fit_budget need one module that does all that is trained; the training step "
                f"calls {type(module).__name__} first, which has {trained_here} of {trained} trained parameters; call "
                "it within the forward of one module, or leave these options out"
            )
        names = list(inspect.signature(module.forward).parameters)
        inputs = {**dict(zip(names, args, strict=False)), **kwargs} if kwargs else args
        if self.fit_budget is None:
            report: object = fuse(module, inputs)
            restore(module, self._before or patches_of(module))
        else:
            budget: Any = {"fraction" if isinstance(self.fit_budget, float) else "memory_budget_bytes": self.fit_budget}
            report = fit(module, inputs, **budget)
        if self.report:
            print(report)
