"""Traced functions, which may read other tensors besides z: what a user's activation becomes.

The traced function, or its traced gradient, runs block by block (``program.py``), so that no intermediate has the size
of the whole. The backward pass computes everything from z.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...utils.layout import Layout, laid_out, layout_along
from ..interface import GradientRequest
from .chunks import blocks
from .program import Program

#: Programs cached: one for each activation, set of gradients and dtype.
_PROGRAMS = 512


def activate(z: Tensor, y: Tensor, activation: Activation, operands: Sequence[Tensor], dim: int) -> None:
    """Write the activation's output into y, which may be z."""
    program = _forward(activation, torch.promote_types(z.dtype, torch.float32))
    for _ in _walk(program, (z,), y, operands, dim):
        pass


def gradient(
    dy: Tensor,
    z: Tensor,
    dz: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    dim: int,
) -> list[Tensor | None]:
    """Write dz, and return the requested gradients of the operands, flat."""
    program = _gradient(activation, request.needs_operands, torch.promote_types(z.dtype, torch.float32))
    needy = [p for p, need in zip(operands, request.needs_operands, strict=True) if need]
    # Summed in float64, block by block: the order is fixed, so the rounding is too.
    sums = [torch.zeros(p.numel(), dtype=torch.float64, device=z.device) for p in needy]
    for channels, (_, *shares) in _walk(program, (dy, z), dz, operands, dim):
        for total, share in zip(sums, shares, strict=True):
            if total.numel() == 1:
                total += share.sum()
            else:
                total[channels] += share.sum((0, 2))
    found = iter(sums)
    return [next(found).to(p.dtype) if need else None for p, need in zip(operands, request.needs_operands, strict=True)]


def _walk(
    program: Program, inputs: Sequence[Tensor], out: Tensor, operands: Sequence[Tensor], dim: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Run the program on all blocks of dense tensors, laid out alike, and write its first result into ``out``. Yields
    each block's channels and results."""
    layout = layout_along(inputs[0], dim)
    whole = [laid_out(tensor, layout) for tensor in (*inputs, out)]
    others = [_spread(p.detach().to(program.dtype), layout) for p in operands]
    overlaps = any(out.data_ptr() == tensor.data_ptr() for tensor in inputs)
    run = program.bind(others)
    for block in blocks(layout):
        *parts, target = (tensor[block] for tensor in whole)
        wide = [upcast(part) for part in parts]
        if wide[0].shape[1] < layout.channels:
            run = program.bind([p[block[1]] if p.dim() else p for p in others])
        is_safe = not overlaps or wide[0] is not parts[0]
        results = run(wide, target if is_safe else None)
        if not is_safe:
            target.copy_(results[0])
        yield (
            block[1],
            [r if r.shape == target.shape else r.expand_as(target) for r in results],
        )  # a constant is one number


def _spread(operand: Tensor, layout: Layout) -> Tensor:
    """An operand, shaped to be combined with blocks."""
    if operand.numel() == 1:
        return operand.reshape(())
    column = operand.reshape(-1, 1)
    # Where few neighbours share a channel torch would start a new loop for every few numbers.
    if layout.inner in range(2, _SHORT_LOOP) and layout.outer >= _OFTEN:
        return column.expand(-1, layout.inner).contiguous()
    return column


#: Neighbours from which a loop over them is long enough, and images from which a copy for one of them is small.
_SHORT_LOOP = 256
_OFTEN = 4


@functools.lru_cache(_PROGRAMS)
def _forward(activation: Activation, dtype: torch.dtype) -> Program:
    return _program(activation.function, 1, activation, dtype)


@functools.lru_cache(_PROGRAMS)
def _gradient(activation: Activation, needs: tuple[bool, ...], dtype: torch.dtype) -> Program:
    return _program(activation.gradient_function(needs), 2, activation, dtype)


def _program(function: Callable[..., Any], inputs: int, activation: Activation, dtype: torch.dtype) -> Program:
    from ...activations.tracing import aten_graph, simplified, slow_kernels  # whose import takes a second

    count = inputs + len(activation.operand_dims)
    examples = [torch.zeros(_EXAMPLE, dtype=dtype, device="cpu") for _ in range(count)]
    return Program(simplified(aten_graph(function, examples, slow_kernels())), inputs, dtype)


#: All examples have one shape: the trace then leaves an operand's gradient as it is, element by element.
_EXAMPLE = (4, 6)
