"""The description of an MLP block, and its forward pass: whole, or for a chunk of rows at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation, Saved
from ..kernels import Backend, GradientRequest, reference

#: Rows of a chunk, at least: with fewer a product reads its weight, and writes the weight's gradient, for too little.
LEAST_ROWS = 256


class BlockDropout(NamedTuple):
    """A dropout of hidden numbers, with a bit for each; survivors are scaled by ``factor``."""

    factor: float
    #: The bits of the whole hidden layer, row by row.
    bits: Tensor

    @classmethod
    def draw(cls, p: float, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Drop what ``F.dropout`` would drop of a hidden layer of this size."""
        keep = torch.zeros(rows, hidden, dtype=torch.bool, device=device)
        if p < 1:
            keep = reference.drawn(torch.empty(rows, hidden, dtype=dtype, device=device), p)
        return cls(1 / (1 - p) if p < 1 else 0.0, reference.packed(keep))

    def apply(self, hidden: Tensor) -> Tensor:
        """Drop in operations that autograd can differentiate."""
        return hidden * self._mask(hidden, 0) * self.factor

    def overwrite(self, hidden: Tensor, first: int) -> None:
        """Drop in place, in rows that begin with the ``first``, a multiple of ``LEAST_ROWS``."""
        hidden.mul_(self._mask(hidden, first)).mul_(self.factor)

    def _mask(self, hidden: Tensor, first: int) -> Tensor:
        rows, columns = hidden.shape
        start = first * columns // 8
        bits = self.bits[start : start - (-rows * columns // 8)]
        return reference.unpacked(bits, hidden.shape)


class Linear(NamedTuple):
    """``linear(x, w, b)``."""

    w: Tensor
    b: Tensor | None


class Block(NamedTuple):
    """A block without its tensors."""

    activation: Activation
    saved: Saved
    is_gated: bool
    #: Whether one product makes gate and up.
    is_packed: bool
    dropout: BlockDropout | None
    #: Into how many chunks the rows are cut, at most.
    chunks: int
    backend: Backend

    def rows(self, x: Tensor) -> Iterator[slice]:
        """The rows of each chunk."""
        count = x.shape[0]
        size = self.chunk_rows(count)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def chunk_rows(self, count: int) -> int:
        """How many rows a chunk has, of so many in all: a multiple of ``LEAST_ROWS``."""
        return LEAST_ROWS * max(1, -(-count // (self.chunks * LEAST_ROWS)))

    @property
    def is_whole(self) -> bool:
        """Whether the saved tensor is the last layer's input."""
        return self.saved == "output" and self.dropout is None

    def pre_activations(self, x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
        return [F.linear(x, w, b) for w, b in layers]

    def activated(self, x: Tensor, layer: Linear, operands: Sequence[Tensor]) -> Tensor:
        """The activation of the one layer's result, in one buffer, with the branch in it."""
        w, b = layer
        kernel_b, b = (b, None) if self.backend.ADDS_BIAS else (None, b)
        z = F.linear(x, w, b)
        return self.backend.bias_act(z, kernel_b, self.activation, operands, dim=-1, encode=True, out=z)

    def hidden(self, parts: Sequence[Tensor], operands: Sequence[Tensor], first: int, *, overwrite: bool) -> Tensor:
        """The last layer's input, from the pre-activations, or from the activation's outputs if these are saved; in
        place over the first of them, or in a new buffer."""
        z = parts[0]
        out = z if overwrite else None
        if self.is_gated:
            hidden = self.backend.gate(z, parts[1], self.activation, operands, out)
        elif self.saved == "output":
            hidden = z if overwrite or self.dropout is None else z.clone()
        else:
            hidden = self.backend.bias_act(z, None, self.activation, operands, dim=-1, encode=False, out=out)
        if self.dropout is not None:
            self.dropout.overwrite(hidden, first)
        return hidden

    def gradients(
        self, dy: Tensor, parts: Sequence[Tensor], operands: Sequence[Tensor], request: GradientRequest, first: int
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Go from the gradient of the last layer's input, which is overwritten too, to those of the pre-activations, in
        place over ``parts``; returned are those of the bias and of the operands."""
        if self.dropout is not None:
            self.dropout.overwrite(dy, first)
        z = parts[0]
        if self.is_gated:
            shares = self.backend.gate_gradient(dy, z, parts[1], self.activation, operands, request.needs_operands)
            return None, shares
        dz, db, *shares = self.backend.gradient(dy, z, self.activation, operands, request, dim=-1)
        assert dz is z
        return db, shares


def unpacked(layers: Sequence[Linear]) -> list[Linear]:
    """Gate and up of one packed layer."""
    weights, biases = ((None, None) if t is None else t.chunk(2) for t in layers[0])
    return [Linear(w, b) for w, b in zip(weights, biases, strict=True)]  # type: ignore[arg-type]  # as in ``Linear``


def run(
    block: Block, x: Tensor, layers: Sequence[Linear], last: Linear, operands: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The output, (rows, out), and the tensors to save. The last layer runs chunk by chunk, from these or from x."""
    if block.saved == "output":
        kept = [block.activated(x, layers[0], operands)]
    else:
        kept = [] if block.saved == "recompute" else block.pre_activations(x, layers)
    if block.is_whole:
        return F.linear(kept[0], *last), kept
    is_cut = block.chunk_rows(len(x)) < len(x)
    out = x.new_empty(len(x), last.w.shape[0]) if is_cut else None
    for rows in block.rows(x):
        parts = [part[rows] for part in kept] or block.pre_activations(x[rows], layers)
        hidden = block.hidden(parts, operands, rows.start, overwrite=not kept)
        of_rows = linear(hidden, *last, out=None if out is None else out[rows])
    return of_rows if out is None else out, kept


def linear(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """``x w^T + b``, in ``out`` or in a new buffer: (rows, in), (out, in), (out,) -> (rows, out)."""
    if out is None:
        return F.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)
