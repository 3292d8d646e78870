"""``fit``: measure the blocks of a model, choose how each is trained, and see that the budget holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._torch import is_optimized
from ..fusion.fuse import unfuse
from ..fusion.region import region_of
from ..memory import OF_GRAPH
from ..profiling.step import Step
from ..profiling.timing import telling
from ..utils.example import arguments_from, eagerly, evaluation_notes
from ..utils.formatting import path_text, pattern_of, size_text
from ..utils.module_state import isolated_gradients, unchanged
from ..utils.progress import OnStage, asked, within
from ..utils.refusals import check_flag
from ..utils.storages import tensors_in
from .agreement import together
from .arguments import check_arguments, readable
from .blocks import MODES, Mode
from .measuring import measured_plans
from .parts import NO_BLOCKS, Parts
from .plans import Plan, Plans
from .report import Choice, FitReport, Measurement
from .training import Of, Training

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
#: Of plans that take so much longer than the fastest at most, the smallest is applied: no step is timed more exactly.
ALIKE = 0.01
#: A measured time that differs by this factor from the predicted one is worth a word.
UNLIKE = 1.25


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

    Blocks are the repeated parts of a model: the layers of a transformer, the residual blocks of a ResNet. Each is
    measured by itself, once for each kind of blocks, in every way that it can be trained: as PyTorch does; its
    operations keeping their outputs (``fuse``); its MLP recomputed in the backward pass; everything but matmuls,
    convolutions and attention recomputed (``sublinear(recompute="cheap")``); all of it recomputed. The fastest
    combinations within the budget, as predicted, are run: one of all these ways, one that recomputes whole blocks
    alone, and one of plain checkpoints; and what ``fuse`` does, if it fits. The fastest of them is applied; of those
    that take at most 1 % longer, the one that takes the fewest bytes. ``unfuse`` undoes it. Times are medians of seven
    steps: where a machine is so noisy that they do not tell plans apart, another call may choose another one.

    Bytes are those of these inputs and of the parameters as they are. A norm keeps its input too of columns whose
    weight becomes small, or much smaller than the bias.

    Random numbers, statistics of batch norms and gradients are those of the model as it was: a way to train whose
    gradients differ is left out. Left to PyTorch are blocks that recompute something by themselves, that are called
    with objects which they may change (a cache), or in one step with inputs of several kinds.

    In a distributed job all processes call it, with the same model, before that is wrapped or sharded; they follow the
    plan of the first one, and the budget is for the process that takes most.

    Args:
        model: any module, in training mode. Measuring it takes as long as 54 to 159 of its steps (small models: more).
            Its buffers, gradients and attributes are put back, but not modules that its code exchanges. Hooks of yours
            run, those that step an optimizer too.
        inputs: what it is called with: a tensor, a tuple of positional arguments, or a mapping of keywords. The budget
            is for inputs of this size.
        memory_budget_bytes: how much there may be: bytes, or a size such as "8GiB".
        fraction: the same as a part of what the model takes as it is. One of the two must be given.
        of: what counts: "saved", what the forward pass saves for the backward pass; or "peak", the most that a step
            has allocated at once, without parameters, their gradients and the states of an optimizer.
        loss: of the model's result, a scalar. By default the sum of the means of all tensors that require grad.
        plan_only: whether to change nothing.
        progress: True shows how far it has come and the time left: a bar on stderr in a terminal (with ``rich``
            installed), elsewhere a line every 10 seconds. A function is told each stage, and which part of all is done.

    Returns:
        a report: what was chosen where; the bytes and the time of a step, predicted and measured; the smallest budget
        that could be met, and the next plans.

    Raises:
        TypeError: ``model`` is no module; ``loss``, ``progress`` or ``plan_only`` is of the wrong type.
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
    check_flag("fit", "plan_only", plan_only)
    with asked("fit", progress) as on_stage:
        return fit_step(step, memory_budget_bytes, fraction, of, plan_only, on_stage)


def fit_step(
    step: Step,
    memory_budget_bytes: int | str | None,
    fraction: float | None,
    of: Of,
    plan_only: bool,
    on_stage: OnStage,
) -> FitReport:
    """``fit`` with this training step for the example."""
    model, allowed = check_arguments(step, memory_budget_bytes, fraction, of)
    before = [region for module in model.modules() if (region := region_of(module)) is not None]
    unfuse(model)
    found = None
    try:
        tensors = [*tensors_in((step.args, step.kwargs))]
        with (
            unchanged([*model.modules()], tensors, attributes=True) as reset_random,
            eagerly(),
            isolated_gradients(_trained(step, model)),
        ):
            reset_random()
            parts = Parts(model, Training(step, of, reset_random))
            parts.notes += evaluation_notes(model)
            if before:
                parts.notes.append("The model was fused or fitted before; this plan takes the place of that.")
            if is_optimized(model):
                parts.notes.append(
                    "These are eager steps of a compiled model; fit_compiled finds the compiler's budget."
                )
            plans, eager_bytes = measured_plans(parts, on_stage)
            if parts.training.refused_hooks:
                parts.notes.append(OF_GRAPH)
            budget = allowed(eager_bytes)
            if plan_only:
                found = _predicted_fastest(parts, plans, budget, eager_bytes)
            else:
                found = _fastest(parts, plans, budget, eager_bytes, on_stage)
        on_stage("done", 1.0)
    finally:
        unfuse(model)
        for region in before if found is None or plan_only else ():
            region.attach()
    if not plan_only:
        parts.follow(found.plan)
    return _report(parts, found, budget)


def _trained(step: Step, model: nn.Module) -> list[Tensor]:
    """What gradients are accumulated into, in whole steps and in those of blocks by themselves."""
    found: list[Tensor] = []

    def find() -> None:
        try:
            found.extend(step.trained(step.forward(), model.modules()))
        except Exception as error:
            raise readable(error, step.function, step.args) from error

    together(find)
    return found


class _Found(NamedTuple):
    """The plan that was chosen, of these; and the model as it was, and with this plan, measured."""

    plan: Plan
    plans: Plans
    eager: Measurement
    measured: Measurement | None


def _predicted_fastest(parts: Parts, plans: Plans, budget: int, eager_bytes: int) -> _Found:
    smallest = plans.smallest()
    if smallest.bytes > budget:
        raise _unmet(parts, budget, eager_bytes, smallest.bytes)
    return _Found(plans.best(budget), plans, Measurement(eager_bytes, plans.of_mode("eager").time_ms), None)


def _fastest(parts: Parts, plans: Plans, budget: int, eager_bytes: int, on_stage: OnStage) -> _Found:
    """The fastest, as measured, of the best plans of the families, and of ``fuse`` alone."""
    taken = {plans.of_mode("eager"): eager_bytes}
    fused = plans.of_mode("outputs", rest="outputs")
    if fused.bytes <= budget:
        taken[fused] = parts.bytes_of(fused)
    for i, family in enumerate(FAMILIES):
        on_stage("measuring plans", round(0.45 + 0.02 * i, 2))
        _try_within(parts, plans.of_modes(family), budget, taken)
    found = {plan: size for plan, size in taken.items() if size <= budget}
    if not found:  # predictions may be too high
        least = {plan: parts.bytes_of(plan) for plan in (plans.smallest(), plans.of_mode("all"))}
        smallest = min(least, key=lambda plan: least[plan])
        found[smallest] = least[smallest]
        if found[smallest] > budget:
            raise _unmet(parts, budget, eager_bytes, found[smallest])
    candidates = [*found]
    as_pytorch = telling(functools.partial(parts.train_all_as, "eager"), within(on_stage, 0.5, 1))
    switches: list[Callable[[], None]] = [as_pytorch, *(functools.partial(parts.follow, p) for p in candidates)]
    eager_ms, *times = together(lambda: parts.training.times_ms(switches))[0]
    alike = {p: ms for p, ms in zip(candidates, times, strict=True) if ms <= (1 + ALIKE) * min(times)}
    chosen = min(alike, key=lambda plan: (found[plan], alike[plan]))
    # The machine may be slower or faster than it was when the blocks were measured.
    plans = plans.scaled(eager_ms / plans.of_mode("eager").time_ms)
    plan = plans.plan(chosen.modes[1:], chosen.modes[0])
    return _Found(plan, plans, Measurement(eager_bytes, eager_ms), Measurement(found[chosen], alike[chosen]))


def _try_within(parts: Parts, plans: Plans, budget: int, taken: dict[Plan, int]) -> None:
    """Measure the fastest plans, until one keeps to a budget. ``taken``: what those take that were measured."""
    allowed, least = budget + budget // SLACK, plans.smallest().bytes
    for _ in range(TRIES):
        if allowed < least:
            break
        plan = plans.best(allowed)
        if plan not in taken:
            taken[plan] = parts.bytes_of(plan)
        if taken[plan] <= budget:
            break
        allowed = min(allowed - (taken[plan] - budget), plan.bytes) - 1


def _at_least(fraction: float) -> float:
    """Rounded up to three digits."""
    digits = 2 - math.floor(math.log10(fraction))
    scale = 10.0**digits
    return math.ceil(fraction * scale) / scale


def _unmet(parts: Parts, budget: int, eager_bytes: int, smallest: int) -> ValueError:
    what = "saves" if parts.training.of == "saved" else "allocates"
    skipped = [f"{path_text(tuple(paths))}: {reason}" for reason, paths in parts.skipped.items()]
    reasons = f". Left to PyTorch are {'; '.join(skipped)}" if skipped else ""
    advice = "and no plan takes less, but for a smaller batch"
    if smallest < eager_bytes:
        advice = (
            f"and with the smallest plan {size_text(smallest)} ({smallest} bytes, "
            f"fraction={_at_least(smallest / eager_bytes)}); ask for that, or pass a smaller batch"
        )
    found = f". {NO_BLOCKS}" if NO_BLOCKS in parts.notes else ""
    return ValueError(
        f"fit: a budget of {size_text(budget)} cannot be met: as it is the model {what} {size_text(eager_bytes)}, "
        f"{advice}{reasons}{found}"
    )


def _report(parts: Parts, found: _Found, budget: int) -> FitReport:
    plan, plans = found.plan, found.plans
    added = plans.added_ms(plan)
    groups: dict[Any, list[int]] = {}
    for i, block in enumerate(parts.blocks):
        groups.setdefault((plan.modes[i + 1], pattern_of(block.path)), []).append(i)
    choices = [
        Choice(tuple(parts.blocks[i].path for i in members), mode, sum(added[i + 1] for i in members))
        for (mode, _), members in groups.items()
    ]
    if parts.rest.fused:
        choices.append(Choice(("",), plan.modes[0], added[0]))
    everything = plans.of_mode("all")
    notes = [*parts.notes]
    if found.measured is not None and found.measured.time_ms is not None and plan.time_ms:
        ratio = found.measured.time_ms / plan.time_ms
        if not 1 / UNLIKE < ratio < UNLIKE:
            notes.append(
                f"The plan takes {ratio:.2f} times the predicted time. Where other programs run on the machine, times "
                "say little; call fit again when it is idle."
            )
    return FitReport(
        type(parts.model).__name__,
        parts.training.of,
        budget,
        tuple(choices),
        found.eager,
        Measurement(plan.bytes, plan.time_ms),
        found.measured,
        Measurement(everything.bytes, everything.time_ms),
        tuple(plans.undominated()),
        {reason: tuple(paths) for reason, paths in parts.skipped.items()},
        tuple(notes),
    )
