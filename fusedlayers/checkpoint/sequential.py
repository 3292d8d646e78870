"""``nn.Sequential`` whose children run in segments, each of which may run again for its backward pass."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from .._torch import tree_leaves, tree_map_only
from .free_state import FreeState
from .measurement import ChildCosts, measure
from .planner import Plan, Segment, plan_balanced, plan_of_lengths, plan_within_budget, segments_of_lengths
from .recompute import Recompute, can_recompute, check_recompute, run_checkpointed, run_compiled
from .state_snapshot import StateSnapshot, recomputed_region


class SublinearSequential(nn.Sequential):
    """``nn.Sequential`` that keeps the inputs of segments, and runs these again for their backward pass (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost").

    It is built, indexed, sliced, extended and nested as ``nn.Sequential``, and has its ``state_dict`` keys. The first
    forward pass in training runs the children once more, one by one, to see what each keeps and costs; ``plan`` says
    what came of it, and is made anew when children change or a larger input comes.

    Batch norms, and whatever else writes on buffers, do so once for each forward pass, with a backward pass or without.
    Random numbers and autocast are those of the first run. Second derivatives, a second backward pass, inputs and
    outputs of any kind are as in ``nn.Sequential``; several inputs go to the first child. In evaluation nothing runs
    again, nor where ``fl.sublinear`` would run plainly.

    Args:
        *modules: as for ``nn.Sequential``: modules, or one ``OrderedDict``.
        segments: how many there are, or how many children each has; the last one runs once. By default as many as keep
            least: about the square root of the number of children, if these are alike.
        memory_budget_bytes: of all plans that keep no more than this at any moment, the one that recomputes least.
        recompute: "all", "cheap" (results of convolutions, matmuls and attention are kept, and only what lies between
            them runs again) or "nothing". By default "all"; with a budget whichever is best for each segment. The
            attribute may be changed at any time.

    Raises:
        TypeError, ValueError: what cannot be; both ``segments`` and a budget; in the first forward pass, a budget that
            no plan fits in.

    Saved for the backward pass: the segments' inputs, and, of segments that run once, what their children save.

    >>> import torch, fusedlayers as fl
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)]
    >>> net = fl.SublinearSequential(*blocks)
    >>> y = net(torch.randn(32, 64))
    >>> print(net.plan)
    15 of 16 children run again, in 6 segments: 56.0 KiB kept from the forward pass, at most 56.0 KiB ...
    """

    def __init__(
        self,
        *modules: Any,
        segments: int | Sequence[int] | None = None,
        memory_budget_bytes: int | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__(*modules)
        name = type(self).__name__
        if recompute is not None:
            check_recompute(name, recompute)
        if segments is not None and memory_budget_bytes is not None:
            raise ValueError(f"{name}: segments and memory_budget_bytes exclude each other; leave one of them out")
        if memory_budget_bytes is not None and not (_is_count(memory_budget_bytes) and memory_budget_bytes >= 0):
            raise ValueError(f"{name}: memory_budget_bytes must be a number of bytes, got {memory_budget_bytes!r}")
        lengths = segments if isinstance(segments, Sequence) and not isinstance(segments, str) else [segments or 1]
        if segments == 0 or not lengths or not all(_is_count(length) and length > 0 for length in lengths):
            raise ValueError(f"{name}: segments must be a positive number, or a list of such, got {segments!r}")
        self.segments = segments
        self.memory_budget_bytes = memory_budget_bytes
        self.recompute = recompute
        self._plan_cache = _PlanCache()

    @property
    def plan(self) -> Plan | None:
        """What runs again, and what is kept; None before the first forward pass in training."""
        return None if self._plan_cache.cached is None else self._plan_cache.cached.plan

    def forward(self, input: Any, *others: Any) -> Any:
        inputs = (input, *others)
        children = list(self)
        if not (children and self.training and torch.is_grad_enabled()) or self.recompute == "nothing":
            return _run(children, *inputs)
        if torch.compiler.is_compiling():
            for start, stop, mode in self._segments_for_compiler():
                run = functools.partial(_run, children[start:stop])
                inputs = (run(*inputs) if mode == "nothing" else run_compiled(run, inputs, {}, mode),)
            return inputs[0]
        if not can_recompute(self.modules(), tree_leaves(inputs)):
            return _run(children, *inputs)
        for start, stop, mode in self._segments(children, inputs):
            if mode == "nothing":
                with recomputed_region():  # as it was measured
                    inputs = (_run(children[start:stop], *inputs),)
            else:
                cached = self._plan_cache.cached
                copies = cached is not None and start in cached.copied
                inputs = (_run_segment(children[start:stop], inputs, mode, copies),)
        return inputs[0]

    def _segments(self, children: list[nn.Module], inputs: tuple[Any, ...]) -> Sequence[Segment]:
        cached = self._plan_cache.cached
        if cached is None or not cached.applies(children, inputs, self._options()):
            measured = measure(children, inputs, is_selective="cheap" in self._modes())
            self._plan_cache.cached = cached = _CachedPlan.of(
                self._plan(measured), measured, children, inputs, self._options()
            )
        return cached.plan.segments

    def _options(self) -> Any:
        segments = tuple(self.segments) if isinstance(self.segments, Sequence) else self.segments
        return segments, self.memory_budget_bytes, self.recompute

    def _plan(self, measured: list[ChildCosts]) -> Plan:
        if isinstance(self.segments, int):
            return plan_balanced(measured, self.segments, self.recompute or "all")
        if self.segments is not None:
            return plan_of_lengths(measured, self._lengths(), self.recompute or "all")
        return plan_within_budget(measured, self.memory_budget_bytes, self._modes())

    def _modes(self) -> tuple[Recompute, ...]:
        if self.recompute is None and self.memory_budget_bytes is not None:
            return ("nothing", "cheap", "all")
        return ("nothing", self.recompute or "all")

    def _lengths(self) -> list[int]:
        lengths = list(cast("Sequence[int]", self.segments))
        if sum(lengths) != len(self):
            raise ValueError(
                f"{type(self).__name__}: segments={lengths} are {sum(lengths)} children, but there are {len(self)}"
            )
        return lengths

    def _segments_for_compiler(self) -> Sequence[Segment]:
        """For the compiler, which cannot measure: what was cached before, or segments of as many children each."""
        cached = self._plan_cache.cached
        if cached is not None and cached.plan.segments[-1].stop == len(self) and cached.options == self._options():
            return cached.plan.segments
        if self.memory_budget_bytes is not None:
            raise RuntimeError(
                f"{type(self).__name__}: memory_budget_bytes needs to be measured, which torch.compile cannot do: call "
                "the container once in training before it is compiled, or say segments="
            )
        if self.segments is not None and not isinstance(self.segments, int):
            return segments_of_lengths(self._lengths(), self.recompute or "all")
        count = min(len(self), self.segments or math.ceil(math.sqrt(len(self))))
        ends = [k * len(self) // count for k in range(count + 1)]
        return segments_of_lengths([b - a for a, b in itertools.pairwise(ends)], self.recompute or "all")

    def __getitem__(self, index: Any) -> Any:
        found: Any = super().__getitem__(index)
        if isinstance(index, slice):
            # Lengths of segments are those of all children.
            found.segments = self.segments if isinstance(self.segments, int) else None
            found.memory_budget_bytes, found.recompute = self.memory_budget_bytes, self.recompute
        return found

    def __add__(self, other: Any) -> Self:
        if not isinstance(other, nn.Sequential):
            return cast("Self", super().__add__(other))  # which refuses
        return cast("Self", self[:0].extend([*self, *other]))

    def __mul__(self, count: int) -> Self:
        product = super().__mul__(count)  # which refuses what is no count
        return cast("Self", self[:0].extend(product))

    def extra_repr(self) -> str:
        shown = {
            "segments": self.segments, "memory_budget_bytes": self.memory_budget_bytes, "recompute": self.recompute
        }  # fmt: skip
        parts = [f"{name}={value!r}" for name, value in shown.items() if value is not None]
        return ", ".join([*parts, *([] if self.plan is None else [str(self.plan)])])


class _PlanCache:
    """What a container has cached. Not among its attributes: a second run would not find it, and copies have other
    children."""

    cached: _CachedPlan | None = None

    def __reduce__(self) -> Any:
        return _PlanCache, ()


@dataclass(frozen=True)
class _CachedPlan:
    """A plan, and what it was made for.

    Attributes:
        copied: the children with which segments begin that write over their input, and must leave it as it is.
        children: not by their ids, which others may have once they are gone.
    """

    plan: Plan
    copied: frozenset[int]
    children: list[weakref.ref[nn.Module]]
    size: int
    kinds: Any
    options: Any

    @classmethod
    def of(
        cls, plan: Plan, measured: list[ChildCosts], children: list[nn.Module], inputs: tuple[Any, ...], options: Any
    ) -> _CachedPlan:
        copied = frozenset(start for start, stop, _ in plan.segments if _writes_input(measured[start:stop]))
        return cls(plan, copied, [weakref.ref(child) for child in children], *_kind(inputs), options)

    def applies(self, children: list[nn.Module], inputs: tuple[Any, ...], options: Any) -> bool:
        size, kinds = _kind(inputs)
        same = [ref() for ref in self.children] == children and self.kinds == kinds and self.options == options
        return same and size <= self.size


def _writes_input(children: list[ChildCosts]) -> bool:
    """Whether one of them does, that gets the first one's input from those before it."""
    for child in children:
        if child.writes_input or not child.returns_input:
            return child.writes_input
    return False


def _kind(inputs: tuple[Any, ...]) -> tuple[int, Any]:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    kinds = {(t.dtype, t.device.type, torch.is_autocast_enabled(t.device.type)) for t in tensors}
    return sum(tensor.numel() for tensor in tensors), kinds


def _run(children: list[nn.Module], *inputs: Any) -> Any:
    for child in children:
        inputs = (child(*inputs),)
    return inputs[0] if len(inputs) == 1 else inputs


def _run_on_copies(children: list[nn.Module], *inputs: Any) -> Any:
    return _run(children, *tree_map_only(Tensor, torch.clone, inputs))


def _run_segment(children: list[nn.Module], inputs: tuple[Any, ...], mode: Recompute, copies: bool) -> Any:
    modules = [module for child in children for module in child.modules()]
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    run = functools.partial(_run_on_copies if copies else _run, children)
    return run_checkpointed(run, inputs, {}, StateSnapshot(FreeState(modules), tensors), mode)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
