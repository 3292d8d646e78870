"""The blocks of a model: modules that are looked at one by one, each of which may be trained in its own way.

Blocks are the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` that have children themselves.
Where such lists are nested the inner ones count, if their blocks keep most of what the outer block keeps: a stage of
Swin is looked at layer by layer, but a mixture of experts as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .._torch import saved_tensors_hooks_on_top, tree_leaves
from ..fusion.region import Region, region_of
from ..utils.storages import tensors_in
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
    """

    path: str
    module: nn.Module
    fused: set[nn.Module] = field(default_factory=set)
    mlps: list[nn.Module] = field(default_factory=list)
    calls: int = 0
    first: Call | None = None
    follows: bool = False
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


@contextlib.contextmanager
def watching(blocks: Sequence[Block]) -> Iterator[Callable[[], list[Block]]]:
    """While a model runs, note the calls of its blocks; yield what returns those that were called, in order."""
    called: list[Block] = []
    hooks = saved_tensors_hooks_on_top(True)
    last: list[Tensor] = []

    def enter(block: Block) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            block.calls += 1
            if block.calls > 1:
                block.follows = False
                return
            called.append(block)
            if saved_tensors_hooks_on_top(True) != hooks:
                block.skipped_because = "the model's own code recomputes it, or moves what it saves"
                return
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            block.follows = len(inputs) == 1 and any(_shares(inputs[0], t) for t in last)
            block.first = Call.of(args, kwargs)

        return note

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        last[:] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(enter(block), with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(leave).remove)
        yield lambda: called
        last.clear()


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
