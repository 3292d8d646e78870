"""``nn.Sequential`` that recomputes segments of its children (Chen et al. 2016, "Training Deep Nets with Sublinear
Memory Cost").

The first forward pass in training measures the children (``child_costs.py``) and plans the segments (``segments.py``);
each segment is a checkpoint (``recompute.py``). Training costs at most one more forward pass for each backward pass,
and the measurement one, or two if results of products may be saved. What the children write to attributes while they
are measured stays. For inputs smaller than those measured, a plan recomputes more than it need.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves, tree_map_only
from ..calls.validation import is_whole
from ..utils.module_state import modules_in
from ..utils.storages import tensors_in
from .child_costs import ChildCosts, measure
from .recompute import Recompute, can_recompute, check_recompute, recomputed
from .segments import Plan, Segment, budget_from, plan_of, plan_within_budget, segments_of_lengths


class SublinearSequential(nn.Sequential):
    """``nn.Sequential`` that saves the inputs of segments, and recomputes these for their backward pass (Chen et al.
    2016, "Training Deep Nets with Sublinear Memory Cost").

    It is built, indexed, sliced, extended and nested as ``nn.Sequential``, and has its ``state_dict`` keys (a sum or a
    product of containers is an ``nn.Sequential``). The first forward pass in training runs the children once more, one
    by one, to measure what each saves and costs; ``plan`` says what follows from that. It is made anew when children
    change or a larger input comes.

    Batch norms, and all other modules that write to buffers, do so once for each forward pass, with a backward pass or
    without. PyTorch's random numbers and autocast are those of the first run; what else is not replayed, and where
    nothing is recomputed, ``fl.sublinear`` says. Several inputs go to the first child; inputs and outputs are of any
    kind.

    Args:
        *modules: as for ``nn.Sequential``: modules, or one ``OrderedDict``.
        segments: how many there are, of equally many children, or how many children each has; the last one is not
            recomputed. By default as many as need least memory: about the square root of the number of children, if
            these are alike.
        memory_budget_bytes: of all plans that hold no more than this at any moment, the one that recomputes least:
            bytes, or a size such as "8GiB".
        recompute: "all", "cheap" (results of convolutions, matmuls and attention are saved, and only what lies between
            them is recomputed; one backward pass) or "nothing". By default "all"; with a budget whichever is best for
            each segment. The attribute may be changed at any time.

    Raises:
        ValueError: an option out of range; both ``segments`` and a budget; in the first forward pass, a budget that no
            plan fits in, or "cheap" where a child writes over the result of a convolution or matmul in place.

    Saved for the backward pass: the segments' inputs, and what the children save that are not recomputed.

    >>> import torch, fusedlayers as fl
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)]
    >>> net = fl.SublinearSequential(*blocks)
    >>> y = net(torch.randn(32, 64))
    >>> print(net.plan)
    15 of 16 children are recomputed, in 6 segments: 56.0 KiB saved in the forward pass, at most 56.0 KiB held ...
    """

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
        lengths = segments if isinstance(segments, Sequence) else [1 if segments is None else segments]
        if isinstance(segments, str) or not lengths or not all(is_whole(length) and length > 0 for length in lengths):
            raise ValueError(f"{name}: segments must be a positive number, or a list of such, got {segments!r}")
        self.segments = segments
        self.memory_budget_bytes = memory_budget_bytes
        self.recompute = recompute
        self._planned: _Planned | None = None

    @property
    def plan(self) -> Plan | None:
        """The segments, and the bytes that they save; None before the first forward pass in training."""
        return None if self._planned is None else self._planned.plan

    def forward(self, input: Any, *others: Any) -> Any:
        inputs = (input, *others)
        children = list(self)
        if not (children and self.training and torch.is_grad_enabled()) or self.recompute == "nothing":
            return _run(children, *inputs)
        copied: frozenset[int] = frozenset()
        if torch.compiler.is_compiling():
            segments = self._segments_for_compiler()
        else:
            if not can_recompute(modules_in(self), tree_leaves(inputs)):
                return _run(children, *inputs)
            tensors = list(tensors_in(inputs))
            kinds = {(t.dtype, t.device.type, torch.is_autocast_enabled(t.device.type)) for t in tensors}
            planned, size = self._planned, sum(tensor.numel() for tensor in tensors)
            asked = self._options(), children, kinds
            if planned is None or (planned.options, planned.children, planned.kinds) != asked or planned.size < size:
                self._planned = planned = _Planned(*self._plan_for(children, inputs), *asked, size)
            segments, copied = planned.plan.segments, planned.copied
        for start, stop, mode in segments:
            run = functools.partial(_run, children[start:stop], is_copied=start in copied)
            inputs = (run(*inputs) if mode == "nothing" else recomputed(run, children[start:stop], inputs, {}, mode),)
        return inputs[0]

    def _options(self) -> Any:
        segments = tuple(self.segments) if isinstance(self.segments, Sequence) else self.segments
        return segments, self.memory_budget_bytes, self.recompute

    def _plan_for(self, children: list[nn.Module], inputs: tuple[Any, ...]) -> tuple[Plan, frozenset[int]]:
        """Measure the children, and plan. Besides the plan, the starts of segments that run on a copy of their input,
        because a child modifies it in place."""
        name, mode, budget = type(self).__name__, self.recompute or "all", self.memory_budget_bytes
        modes: tuple[Recompute, ...] = ("nothing", mode)
        if self.recompute is None and budget is not None:
            modes = ("nothing", "cheap", "all")
        costs = measure(children, inputs, is_selective="cheap" in modes)
        if "cheap" in modes and _write_products(costs):
            if self.recompute == "cheap":
                raise ValueError(
                    f"{name}: recompute='cheap' saves the results of convolutions and matmuls, but a child writes over "
                    "one in place, as ReLU(inplace=True) does behind a convolution; pass inplace=False there, or "
                    "recompute='all'"
                )
            modes = ("nothing", "all")
        if self.segments is not None:
            plan = plan_of(costs, segments_of_lengths(self._lengths(), mode))
        else:
            try:
                plan = plan_within_budget(costs, None if budget is None else budget_from(name, budget), modes)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return plan, frozenset(start for start, stop, _ in plan.segments if _write_input(costs[start:stop]))

    def _lengths(self) -> list[int]:
        """How many children each segment has: of a number of segments, or without one, as many as one another."""
        total, segments = len(self), self.segments or math.ceil(math.sqrt(len(self)))
        if not isinstance(segments, Sequence):
            ends = [k * total // min(total, segments) for k in range(min(total, segments) + 1)]
            return [b - a for a, b in itertools.pairwise(ends)]
        if sum(segments) != total:
            raise ValueError(
                f"{type(self).__name__}: segments={[*segments]} are {sum(segments)} children, but there are {total}"
            )
        return [*segments]

    def _segments_for_compiler(self) -> Sequence[Segment]:
        """While compiling nothing can be measured: the plan of before, or segments of as many children each."""
        planned = self._planned
        if planned is not None and planned.plan.segments[-1].stop == len(self) and planned.options == self._options():
            return planned.plan.segments
        if self.memory_budget_bytes is not None:
            raise RuntimeError(
                f"{type(self).__name__}: memory_budget_bytes needs a measurement, which torch.compile cannot make: "
                "call the container once in training before it is compiled, or say segments="
            )
        return segments_of_lengths(self._lengths(), self.recompute or "all")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_planned": None}  # copies have other children

    def __getitem__(self, index: Any) -> Any:
        found: Any = super().__getitem__(index)
        if isinstance(index, slice):
            # Lengths of segments are those of all children.
            found.segments = self.segments if isinstance(self.segments, int) else None
            found.memory_budget_bytes, found.recompute = self.memory_budget_bytes, self.recompute
        return found

    def extra_repr(self) -> str:
        names = ("segments", "memory_budget_bytes", "recompute")
        parts = [f"{name}={value!r}" for name in names if (value := getattr(self, name)) is not None]
        return ", ".join([*parts, *([] if self.plan is None else [str(self.plan)])])


@dataclass(frozen=True)
class _Planned:
    """A plan, the segments that run on copies, and for which options, children and inputs it was made."""

    plan: Plan
    copied: frozenset[int]
    options: Any
    children: list[nn.Module]
    kinds: Any
    size: int


def _write_input(costs: Sequence[ChildCosts]) -> bool:
    """Whether a child modifies the first one's input, which those before it pass on."""
    for child in costs:
        if child.writes_input or not child.returns_input:
            return child.writes_input
    return False


def _write_products(costs: Sequence[ChildCosts]) -> bool:
    """Whether a child modifies the result of a product in place: its own, or that of the one before it."""
    costs = [child.selective or child for child in costs]
    of_neighbours = any(a.output_is_product and b.writes_input for a, b in itertools.pairwise(costs))
    return of_neighbours or any(child.writes_product for child in costs)


def _run(children: list[nn.Module], *inputs: Any, is_copied: bool = False) -> Any:
    inputs = tree_map_only(Tensor, torch.clone, inputs) if is_copied else inputs
    for child in children:
        inputs = (child(*inputs),)
    return inputs[0] if len(inputs) == 1 else inputs
