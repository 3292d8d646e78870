"""``nn.Sequential`` that recomputes segments of its children (Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost").

The first forward pass in training measures the children (``measurement.py``) and plans the segments (``planner.py``);
each segment is a checkpoint (``recompute.py``). Training costs at most one more forward pass for each backward pass,
and the measurement one, or two if results of products may be saved.

A plan holds for inputs up to the size that was measured; for smaller ones it recomputes more than it need. A larger one
is measured anew.
"""

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

from .._torch import tree_map_only
from ..utils.storages import tensors_in
from ..utils.torchscript import refuse_script
from ..validation import budget_from
from .free_state import FreeState
from .measurement import ChildCosts, measure
from .planner import Plan, plan_balanced, plan_of_lengths, plan_within_budget, segments_of_lengths
from .recompute import Arguments, Recompute, can_recompute, check_recompute, run_checkpointed, run_compiled
from .search import Segment
from .state_snapshot import StateSnapshot, recomputed_region


class SublinearSequential(nn.Sequential):
    """``nn.Sequential`` that saves the inputs of segments, and recomputes these for their backward pass (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost").

    It is built, indexed, sliced, extended and nested as ``nn.Sequential``, and has its ``state_dict`` keys. The first
    forward pass in training runs the children once more, one by one, to measure what each saves and costs; ``plan``
    says what follows from that. It is made anew when children change or a larger input comes.

    Batch norms, and all other modules that write to buffers, do so once for each forward pass, with a backward pass or
    without. Random numbers and autocast are those of the first run. Second derivatives, a second backward pass, inputs
    and outputs of any kind work as in ``nn.Sequential``; several inputs go to the first child. In evaluation nothing is
    recomputed, nor where ``fl.sublinear`` would run plainly.

    Args:
        *modules: as for ``nn.Sequential``: modules, or one ``OrderedDict``.
        segments: how many there are, or how many children each has; the last one is not recomputed. By default as many
            as need least memory: about the square root of the number of children, if these are alike.
        memory_budget_bytes: of all plans that hold no more than this at any moment, the one that recomputes least:
            bytes, or a size such as "8GiB".
        recompute: "all", "cheap" (results of convolutions, matmuls and attention are saved, and only what lies between
            them is recomputed) or "nothing". By default "all"; with a budget whichever is best for each segment. The
            attribute may be changed at any time.

    Raises:
        ValueError: an option out of range; both ``segments`` and a budget; in the first forward pass, a budget that no
            plan fits in.

    Saved for the backward pass: the segments' inputs, and what the children save that are not recomputed.

    >>> import torch, fusedlayers as fl
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)]
    >>> net = fl.SublinearSequential(*blocks)
    >>> y = net(torch.randn(32, 64))
    >>> print(net.plan)
    15 of 16 children are recomputed, in 6 segments: 56.0 KiB saved in the forward pass, at most 56.0 KiB held ...
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        *modules: Any,
        segments: int | Sequence[int] | None = None,
        memory_budget_bytes: int | str | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__(*modules)
        name = type(self).__name__
        if recompute is not None:
            check_recompute(name, recompute)
        if segments is not None and memory_budget_bytes is not None:
            raise ValueError(f"{name}: segments and memory_budget_bytes exclude each other; leave one of them out")
        if memory_budget_bytes is not None:
            budget_from(name, memory_budget_bytes)
        given: object = segments
        lengths: Sequence[Any] = (
            given if isinstance(given, Sequence) and not isinstance(given, str) else [segments or 1]
        )
        if segments == 0 or not lengths or not all(_is_count(length) and length > 0 for length in lengths):
            raise ValueError(f"{name}: segments must be a positive number, or a list of such, got {segments!r}")
        self.segments = segments
        self.memory_budget_bytes = memory_budget_bytes
        self.recompute = recompute
        self._plan_cache = _PlanCache()

    @property
    def plan(self) -> Plan | None:
        """What is recomputed, and what is saved; None before the first forward pass in training."""
        return None if self._plan_cache.current is None else self._plan_cache.current.plan

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
        if not can_recompute(Arguments.of(inputs).leaves):
            return _run(children, *inputs)
        cached = self._plan_cache.current
        if cached is None or not cached.applies(children, inputs, self._options()):
            if FreeState([*self.modules()]).runs_differently_first:
                return _run(children, *inputs)
            costs = measure(children, inputs, is_selective="cheap" in self._modes())
            cached = _CachedPlan.of(self._plan(costs), costs, children, inputs, self._options())
            self._plan_cache.current = cached
        for start, stop, mode in cached.plan.segments:
            if mode == "nothing":
                with recomputed_region():  # as it was measured
                    inputs = (_run(children[start:stop], *inputs),)
            else:
                inputs = (_run_segment(children[start:stop], inputs, mode, start in cached.copied),)
        return inputs[0]

    def _options(self) -> Any:
        segments = tuple(self.segments) if isinstance(self.segments, Sequence) else self.segments
        return segments, self.memory_budget_bytes, self.recompute

    def _plan(self, costs: list[ChildCosts]) -> Plan:
        if isinstance(self.segments, int):
            return plan_balanced(costs, self.segments, self.recompute or "all")
        if self.segments is not None:
            return plan_of_lengths(costs, self._lengths(), self.recompute or "all")
        name, budget = type(self).__name__, self.memory_budget_bytes
        if budget is not None:
            budget = budget_from(name, budget)
        try:
            return plan_within_budget(costs, budget, self._modes())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

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
        """While compiling nothing can be measured: the plan of before, or segments of as many children each."""
        cached = self._plan_cache.current
        if cached is not None and cached.plan.segments[-1].stop == len(self) and cached.options == self._options():
            return cached.plan.segments
        if self.memory_budget_bytes is not None:
            raise RuntimeError(
                f"{type(self).__name__}: memory_budget_bytes needs a measurement, which torch.compile cannot make: "
                "call the container once in training before it is compiled, or say segments="
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
    """Holds the plan of a container. It is not among the attributes: a recomputation would not find it, and copies have
    other children."""

    current: _CachedPlan | None = None

    def __reduce__(self) -> Any:
        return _PlanCache, ()


@dataclass(frozen=True)
class _CachedPlan:
    """A plan, and what it was made for.

    Attributes:
        copied: the starts of segments of which a child modifies the segment's input in place. They run on a copy.
        children: weak references; the ids of dead children may be those of others.
    """

    plan: Plan
    copied: frozenset[int]
    children: list[weakref.ref[nn.Module]]
    size: int
    kinds: Any
    options: Any

    @classmethod
    def of(
        cls, plan: Plan, costs: list[ChildCosts], children: list[nn.Module], inputs: tuple[Any, ...], options: Any
    ) -> _CachedPlan:
        copied = frozenset(start for start, stop, _ in plan.segments if _writes_input(costs[start:stop]))
        return cls(plan, copied, [weakref.ref(child) for child in children], *_size_and_kinds(inputs), options)

    def applies(self, children: list[nn.Module], inputs: tuple[Any, ...], options: Any) -> bool:
        size, kinds = _size_and_kinds(inputs)
        same = [ref() for ref in self.children] == children and self.kinds == kinds and self.options == options
        return same and size <= self.size


def _writes_input(costs: list[ChildCosts]) -> bool:
    """Whether a child modifies the first one's input, which those before it pass on."""
    for child in costs:
        if child.writes_input or not child.returns_input:
            return child.writes_input
    return False


def _size_and_kinds(inputs: tuple[Any, ...]) -> tuple[int, Any]:
    tensors = list(tensors_in(inputs))
    kinds = {(t.dtype, t.device.type, torch.is_autocast_enabled(t.device.type)) for t in tensors}
    return sum(tensor.numel() for tensor in tensors), kinds


def _run(children: list[nn.Module], *inputs: Any) -> Any:
    for child in children:
        inputs = (child(*inputs),)
    return inputs[0] if len(inputs) == 1 else inputs


def _run_on_copies(children: list[nn.Module], *inputs: Any) -> Any:
    return _run(children, *tree_map_only(Tensor, torch.clone, inputs))


def _run_segment(children: list[nn.Module], inputs: tuple[Any, ...], mode: Recompute, copies: bool) -> Any:
    free_state = FreeState([module for child in children for module in child.modules()])
    if free_state.runs_differently_first:  # a module that has come since the plan was made
        return _run(children, *inputs)
    arguments = Arguments.of(inputs)
    run = functools.partial(_run_on_copies if copies else _run, children)
    return run_checkpointed(run, arguments, StateSnapshot(free_state, arguments.tensors), mode)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
