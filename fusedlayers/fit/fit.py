"""``fit``: measure the blocks of a model, choose which are recomputed, and see that the budget holds."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..recipes.fuse import restore, unfuse
from ..recipes.patch import patches_of
from ..utils.example import arguments_from, check_flag, check_uncompiled, eagerly
from ..utils.formatting import counted_lines, path_text, size_text
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.progress import OnStage, asked, within
from ..utils.report import Report
from ..utils.step import Step, telling
from ..utils.storages import tensors_in
from .blocks import Blocks, FitBlock, measured
from .training import COUNTED, Measurement, Of, Training, everyone

#: How far gradients may differ, of their norm: layers carry a rounding error far, and other random numbers farther.
ALIKE = 0.1
NO_BLOCKS = (
    "no blocks were found: children of a Sequential, ModuleList or ModuleDict that have children, and are called; put "
    "the repeated parts of the model into an nn.ModuleList, or call a part by fl.sublinear(part, x)"
)


@dataclass(frozen=True)
class FitReport(Report):
    """The report of ``fit``. ``str()`` is a table.

    Attributes:
        name: of the model's class.
        of: the bytes that count: "saved" or "peak".
        budget_bytes: the most that there may be.
        recomputed: paths of the blocks that are recomputed.
        saved_once: those of the others.
        eager: the model as it was; None where that does not fit the memory.
        predicted, measured: the chosen plan.
        smallest: the plan that recomputes all blocks.
        skipped: by reason, blocks that cannot be recomputed.
        notes: limits of the report itself.
    """

    name: str
    of: Of
    budget_bytes: int
    recomputed: tuple[str, ...]
    saved_once: tuple[str, ...]
    eager: Measurement | None
    predicted: Measurement
    measured: Measurement
    smallest: Measurement
    skipped: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("blocks", "way to train", "modules")]
        for way, paths in (("recomputed", self.recomputed), ("saved once", self.saved_once)):
            rows += [(str(len(paths)), way, path_text(paths))] if paths else []
        rows += [(str(len(paths)), "saved once", f"{path_text(paths)}: {why}") for why, paths in self.skipped.items()]
        rows += [("", "saved once", "the rest of the model")]
        found = {
            "eager PyTorch": self.eager,
            "this plan, predicted": self.predicted,
            "this plan, measured": self.measured,
            "the smallest plan": self.smallest,
        }
        known = {name: each for name, each in found.items() if each is not None}
        width = max(map(len, known))
        title = f"{self.name}: at most {size_text(self.budget_bytes)} {COUNTED[self.of]}"
        lines = [title, "", *counted_lines(rows), ""]
        for name, each in known.items():
            lines.append(f"{name:<{width}}  {size_text(each.bytes):>9}{each.time_ms:>10.4g} ms a step")
        lines.append("(predicted: by forward passes of blocks. Times of the same plan vary from run to run.)")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def fit(
    model: nn.Module,
    inputs: Any,
    *,
    memory_budget_bytes: int | str | None = None,
    fraction: float | None = None,
    of: Of = "saved",
    loss: Callable[[Any], Tensor] | None = None,
    plan_only: bool = False,
    progress: bool | OnStage = False,
) -> FitReport:
    """Let a model be trained within a number of bytes, in the least time, in place.

    Every value is saved once, as ``fuse`` does. Blocks, the repeated parts of a model (a transformer's layers, a
    ResNet's residual blocks), are recomputed in backward besides, as few as the budget needs, but for those that are
    called with an object which they may change (a cache). The model is measured with all blocks recomputed, and with
    one of each kind saved once, so that it need not fit as it is. The fastest plan by these measurements is measured
    too, and corrected until the budget holds. ``unfuse`` undoes it.

    In a distributed job all processes call it, with the same model, before that is wrapped or sharded; they follow the
    plan of the first one, and the budget is for the process that takes most.

    Args:
        model: any module, in training mode. Measuring it takes as long as 30 to 50 of its steps. Its buffers and
            gradients are put back, but not other attributes that its code writes to. Your hooks run.
        inputs: an example of this size: a tensor, a tuple of positional arguments, or a mapping of keywords.
        memory_budget_bytes: how much there may be: bytes, or a size such as "8GiB".
        fraction: the same as a part of what the model takes as it is. One of the two must be given.
        of: what counts: "saved", what the forward pass saves for the backward pass; or "peak", the most that a step
            has allocated at once, without parameters, their gradients and the states of an optimizer. For the latter
            blocks that are recomputed save each value once too; else they run as PyTorch runs them, which is faster.
        loss: of the model's result, a scalar. By default the sum of the means of all tensors that require grad.
        plan_only: whether to change nothing.
        progress: True writes how far it has come and the time left on stderr, every 10 seconds. A function is told each
            stage, and which part of all is done.

    Returns:
        a report: the blocks that are recomputed; bytes and the time of a step, predicted and measured.

    Raises:
        TypeError: ``model`` is no module; ``loss``, ``progress`` or ``plan_only`` is of the wrong type.
        ValueError: both or neither of the budgets, or one that makes no sense, or that no plan meets; a model in
            evaluation; inputs that it does not run on; nothing that needs a gradient; gradients that a recomputation
            changes; ``fraction`` of a model that does not fit the memory as it is.
        torch.OutOfMemoryError: not even recomputing all blocks fits. Wherever it raises, the model is as it was.

    Saved for the backward pass: what the report says.

    >>> import torch, fusedlayers as fl
    >>> def block():
    ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> model = torch.nn.Sequential(*(block() for _ in range(4)))
    >>> report = fl.fit(model, torch.randn(512, 64), fraction=0.5)
    >>> report.measured.bytes <= report.budget_bytes
    True
    """
    training = Training(Step(model, *arguments_from(inputs), loss, function="fit"), of, memory_budget_bytes, fraction)
    check_flag("fit", "plan_only", plan_only)
    check_uncompiled("fit", model)
    step, leaves, report = training.step, list[Tensor](), None
    before = patches_of(model)
    on_stage = asked("fit", progress)
    unfuse(model)
    try:
        with unchanged([*model.modules()], tensors_in((step.args, step.kwargs))), eagerly():
            on_stage("finding blocks", 0.0)
            blocks = Blocks(model, training.of)
            with training.step.readable():
                training.together(lambda: leaves.extend(step.trained(blocks.find(step), model.modules())))
            if len({*everyone(repr([(block.path, block.kind) for block in blocks]))}) > 1:
                raise ValueError("fit: the processes have different models; call it before the model is split")
            with isolated_gradients(leaves):
                report = _choose(blocks, training, on_stage)
    finally:
        if report is None or plan_only:
            restore(model, before)
    if not plan_only:
        blocks.apply([block for block in blocks if block.path in report.saved_once])
    on_stage("done", 1.0)
    return report


def _choose(blocks: Blocks, training: Training, on_stage: OnStage) -> FitReport:
    """Measure the model and its blocks, and choose those that are saved once."""
    on_stage("measuring the model", 0.02)
    gradients: list[Tensor | None] = []

    def as_it_was() -> int | None:
        unfuse(blocks.model)
        try:
            gradients[:] = training.gradients()
            return training.bytes()
        except torch.OutOfMemoryError:
            return None

    def bytes_with(saved: Collection[FitBlock]) -> int:
        blocks.apply(saved)
        return max(training.together(training.bytes))

    with training.step.readable():
        sizes = training.together(as_it_was)
    eager_bytes = None if None in sizes else max(size or 0 for size in sizes)
    allowed = training.allowed(eager_bytes)
    with training.step.readable("with its blocks recomputed"):
        least = bytes_with(())
        if least > allowed:
            but = [f"{path_text(paths)}: {reason}" for reason, paths in blocks.skipped.items()]
            but += [] if blocks or but else [NO_BLOCKS]
            way = f"with {'every' if blocks else 'no'} block recomputed" + f" ({'; '.join(but)})" * bool(but)
            raise training.unmet(eager_bytes, least, way)
        on_stage("measuring blocks", 0.1)
        plans = measured(blocks, training, least, telling(partial(blocks.apply, ()), within(on_stage, 0.1, 0.4)))
        on_stage("measuring plans", 0.4)
        plan, size = plans.within(allowed, bytes_with)
        blocks.apply(plan.saved)
        if eager_bytes is not None and not all(training.together(lambda: _are_alike(training.gradients(), gradients))):
            raise ValueError(
                "fit: gradients differ where blocks are recomputed, or from run to run, as where a block draws random "
                "numbers that are not PyTorch's; fuse(model) recomputes none"
            )
        switches = [telling(partial(blocks.apply, plan.saved), within(on_stage, 0.5, 1))]
        switches += [] if eager_bytes is None else [partial(unfuse, blocks.model)]
        time_ms, *eager_ms = training.together(lambda: training.times_ms(switches))[0]
    notes = [] if blocks or blocks.skipped else [f"Nothing is recomputed: {NO_BLOCKS}."]
    if eager_bytes is None:
        notes.append("The model as it was ran out of memory, so that gradients were not compared with its own.")
    return FitReport(
        type(blocks.model).__name__,
        training.of,
        allowed,
        tuple(block.path for block in blocks if block not in plan.saved),
        tuple(block.path for block in blocks if block in plan.saved),
        None if eager_bytes is None else Measurement(eager_bytes, *eager_ms),
        plan.found,
        Measurement(size, time_ms),
        plans.least,
        {reason: tuple(paths) for reason, paths in blocks.skipped.items()},
        tuple(notes),
    )


def _are_alike(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """Whether gradients are the same but for rounding."""
    pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    errors, norms = [float((a - b).norm()) for a, b in pairs], [float(b.norm()) for _, b in pairs]
    error, norm = math.hypot(*errors), math.hypot(*norms)
    is_small = error <= ALIKE * norm or not math.isfinite(norm)
    return is_small and [a is None for a in ours] == [b is None for b in theirs]
