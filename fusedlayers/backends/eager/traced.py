"""Functions that read other tensors besides z: what a user's trainable activation becomes.

The traced function, and its traced gradient, are run as they are on one part of the tensor after the other, so that
what they need in between never has the size of the whole. The backward pass has z and computes everything from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...activations import Activation, widened
from ...broadcast import Layout, laid_out, layout_along
from ..interface import Wanted
from .chunks import RESERVE, blocks


def activate_(z: Tensor, activation: Activation, operands: Sequence[Tensor], dim: int) -> None:
    """Overwrite the pre-activation with the activation's output."""
    layout = layout_along(z, dim)
    for (part,), p, _ in _parts(layout, (z,), operands):
        part.copy_(activation.function(widened(part), *p))


def gradient(
    dy: Tensor, z: Tensor, dz: Tensor, activation: Activation, operands: Sequence[Tensor], wanted: Wanted, dim: int
) -> list[Tensor | None]:
    """Write dz, and return the gradients of the operands that are wanted, flat."""
    layout = layout_along(z, dim)
    graph = _gradient_graph(activation, wanted.operands, torch.promote_types(z.dtype, torch.float32))
    sums = [torch.zeros(p.numel(), dtype=torch.float64, device=z.device) for p in _only(operands, wanted.operands)]
    for (dy_part, z_part, dz_part), p, channels in _parts(layout, (dy, z, dz), operands):
        result, *shares = graph(widened(dy_part), widened(z_part), *p)
        dz_part.copy_(result)
        for total, share in zip(sums, shares, strict=True):
            if total.numel() == 1:
                total += share.sum()
            else:
                total[channels] += share.expand_as(dy_part).sum((0, 2))
    found = iter(sums)
    return [next(found).to(p.dtype) if need else None for p, need in zip(operands, wanted.operands, strict=True)]


def _only(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, need in zip(tensors, needs, strict=True) if need]


def _parts(
    layout: Layout, tensors: Sequence[Tensor], operands: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], slice]]:
    """Corresponding parts of dense tensors, laid out alike, with those of the operands, and which channels they are."""
    whole = [laid_out(tensor, layout) for tensor in tensors]
    flat = [widened(p).reshape(() if p.numel() == 1 else (-1, 1)) for p in operands]
    reserved = False
    for part in blocks(layout):
        views = [tensor[part] for tensor in whole]
        if not reserved:
            views[0].new_empty((RESERVE, views[0].numel()))
            reserved = True
        yield views, [p[part[1]] if p.dim() else p for p in flat], part[1]


@functools.lru_cache(256)
def _gradient_graph(activation: Activation, needs: tuple[bool, ...], dtype: torch.dtype) -> GraphModule:
    from ...activations.trace import aten_graph, simplified  # whose import takes a second

    examples = [torch.zeros(_EXAMPLE, dtype=dtype, device="cpu") for _ in range(2 + len(needs))]
    return simplified(aten_graph(activation.gradients(needs), examples))


_EXAMPLE = (4, 6)
