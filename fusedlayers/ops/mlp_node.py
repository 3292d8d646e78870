"""MLP blocks: one autograd node from the block's input to its output, which owns the hidden buffers.

A block is ``linear(dropout(f(z)), w, b)`` with ``z = linear(x, w1, b1)``, or with ``f(gate) * up`` of two of these.
Nobody outside of the node ever holds a hidden buffer, so it is overwritten as soon as it has been read. What is needed
for a moment only, f(z) or its gradient, is computed for one chunk of rows at a time. Saved for backward is one of

* "output": f(z), in place over z;
* "input": the pre-activations, from which f(z) is recomputed, chunk by chunk;
* "recompute": nothing; forward and backward run over chunks of rows, from the first layer to the last.

Backward first computes the gradient of the last weight, which reads f(z), and then writes the gradients of the
pre-activations over the saved buffers. Where the graph is retained it writes them over copies.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import Node
from ..kernels import GradientRequest
from .mlp_forward import Block, Linear, linear, run, unpacked
from .saved_buffers import take_over
from .second_derivatives import applied, gradients_through, needs_composite


class MLP(Node):
    """A block. ``tensors`` are the weights of its first layers, their biases and the activation's operands.

    Saved is what backward reads. Weights and biases that only second derivatives read bypass ``save_for_backward``, so
    that in-place edits before backward stay legal; version counters are checked when they are read. The plan sees to it
    that this keeps nothing alive.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, count: int, x: Tensor, w: Tensor, b: Tensor | None, *tensors: Any) -> Tensor:
        weights, biases, operands = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        *layers, last = _layers((*weights, w), (*biases, b))
        out, saved = run(block, x, unpacked(layers) if block.is_packed else layers, last, operands)
        needs_x, recomputes = ctx.needs_input_grad[2], block.saved == "recompute"
        nothing = (None,) * count
        given = (weights if needs_x or recomputes else nothing) + (biases if recomputes else nothing)
        ctx.save_for_backward(x, w, *given, *operands, *saved)
        ctx.held = (nothing if needs_x or recomputes else weights) + (nothing if recomputes else biases)
        ctx.versions = [None if t is None else t._version for t in ctx.held]
        ctx.block, ctx.count = block, count
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        block, count = ctx.block, ctx.count
        x, w, *saved = ctx.saved_tensors
        _, _, needs_x, needs_w, needs_b, *others = ctx.needs_input_grad
        needs = NeededGradients(needs_x, needs_w, needs_b, *map(tuple, _split(others, count)))
        given = 2 * count + len(needs.operands)
        (weights, biases, operands), hidden = _split(saved[:given], count), saved[given:]
        with torch.autocast(x.device.type, enabled=False):  # the forward pass has cast what was to be cast
            if needs_composite(dy):
                if ctx.versions != [None if t is None else t._version for t in ctx.held]:
                    name = "gated_mlp" if block.is_gated else "mlp"
                    raise RuntimeError(
                        f"{name}: a weight or bias was edited in place between forward and backward, which a second "
                        "derivative cannot be taken after; edit it after backward"
                    )
                both = zip((*weights, *biases), ctx.held, strict=True)
                first = [held if t is None else t for t, held in both]
                found = _differentiable(block, dy, x, w, first, operands, needs)
            else:
                layers = _layers(weights, biases)
                layers = unpacked(layers) if block.is_packed else layers
                del saved
                # What is not this node's own is copied: a second backward pass will read it, or somebody else.
                dense = torch.contiguous_format
                for i, may in enumerate(take_over(ctx, hidden)):
                    hidden[i] = hidden[i].contiguous() if may else hidden[i].clone(memory_format=dense)
                found = _gradients(_Totals(block, w, layers, operands, needs, len(x)), dy, x, hidden)
        return None, None, *found


class NeededGradients(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    w: bool
    b: bool
    weights: tuple[bool, ...]
    biases: tuple[bool, ...]
    operands: tuple[bool, ...]

    @property
    def hidden(self) -> bool:
        """Whether gradients go through the hidden layer."""
        return self.x or any((*self.weights, *self.biases, *self.operands))


class _Totals:
    """The gradients of weights, biases and operands, summed over chunks of rows."""

    def __init__(
        self,
        block: Block,
        w: Tensor,
        layers: Sequence[Linear],
        operands: Sequence[Tensor],
        needs: NeededGradients,
        rows: int,
    ) -> None:
        self.block, self.w, self.layers, self.operands, self.needs = block, w, layers, operands, needs
        self.rows = rows
        self.of_w = _Sum(rows)
        self.of_operands = [torch.zeros_like(p, dtype=torch.float64) for p in operands]
        halves = 2 if block.is_packed else 1
        self.of_biases = [_Sum(rows) if need else None for need in needs.biases * halves]
        self.of_weights = [_Sum(rows) if need else None for need in needs.weights]
        #: The gradient of packed weights, whose halves are the sums: to join these would take their bytes twice.
        self.of_packed: Tensor | None = None
        if block.is_packed:
            self.of_weights = [None, None]
        #: The kernels add up a bias's gradient on the way, but for those of a gate.
        self.adds_bias = len(self.of_biases) == 1
        bias = self.adds_bias and needs.biases[0]
        self.wanted = GradientRequest("output" if block.saved == "output" else "input", True, bias, needs.operands)

    def through_last(self, dy: Tensor, parts: Sequence[Tensor], first: int) -> None:
        """Go from the gradient of the result to those of the pre-activations, in place over ``parts``, for the chunk
        whose first row is ``first``."""
        block = self.block
        if self.needs.w and not block.is_whole:
            self.of_w.add_product(dy, block.hidden(parts, self.operands, first, overwrite=False))
        if self.needs.hidden:
            of_hidden = dy @ self.w
            db, shares = block.gradients(of_hidden, parts, self.operands, self.wanted, first)
            if db is not None and self.of_biases[0] is not None:
                self.of_biases[0].add(db)
            for total, share in zip(self.of_operands, shares, strict=True) if shares else ():
                total += 0.0 if share is None else share.view_as(total)

    def through_first(self, of_parts: list[Tensor], x: Tensor, out: Tensor | None) -> Tensor | None:
        """Go from the gradients of the pre-activations, each of which is freed when it has been read, to those of the
        first layers, and of x, which is returned, in ``out`` if given."""
        dx = None
        if self.block.is_packed and self.needs.weights[0] and self.of_packed is None:
            self.of_packed = x.new_empty(2 * of_parts[0].shape[1], x.shape[1])
            self.of_weights = [_Sum(self.rows, half) for half in self.of_packed.chunk(2)]
        for (w, _), of_weight, of_bias in zip(self.layers, self.of_weights, self.of_biases, strict=True):
            of_part = of_parts.pop(0)
            if of_weight is not None:
                of_weight.add_product(of_part, x)
            if of_bias is not None and not self.adds_bias:
                of_bias.add(of_part.sum(0))
            if dx is not None:
                torch.addmm(dx, of_part, w, out=dx)
            elif self.needs.x:
                dx = linear(of_part, w.t(), None, out=out)
        return dx

    def take(self) -> list[Tensor | None]:
        """The sums: of the first weights, of their biases, and of the operands."""
        of_weights = [None if one is None else one.take() for one in self.of_weights]
        of_biases = [None if one is None else one.take() for one in self.of_biases]
        if self.block.is_packed:
            of_weights = [self.of_packed]
            of_biases = [torch.cat(of_biases) if self.needs.biases[0] else None]  # type: ignore[arg-type]  # then all are
        of_operands = zip(self.of_operands, self.operands, self.needs.operands, strict=True)
        return [*of_weights, *of_biases, *(total.to(p.dtype) if need else None for total, p, need in of_operands)]


def _gradients(totals: _Totals, dy: Tensor, x: Tensor, saved: list[Tensor]) -> list[Tensor | None]:
    """The gradients of x, of the last weight and bias, of the first weights, their biases and the operands. The saved
    buffers are overwritten and freed."""
    # The contiguous copy is made here so that it can be freed here: a caller's frame may hold what it has passed on, as
    # it does once torch's compiler has hooked itself into how Python evaluates frames.
    dy = dy.contiguous()
    block, needs, recomputes = totals.block, totals.needs, not saved
    is_cut = block.chunk_rows(len(x)) < len(x)
    dx = torch.empty_like(x) if needs.x and recomputes and is_cut else None
    db = dy.sum(0) if needs.b else None
    if block.is_whole and needs.w:
        totals.of_w.add_product(dy, saved[0])
    for rows in block.rows(x):
        parts = [part[rows] for part in saved] or block.pre_activations(x[rows], totals.layers)
        totals.through_last(dy[rows], parts, rows.start)
        if recomputes and needs.hidden:
            of_rows = totals.through_first(parts, x[rows], None if dx is None else dx[rows])
            dx = dx if is_cut else of_rows
            del of_rows
        del parts
    del dy  # which may be a copy
    if not recomputes:
        dx = totals.through_first(saved, x, None)
    return [dx, totals.of_w.take() if needs.w else None, db, *totals.take()]


_wide_products: dict[torch.device, bool] = {}


def _has_wide_products(device: torch.device) -> bool:
    """Whether matmuls of 16-bit numbers add to float32 numbers, as CUDA's do. That is tried once, and not while a CUDA
    graph is captured."""
    if device not in _wide_products:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        _wide_products[device] = _adds_to_float32(device)
    return _wide_products[device]


def _adds_to_float32(device: torch.device) -> bool:
    a = torch.full((16, 16), 2.0, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return bool((total == 65).all())


class _Sum:
    """A sum over chunks of so many rows. 16-bit shares of several chunks are added in float32. The result is in
    ``out``, if given."""

    def __init__(self, rows: int, out: Tensor | None = None) -> None:
        self.rows = rows
        self.dtype = torch.float32
        self.sum: Tensor | None = None
        self.out = out

    def add(self, share: Tensor) -> None:
        if self.sum is None:
            self.dtype, self.sum = share.dtype, share
        else:
            self.sum = self.sum.to(torch.promote_types(self.dtype, torch.float32))
            # On a CPU torch makes a float32 copy of 16-bit numbers that it adds to others: of a part of them, then.
            pieces = 16 if share.is_cpu else 1
            for total, piece in zip(self.sum.chunk(pieces), share.chunk(pieces), strict=True):
                total.add_(piece)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """``a^T b``."""
        is_in_float32 = len(b) < self.rows and b.dtype.itemsize == 2 and _has_wide_products(b.device)
        if is_in_float32:
            if self.sum is None:
                self.dtype, self.sum = b.dtype, b.new_zeros(a.shape[1], b.shape[1], dtype=torch.float32)
            torch.addmm(self.sum, a.t(), b, out_dtype=torch.float32, out=self.sum)
        elif self.sum is None and self.out is not None:
            self.add(torch.mm(a.t(), b, out=self.out))
        elif self.sum is None or b.dtype.itemsize == 2:
            self.add(a.t() @ b)
        else:
            torch.addmm(self.sum, a.t(), b, out=self.sum)  # torch counts the arithmetic of it, but not of addmm_

    def take(self) -> Tensor:
        assert self.sum is not None
        total, self.sum = self.sum.to(self.dtype), None
        return total if self.out is None or total is self.out else self.out.copy_(total)


def _differentiable(
    block: Block,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    first: Sequence[Tensor | None],
    operands: Sequence[Tensor],
    needs: NeededGradients,
) -> list[Tensor | None]:
    """The gradients of x, w, b, of the first weights and biases, and of the operands, in operations that autograd can
    differentiate again."""
    count = len(needs.weights)

    def without_bias(x: Tensor, w: Tensor, *tensors: Any) -> Tensor:
        weights, biases, operands = _split(tensors, count)
        layers = _layers(weights, biases)
        z, *others = block.pre_activations(x, unpacked(layers) if block.is_packed else layers)
        activated = applied(block.activation.plain, z, operands, -1)
        hidden = functools.reduce(torch.mul, others, activated).to(x.dtype)
        return F.linear(hidden if block.dropout is None else block.dropout.apply(hidden), w)

    wanted = needs.x, needs.w, *needs.weights, *needs.biases, *needs.operands
    dx, dw, *others = gradients_through(without_bias, (x, w, *first, *operands), wanted, dy)
    return [dx, dw, dy.sum(0) if needs.b else None, *others]


def _layers(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Linear]:
    """The layers. Under autocast weights come as its casts, which torch keeps for all who use them, and biases are cast
    here: parameters are alive anyway, and casts would be held for second derivatives alone."""
    pairs = zip(weights, biases, strict=True)
    return [Linear(w, b if b is None or b.dtype is w.dtype else b.to(w.dtype)) for w, b in pairs]


def _split(items: Sequence[Any], count: int) -> tuple[Any, Any, Any]:
    """The items of the weights, of the biases, and of the operands."""
    return items[:count], items[count : 2 * count], items[2 * count :]
