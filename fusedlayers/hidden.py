"""The calculus of MLP blocks: one node from the block's input to its output, which owns the hidden buffers.

A block is ``linear(dropout(f(z)), w, b)`` with ``z = linear(x, w1, b1)``, or with ``f(gate) * up`` of two of these.
Nobody outside of the node ever holds what is hidden. So it is written over as soon as it has been read, and all that is
needed for a moment only, f(z) or its gradient, is made for a chunk of rows at a time. Kept for backward is one of

* "output": f(z), written over z;
* "input": the pre-activations, from which f(z) is computed again, chunk by chunk;
* "recompute": nothing; forward and backward run over chunks of rows, from the first product to the last.

Backward first makes the gradient of the last weight, which reads f(z), and then writes the gradients of the
pre-activations over what was kept. Where the graph is kept for another backward pass it writes them over a copy.

The mask of a dropout is made again from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .activations import Activation, Saved
from .autograd import apart, is_batched
from .backends import Backend, Wanted
from .broadcast import operand_along
from .ownership import graph_is_given_up, saved_under_hooks
from .products import MATMUL

#: Rows of a chunk, at least: with fewer a product reads its weight, and writes the weight's gradient, for too little.
LEAST_ROWS = 256


class Dropout(NamedTuple):
    """Zeroes hidden numbers with probability ``p``, and scales the others up; the same ones each time."""

    p: float
    seed: int

    def keeps(self, hidden: Tensor, chunk: int) -> Tensor:
        generator = torch.Generator(hidden.device).manual_seed(self.seed + chunk)
        keeps = torch.empty_like(hidden, dtype=torch.bool, memory_format=torch.contiguous_format)
        return keeps.bernoulli_(1.0 - self.p, generator=generator)

    @property
    def scale(self) -> float:
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)

    def overwrite(self, hidden: Tensor, chunk: int) -> None:
        hidden.mul_(self.keeps(hidden, chunk)).mul_(self.scale)


class Product(NamedTuple):
    """``linear(x, w, b)``."""

    w: Tensor
    b: Tensor | None


class Block(NamedTuple):
    """What a block is, but for its tensors."""

    activation: Activation
    keep: Saved
    is_gated: bool
    dropout: Dropout | None
    #: Into how many chunks the rows are cut, at most.
    chunks: int
    backend: Backend

    def rows(self, x: Tensor) -> Iterator[tuple[int, slice]]:
        """The number of each chunk, and its rows."""
        count = x.shape[0]
        size = max(LEAST_ROWS, -(-count // self.chunks))
        for chunk, start in enumerate(range(0, count, size)):
            yield chunk, slice(start, min(start + size, count))

    @property
    def is_whole(self) -> bool:
        """Whether what is kept is what the last product multiplies."""
        return self.keep == "output" and self.dropout is None

    def pre_activations(self, x: Tensor, products: Sequence[Product]) -> list[Tensor]:
        return [self.backend.linear(x, w, b) for w, b in products]

    def encode(self, z: Tensor) -> None:
        """Overwrite the pre-activation with what the activation returns, and the branch."""
        self.backend.bias_act(z, None, self.activation, dim=-1, encode=True, out=z)

    def hidden(self, parts: Sequence[Tensor], operands: Sequence[Tensor], chunk: int, *, overwrite: bool) -> Tensor:
        """What the last product multiplies, from the pre-activations, or from their outputs if these are kept; over the
        first of them, or in a new buffer."""
        z = parts[0]
        out = z if overwrite else None
        if self.is_gated:
            hidden = self.backend.gate(z, parts[1], self.activation, operands, out)
        elif self.keep == "output":
            hidden = z if overwrite or self.dropout is None else z.clone()
        else:
            hidden = self.backend.bias_act(z, None, self.activation, operands, dim=-1, encode=False, out=out)
        if self.dropout is not None:
            self.dropout.overwrite(hidden, chunk)
        return hidden

    def gradients(
        self, dy: Tensor, parts: Sequence[Tensor], operands: Sequence[Tensor], needs: tuple[bool, ...], chunk: int
    ) -> Sequence[Tensor | None]:
        """Write the gradients of the pre-activations over these, or over their outputs; dy is written over too.
        Returns those of the operands."""
        if self.dropout is not None:
            self.dropout.overwrite(dy, chunk)
        z = parts[0]
        if self.is_gated:
            return self.backend.gate_gradient(dy, z, parts[1], self.activation, operands, needs)
        wanted = Wanted("output" if self.keep == "output" else "input", True, False, needs)
        dz, _, *shares = self.backend.gradient(dy, z, self.activation, operands, wanted, dim=-1)
        assert dz is z
        return shares


def run(
    block: Block, x: Tensor, products: Sequence[Product], last: Product, operands: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The output, (rows, out), and what is kept."""
    kept = [] if block.keep == "recompute" else block.pre_activations(x, products)
    if block.keep == "output":
        block.encode(kept[0])
    if block.is_whole:
        return block.backend.linear(kept[0], *last), kept
    out = x.new_empty(x.shape[0], last.w.shape[0])
    for chunk, rows in block.rows(x):
        parts = [part[rows] for part in kept] or block.pre_activations(x[rows], products)
        out[rows] = block.backend.linear(block.hidden(parts, operands, chunk, overwrite=not kept), *last)
    return out, kept


def without_gradients(
    block: Block, x: Tensor, products: Sequence[Product], last: Product, operands: Sequence[Tensor]
) -> Tensor:
    """The output where nothing is kept, without a branch in what is hidden."""
    # A checkpoint computes again with gradients, and must find the same masks: they are made for chunks.
    if block.keep == "recompute" or block.dropout is not None:
        return run(block._replace(keep="recompute"), x, products, last, operands)[0]
    if block.is_gated or operands:
        parts = block.pre_activations(x, products)
        hidden = block._replace(keep="recompute").hidden(parts, operands, 0, overwrite=True)
    else:
        hidden = block.backend.product_act(MATMUL, x, *products[0], block.activation)
    return block.backend.linear(hidden, *last)


class MLP(Function):
    """A block. ``tensors`` are the weights of its first products, their biases and the activation's operands.

    x is saved, and the biases of the first products with "recompute". Else these are there for second derivatives, and
    not saved: they may be edited before backward.
    """

    @staticmethod
    def forward(
        ctx: Any, block: Block, count: int, x: Tensor, w: Tensor, b: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        weights, biases, operands = _split(tensors, count)
        out, kept = run(block, x, _products(weights, biases), Product(w, b), operands)
        saved_biases = biases if block.keep == "recompute" else (None,) * count
        ctx.save_for_backward(x, w, *weights, *saved_biases, *operands, *kept)
        ctx.block, ctx.count, ctx.hooked = block, count, saved_under_hooks()
        ctx.biases = biases, b
        ctx.versions = _versions(biases)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        block, count = ctx.block, ctx.count
        x, w, *saved = ctx.saved_tensors
        needs = Needs.of(ctx.needs_input_grad, count)
        given = 2 * count + len(needs.operands)
        (weights, biases, operands), kept = _split(saved[:given], count), saved[given:]
        if torch.is_grad_enabled() or is_batched(dy):
            biases, b = ctx.biases
            if _versions(biases) != ctx.versions:
                raise RuntimeError(
                    "mlp: a bias was edited in place between forward and backward, which a second derivative cannot "
                    "be taken after; edit it after backward"
                )
            found = _differentiable(block, dy, x, _products(weights, biases), Product(w, b), operands, needs)
        else:
            # What hooks hand back may be laid out in any way, and be theirs.
            is_ours = not ctx.hooked and graph_is_given_up()
            kept = [t.contiguous() if is_ours else t.clone(memory_format=torch.contiguous_format) for t in kept]
            with torch.autocast(x.device.type, enabled=False):  # the forward pass has cast what was to be cast
                found = _gradients(block, dy.contiguous(), x, _products(weights, biases), w, operands, kept, needs)
        return None, None, *found


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    w: bool
    b: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]
    operands: tuple[bool, ...]

    @classmethod
    def of(cls, needs: Sequence[bool], count: int) -> Needs:
        _, _, x, w, b, *rest = needs
        return cls(x, w, b, *(tuple(part) for part in _split(rest, count)))


def _gradients(
    block: Block,
    dy: Tensor,
    x: Tensor,
    products: Sequence[Product],
    w: Tensor,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    needs: Needs,
) -> list[Tensor | None]:
    """Of all tensors, in the order in which they are given. What is kept is overwritten."""
    backend = block.backend
    of_w = _Sum()
    of_weights = [_Sum() if need else None for need in needs.weights]
    of_biases = [_Sum() if need else None for need in needs.biases]
    of_operands = [torch.zeros_like(p, dtype=torch.float64) for p in operands]
    dx = torch.empty_like(x) if needs.x and not kept else None
    if needs.w and block.is_whole:
        of_w.add_product(dy, kept[0])
    for chunk, rows in block.rows(x):
        parts = [part[rows] for part in kept] or block.pre_activations(x[rows], products)
        if needs.w and not block.is_whole:
            of_w.add_product(dy[rows], block.hidden(parts, operands, chunk, overwrite=False))
        of_hidden = backend.linear(dy[rows], w.t(), None)
        shares = block.gradients(of_hidden, parts, operands, needs.operands, chunk)
        del of_hidden
        for total, share in zip(of_operands, shares, strict=True) if shares else ():
            total += 0.0 if share is None else share.view_as(total)
        if kept:
            continue
        _add(of_weights, of_biases, parts, x[rows])
        if dx is not None:
            dx[rows] = _through(backend, parts, products)
    if kept:
        _add(of_weights, of_biases, kept, x)
        dx = _through(backend, kept, products) if needs.x else None
    totals = zip(of_operands, operands, needs.operands, strict=True)
    return [
        dx,
        of_w.total if needs.w else None,
        dy.sum(0) if needs.b else None,
        *(None if one is None else one.total for one in of_weights),
        *(None if one is None else one.total for one in of_biases),
        *(total.to(p.dtype) if need else None for total, p, need in totals),
    ]


class _Sum:
    """Over chunks of rows. Where there are several, those of 16 bits are added in float32."""

    def __init__(self) -> None:
        self.dtype = torch.float32
        self.sum: Tensor | None = None

    def add(self, share: Tensor) -> None:
        if self.sum is None:
            self.dtype, self.sum = share.dtype, share
        else:
            self.sum = self.sum.to(torch.promote_types(self.dtype, torch.float32)).add_(share)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """``a^T b``."""
        if self.sum is None or b.dtype.itemsize == 2:
            self.add(a.t() @ b)
        else:
            self.sum.addmm_(a.t(), b)

    @property
    def total(self) -> Tensor:
        assert self.sum is not None
        return self.sum.to(self.dtype)


def _add(
    of_weights: Sequence[_Sum | None],
    of_biases: Sequence[_Sum | None],
    of_parts: Sequence[Tensor],
    x: Tensor,
) -> None:
    for of_weight, of_bias, of_part in zip(of_weights, of_biases, of_parts, strict=True):
        if of_weight is not None:
            of_weight.add_product(of_part, x)
        if of_bias is not None:
            of_bias.add(of_part.sum(0))


def _through(backend: Backend, of_parts: Sequence[Tensor], products: Sequence[Product]) -> Tensor:
    """The gradient of x."""
    dx, *others = (backend.linear(part, w.t(), None) for part, (w, _) in zip(of_parts, products, strict=True))
    for other in others:
        dx += other
    return dx


def composite(
    block: Block, x: Tensor, products: Sequence[Product], last: Product, operands: Sequence[Tensor]
) -> Tensor:
    """The block in operations that autograd can differentiate."""
    first, *others = (F.linear(x, w, b) for w, b in products)
    along = [operand_along(p, -1, 2) for p in operands]
    hidden = block.activation.plain(first) if not operands else block.activation.function(first, *along)
    for other in others:
        hidden = hidden * other
    if block.dropout is not None:
        keeps = torch.cat([block.dropout.keeps(hidden[rows].detach(), chunk) for chunk, rows in block.rows(x)])
        hidden = hidden * keeps * block.dropout.scale
    return F.linear(hidden, *last)


def _differentiable(
    block: Block,
    dy: Tensor,
    x: Tensor,
    products: Sequence[Product],
    last: Product,
    operands: Sequence[Tensor],
    needs: Needs,
) -> list[Tensor | None]:
    """The gradients, in operations that autograd can differentiate again."""
    wanted = [needs.x, needs.w, needs.b, *needs.weights, *needs.biases, *needs.operands]
    with torch.enable_grad():
        tensors: Any = apart(x, *last, *(w for w, _ in products), *(b for _, b in products), *operands)
        own_x, w, b, *rest = tensors
        weights, biases, own_operands = _split(rest, len(products))
        y = composite(block, own_x, _products(weights, biases), Product(w, b), own_operands)
        sources = [t for t, need in zip(tensors, wanted, strict=True) if need]
        found = iter(torch.autograd.grad(y, sources, dy, create_graph=True))
    return [next(found) if need else None for need in wanted]


def _products(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Product]:
    return [Product(w, b) for w, b in zip(weights, biases, strict=True)]


def _split(items: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """What is of the weights, of the biases, and of the operands."""
    return items[:count], items[count : 2 * count], items[2 * count :]


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]
