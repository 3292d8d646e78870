"""``fit``: measure the blocks of a model, choose how each is trained, and see that the budget holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import Tensor, nn

from ..fusion.fuse import Fusing, arguments_from, check_model, does_not_run, eagerly, unfuse
from ..fusion.region import region_of
from ..fusion.timing import step_times
from ..memory import saved_bytes
from ..profiling.memory_use import report_of
from ..profiling.step import Step
from ..utils.formatting import pattern_of, size_text
from ..utils.module_state import unchanged
from ..utils.storages import tensors_in
from .agreement import agreed
from .blocks import Block, Mode, Watch, find_blocks
from .costs import Costs, Measured, measure, step_peak
from .plans import Of, Plan, Plans, Rest
from .report import Choice, FitReport, Measurement

#: A plan that takes more than predicted is replaced by that of a smaller budget, so often.
TRIES = 5
#: How the blocks are trained to see what the model's end holds, besides as PyTorch does.
WAYS_TO_END: tuple[Mode, ...] = ("outputs", "all")


def fit(
    model: nn.Module,
    inputs: Any,
    *,
    memory_budget_bytes: int | None = None,
    fraction: float | None = None,
    of: Of = "saved",
    loss: Callable[[Any], Tensor] | None = None,
    plan_only: bool = False,
    on_stage: Callable[[str, float], None] = lambda stage, part: None,
) -> FitReport:
    """Let a model be trained within a number of bytes, in the least time, in place.

    Blocks are the repeated parts of a model: the layers of a transformer, the residual blocks of a ResNet. Each is
    measured by itself, once for each kind of blocks, in every way that it can be trained: as PyTorch does; its
    operations keeping their outputs (``fuse``); its MLP recomputed in the backward pass; everything but matmuls,
    convolutions and attention recomputed (``sublinear(recompute="cheap")``); all of it recomputed. Of all
    combinations the one that takes least time within the budget is chosen, applied and measured; where it takes more
    than was predicted, the next smaller one. ``unfuse`` undoes it.

    Random numbers, statistics of batch norms and gradients are those of the model as it was.

    Args:
        model: any module, in training mode; it is run, but left as it was in all that is not said here.
        inputs: what it is called with: a tensor, a tuple of positional arguments, or a mapping of keywords. The budget
            is for inputs of this size.
        memory_budget_bytes: how much there may be.
        fraction: the same as a part of what the model takes as it is. One of the two must be given.
        of: what counts: "saved", what the forward pass saves for the backward pass; or "peak", the most that a step
            has allocated at once, without parameters, their gradients and the states of an optimizer.
        loss: of the model's result, a scalar. By default the sum of the means of all tensors that require grad.
        plan_only: whether to change nothing.
        on_stage: is told what is done next, and which part of all has been done.

    Returns:
        a report: what was chosen where; the bytes and the time of a step, predicted and measured; the smallest budget
        that could be met, and the next plans.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: both or neither of the budgets, or one that makes no sense, or that no plan meets; inputs that the
            model does not run on; nothing that needs a gradient. The model is as it was then.

    Saved for the backward pass: what the report says.

    >>> import torch, fusedlayers as fl
    >>> def block():
    ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> model = torch.nn.Sequential(*(block() for _ in range(4)))
    >>> report = fl.fit(model, torch.randn(512, 64), fraction=0.5)
    >>> report.measured.bytes <= report.budget_bytes
    True
    """
    step = Step(model, *arguments_from(inputs), loss, function="fit")
    return fit_step(step, memory_budget_bytes, fraction, of, plan_only, on_stage)


def fit_step(
    step: Step,
    memory_budget_bytes: int | None,
    fraction: float | None,
    of: Of,
    plan_only: bool,
    on_stage: Callable[[str, float], None],
) -> FitReport:
    """``fit`` with this training step for the example."""
    check_model("fit", step.model)
    _check_budget(memory_budget_bytes, fraction, of)
    assert isinstance(step.model, nn.Module)
    return _Fitting(step.model, step, of, on_stage).run(memory_budget_bytes, fraction, plan_only)


def _check_budget(memory_budget_bytes: object, fraction: object, of: object) -> None:
    if (memory_budget_bytes is None) == (fraction is None):
        given = "neither" if fraction is None else "both"
        raise ValueError(f"fit: give memory_budget_bytes or fraction, got {given}")
    if memory_budget_bytes is not None and (
        not isinstance(memory_budget_bytes, int) or isinstance(memory_budget_bytes, bool) or memory_budget_bytes < 0
    ):
        raise ValueError(f"fit: memory_budget_bytes must be a number of bytes, got {memory_budget_bytes!r}")
    if fraction is not None and not (
        isinstance(fraction, int | float) and not isinstance(fraction, bool) and 0 < fraction <= 1
    ):
        raise ValueError(f"fit: fraction must be above 0 and at most 1, got {fraction!r}")
    if of not in get_args(Of):
        raise ValueError(f"fit: of must be one of {', '.join(map(repr, get_args(Of)))}, got {of!r}")


class _Fitting:
    """One call of ``fit``."""

    def __init__(self, model: nn.Module, step: Step, of: Of, on_stage: Callable[[str, float], None]) -> None:
        self._model, self._step, self._of, self._on_stage = model, step, of, on_stage
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._blocks: list[Block] = []
        self._costs: list[dict[Mode, Costs]] = []
        self._skipped: dict[str, list[str]] = {}
        self._notes: list[str] = []
        self._rest = Block("", model)
        self._before = [region for module in model.modules() if (region := region_of(module)) is not None]

    def run(self, budget: int | None, fraction: float | None, plan_only: bool) -> FitReport:
        model, step = self._model, self._step
        is_done = False
        unfuse(model)
        try:
            with unchanged([*model.modules()], [*tensors_in((step.args, step.kwargs))]) as reset_random, eagerly():
                self._reset_random = reset_random
                eager_bytes = self._measure_eager()
                plans = self._plans(eager_bytes)
                eager = Measurement(eager_bytes, plans.plan(["eager"] * len(self._blocks), "eager").time_ms)
                if budget is None:
                    assert fraction is not None
                    budget = int(fraction * eager.bytes)
                report = self._fitted(plans, budget, eager, plan_only)
            is_done = not plan_only
            return report
        finally:
            if not is_done:
                unfuse(model)
                for region in self._before:
                    region.attach()

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _bytes(self) -> int:
        """What counts, of the model as it is now."""
        self._reset_random()
        if self._of == "peak":
            return step_peak(self._step, self._parameters)
        return self._saved()

    def _saved(self) -> int:
        exclude = [*self._model.buffers(), self._step.args, self._step.kwargs]
        return saved_bytes(self._step.forward, exclude=exclude)

    def _measure_eager(self) -> int:
        """What the model takes as it is, and its blocks: which there are, and their calls."""
        model, step = self._model, self._step
        self._on_stage("measuring the model", 0.0)
        try:
            rows = report_of(step, lambda stage: None).rows
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("fit: "):
                raise
            raise does_not_run("fit", error) from error
        saved: dict[str, int] = {}
        for row in rows:
            if row.kind == "activation":
                saved[row.module] = saved.get(row.module, 0) + row.bytes
        blocks = find_blocks(model, saved)
        self._reset_random()
        watch = Watch()
        with watch.watching(blocks):
            self._saved_at_end = watch.finish([step.forward()], tensors_in((model, step.args, step.kwargs)))
        for block in watch.blocks:
            if block.skipped_because is not None:
                self._skipped.setdefault(block.skipped_because, []).append(block.path)
        self._blocks = [block for block in watch.blocks if block.first is not None]
        if not self._blocks:
            self._notes.append("No repeated blocks were found: operations may keep their outputs, and no more.")
        return self._bytes()

    def _plans(self, eager_bytes: int) -> Plans:
        """Measure what the blocks cost, and the rest of the model."""
        self._on_stage("finding what may keep outputs", 0.2)
        fusing = Fusing(self._model, function="fit")
        fusing.on(self._step.args, self._step.kwargs)
        mlps = [place.module for place in fusing.blocks]
        for block in self._blocks:
            block.prepare(mlps)
        inside = {module for block in self._blocks for module in block.module.modules()}
        self._rest.prepare([])
        self._rest.fused = {module for module in self._rest.fused if module not in inside}
        self._rest.regions = {module: region for module, region in self._rest.regions.items() if module not in inside}

        measured: dict[Any, Measured] = {}
        self._as_pytorch()
        for block in self._blocks:
            assert block.first is not None
            key = _kind(block)
            if key not in measured:
                self._on_stage(f"measuring {block.path}", 0.4 + 0.2 * len(self._costs) / len(self._blocks))
                measured[key] = measure(block, with_peaks=self._of == "peak", reset_random=self._reset_random)
            found = measured[key]
            for mode, reason in found.failed.items():
                self._skipped.setdefault(f"{mode} does not work: {reason}", []).append(block.path)
            self._costs.append(found.costs)
        for block in self._blocks:
            block.first = None  # the inputs
        works = [i for i, costs in enumerate(self._costs) if "eager" in costs]
        self._blocks, self._costs = [self._blocks[i] for i in works], [self._costs[i] for i in works]
        self._on_stage("measuring the rest of the model", 0.6)
        return Plans(self._blocks, agreed(self._costs), agreed(self._measure_rest(eager_bytes)), self._of)

    def _measure_rest(self, eager_bytes: int) -> Rest:
        count = len(self._blocks)
        modes: list[Mode] = ["eager", "outputs"] if self._rest.fused else ["eager"]
        switches = {mode: functools.partial(self._train_as, ["eager"] * count, mode) for mode in modes}
        times = dict(zip(modes, step_times(self._step, [*switches.values()], self._reset_random), strict=True))
        none = Rest(dict.fromkeys(modes, 0), dict.fromkeys(modes, 0.0), 0, 0)
        saved_by_blocks = Plans(self._blocks, self._costs, none, "saved").plan(["eager"] * count, "eager")
        saved = {}
        for mode, switch in switches.items():
            switch()
            self._reset_random()
            saved[mode] = self._saved() - saved_by_blocks.bytes
        times = {mode: time - saved_by_blocks.time_ms for mode, time in times.items()}
        extra = 0
        if self._of == "peak":
            # The model's end may hold the most: no more than is seen in any of these ways.
            plans = Plans(self._blocks, self._costs, Rest(saved, times, 0, 0), "saved")
            peaks: dict[Mode, int] = {"eager": eager_bytes}
            for mode in WAYS_TO_END:
                self._train_as([mode] * count, "eager")
                peaks[mode] = self._bytes()
            extra = max(0, min(peak - plans.plan([mode] * count, "eager").bytes for mode, peak in peaks.items()))
        self._as_pytorch()
        at_end = min(self._saved_at_end, *saved.values())
        return Rest({mode: size - at_end for mode, size in saved.items()}, times, at_end, extra)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _train_as(self, modes: Sequence[Mode], rest: Mode) -> None:
        for block, mode in zip(self._blocks, modes, strict=True):
            block.train_as(mode)
        self._rest.train_as(rest)

    def _as_pytorch(self) -> None:
        self._train_as(["eager"] * len(self._blocks), "eager")

    def _apply(self, plan: Plan) -> None:
        self._train_as(plan.modes[1:], plan.modes[0])

    def _fitted(self, plans: Plans, budget: int, eager: Measurement, plan_only: bool) -> FitReport:
        smallest, allowed, tries = plans.smallest(), budget, 1 if plan_only else TRIES
        while tries and allowed >= smallest:
            plan = plans.best(allowed)
            if plan_only:
                return self._report(plans, plan, budget, eager, None)
            self._on_stage("measuring the plan", 0.8)
            self._apply(plan)
            found = agreed(self._bytes())
            if found <= budget:
                before_ms, after_ms = step_times(
                    self._step, [self._as_pytorch, functools.partial(self._apply, plan)], self._reset_random
                )
                eager = Measurement(eager.bytes, before_ms)
                return self._report(plans, plan, budget, eager, Measurement(found, after_ms))
            allowed, tries = min(allowed - (found - budget), plan.bytes) - 1, tries - 1
        what = "saves" if self._of == "saved" else "allocates"
        least = max(smallest, smallest + budget - allowed)
        raise ValueError(
            f"fit: a budget of {size_text(budget)} cannot be met: as it is the model {what} {size_text(eager.bytes)}, "
            f"and the smallest plan needs about {size_text(least)} ({least} bytes)"
        )

    def _report(
        self, plans: Plans, plan: Plan, budget: int, eager: Measurement, measured: Measurement | None
    ) -> FitReport:
        groups: dict[Any, list[int]] = {}
        for i, block in enumerate(self._blocks):
            groups.setdefault((plan.modes[i + 1], pattern_of(block.path)), []).append(i)
        choices = [
            Choice(tuple(self._blocks[i].path for i in found), mode, sum(plans.added_ms(i + 1, mode) for i in found))
            for (mode, _), found in groups.items()
        ]
        if self._rest.fused:
            choices.append(Choice(("",), plan.modes[0], plans.added_ms(0, plan.modes[0])))
        everything = plans.plan(["all"] * len(self._blocks), "eager")
        return FitReport(
            type(self._model).__name__,
            self._of,
            budget,
            tuple(choices),
            eager,
            Measurement(plan.bytes, plan.time_ms),
            measured,
            Measurement(everything.bytes, everything.time_ms),
            tuple(plans.undominated()),
            {reason: tuple(paths) for reason, paths in self._skipped.items()},
            tuple(self._notes),
        )


def _kind(block: Block) -> Any:
    """What blocks have in common that cost the same."""
    assert block.first is not None
    tensors = [
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*block.module.named_parameters(), *block.module.named_buffers())
    ]
    return repr((type(block.module), str(block.module), tensors, block.module.training, block.first.signature))
