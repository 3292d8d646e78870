"""Find the parts of a model, and measure what they save and cost in each way to train them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from ..fusion.fuse import Fusing
from ..profiling.memory_use import report_of
from ..utils.formatting import first_line
from ..utils.storages import tensors_in
from .agreement import agreed, everyone, together
from .arguments import readable
from .blocks import MODES, Mode, find_blocks
from .costs import Costs, measure, saved_parts
from .parts import Parts
from .plans import Plans, Rest
from .report import WORDS
from .training import are_alike
from .watch import Watch


def measured_plans(parts: Parts, on_stage: Callable[[str, float], None]) -> tuple[Plans, int]:
    """All plans for a model, whose blocks and rest are noted; and what the budget counts of the model as it is."""
    # Which part of all is done is that of a transformer of six layers on a CPU, whose 46 s these numbers divide.
    on_stage("measuring the model", 0.0)
    end_bytes = together(functools.partial(_find_blocks, parts))[0]
    on_stage("finding what may keep outputs", 0.1)
    _find_regions(parts)
    if len(set(everyone(repr([(block.path, block.modes) for block in parts.blocks])))) > 1:
        raise ValueError("fit: the processes have different models; call it before the model is split")
    eager_bytes = parts.bytes()
    on_stage("checking gradients", 0.15)
    peaks = _check_modes(parts)
    costs = _measure_blocks(parts, on_stage)
    on_stage("measuring the rest of the model", 0.45)
    rests = _measure_rest(parts, costs, end_bytes, {"eager": eager_bytes, **peaks})
    return Plans(parts.blocks, agreed(costs), agreed(rests), parts.training.of), eager_bytes


def _find_blocks(parts: Parts) -> int:
    """The blocks, and their calls; return the bytes that are saved behind them."""
    step = parts.training.step
    try:
        rows = report_of(step).rows
    except Exception as error:
        raise readable(error, "fit", step.args) from error
    saved: dict[str, int] = {}
    for row in rows:
        if row.kind == "activation":
            saved[row.module] = saved.get(row.module, 0) + row.bytes
    blocks = find_blocks(parts.model, saved)
    parts.training.reset_random()
    watch = Watch()
    with watch.watching(blocks):
        loss = step.forward()
    end_bytes = watch.finish([loss], tensors_in((parts.model, step.args, step.kwargs)))
    for block in blocks:
        if block not in watch.blocks:
            parts.skip("it is not called with these inputs, or without gradients", block)
        elif block.skipped_because is not None:
            parts.skip(block.skipped_because, block)
        else:
            parts.blocks.append(block)
    parts.blocks.sort(key=watch.blocks.index)
    if not blocks:
        parts.notes.append("No repeated blocks were found: operations may keep their outputs, and no more.")
    return end_bytes


def _find_regions(parts: Parts) -> None:
    parts.training.reset_random()
    fusing = Fusing(parts.model, function="fit")
    fusing.on(parts.training.step.args, parts.training.step.kwargs)
    inside = Counter(module for block in parts.blocks for module in block.module.modules())
    outside = _outside(parts)
    # What parts of the model share cannot be changed, or recomputed, in one of them alone.
    own = frozenset(module for module, count in inside.items() if count + (module in outside) == 1)
    parts.rest.find_regions([], without=own | {block.module for block in parts.blocks})
    within = {inner for module in parts.rest.fused for inner in module.modules()}
    for block in parts.blocks:
        block.find_regions([place.module for place in fusing.mlps if place.module in own])
        # What a recomputation saves counts for the peak alone.
        block.plain_recomputed = own if parts.training.of == "saved" else frozenset()
        block.is_in_fused = block.module in within
        block.is_sharing = not block.fused.isdisjoint(parts.rest.fused)
    if any(block.is_sharing for block in parts.blocks):
        parts.notes.append(
            "Modules that blocks share count as the rest of the model: they keep outputs everywhere or nowhere."
        )
    parts.train_all_as("eager")


def _outside(parts: Parts) -> set[nn.Module]:
    """The modules that are reached without passing through a block."""
    blocks, found, waiting = {block.module for block in parts.blocks}, set[nn.Module](), [parts.model]
    while waiting:
        module = waiting.pop()
        if module not in blocks and module not in found:
            found.add(module)
            waiting += module.children()
    return found


def _check_modes(parts: Parts) -> dict[Mode, int]:
    """Leave out the ways to train that do not work, or change gradients; what the others take at the peak."""
    training = parts.training
    expected = training.gradients()
    is_repeatable = are_alike(training.gradients(), expected)
    if not is_repeatable and parts.blocks:
        parts.notes.append("Gradients differ from run to run, so that nothing may be recomputed.")
    peaks: dict[Mode, int] = {}
    for mode in MODES[1:]:
        blocks = [block for block in parts.blocks if mode in block.modes]
        if not blocks:
            continue
        reason, peak = None, 0
        parts.train_all_as(mode, rest="eager" if parts.can_train(mode, "eager") else "outputs")
        try:
            if mode != "outputs" and not (is_repeatable and are_alike(training.gradients(), expected)):
                reason = "gradients differ"
            elif training.of == "peak":
                peak = training.bytes()
        except Exception as error:  # whatever a model's code does with what it is not used to
            reason = f"{type(error).__name__}: {first_line(error)}"
        reasons, of_all = zip(*everyone((reason, peak)), strict=True)
        peaks[mode] = max(of_all)
        reason = next((found for found in reasons if found is not None), None)
        if reason is not None:
            del peaks[mode]
            parts.skip(f"cannot {WORDS[mode]}: {reason}", *blocks)
            for block in blocks:
                block.without.add(mode)
    parts.train_all_as("eager")
    return peaks


def _measure_blocks(parts: Parts, on_stage: Callable[[str, float], None]) -> list[dict[Mode, Costs]]:
    """The costs of each block; one of each kind is measured. Those that do not run by themselves are skipped."""
    measured: dict[Any, dict[Mode, Costs]] = {}
    works, costs = [], []
    for i, block in enumerate(parts.blocks):
        assert block.call is not None
        try:
            with block.call.autocasting():
                key = block.kind, saved_parts(block)  # blocks may differ in what their kind does not show
                if key not in measured:
                    on_stage(f"measuring {block.path}", round(0.25 + 0.2 * i / len(parts.blocks), 2))
                    measured[key] = measure(block, parts.training)
        except Exception as error:
            parts.skip(f"it does not run by itself: {type(error).__name__}: {first_line(error)}", block)
            continue
        finally:
            block.call = None  # its tensors are not needed any more
        works.append(block)
        costs.append(measured[key])
    parts.blocks = works
    return costs


def _measure_rest(
    parts: Parts, costs: list[dict[Mode, Costs]], end_bytes: int, peaks: dict[Mode, int]
) -> dict[Mode, Rest]:
    """What lies outside of the blocks. ``peaks``: of the model, by how all blocks are trained."""
    training = parts.training
    modes: list[Mode] = ["eager", "outputs"] if parts.rest.fused else ["eager"]
    in_blocks = Plans(parts.blocks, costs, dict.fromkeys(modes, Rest(0, 0, 0, 0.0)), "saved")
    found = (in_blocks.plan([mode if b.is_sharing else "eager" for b in parts.blocks], mode) for mode in modes)
    plans = {plan.modes[0]: plan for plan in found}
    times = training.times_ms([functools.partial(parts.follow, plan) for plan in plans.values()])
    rests: dict[Mode, Rest] = {}
    for (mode, plan), time_ms in zip(plans.items(), times, strict=True):
        parts.follow(plan)
        saved = training.saved() - plan.bytes
        if saved < 0:
            parts.notes.append("Blocks share what they save, so that predictions are too high.")
            saved = 0
        extra = 0
        if training.of == "peak":
            # The model's end may hold the most: no more than is seen whichever way the blocks are trained.
            ways = [way for way in peaks if parts.can_train(way, mode)]
            seen = {way: peaks[way] if mode == "eager" else _peak(parts, way, mode) for way in ways}
            at_end = [peak - in_blocks.of_mode(way, mode).bytes - saved for way, peak in seen.items()]
            extra = max(0, min(at_end, default=0))
        behind = min(end_bytes, saved)
        rests[mode] = Rest(saved - behind, behind, extra, time_ms - plan.time_ms)
    parts.train_all_as("eager")
    return rests


def _peak(parts: Parts, blocks: Mode, rest: Mode) -> int:
    parts.train_all_as(blocks, rest)
    return parts.bytes()
