"""What blocks are called with in a training step, and what they share with the rest of the model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import sequence_number, tree_leaves
from ..utils.autograd_graph import checkpoints_of, nodes_of, saved_by
from ..utils.storages import sizes_of, tensors_in
from .blocks import Block
from .calls import Call


@dataclass(eq=False)
class _Visit:
    """A call of a block: its tensors, and the numbers that autograd gives the nodes made in it."""

    block: Block
    inputs: list[Tensor]
    start: int
    outputs: list[Tensor] = field(default_factory=list)
    end: int = 0

    def made(self, number: int) -> bool:
        return self.start <= number < self.end

    def is_saved_elsewhere(self, tensors: Sequence[Tensor], other: _Visit, savers: Mapping[int, list[int]]) -> bool:
        """Whether a node saves one that was made neither in this call nor in ``other``."""
        numbers = [number for key in sizes_of(tensors) for number in savers.get(key, ())]
        return not all(self.made(number) or other.made(number) for number in numbers)


class Watch:
    """Notes the calls of blocks while a model runs.

    Attributes:
        blocks: those that were called with gradients on, in order.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._visits: list[_Visit] = []
        self._open: list[_Visit] = []

    @contextlib.contextmanager
    def watching(self, blocks: Sequence[Block]) -> Iterator[None]:
        known = {block.module: block for block in blocks}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self._enter(known[module], args, kwargs)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._open and self._open[-1].block is known[module]:
                visit = self._open.pop()
                visit.outputs += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                visit.end = sequence_number()

        with contextlib.ExitStack() as stack:
            for module in known:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        before = self._visits[-1] if self._visits else None
        visit = _Visit(block, inputs, sequence_number())
        block.is_part |= bool(self._open)
        self._visits.append(visit)
        self._open.append(visit)
        block.calls += 1
        block.calls_with_grad += bool(inputs)
        call = Call.of(args, kwargs)
        if call.changeable is not None:
            kind = type(call.changeable).__name__
            advice = " (use_cache=False calls it without)" if kind.endswith("Cache") else ""
            block.skipped_because = f"it is called with a {kind}, which it may change{advice}"
        if block.calls == 1:
            self.blocks.append(block)
            block.call = call
            is_handed_on = before is not None and not sizes_of(inputs).keys().isdisjoint(sizes_of(before.outputs))
            block.follows = before.block if before is not None and len(inputs) == 1 and is_handed_on else None
            return
        block.follows = None
        if block.call is not None and call.form != block.call.form:
            block.skipped_because = "its calls in one step differ"
        elif any(call.requires_grad):
            block.call = call  # the first one may be given a constant

    def finish(self, outputs: Iterable[Tensor], existing: Iterable[Tensor]) -> int:
        """Note what blocks share with the rest of the model, whose outputs these are, and which of them recompute
        something by themselves.

        Returns:
            the bytes that are saved behind the last block, but for those of ``existing`` tensors.
        """
        nodes = nodes_of(outputs)
        savers: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        for node in nodes:
            found = sizes_of(saved_by(node))
            sizes |= found
            for key in found:
                savers.setdefault(key, []).append(node._sequence_nr())
        visits, self._visits = self._visits, []
        for before, visit, after in zip([None, *visits], visits, [*visits[1:], None], strict=False):
            block = visit.block
            source = before if before is not None and block.follows is before.block else visit
            reader = after if after is not None and after.block.follows is block else visit
            block.shares_input |= visit.is_saved_elsewhere(visit.inputs, source, savers)
            block.shares_output |= visit.is_saved_elsewhere(visit.outputs, reader, savers)
        for (own, _), visit in itertools.product(checkpoints_of(nodes), visits):
            if visit.made(own[0]._sequence_nr()):
                visit.block.skipped_because = "its own code recomputes something"
        end, owned = max((visit.end for visit in visits), default=0), sizes_of(existing)
        return sum(sizes[key] for key, numbers in savers.items() if min(numbers) >= end and key not in owned)
