"""Dropout that saves a bit for each element, or nothing besides an activation's output.

In MLP blocks: the mask, eight elements a byte.

Behind an activation: of its output f(z), ``f(z) / (1 - p)`` is stored, with the branch of a folded f in its last bit,
and -0 where it was dropped. A zero of f is stored as +0, or as -0 on the marked branch, where f' is 0 as if it had been
dropped. Dropped infinities and NaN are NaN, as in ``F.dropout``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...derivative import branch_bit
from ...derivative.folded import FoldedDerivative
from ...utils.caching import in_clean_state
from .chunks import for_each


def drawn(x: Tensor, p: float) -> Tensor:
    """The mask of what ``F.dropout(x, p)`` would keep; its generator goes on as it would."""
    if x.is_cpu:
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return torch.native_dropout(x, p, True)[1]


@functools.lru_cache(256)
@in_clean_state
def factor_of(p: float, dtype: torch.dtype, device: str) -> float:
    """The factor of ``F.dropout``: on CPUs a number in dtype, on GPUs one in float32 at least."""
    wide = dtype if device == "cpu" else torch.promote_types(dtype, torch.float32)
    return float(torch.ones((), dtype=wide).div_(1 - p))


def packed(keep: Tensor) -> Tensor:
    """The bits of a contiguous mask: the first element is the lowest bit of the first byte."""
    eights = torch.nn.functional.pad(keep.view(-1).view(torch.uint8), (0, -keep.numel() % 8)).view(torch.int64)
    # Each of eight bytes, 0 or 1, is added into the highest one at a bit of its own.
    return (eights * 0x0102040810204080 >> 56).to(torch.uint8)


def unpacked(bits: Tensor, shape: torch.Size) -> Tensor:
    """The mask of these bits."""
    # A copy of the byte in each of eight, of which each keeps one bit, and moves it to the lowest.
    eights = bits.to(torch.int64).mul_(0x0101010101010101).bitwise_and_(0x8040201008040201 - 2**64)
    eights.add_(0x7F7F7F7F7F7F7F7F).bitwise_right_shift_(7).bitwise_and_(0x0101010101010101)
    return eights.view(torch.uint8).view(torch.bool)[: shape.numel()].view(shape)


def drop_marked(y: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The dropout of outputs y, which carry the branch, in ``out``, which may be y; all are dense and laid out
    alike."""

    def store(part: Tensor, kept: Tensor, result: Tensor) -> None:
        lost = (part - part).neg_()  # -0, or NaN where y is not finite
        result.copy_(scaled(activation, upcast(part), part.dtype, 1 - p))
        result.copy_(torch.where(kept, result, lost))

    for_each(store, y, keep, out)
    return out


def scaled(activation: Activation, y: Tensor, dtype: torch.dtype, rest: Tensor | float) -> Tensor:
    """The stored numbers for kept outputs y of ``dtype``, of which ``rest`` are kept, in float32 or wider."""
    fold, found = activation.fold, y * (1 / rest)
    if fold is None:
        return found + 0.0
    return branch_bit.encode(found, branch_bit.decode(y, dtype), dtype)


def is_kept(y: Tensor) -> Tensor:
    """Where stored y was not dropped, and is no marked zero."""
    return (y != 0) | ~y.signbit()


def drop_marked_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    for_each(functools.partial(_multiply, activation, p), dy, y, out)
    return out


def _multiply(activation: Activation, p: float, dy: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(gradient_of_marked(activation, upcast(dy), upcast(y), y.dtype, 1 - p))


def gradient_of_marked(
    activation: Activation,
    dy: Tensor,
    y: Tensor,
    dtype: torch.dtype,
    rest: Tensor | float,
) -> Tensor:
    """The gradient through an activation and its dropout, of which ``rest`` are kept, from stored y of ``dtype``, in
    float32 or wider."""
    kept = is_kept(y)
    given = dy * kept
    # The derivative of what was dropped is not known, and may be infinite at 0.
    factors = slope(activation, y, dtype, rest).to(y.dtype) * (1 / rest)
    return torch.where(kept, given * factors, given)


def slope(activation: Activation, y: Tensor, dtype: torch.dtype, rest: Tensor | float) -> Tensor:
    """f' from stored y, of ``dtype``, in float32 or wider."""
    fitted = activation.fitted_derivative(dtype)
    if isinstance(fitted, FoldedDerivative):
        return fitted(y * rest, branch_bit.decode(y.to(torch.float32), dtype))
    return activation.derivative_given_output(y * rest, dtype)
