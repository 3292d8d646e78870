"""Activations with a fitted derivative in float32: the branch bit and the derivative, in few torch operations.

Idea: ``derivative/branch_bit.py`` and ``derivative/folded.py`` define what is computed. Here it is written in
operations that overwrite their operands, because each operation is a pass over the chunk. Bitwise operations stand for
comparisons and ``where``, which torch does not vectorise: three bitwise passes cost less than one of these. The
polynomials are replaced by a table that is linear between its nodes.

Cost: seven passes besides the function forward, fifteen backward. Limits: float32 only. Tests compare the branch with
the definition bit for bit, and the derivative to the tolerance of the fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...activations import Activation
from ...derivative.folded import FoldedDerivative, Polynomials
from ...utils.isolation import in_clean_state
from .chunks import Chunkwise
from .lookup import lookup
from .table import interpolated

_SIGN_AND_BIT = -(2**31) + 1


def forward_(activation: Activation) -> Chunkwise:
    """Overwrites float32 pre-activations with outputs, the branch in the last bit of the ambiguous ones."""
    fold = activation.fold
    assert fold is not None
    if fold.ambiguous != "negative" or fold.marked != "left" or not fold.bounded:
        return Chunkwise(lambda z: z.copy_(activation.encoded(z, torch.float32)), allocates=True)
    overwrite = functools.partial(_overwrite, function=activation.function, position=fold.position)
    return Chunkwise(overwrite, (torch.float32, torch.int32), allocates=True)


def _overwrite(
    z: Tensor, left: Tensor, clear: Tensor, *, function: Callable[[Tensor], Tensor], position: float
) -> Tensor:
    # The sign of z - position, spread over the word, selects the two bits that an output of the left branch has.
    left = torch.sub(z, position, out=left).view(torch.int32)
    left.bitwise_right_shift_(31).bitwise_and_(_SIGN_AND_BIT)
    bits = function(z).view(torch.int32)
    # Arithmetic shift: -1 where y is negative, else 0; minus 1: all bits but the last, else all bits.
    torch.bitwise_right_shift(bits, 31, out=clear).sub_(1).bitwise_and_(bits)
    return torch.bitwise_or(clear, left, out=z.view(torch.int32))


def derivative(activation: Activation) -> Chunkwise:
    """The derivative from encoded float32 outputs, as a function of a chunk of these."""
    fitted = activation.fitted_derivative()
    if isinstance(fitted, FoldedDerivative) and isinstance(fitted.of_distance, Polynomials):
        return Chunkwise(_interpolated(activation), _Interpolated.SCRATCH, looks_up=True)
    table = interpolated(activation)
    if table is not None:
        return Chunkwise(table, table.SCRATCH, looks_up=True)
    return Chunkwise(lambda y: activation.derivative_given_output(y, torch.float32), allocates=True)


@functools.cache
@in_clean_state
def _interpolated(activation: Activation) -> _Interpolated:
    folded = activation.folded_derivative()
    assert folded is not None and isinstance(folded.of_distance, Polynomials)
    return _Interpolated(folded, folded.of_distance)


class _Interpolated:
    """``FoldedDerivative`` on encoded float32 outputs of a function like GELU, from a table.

    Forty Horner steps are forty passes; the table takes one look-up. Its nodes are uniform in ``c = sqrt(v - v_0)``
    with ``v = +-sqrt(y - y_min)``: the inner root makes the derivative smooth through the minimum, the outer one where
    the falling branch ends in y = 0, at v_0 = -sqrt(-y_min). (One root alone errs by 8.4e-6 rms in the tail, both by
    3.4e-7.)
    """

    INTERVALS = 8192
    #: c^2 is counted from 2 or 3, not from 0, because float32 resolves it to about 1. The first nodes, up to c^2 = 4,
    #: are 0, so that an output that has underflowed has the derivative 0. (Other outputs there have one below 1e-6.)
    FLAT = 3
    SCRATCH = (torch.float32, torch.float32, torch.complex64)

    def __init__(self, folded: FoldedDerivative, polynomials: Polynomials) -> None:
        self.high, self.low = folded.origin_parts
        self.nearest = folded.margin
        self.farthest = polynomials.pieces[-1].stop ** 2
        root = math.sqrt(-folded.fold.extremum)
        self.scale = self.INTERVALS**2 / (math.sqrt(self.farthest) + root)  # c = sqrt(scale v + offset)
        self.offset = torch.tensor(math.ceil(root * self.scale + 2), dtype=torch.float32)
        self.nodes = self._evaluate(folded, root)

    def _evaluate(self, folded: FoldedDerivative, root: float) -> Tensor:
        c = torch.arange(self.INTERVALS + 1, dtype=torch.float64)
        v = ((c.square() - self.offset.double()) / self.scale).clamp_min(-root)
        values = folded.of_distance(v * v, folded.fold.extremum + v * v, v < 0)
        values[: self.FLAT] = 0
        return torch.complex(values.float(), values.diff(append=values[-1:]).float())  # a pair is one look-up

    def __call__(self, y: Tensor, v: Tensor, c: Tensor, pairs: Tensor, *for_lookup: Tensor) -> Tensor:
        y_bits, v_bits, c_bits = y.view(torch.int32), v.view(torch.int32), c.view(torch.int32)
        torch.sub(y, self.high, out=v).sub_(self.low).clamp_(self.nearest, self.farthest).sqrt_()
        # The last bit, moved to the sign's place where the sign is set: or-ing it into the root makes it negative.
        v_bits.bitwise_or_(torch.bitwise_left_shift(y_bits, 31, out=c_bits).bitwise_and_(y_bits))
        torch.add(self.offset, v, alpha=self.scale, out=c).sqrt_()
        # NaN has no index; its fraction is NaN, and so is the result.
        index = v_bits.copy_(c).clamp_(0, self.INTERVALS)
        node, step = torch.view_as_real(lookup(self.nodes, index, *for_lookup, out=pairs)).unbind(-1)
        return torch.addcmul(node, c.frac_(), step, out=v)
