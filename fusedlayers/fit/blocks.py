"""The blocks of a model: repeated modules, each of which is saved once or recomputed, and plans of which are saved.

Blocks are the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` that have children themselves.
Where such lists are nested the inner ones count, if they compute most of the outer block's results: a stage of Swin is
looked at layer by layer, but a mixture of experts as a whole.

Where all blocks are recomputed a model takes least. A block that is saved once takes more bytes, and its forward pass
runs once less. Blocks are saved in the order of milliseconds per byte, as long as the budget holds: greedy, and so at
most one block from the best. Of alike blocks the last ones are saved: at the peak, where backward begins, a recomputed
last block holds as much as a saved one, and early ones are recomputed when the others are freed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from statistics import median
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import tree_leaves
from ..recipes.fuse import fuse
from ..recipes.patch import patch_of, patches_of
from ..utils.step import Step, now
from .training import Measurement, Of, Training, everyone

#: Inner blocks take the place of an outer one if they compute this part of its results: 92 to 94 % in a stage of
#: ConvNeXt or Swin, 78 % in a bottleneck of a ResNet, whose convolutions are in a list.
INNER_PART = 0.9
#: Arguments that a call cannot change, so that a recomputation finds the same.
PLAIN = (Tensor, NoneType, bool, int, float, complex, str, bytes, Enum, slice, torch.dtype, torch.device, torch.Size)
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: Predicted bytes are corrected by those that were measured, so often.
TRIES = 5


@dataclass(eq=False)
class FitBlock:
    """A block, how often a step calls it, and its kind: a number that blocks have in common that cost the same."""

    path: str
    module: nn.Module
    calls: int
    kind: int


class Blocks(list[FitBlock]):
    """The blocks of a model that may be recomputed, in the order of their calls; the model is fused.

    A block that is recomputed saves nothing in the forward pass. So it runs as PyTorch runs it, which takes less time,
    unless the budget counts the peak, which may be in its backward pass.

    Attributes:
        skipped: by reason, the paths of blocks that a recomputation would get wrong.
    """

    def __init__(self, model: nn.Module, of: Of) -> None:
        fuse(model)
        self._of = of
        self.model, self.skipped = model, dict[str, list[str]]()
        self._patches = {patch.module: patch for patch in patches_of(model)}

    def apply(self, blocks: Collection[FitBlock]) -> None:
        """Recompute all but these."""
        recomputed = {block.module for block in self if block not in blocks}
        plain = {module for block in recomputed for module in block.modules()} if self._of == "saved" else set()
        for module, patch in self._patches.items():
            patch.recompute, patch.saves_once = module in recomputed, module not in plain
            if patch_of(module) is None:
                patch.attach()

    def find(self, step: Step) -> Tensor:
        """Fill the list by a forward pass, whose loss is returned. It need not fit without recomputation: the children
        of all lists are under checkpoints."""
        calls, sizes = Counter[nn.Module](), Counter[nn.Module]()
        changeable: dict[nn.Module, str] = {}
        inside: list[nn.Module] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            inside.append(module)
            calls[module] += torch.is_grad_enabled()
            for leaf in tree_leaves((args, kwargs)):
                if not isinstance(leaf, PLAIN):
                    changeable[module] = type(leaf).__name__

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, Tensor) and not [*module.children()] and not any(result is arg for arg in args):
                sizes.update(dict.fromkeys(inside, result.nbytes))
            inside.pop()

        with ExitStack() as stack:
            for module in self.model.modules():
                for child in module.children() if isinstance(module, LISTS) else ():
                    if child in self._patches:
                        self._patches[child].recompute = True
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            loss = step.forward()
        chosen = self._chosen(self.model, sizes, set())
        paths = {module: path for path, module in self.model.named_modules()}
        kinds: dict[str, int] = {}
        for module in +calls:
            if module in chosen and module in changeable:
                name = changeable[module]
                advice = " (use_cache=False calls it without)" if name.endswith("Cache") else ""
                reason = f"it is called with a {name}, which it may change{advice}"
                self.skipped.setdefault(reason, []).append(paths[module])
            elif module in chosen:
                kind = kinds.setdefault(_kind_of(module, calls[module], sizes[module]), len(kinds))
                self.append(FitBlock(paths[module], module, calls[module], kind))
        return loss

    def _chosen(self, module: nn.Module, sizes: Counter[nn.Module], seen: set[nn.Module]) -> set[nn.Module]:
        """The modules below this one that are blocks."""
        seen.add(module)
        found: set[nn.Module] = set()
        children = [child for child in module.children() if child not in seen]
        blocks = [c for c in children if c in self._patches and [*c.children()] and not isinstance(c, LISTS[1:])]
        for child in children:
            inner = self._chosen(child, sizes, seen)
            is_block = isinstance(module, LISTS) and len(blocks) > 1 and child in blocks
            is_block &= sum(sizes[each] for each in inner) < INNER_PART * sizes[child]
            found |= {child} if is_block else inner
        return found


def _kind_of(module: nn.Module, calls: int, size: int) -> str:
    tensors = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    return repr(([(name, type(m), m.training) for name, m in module.named_modules()], tensors, calls, size))


# --- plans ------------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """How many more bytes are saved where a block is not recomputed, and the time of its recomputation."""

    bytes: int
    time_ms: float


class FitPlan(NamedTuple):
    """The blocks that are saved once, and what that takes, as predicted."""

    saved: frozenset[FitBlock]
    found: Measurement


class FitPlans:
    """All plans for blocks with these costs, in the order of their calls. ``least``: the one that recomputes all."""

    def __init__(self, costs: Mapping[FitBlock, Cost], least: Measurement, of: Of) -> None:
        self._costs, self.least, self._of = costs, least, of
        per_byte = {block: ms / size if size > 0 else math.inf for block, (size, ms) in costs.items()}
        self._order = sorted(costs, key=lambda block: per_byte[block])[::-1]  # the last of alike blocks first

    def _plan(self, saved: Collection[FitBlock]) -> FitPlan:
        """The bytes that blocks add. At the peak the backward pass of one holds all of its own, and those of blocks
        before it that are saved once."""
        total = most = most_of_one = 0
        for block, cost in self._costs.items():
            most, most_of_one = max(most, total + cost.bytes), max(most_of_one, cost.bytes)
            total += cost.bytes if block in saved else 0
        more = total if self._of == "saved" else most - most_of_one
        faster_ms = sum(self._costs[block].time_ms for block in saved)
        return FitPlan(frozenset(saved), Measurement(self.least.bytes + more, self.least.time_ms - faster_ms))

    def best(self, budget: int) -> FitPlan:
        """The fastest within a budget; the smallest where none is within it."""
        plan = self._plan(())
        for block in self._order:
            more = self._plan({*plan.saved, block})
            plan = more if more.found.bytes <= budget else plan
        return plan

    def within(self, budget: int, bytes_with: Callable[[Collection[FitBlock]], int]) -> tuple[FitPlan, int]:
        """The fastest of the plans tried whose bytes, as measured, keep to a budget, which the smallest does."""
        tried = {self._plan(()): self.least.bytes}
        allowed = budget
        for _ in range(TRIES):
            plan = self.best(allowed)
            if plan not in tried:
                tried[plan] = bytes_with(plan.saved)
            allowed = budget - (tried[plan] - plan.found.bytes)
        plan = min((plan for plan, size in tried.items() if size <= budget), key=lambda plan: plan.found.time_ms)
        return plan, tried[plan]


def measured(blocks: Blocks, training: Training, least: int, recompute_all: Callable[[], None]) -> FitPlans:
    """The plans, by a few steps that recompute all blocks, and by the bytes of one block of each kind saved once."""
    calls_ms: dict[int, list[float]] = defaultdict(list)
    began: list[float] = []

    def leave(block: FitBlock, *_: object) -> None:
        calls_ms[block.kind].append(1e3 * (now() - began.pop()))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(lambda *_: began.append(now())).remove)
            stack.callback(block.module.register_forward_hook(partial(leave, block)).remove)
        (least_ms,) = training.together(lambda: training.times_ms([recompute_all]))[0]
    saved: dict[int | None, int] = {}
    of_kind: dict[int | None, list[FitBlock]] = {None: [], **{block.kind: [block] for block in blocks}}
    for kind, kept in of_kind.items():
        blocks.apply(kept)
        saved[kind] = max(training.together(training.saved))
    costs = [Cost(saved[b.kind] - saved[None], b.calls * median(calls_ms[b.kind])) for b in blocks]
    return FitPlans(dict(zip(blocks, everyone(costs)[0], strict=True)), Measurement(least, least_ms), training.of)
