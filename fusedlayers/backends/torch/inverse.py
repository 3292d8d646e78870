"""The input of an activation from its output: by the formula of the activation's row, or by one look-up.

Idea: the fitted inverse of a folded activation (``derivative/folded.py``) is seventy Horner steps, each a pass over the
chunk. Instead ``z - y`` is looked up, linear between nodes that lie closest where it bends most: at the minimum, where
``d = y - y_min`` is small, and in the tail, where y is small. Floating-point numbers are spaced like this, so the
leading bits of d, or of y, are the index.

Cost: about twenty passes, and a table of 4 MiB for each activation. Limits: float32 only; the error is that of the
fit plus as much again.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...activations import Activation, upcast
from ...derivative.folded import SMALLEST, TAIL_FRACTION, FoldedInverse, Polynomials
from ...utils.isolation import in_clean_state
from ...utils.layout import is_dense
from .chunks import Chunkwise, for_each
from .lookup import lookup


def inverse(y: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
    """z with ``activation(z) = y``, in ``out`` (which may be y) or in a new buffer; y carries the branch."""
    z = out if out is not None and is_dense(out) else torch.empty_like(y)
    if not (is_dense(y) and y.stride() == z.stride()):
        y = torch.empty_like(z).copy_(y)
    for_each(_inverse(activation, z.dtype), y, z)
    return z if out is None or z is out else out.copy_(z)


def _inverse(activation: Activation, dtype: torch.dtype) -> Chunkwise:
    fitted = activation.fitted_inverse()
    if fitted is not None:
        assert dtype is torch.float32
        table = _table(activation)
        return Chunkwise(lambda y, z, *more: z.copy_(table(y, *more)), _Table.SCRATCH, looks_up=True)
    return Chunkwise(lambda y, z: z.copy_(activation.input_given_output(upcast(y), dtype)), allocates=True)


@functools.cache
@in_clean_state
def _table(activation: Activation) -> _Table:
    fitted = activation.fitted_inverse()
    assert fitted is not None
    return _Table(fitted)


class _Table:
    """``FoldedInverse`` on encoded float32 outputs.

    The variable is a float32 number w: d, with its sign set on the falling branch; in the tail of that branch, y times
    a power of two that keeps it apart from all d. An interval is all numbers with the same sign, exponent and leading
    bits.
    """

    #: The last bits of w, which are the place in the interval: intervals have 2^-10 of the size of w.
    REST = 13
    SCRATCH = (torch.float32, torch.float32, torch.int32, torch.complex64)

    def __init__(self, fitted: FoldedInverse) -> None:
        polynomials = fitted.of_distance
        assert isinstance(polynomials, Polynomials) and fitted.fold.ambiguous == "negative"
        self.high, self.low = fitted.origin_parts
        self.nearest = fitted.margin
        #: The factor of the tail: all of it is then below the smallest distance.
        self.down = 2.0 ** (math.frexp(self.nearest)[1] - 2)
        assert SMALLEST * self.down >= 2.0**-126
        self.tail = polynomials.minimum * TAIL_FRACTION
        self.nodes = self._evaluate(fitted, polynomials)

    def _evaluate(self, fitted: FoldedInverse, polynomials: Polynomials) -> Tensor:
        start = torch.arange(-(2**31), 2**31, 2**self.REST, dtype=torch.int64)
        ends = []
        for bits in (start, start + 2**self.REST - 1):
            w = bits.to(torch.int32).view(torch.float32).double()
            size, falling = w.abs(), w.signbit()
            in_tail = falling & (size < self.nearest / 2)
            distance = torch.where(in_tail, 1.0, size.clamp_min(self.nearest))
            y = torch.where(in_tail, -size / self.down, fitted.fold.extremum + distance)
            y = torch.where(in_tail, y.clamp(max=-SMALLEST), y)
            distance = torch.where(in_tail, y - fitted.fold.extremum, distance)
            ends.append(torch.where(w.isnan(), w, polynomials(distance, y, falling)))
        step = ((ends[1] - ends[0]) / (2**self.REST - 1)).nan_to_num(0.0)
        return torch.complex(ends[0].float(), step.float())  # a pair is one look-up

    def __call__(self, y: Tensor, w: Tensor, tail: Tensor, index: Tensor, pairs: Tensor, *for_lookup: Tensor) -> Tensor:
        bits, tail_bits, w_bits = y.view(torch.int32), tail.view(torch.int32), w.view(torch.int32)
        torch.sub(y, self.high, out=w).sub_(self.low).clamp_(min=self.nearest)
        # The last bit, moved to the sign's place where the sign is set: the falling branch.
        torch.bitwise_left_shift(bits, 31, out=index).bitwise_and_(bits)
        w_bits.bitwise_or_(index)
        # All bits set for those on the falling branch whose y lies above the start of its tail.
        torch.sub(self.tail, y, out=tail)
        index.bitwise_and_(tail_bits).bitwise_right_shift_(31)
        torch.mul(y, self.down, out=tail)
        tail_bits.bitwise_xor_(w_bits).bitwise_and_(index)
        w_bits.bitwise_xor_(tail_bits)
        # The interval, and the place in it.
        torch.bitwise_right_shift(w_bits, self.REST, out=index).add_(2 ** (31 - self.REST))
        value, step = torch.view_as_real(lookup(self.nodes, index, *for_lookup, out=pairs)).unbind(-1)
        place = tail.copy_(w_bits.bitwise_and_(2**self.REST - 1))
        return torch.addcmul(value, place, step, out=w).add_(y)
