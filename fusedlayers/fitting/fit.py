"""``fit``: measure the blocks of a model, choose how each is trained, and see that the budget holds."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import Tensor, nn

from ..fusion.fuse import Fusing, arguments_from, check_model, does_not_run, eagerly, unfuse
from ..fusion.region import region_of
from ..profiling.memory_use import report_of
from ..profiling.step import Step
from ..utils.formatting import first_line, pattern_of, size_text
from ..utils.module_state import unchanged
from ..utils.storages import tensors_in
from .agreement import agreed, everyone, together
from .blocks import MODES, Block, Mode, find_blocks
from .costs import Costs, measure, saved_parts
from .plans import Plan, Plans, Rest
from .report import WORDS, Choice, FitReport, Measurement
from .training import Of, Training, are_alike
from .watch import Watch

#: A plan that takes more than predicted is replaced by that of a smaller budget, so often.
TRIES = 5
#: The first try is with one part in so many more than the budget: predictions may be a little too high.
SLACK = 64
#: Blocks are measured by themselves, a little wrongly. The best plans of these ways to train are run against each
#: other: of all ways; of those that recompute a block as a whole or not at all; and checkpoints alone.
FAMILIES: tuple[frozenset[Mode], ...] = (
    frozenset(MODES),
    frozenset({"eager", "outputs", "all"}),
    frozenset({"eager", "all"}),
)


def fit(
    model: nn.Module,
    inputs: Any,
    *,
    memory_budget_bytes: int | None = None,
    fraction: float | None = None,
    of: Of = "saved",
    loss: Callable[[Any], Tensor] | None = None,
    plan_only: bool = False,
    on_stage: Callable[[str, float], None] | None = None,
) -> FitReport:
    """Let a model be trained within a number of bytes, in the least time, in place.

    Blocks are the repeated parts of a model: the layers of a transformer, the residual blocks of a ResNet. Each is
    measured by itself, once for each kind of blocks, in every way that it can be trained: as PyTorch does; its
    operations keeping their outputs (``fuse``); its MLP recomputed in the backward pass; everything but matmuls,
    convolutions and attention recomputed (``sublinear(recompute="cheap")``); all of it recomputed. The fastest
    combinations within the budget, as predicted, are run: one of all these ways, one that recomputes whole blocks
    alone, and one of plain checkpoints. The fastest of them is applied. ``unfuse`` undoes it.

    Random numbers, statistics of batch norms and gradients are those of the model as it was: a way to train whose
    gradients differ is left out. Left to PyTorch are blocks that recompute something by themselves, that are called
    with objects which they may change (a cache), or in one step with inputs of several kinds.

    In a distributed job all processes call it, with the same model, before that is wrapped or sharded; they follow the
    plan of the first one, and the budget is for the process that takes most.

    Args:
        model: any module, in training mode. It is run some eighty times; its buffers, gradients and attributes are put
            back. Hooks of yours run, those that step an optimizer too.
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
    on_stage: Callable[[str, float], None] | None,
) -> FitReport:
    """``fit`` with this training step for the example."""
    check_model("fit", step.model)
    assert isinstance(step.model, nn.Module)
    _check_budget(memory_budget_bytes, fraction, of)
    if step.loss is not None and not callable(step.loss):
        raise TypeError(f"fit: loss must be a function of the model's result, got {step.loss!r}")
    model = step.model
    before = [region for module in model.modules() if (region := region_of(module)) is not None]
    unfuse(model)
    fitting = None
    try:
        tensors = [*tensors_in((step.args, step.kwargs))]
        with unchanged([*model.modules()], tensors, attributes=True) as reset_random, eagerly():
            fitting = _Fitting(model, Training(step, of, reset_random), on_stage or (lambda stage, part: None))
            report = fitting.run(memory_budget_bytes, fraction, plan_only)
    except BaseException:
        fitting = None
        raise
    finally:
        unfuse(model)
        for region in before if fitting is None or plan_only else ():
            region.attach()
    if not plan_only:
        fitting.apply(fitting.chosen)
    return report


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
    """One call of ``fit``.

    Attributes:
        chosen: the plan, once there is one.
    """

    chosen: Plan

    def __init__(self, model: nn.Module, training: Training, on_stage: Callable[[str, float], None]) -> None:
        self._model, self._training, self._on_stage = model, training, on_stage
        self._blocks: list[Block] = []
        self._costs: list[dict[Mode, Costs]] = []
        #: What lies outside of the blocks, which only ``fuse`` changes.
        self._rest = Block("", model)
        self._skipped: dict[str, list[str]] = {}
        self._notes: list[str] = []

    def run(self, budget: int | None, fraction: float | None, plan_only: bool) -> FitReport:
        # Which part of all is done is that of a transformer of six layers on a CPU, whose 46 s these numbers divide.
        self._on_stage("measuring the model", 0.0)
        end_bytes = together(self._find_blocks)[0]
        self._on_stage("finding what may keep outputs", 0.1)
        self._find_regions()
        if len(set(everyone(repr([(block.path, block.modes) for block in self._blocks])))) > 1:
            raise ValueError("fit: the processes have different models; call it before the model is split")
        eager_bytes = self._bytes()
        self._on_stage("checking gradients", 0.15)
        peaks = self._check_modes()
        self._measure_blocks()
        self._on_stage("measuring the rest of the model", 0.45)
        rests = self._measure_rest(end_bytes, {"eager": eager_bytes, **peaks})
        plans = Plans(self._blocks, agreed(self._costs), agreed(rests), self._training.of)
        if budget is None:
            assert fraction is not None
            budget = math.floor(fraction * eager_bytes)
        return self._fitted(plans, budget, eager_bytes, plan_only)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def _find_blocks(self) -> int:
        """The blocks, and their calls; return the bytes that are saved behind them."""
        step = self._training.step
        try:
            rows = report_of(step).rows
        except Exception as error:
            raise _readable(error) from error
        saved: dict[str, int] = {}
        for row in rows:
            if row.kind == "activation":
                saved[row.module] = saved.get(row.module, 0) + row.bytes
        blocks = find_blocks(self._model, saved)
        self._training.reset_random()
        watch = Watch()
        with watch.watching(blocks):
            loss = step.forward()
        end_bytes = watch.finish([loss], tensors_in((self._model, step.args, step.kwargs)))
        for block in blocks:
            if block not in watch.blocks:
                self._skip("it is not called with these inputs, or without gradients", block)
            elif block.skipped_because is not None:
                self._skip(block.skipped_because, block)
            else:
                self._blocks.append(block)
        self._blocks.sort(key=watch.blocks.index)
        if not blocks:
            self._notes.append("No repeated blocks were found: operations may keep their outputs, and no more.")
        return end_bytes

    def _find_regions(self) -> None:
        self._training.reset_random()
        fusing = Fusing(self._model, function="fit")
        fusing.on(self._training.step.args, self._training.step.kwargs)
        inside = Counter(module for block in self._blocks for module in block.module.modules())
        # What blocks share cannot be changed, or recomputed, in one of them alone.
        own = frozenset(module for module, count in inside.items() if count == 1)
        for block in self._blocks:
            block.find_regions([place.module for place in fusing.mlps if place.module in own])
            # What a recomputation saves counts for the peak alone.
            block.plain_recomputed = own if self._training.of == "saved" else frozenset()
        self._rest.find_regions([], without=inside.keys())
        within = {inner for module in self._rest.fused for inner in module.modules()}
        for block in self._blocks:
            block.is_in_fused = block.module in within
        self._as_pytorch()

    def _check_modes(self) -> dict[Mode, int]:
        """Leave out the ways to train that do not work, or change gradients; what the others take at the peak."""
        expected = self._training.gradients()
        is_repeatable = are_alike(self._training.gradients(), expected)
        if not is_repeatable and self._blocks:
            self._notes.append("Gradients differ from run to run, so that nothing may be recomputed.")
        peaks: dict[Mode, int] = {}
        for mode in MODES[1:]:
            blocks = [block for block in self._blocks if mode in block.modes]
            if not blocks:
                continue
            reason, peak = None, 0
            self._train_as([mode] * len(self._blocks), "eager")
            try:
                if mode != "outputs" and not (is_repeatable and are_alike(self._training.gradients(), expected)):
                    reason = "gradients differ"
                elif self._training.of == "peak":
                    peak = self._training.bytes()
            except Exception as error:  # whatever a model's code does with what it is not used to
                reason = f"{type(error).__name__}: {first_line(error)}"
            reasons, of_all = zip(*everyone((reason, peak)), strict=True)
            peaks[mode] = max(of_all)
            reason = next((found for found in reasons if found is not None), None)
            if reason is not None:
                del peaks[mode]
                self._skip(f"cannot {WORDS[mode]}: {reason}", *blocks)
                for block in blocks:
                    block.without.add(mode)
        self._as_pytorch()
        return peaks

    def _measure_blocks(self) -> None:
        """One of each kind."""
        measured: dict[Any, dict[Mode, Costs]] = {}
        works = []
        for i, block in enumerate(self._blocks):
            assert block.call is not None
            try:
                with block.call.autocasting():
                    key = block.kind, saved_parts(block)  # blocks may differ in what their kind does not show
                    if key not in measured:
                        self._on_stage(f"measuring {block.path}", 0.25 + 0.2 * i / len(self._blocks))
                        measured[key] = measure(block, self._training)
            except Exception as error:
                self._skip(f"it does not run by itself: {type(error).__name__}: {first_line(error)}", block)
                continue
            finally:
                block.call = None  # its tensors are not needed any more
            works.append(block)
            self._costs.append(measured[key])
        self._blocks = works

    def _measure_rest(self, end_bytes: int, peaks: dict[Mode, int]) -> dict[Mode, Rest]:
        """What lies outside of the blocks. ``peaks``: of the model, by how all blocks are trained."""
        count = len(self._blocks)
        modes: list[Mode] = ["eager", "outputs"] if self._rest.fused else ["eager"]
        switches = {mode: functools.partial(self._train_as, ["eager"] * count, mode) for mode in modes}
        times = dict(zip(modes, self._training.times_ms([*switches.values()]), strict=True))
        in_blocks = Plans(self._blocks, self._costs, {"eager": Rest(0, 0, 0, 0.0)}, "saved")
        in_eager = in_blocks.of_mode("eager")
        rests: dict[Mode, Rest] = {}
        for mode, switch in switches.items():
            switch()
            saved = self._training.saved() - in_eager.bytes
            if saved < 0:
                self._notes.append("Blocks share what they save, so that predictions are too high.")
                saved = 0
            if mode != "eager" and self._training.of == "peak":
                peaks = {way: self._peak([way] * count, mode) for way in peaks}
            # The model's end may hold the most: no more than is seen whichever way the blocks are trained.
            at_end = [peak - in_blocks.of_mode(way).bytes - saved for way, peak in peaks.items()]
            extra = max(0, min(at_end)) if self._training.of == "peak" else 0
            behind = min(end_bytes, saved)
            rests[mode] = Rest(saved - behind, behind, extra, times[mode] - in_eager.time_ms)
        self._as_pytorch()
        return rests

    def _peak(self, modes: Sequence[Mode], rest: Mode) -> int:
        self._train_as(modes, rest)
        return self._bytes()

    def _bytes(self) -> int:
        """What the budget counts, of the process that takes most."""
        return max(together(self._training.bytes))

    def _skip(self, reason: str, *blocks: Block) -> None:
        self._skipped.setdefault(reason, []).extend(block.path for block in blocks)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _train_as(self, modes: Sequence[Mode], rest: Mode) -> None:
        for block, mode in zip(self._blocks, modes, strict=True):
            block.train_as(mode)
        self._rest.train_as(rest)

    def _as_pytorch(self) -> None:
        self._train_as(["eager"] * len(self._blocks), "eager")

    def apply(self, plan: Plan) -> None:
        self._train_as(plan.modes[1:], plan.modes[0])

    def _fitted(self, plans: Plans, budget: int, eager_bytes: int, plan_only: bool) -> FitReport:
        smallest = plans.smallest()
        if plan_only:
            if smallest.bytes > budget:
                raise self._unmet(budget, eager_bytes, smallest.bytes)
            self.chosen = plans.best(budget)
            return self._report(plans, budget, Measurement(eager_bytes, plans.of_mode("eager").time_ms), None)
        self._on_stage("measuring plans", 0.6)
        taken: dict[Plan, int] = {}
        found: dict[Plan, int] = {}
        for family in FAMILIES:
            plan = self._within(plans.of_modes(family), budget, taken)
            if plan is not None:
                found[plan] = taken[plan]
        if not found:  # predictions may be too high
            found[smallest] = self._bytes_of(smallest)
            if found[smallest] > budget:
                raise self._unmet(budget, eager_bytes, found[smallest])
        candidates = [*found]
        switches = [functools.partial(self.apply, plan) for plan in candidates]
        eager_ms, *times = together(lambda: self._training.times_ms([self._as_pytorch, *switches]))[0]
        time_ms, chosen = min(zip(times, candidates, strict=True), key=lambda pair: pair[0])
        # The machine may be slower or faster than it was when the blocks were measured.
        plans = plans.scaled(eager_ms / plans.of_mode("eager").time_ms)
        self.chosen = plans.plan(chosen.modes[1:], chosen.modes[0])
        return self._report(plans, budget, Measurement(eager_bytes, eager_ms), Measurement(found[chosen], time_ms))

    def _within(self, plans: Plans, budget: int, taken: dict[Plan, int]) -> Plan | None:
        """The fastest plan that keeps to a budget as measured; None if there is none after some tries. ``taken``: what
        plans take, of those that were measured."""
        allowed, least = budget + budget // SLACK, plans.smallest().bytes
        for _ in range(TRIES):
            if allowed < least:
                break
            plan = plans.best(allowed)
            if plan not in taken:
                taken[plan] = self._bytes_of(plan)
            if taken[plan] <= budget:
                return plan
            allowed = min(allowed - (taken[plan] - budget), plan.bytes) - 1
        return None

    def _bytes_of(self, plan: Plan) -> int:
        self.apply(plan)
        try:
            return self._bytes()
        except Exception as error:
            raise _readable(error) from error

    def _unmet(self, budget: int, eager_bytes: int, smallest: int) -> ValueError:
        what = "saves" if self._training.of == "saved" else "allocates"
        reasons = "".join(f"; {', '.join(paths[:2])}: {reason}" for reason, paths in self._skipped.items())
        return ValueError(
            f"fit: a budget of {size_text(budget)} cannot be met: as it is the model {what} {size_text(eager_bytes)}, "
            f"and with the smallest plan {size_text(smallest)} ({smallest} bytes){reasons}"
        )

    def _report(self, plans: Plans, budget: int, eager: Measurement, measured: Measurement | None) -> FitReport:
        plan = self.chosen
        groups: dict[Any, list[int]] = {}
        for i, block in enumerate(self._blocks):
            groups.setdefault((plan.modes[i + 1], pattern_of(block.path)), []).append(i)
        choices = [
            Choice(tuple(self._blocks[i].path for i in found), mode, sum(plans.added_ms(i + 1, mode) for i in found))
            for (mode, _), found in groups.items()
        ]
        if self._rest.fused:
            choices.append(Choice(("",), plan.modes[0], plans.added_ms(0, plan.modes[0])))
        everything = plans.of_mode("all")
        return FitReport(
            type(self._model).__name__,
            self._training.of,
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


def _readable(error: Exception) -> Exception:
    """An error of ours as it is, of the user's code as one of ours."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith(("fit: ", "memory_report: ")):
        return ValueError(text.replace("memory_report: ", "fit: ", 1))
    return does_not_run("fit", error)
