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
        wide = upcast(part)
        lost = dropped(activation.function(wide).to(part.dtype))
        result.copy_(stored(activation, wide, part.dtype, p))
        result.copy_(torch.where(kept, plain_zeros(result), lost))

    for_each(store, z, keep, out)
    return out


def stored(activation: Activation, z: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    """What is stored of an output that is not dropped, for float32 (or wider) z."""
    y = activation.function(z) * (1 / (1 - p))
    fold = activation.fold
    if fold is None:
        return y
    return branch_bit.encode(y.to(torch.float32), fold.marks(z), dtype, fold.ambiguous, bounded=fold.bounded)


def dropped(y: Tensor) -> Tensor:
    """What is stored instead of outputs y, before the factor, that are dropped: -0, or NaN where y is not finite."""
    return (y - y).neg_()


def plain_zeros(y: Tensor) -> Tensor:
    """y, in place, with +0 for -0."""
    return y.add_(0.0)


def is_kept(y: Tensor) -> Tensor:
    """Where stored y was not dropped."""
    return (y != 0) | ~y.signbit()


def act_dropout_gradient(dy: Tensor, y: Tensor, activation: Activation, p: float, out: Tensor) -> Tensor:
    """``dy keep / (1 - p) f'``, in ``out``, which may be y; all are dense and laid out alike."""
    for_each(functools.partial(_multiply, activation, p), dy, y, out)
    return out


def _multiply(activation: Activation, p: float, dy: Tensor, y: Tensor, out: Tensor) -> None:
    wide = upcast(y)
    kept = is_kept(wide)
    given = upcast(dy) * kept
    # The derivative of what was dropped is not known, and may be infinite at 0.
    out.copy_(torch.where(kept, given * (slope(activation, wide, y.dtype, p) * (1 / (1 - p))), given))


def slope(activation: Activation, y: Tensor, dtype: torch.dtype, p: float, *, differentiable: bool = False) -> Tensor:
    """f' from stored y, of ``dtype``, in float32 or wider."""
    fitted = activation.fitted_derivative(dtype)
    if isinstance(fitted, FoldedDerivative):
        marked = branch_bit.decode(y.to(torch.float32), dtype, fitted.fold.ambiguous)
        call = fitted.differentiable if differentiable else fitted
        return call(y * (1 - p), marked)
    return activation.derivative_given_output(y * (1 - p), dtype, differentiable=differentiable)
