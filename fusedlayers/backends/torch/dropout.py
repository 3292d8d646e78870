"""An activation and the dropout behind it in one buffer, and the gradient through both from it.

Of the output y ``f(z) / (1 - p)`` is stored, with the branch of a folded f in its last bit, and -0 where it was
dropped; a zero of f is stored as +0. Dropped infinities and NaN are NaN, as in ``F.dropout``. No mask is saved.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...derivative import branch_bit
from ...derivative.folded import FoldedDerivative
from .chunks import for_each


def act_dropout(z: Tensor, keep: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """The output, in ``out``, which may be z; all are dense and laid out alike."""

    def store(part: Tensor, kept: Tensor, result: Tensor) -> None:
        result.copy_(stored(activation, upcast(part), part.dtype, p))
        drop(result, kept)

    for_each(store, z, keep, out)
    return out


def stored(activation: Activation, z: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    """What is stored of an output that is not dropped, for float32 (or wider) z."""
    y = activation.function(z) * (1 / (1 - p))
    fold = activation.fold
    if fold is None:
        return y
    return branch_bit.encode(y.to(torch.float32), fold.marks(z), dtype, fold.ambiguous, bounded=fold.bounded)


def drop(y: Tensor, keep: Tensor) -> None:
    """Mark what is dropped of y, in place."""
    y.add_(0.0)  # -0 becomes +0
    y.copy_(torch.where(keep, y, (y - y).neg_()))


def act_dropout_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    for_each(functools.partial(_multiply, activation, p), dy, y, out)
    return out


def _multiply(activation: Activation, p: float, dy: Tensor, y: Tensor, out: Tensor) -> None:
    wide = upcast(y)
    is_kept = (wide != 0) | ~wide.signbit()
    given = upcast(dy) * is_kept
    # The derivative of what was dropped is not known, and may be infinite at 0.
    out.copy_(torch.where(is_kept, given * (slope(activation, wide, y.dtype, p) * (1 / (1 - p))), given))


def slope(activation: Activation, y: Tensor, dtype: torch.dtype, p: float, *, differentiable: bool = False) -> Tensor:
    """f' from stored y, of ``dtype``, in float32 or wider."""
    fitted = activation.fitted_derivative(dtype)
    if isinstance(fitted, FoldedDerivative):
        marked = branch_bit.decode(y.to(torch.float32), dtype, fitted.fold.ambiguous)
        call = fitted.differentiable if differentiable else fitted
        return call(y * (1 - p), marked)
    return activation.derivative_given_output(y * (1 - p), dtype, differentiable=differentiable)
