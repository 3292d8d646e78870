"""A model in parts, each of which can be trained in its own way: blocks, and the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from .agreement import together
from .arguments import readable
from .blocks import MODES, Block, Mode, Way, is_possible
from .plans import Plan
from .training import Training

#: What is said of a model without blocks.
NO_BLOCKS = (
    "No blocks were found (children of a Sequential, ModuleList or ModuleDict that are called and compute several "
    "tensors): operations may keep their outputs, and no more."
)


class Parts:
    """The model's parts, and how they are trained now.

    Attributes:
        blocks: in the order in which they are called.
        rest: what lies outside of the blocks, or is shared by them, which only ``fuse`` changes.
        skipped: by reason, the blocks that can be trained as PyTorch does alone, or the ways that failed.
        notes: what to know of the report.
    """

    def __init__(self, model: nn.Module, training: Training) -> None:
        self.model, self.training = model, training
        self.blocks: list[Block] = []
        self.rest = Block("", model)
        self.skipped: dict[str, list[str]] = {}
        self.notes: list[str] = []

    def train_as(self, modes: Sequence[Mode], rest: Mode) -> None:
        for block, mode in zip(self.blocks, modes, strict=True):
            block.train_as(mode, rest)
        self.rest.train_as(rest, rest)

    def train_all_as(self, mode: Mode, rest: Mode = "eager") -> None:
        self.train_as([mode] * len(self.blocks), rest)

    @property
    def rests(self) -> list[Mode]:
        """The ways to train the rest that differ."""
        return ["eager", "outputs"] if self.rest.fused else ["eager"]

    @property
    def ways(self) -> list[Way]:
        """The ways to train all blocks, and the rest; only those whose gradients or peaks may differ."""
        shares = any(block.shared for block in self.blocks)
        rests: list[Mode] = self.rests if shares or self.training.of == "peak" else ["eager"]
        return [way for way in itertools.product(MODES, rests) if is_possible(*way, shares=shares)]

    def follow(self, plan: Plan) -> None:
        self.train_as(plan.modes[1:], plan.modes[0])

    def bytes(self) -> int:
        """What the budget counts, of the process that takes most."""
        return max(together(self.training.bytes))

    def bytes_of(self, plan: Plan) -> int:
        self.follow(plan)
        try:
            return self.bytes()
        except Exception as error:
            raise readable(error, "fit") from error

    def skip(self, reason: str, *blocks: Block) -> None:
        self.skipped.setdefault(reason, []).extend(block.path for block in blocks)
