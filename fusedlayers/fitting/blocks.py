"""The blocks of a model: modules that are looked at one by one, each of which may be trained in its own way.

Blocks are the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` that have children themselves.
Where such lists are nested the inner ones count, if their blocks keep most of what the outer block keeps: a stage of
Swin is looked at layer by layer, but a mixture of experts as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .._torch import saved_tensors_hooks_on_top, sequence_number, tree_leaves
from ..fusion.region import Region, region_of
from ..utils.autograd_graph import nodes_of, saved_by
from ..utils.storages import storages_of, tensors_in
from .calls import Call

#: The ways to train a block: as PyTorch does; outputs kept in the place of inputs (``fuse``); that, and its MLPs
#: recomputed; recomputed but for matmuls, convolutions and attention; recomputed as a whole.
Mode = Literal["eager", "outputs", "mlp", "cheap", "all"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: Inner blocks that keep so much of what an outer block keeps take its place.
MOST = 0.8
#: Blocks that keep less than this part of what the model keeps are left as they are.
LEAST = 0.002


@dataclass(eq=False)
class Block:
    """A block and its calls in a training step.

    Attributes:
        fused: the modules in it that ``fuse`` has given regions.
        mlps: those in it that may be recomputed by themselves.
        calls: how often it is called.
        first: its first call; None where it was not called, or where its own code recomputes it.
        follows: whether its input is the output of the block before it.
        shares_input, shares_output: whether others than this block, and the one that it follows or that follows it,
            save its input, or its output.
    """

    path: str
    module: nn.Module
    fused: set[nn.Module] = field(default_factory=set)
    mlps: list[nn.Module] = field(default_factory=list)
    calls: int = 0
    first: Call | None = None
    follows: bool = False
    shares_input: bool = False
    shares_output: bool = False
    skipped_because: str | None = None
    regions: dict[nn.Module, Region] = field(default_factory=dict)

    def prepare(self, mlps: Sequence[nn.Module]) -> None:
        """After ``fuse``: find the regions in it, and the MLPs among those of the model."""
        inside = [*self.module.modules()]
        self.regions = {module: region for module in inside if (region := region_of(module)) is not None}
        self.fused = set(self.regions)
        self.mlps = [mlp for mlp in mlps if mlp in set(inside) and mlp is not self.module]
        for module in (self.module, *self.mlps):
            self.regions.setdefault(module, Region(module))

    def train_as(self, mode: Mode) -> None:
        """Change the modules so that the block is trained in this way."""
        for module, region in self.regions.items():
            region.recompute = "all" if mode == "mlp" and module in self.mlps else "nothing"
            if module is self.module and mode in ("cheap", "all"):
                region.recompute = mode
            is_wanted = region.recompute != "nothing" or (mode != "eager" and module in self.fused)
            if is_wanted and not region.is_attached:
                region.attach()
            elif region.is_attached and not is_wanted:
                region.remove()

    @property
    def modes(self) -> list[Mode]:
        """The ways that differ for it."""
        left_out = {*([] if self.fused else ["outputs"]), *([] if self.mlps else ["mlp"])}
        return [mode for mode in MODES if mode not in left_out]


def find_blocks(model: nn.Module, saved: Mapping[str, int]) -> list[Block]:
    """The blocks of a model of which each path keeps so many bytes, without what is in modules below."""
    candidates: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            composed = {
                f"{path}.{name}" if path else name: child
                for name, child in module.named_children()
                if not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.children())
            }
            candidates |= composed if len(composed) > 1 else {}

    def size(path: str) -> int:
        return sum(bytes for inner, bytes in saved.items() if is_within(inner, path))

    def chosen(path: str) -> list[str]:
        """The block, or those in it that take its place."""
        inner = _outermost([other for other in candidates if other != path and is_within(other, path)])
        return [p for i in inner for p in chosen(i)] if inner and sum(map(size, inner)) >= MOST * size(path) else [path]

    least = LEAST * sum(saved.values())
    paths = [path for outer in _outermost([*candidates]) for path in chosen(outer)]
    return [Block(path, candidates[path]) for path in paths if size(path) > least]


def is_within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(other != path and is_within(path, other) for other in paths)]


class Watch:
    """Notes the calls of blocks in one run of a model.

    Attributes:
        blocks: those that were called, in order.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._visits: list[_Visit] = []
        self._hooks = saved_tensors_hooks_on_top(True)

    @contextlib.contextmanager
    def watching(self, blocks: Sequence[Block]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                enter = functools.partial(self._enter, block)
                stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, block: Block, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        before = self._visits[-1] if self._visits else None
        self._visits.append(_Visit(block, inputs, [], sequence_number()))
        block.calls += 1
        if block.calls > 1:
            block.follows = False
            return
        self.blocks.append(block)
        if saved_tensors_hooks_on_top(True) != self._hooks:
            block.skipped_because = "the model's own code recomputes it, or moves what it saves"
            return
        block.follows = before is not None and len(inputs) == 1 and not _storages(inputs).isdisjoint(before.results)
        block.first = Call.of(args, kwargs)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        visit = self._visits[-1]
        visit.outputs += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        visit.end = sequence_number()

    def finish(self, outputs: Iterable[Tensor], existing: Iterable[Tensor]) -> int:
        """Note what blocks share with the rest of the model, which has made ``outputs``; return the bytes that are
        saved behind the last block, but for those of ``existing`` tensors."""
        savers: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        for node in nodes_of(outputs):
            for storage in storages_of(saved_by(node)):
                savers.setdefault(storage._cdata, []).append(node._sequence_nr())
                sizes[storage._cdata] = storage.nbytes()
        for visit, following in itertools.zip_longest(self._visits, self._visits[1:]):
            other = following if following is not None and following.block.follows else visit
            visit.block.shares_output |= visit.is_saved_elsewhere(visit.outputs, other, savers)
        for before, visit in zip([None, *self._visits], self._visits, strict=False):
            other = before if before is not None and visit.block.follows else visit
            visit.block.shares_input |= visit.is_saved_elsewhere(visit.inputs, other, savers)
        end = max((visit.end for visit in self._visits), default=0)
        owned = _storages(existing)
        self._visits.clear()
        return sum(sizes[key] for key, numbers in savers.items() if min(numbers) >= end and key not in owned)


@dataclass(eq=False)
class _Visit:
    """A call of a block: its tensors, and the numbers that autograd gave the nodes made in it."""

    block: Block
    inputs: list[Tensor]
    outputs: list[Tensor]
    start: int
    end: int = 0

    @property
    def results(self) -> set[int]:
        return _storages(self.outputs)

    def is_saved_elsewhere(self, tensors: Sequence[Tensor], other: _Visit, savers: Mapping[int, list[int]]) -> bool:
        """Whether a node saves one that was made neither in this call nor in ``other``."""
        numbers = [number for key in _storages(tensors) for number in savers.get(key, ())]
        return any(not (self.start <= number < self.end or other.start <= number < other.end) for number in numbers)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {storage._cdata for storage in storages_of(tensors)}
