"""Matrix products that save the factors of what they multiply, if that is itself a product of saved factors.

The weight's gradient needs the matmul's input, h. Where h is ``f(gate) * up``, or ``a * b`` by torch, the factors are
saved already, by the node that multiplied them. Backward multiplies them once more, the same way and so with the same
result, and h itself is freed after the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..backends import Backend
from .buffer_reuse import hooks_move_tensors
from .gate import GatedAct
from .pointwise import is_batched


class Product(NamedTuple):
    """What a tensor is the product of."""

    factors: tuple[Tensor, ...]
    #: The product, and the same in operations that autograd can differentiate.
    multiply: Callable[..., Tensor]
    composite: Callable[..., Tensor]


def product_of(h: Tensor) -> Product | None:
    """What h is the product of, as far as its node has saved that; None where it is none, or was edited since, or where
    saved-tensor hooks would be asked to bring the factors back."""
    node: Any = h.grad_fn
    if node is None or hooks_move_tensors():
        return None
    if getattr(node, "_forward_cls", None) is GatedAct:
        if h._version != node.version:
            return None
        gate, count = node.gate, node.count
        factors = _saved(lambda: node.saved_tensors)
        if factors is None:
            return None
        return Product(
            factors,
            lambda *saved: gate.product(saved[:count], saved[count:]),
            lambda *saved: gate.composite(saved[:count], saved[count:]),
        )
    if h._version or node.name() != "MulBackward0":
        return None
    factors = _saved(lambda: (node._saved_self, node._saved_other))
    if factors is None or any(t is None or t.shape != h.shape or t.dtype is not h.dtype for t in factors):
        return None
    return Product(factors, torch.mul, torch.mul)


def _saved(read: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...] | None:
    try:
        return read()
    except RuntimeError:  # freed by a backward pass, or edited in place, which backward will refuse
        return None


class MatrixProduct(NamedTuple):
    """A product of h with w: ``h w^T + b``, ``h w``, or that of groups of rows."""

    name: str
    backend: Backend
    #: Where each group of rows ends.
    ends: Tensor | None = None

    def __call__(self, h: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        if self.name == "linear":
            return self.backend.linear(h, w, b)
        return torch.matmul(h, w) if self.ends is None else F.grouped_mm(h, w, offs=self.ends)

    def of_h(self, dy: Tensor, w: Tensor, *, differentiable: bool) -> Tensor:
        if self.name == "linear":
            return dy @ w if differentiable else self.backend.linear(dy, w.t(), None)
        w = w.mT
        return torch.matmul(dy, w) if self.ends is None else F.grouped_mm(dy, w, offs=self.ends)

    def of_w(self, dy: Tensor, h: Tensor, w: Tensor) -> Tensor:
        if self.ends is not None:
            return F.grouped_mm(h.t(), dy, offs=self.ends)
        if w.dim() == 2:
            dy, h = dy.reshape(-1, dy.shape[-1]), h.reshape(-1, h.shape[-1])  # flatten has no rule for batches
        return dy.t() @ h if self.name == "linear" else h.mT @ dy


class OfProduct(Function):
    """``matmul(h, w, b)`` for an h whose factors are saved in its place."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, b: Tensor | None, matmul: MatrixProduct, product: Product) -> Tensor:
        # Another node has saved the factors as well, so that nothing is kept for this one alone.
        ctx.save_for_backward(w, *product.factors)
        ctx.matmul, ctx.product = matmul, product._replace(factors=())
        return matmul(h, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        needs_h, needs_w, needs_b, *_ = ctx.needs_input_grad
        w, *factors = ctx.saved_tensors
        matmul, product, of_h, of_w, of_b = ctx.matmul, ctx.product, None, None, None
        differentiable = torch.is_grad_enabled() or is_batched(dy)
        if needs_w:
            h = product.composite(*factors) if differentiable else product.multiply(*factors)
            of_w = matmul.of_w(dy, h, w)
            del h
        if needs_h:
            of_h = matmul.of_h(dy, w, differentiable=differentiable)
        if needs_b:
            of_b = dy.reshape(-1, dy.shape[-1]).sum(0)
        return of_h, of_w, of_b, None, None


def serves(h: Tensor, w: Tensor, others: Sequence[Tensor | None] = ()) -> bool:
    """Whether ``OfProduct`` computes a product with w by these, which are plain tensors of one dtype and device."""
    if not (w.requires_grad and h.dim() >= 2 and h.numel() and w.numel()):
        return False
    return all(t is None or (t.dtype is h.dtype and t.device == h.device) for t in (w, *others))
