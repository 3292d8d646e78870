"""The blocks of a model: modules that are looked at one by one, each of which may be trained in its own way.

Blocks are the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` that have children themselves.
Where such lists are nested the inner ones count, if their blocks keep most of what the outer block keeps: a stage of
Swin is looked at layer by layer, but a mixture of experts as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn

from ..fusion.region import Region, region_of
from ..utils.formatting import is_within
from .calls import Call

#: The ways to train a block: as PyTorch does; outputs kept in the place of inputs (``fuse``); that, and its MLPs
#: recomputed; recomputed but for matmuls, convolutions and attention; recomputed as a whole.
Mode = Literal["eager", "outputs", "mlp", "cheap", "all"]
MODES: tuple[Mode, ...] = get_args(Mode)
#: How a block is trained, and the rest of the model.
Way = tuple[Mode, Mode]
#: Fused modules that a block shares are trained as the rest of the model is, "eager" or "outputs". In these ways the
#: block can be trained then: it is not "eager" where a part of it keeps outputs, and keeps none where that does not.
SHARING: dict[Mode, frozenset[Mode]] = {
    "eager": frozenset({"eager", "all"}),
    "outputs": frozenset({"outputs", "mlp", "cheap", "all"}),
}

#: Inner blocks take the place of an outer block if they keep at least this part of what it keeps.
INNER_PART = 0.8
#: Blocks that keep less than this part of what the model keeps are left as they are.
SMALL_PART = 0.002


def is_possible(mode: Mode, rest: Mode, *, shares: bool) -> bool:
    """Whether a block can be trained so while the rest of the model is."""
    return not shares or mode in SHARING[rest]


@dataclass(eq=False)
class Block:
    """A block, and what is known of it.

    Attributes:
        call: its first call in a training step.
        calls: how often it is called.
        calls_with_grad: how many of these calls got an input that needs a gradient.
        is_part: whether another block calls it.
        follows: the block whose output is its first input, or None.
        shares_input: whether its input is saved by others too, the block that it follows aside.
        shares_output: whether its output is saved by others too, the block that follows it aside.
        skipped_because: why it must be trained as PyTorch does, or None.
        without: ways in which it cannot be trained.
        regions: of the modules in it that may keep or recompute something.
        fused: the modules among them that ``fuse`` has found.
        shared: those of the fused modules that other parts of the model call too.
        is_in_fused: whether a module around it is fused. A region of its own then keeps that one's out where the block
            is trained as PyTorch does.
        mlps: those that may be recomputed by themselves.
        plain_recomputed: the modules in it that keep no outputs while they are recomputed. A recomputation of modules
            that do holds less, and takes 0 to 9 % longer (a Mistral's block on two threads).
    """

    path: str
    module: nn.Module
    call: Call | None = None
    calls: int = 0
    calls_with_grad: int = 0
    is_part: bool = False
    follows: Block | None = None
    shares_input: bool = False
    shares_output: bool = False
    skipped_because: str | None = None
    without: set[Mode] = field(default_factory=set)
    regions: dict[nn.Module, Region] = field(default_factory=dict)
    fused: frozenset[nn.Module] = frozenset()
    shared: frozenset[nn.Module] = frozenset()
    is_in_fused: bool = False
    mlps: frozenset[nn.Module] = frozenset()
    plain_recomputed: frozenset[nn.Module] = frozenset()

    def find_regions(self, inside: Collection[nn.Module], mlps: Collection[nn.Module] = ()) -> None:
        """After ``fuse``: note the regions that it has made of these modules, and which of them are MLPs."""
        self.regions = {module: region for module in inside if (region := region_of(module)) is not None}
        self.fused = frozenset(self.regions)
        self.mlps = frozenset(mlp for mlp in mlps if mlp in inside and mlp is not self.module)
        for module in (self.module, *self.mlps):
            self.regions.setdefault(module, Region(module))

    def train_as(self, mode: Mode, rest: Mode) -> None:
        """Change the modules so that the block is trained in one way, and the rest of the model in another."""
        recomputed: dict[nn.Module, Any] = {}
        if mode == "mlp":
            recomputed = dict.fromkeys(self.mlps, "all")
        elif mode in ("cheap", "all"):
            recomputed = {self.module: mode}
        plain = {inner for outer in recomputed for inner in outer.modules() if inner in self.plain_recomputed}
        for module, region in self.regions.items():
            region.recompute = recomputed.get(module, "nothing")
            way = rest if module in self.shared else mode
            region.keeps_outputs = way != "eager" and module in self.fused and module not in plain
            keeps_out = self.is_in_fused and module is self.module
            is_wanted = module in recomputed or region.keeps_outputs or keeps_out
            if is_wanted and not region.is_attached:
                region.attach()
            elif region.is_attached and not is_wanted:
                region.remove()

    @property
    def modes(self) -> list[Mode]:
        """The ways that differ for it."""
        left_out = {*self.without, *([] if self.fused else ["outputs"]), *([] if self.mlps else ["mlp"])}
        return [mode for mode in MODES if mode not in left_out]

    def modes_beside(self, rest: Mode) -> list[Mode]:
        """Those that it can have while the rest of the model is trained in this way."""
        return [mode for mode in self.modes if is_possible(mode, rest, shares=bool(self.shared))]

    @property
    def kind(self) -> str:
        """What it has in common with blocks that cost the same."""
        assert self.call is not None
        tensors = [
            (name, tuple(t.shape), t.dtype, t.requires_grad)
            for name, t in (*self.module.named_parameters(), *self.module.named_buffers())
        ]
        # Not its repr, which does not end where a module holds its parent.
        inside = [(name, type(module), module.extra_repr()) for name, module in self.module.named_modules()]
        found = self.module.training, len(self.fused), len(self.shared), self.modes
        return repr((inside, tensors, found, self.call.form, self.call.requires_grad))


def find_blocks(model: nn.Module, saved: Mapping[str, int]) -> list[Block]:
    """The blocks of a model of which each path keeps so many bytes, without what is in modules below."""
    candidates: dict[str, nn.Module] = {}
    paths = {module: path for path, module in model.named_modules()}  # the first ones, which have the bytes
    for module in paths:
        if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            composed = {
                paths[child]: child
                for child in module.children()
                if not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.children())
            }
            candidates |= composed if len(composed) > 1 else {}

    def size(path: str) -> int:
        return sum(saved[inner] for inner in saved if is_within(inner, path))

    def chosen(path: str) -> list[str]:
        """The block, or those in it that take its place."""
        inner = _outermost([other for other in candidates if other != path and is_within(other, path)])
        if not inner or sum(map(size, inner)) < INNER_PART * size(path):
            return [path]
        return [found for other in inner for found in chosen(other)]

    least = SMALL_PART * sum(saved.values())
    found = [path for outer in _outermost([*candidates]) for path in chosen(outer)]
    return [Block(path, candidates[path]) for path in found if size(path) > least]


def _outermost(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not any(other != path and is_within(path, other) for other in paths)]
