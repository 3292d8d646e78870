"""Find the parts of a model, and measure what they save and cost in each way to train them."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Set
from typing import Any

from torch import nn

from ..fusion.fuse import Fusing
from ..profiling.memory_use import report_of
from ..profiling.row_groups import bytes_by_module
from ..utils.formatting import first_line
from ..utils.progress import OnStage, within
from ..utils.storages import tensors_in
from .agreement import agreed, everyone, together
from .arguments import readable
from .blocks import Mode, Way, find_blocks
from .costs import BlockCosts, measure, saved_parts
from .parts import NO_BLOCKS, Parts
from .plans import Plans, Rest
from .report import WORDS
from .training import Training, are_alike
from .watch import Watch

#: Predictions that are too high by a smaller part of what blocks save are not worth a word.
ALIKE = 0.001


def measured_plans(parts: Parts, on_stage: OnStage) -> tuple[Plans, int]:
    """All plans for a model, whose blocks and rest are noted; and what the budget counts of the model as it is."""
    # Which part of all is done is by the steps that are run of a transformer of six layers, 15 of 63 up to "checking".
    on_stage("measuring the model", 0.0)
    end_bytes = together(functools.partial(_find_blocks, parts))[0]
    _find_regions(parts, within(on_stage, 0.05, 0.2))
    if len(set(everyone(repr([(block.path, block.modes) for block in parts.blocks])))) > 1:
        raise ValueError("fit: the processes have different models; call it before the model is split")
    eager_bytes = parts.bytes()
    on_stage("checking gradients", 0.2)
    peaks = _check_modes(parts, eager_bytes)
    costs = _measure_blocks(parts, on_stage)
    on_stage("measuring the rest of the model", 0.4)
    rests = _measure_rest(parts, costs, end_bytes, peaks)
    return Plans(parts.blocks, agreed(costs), agreed(rests), parts.training.of), eager_bytes


def _find_blocks(parts: Parts) -> int:
    """The blocks, and their calls; return the bytes that are saved behind them."""
    step = parts.training.step
    try:
        rows = report_of(step).rows
    except Exception as error:
        raise readable(error, "fit", step.args) from error
    blocks = find_blocks(parts.model, bytes_by_module(rows))
    parts.training.reset_random()
    watch = Watch()
    with watch.watching(blocks):
        loss = step.forward()
    end_bytes = watch.finish([loss], tensors_in((parts.model, step.args, step.kwargs)))
    for block in blocks:
        if block not in watch.blocks:
            parts.skip("it is not called with these inputs, or without gradients", block)
        elif block.is_part:
            continue
        elif block.skipped_because is not None:
            parts.skip(block.skipped_because, block)
        elif not block.calls_with_grad and not any(p.requires_grad for p in block.module.parameters()):
            parts.skip("nothing in it needs a gradient", block)
        else:
            parts.blocks.append(block)
    parts.blocks.sort(key=watch.blocks.index)
    if not blocks:
        parts.notes.append(NO_BLOCKS)
    return end_bytes


def _find_regions(parts: Parts, on_stage: OnStage) -> None:
    parts.training.reset_random()
    fusing = Fusing(parts.model, function="fit", on_stage=on_stage)
    fusing.on(parts.training.step.args, parts.training.step.kwargs)
    modules = {block.module for block in parts.blocks}
    outside = _reached(parts.model, modules)
    inside = {block: _reached(block.module, modules - {block.module}) for block in parts.blocks}
    owners = Counter(itertools.chain(outside, *inside.values()))
    # What parts of the model share cannot be changed, or recomputed, in one of them alone.
    own = frozenset(module for module, count in owners.items() if count == 1) - outside
    parts.rest.find_regions(owners.keys() - own)
    within = {inner for module in parts.rest.fused for inner in module.modules()}
    for block in parts.blocks:
        block.find_regions(inside[block], [place.module for place in fusing.mlps if place.module in own])
        # What a recomputation saves counts for the peak alone.
        block.plain_recomputed = own if parts.training.of == "saved" else frozenset()
        block.is_in_fused = block.module in within
        block.shared = block.fused - own
    if any(block.shared for block in parts.blocks):
        parts.notes.append(
            "Modules that blocks share count as the rest of the model: they keep outputs everywhere or nowhere."
        )
    parts.train_all_as("eager")


def _reached(start: nn.Module, stops: Set[nn.Module]) -> set[nn.Module]:
    """A module and those in it, but for these blocks and what only they lead to."""
    found, waiting = set[nn.Module](), [start]
    while waiting:
        module = waiting.pop()
        if module not in stops and module not in found:
            found.add(module)
            waiting += module.children()
    return found


def _check_modes(parts: Parts, eager_bytes: int) -> dict[Way, int]:
    """Leave out the ways to train that do not work, or change gradients; what the others take at the peak."""
    training = parts.training
    expected = training.gradients()
    is_repeatable = are_alike(training.gradients(), expected)
    if not is_repeatable and parts.blocks:
        parts.notes.append("Gradients differ from run to run, so that nothing may be recomputed.")

    def differs() -> bool:
        return not (is_repeatable and are_alike(training.gradients(), expected))

    peaks: dict[Way, int] = {("eager", "eager"): eager_bytes}
    for mode, rest in parts.ways[1:]:
        blocks = [block for block in parts.blocks if mode in block.modes]
        parts.train_all_as(mode, rest)
        if mode == "eager":  # no block is recomputed, which could go wrong
            peaks[mode, rest] = parts.bytes()
        elif blocks:
            reason, peaks[mode, rest] = _tried(training, None if mode == "outputs" else differs)
            if reason is not None:  # whatever the rest does then
                parts.skip(f"cannot {WORDS[mode]}: {reason}", *blocks)
                for block in blocks:
                    block.without.add(mode)
    parts.train_all_as("eager")
    failed = {mode for block in parts.blocks for mode in block.without}
    return {way: peak for way, peak in peaks.items() if way[0] not in failed}


def _tried(training: Training, differs: Callable[[], bool] | None) -> tuple[str | None, int]:
    """Why the model cannot be trained as it is now, or None; and the peak, where the budget counts that. The processes
    agree: on the first reason, and on the highest peak."""
    reason, peak = None, 0
    try:
        if differs is not None and differs():
            reason = "gradients differ"
        elif training.of == "peak":
            peak = training.bytes()
    except Exception as error:  # whatever a model's code does with what it is not used to
        reason = f"{type(error).__name__}: {first_line(error)}"
    reasons, peaks = zip(*everyone((reason, peak)), strict=True)
    return next((found for found in reasons if found is not None), None), max(peaks)


def _measure_blocks(parts: Parts, on_stage: OnStage) -> list[BlockCosts]:
    """The costs of each block; one of each kind is measured. Those that do not run by themselves are skipped."""
    measured: dict[Any, BlockCosts] = {}
    works, costs = [], []
    for i, block in enumerate(parts.blocks):
        assert block.call is not None
        try:
            with block.call.autocasting():
                key = block.kind, saved_parts(block)  # blocks may differ in what their kind does not show
                if key not in measured:
                    on_stage(f"measuring {block.path}", round(0.25 + 0.15 * i / len(parts.blocks), 2))
                    measured[key] = measure(block, parts.training, parts.rests)
        except Exception as error:
            parts.skip(f"it does not run by itself: {type(error).__name__}: {first_line(error)}", block)
            continue
        finally:
            block.call = None  # its tensors are not needed any more
        works.append(block)
        costs.append(measured[key])
    parts.blocks = works
    return costs


def _measure_rest(parts: Parts, costs: list[BlockCosts], end_bytes: int, peaks: dict[Way, int]) -> dict[Mode, Rest]:
    """What lies outside of the blocks: what the model takes, less what the blocks do. ``peaks``: of the model, by how
    all blocks, and the rest, are trained."""
    training = parts.training
    in_blocks = Plans(parts.blocks, costs, dict.fromkeys(parts.rests, Rest(0, 0, 0, 0.0)), "saved")
    # Blocks that share modules with the rest cannot all be left to PyTorch where it is not.
    plans = [in_blocks.plan([rest if b.shared else "eager" for b in parts.blocks], rest) for rest in in_blocks.rests]
    times = training.times_ms([functools.partial(parts.follow, plan) for plan in plans])
    outside = [time_ms - plan.time_ms for plan, time_ms in zip(plans, times, strict=True)]
    # None below 0: other processes may have had the processor while the blocks were timed.
    lift = max(0.0, -min(outside))
    rests: dict[Mode, Rest] = {}
    is_too_high = False
    for plan, outside_ms in zip(plans, outside, strict=True):
        parts.follow(plan)
        rest, saved = plan.modes[0], training.saved() - plan.bytes
        is_too_high |= saved < -plan.bytes * ALIKE
        saved = max(0, saved)
        behind = min(end_bytes, saved)
        # The model's end may hold the most: no more than is seen whichever way the blocks are trained.
        at_end = [
            peak - saved - in_blocks.of_mode(mode, rest).bytes
            for (mode, of_rest), peak in peaks.items()
            if of_rest == rest and training.of == "peak"
        ]
        extra = max(0, min(at_end, default=0))
        rests[rest] = Rest(saved - behind, behind, extra, outside_ms + lift)
    parts.train_all_as("eager")
    if is_too_high:
        parts.notes.append("Blocks share what they save, so that predictions are too high.")
    return rests
