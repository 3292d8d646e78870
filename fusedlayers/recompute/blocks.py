"""The blocks of a model: repeated modules, each of which is saved once or recomputed.

Blocks are the children of ``nn.Sequential``, ``nn.ModuleList`` and ``nn.ModuleDict`` that have children themselves.
Where such lists are nested the inner ones count, if they compute most of the outer block's results: a stage of Swin is
looked at layer by layer, but a mixture of experts as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves
from ..recipes.fuse import fuse
from ..recipes.patch import patch_of
from ..reports.step import Step

#: Inner blocks take the place of an outer one if they compute this part of its results: 92 to 94 % in a stage of
#: ConvNeXt or Swin, 78 % in a bottleneck of a ResNet, whose convolutions are in a list.
INNER_PART = 0.9
#: Arguments that a call cannot change, so that a recomputation finds the same.
PLAIN = (Tensor, NoneType, bool, int, float, complex, str, bytes, Enum, slice, torch.dtype, torch.device, torch.Size)
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(eq=False)
class Block:
    """A block, how often a step calls it, and its kind: a number that blocks have in common that cost the same."""

    path: str
    module: nn.Module
    calls: int
    kind: int


class Blocks(list[Block]):
    """The blocks of a model that may be recomputed, in the order of their calls; the model is fused.

    Attributes:
        skipped: by reason, the paths of blocks that a recomputation would get wrong.
    """

    def __init__(self, model: nn.Module, *, exact: bool = False) -> None:
        fuse(model, exact=exact)
        self.model, self.skipped = model, dict[str, list[str]]()
        self._patches = {module: patch for module in model.modules() if (patch := patch_of(module)) is not None}

    def save(self, blocks: Collection[Block]) -> None:
        """Recompute all but these."""
        recomputed = {block.module for block in self if block not in blocks}
        for module, patch in self._patches.items():
            patch.recompute = module in recomputed
            if patch_of(module) is None:
                patch.attach()

    def as_it_was(self) -> None:
        """Let the model be as PyTorch trains it."""
        for module, patch in self._patches.items():
            if patch_of(module) is patch:
                patch.remove()

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
                self.append(Block(paths[module], module, calls[module], kind))
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
