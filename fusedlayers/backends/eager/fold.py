"""Folded activations in float32: the branch bit and the fitted derivative, in as few passes as torch operations allow.

``activations/branch.py`` and ``activations/inverse.py`` say what is computed; this says it again in operations that
overwrite their operands, because on a CPU each operation is a pass over the chunk. Comparisons and ``where`` are
avoided: torch does not vectorise them, and three bitwise passes cost less. Tests hold the two together bit for bit
(branch) and to the tolerance of the fit (derivative).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...activations import Activation
from ...activations.inverse import FoldedDerivative, Polynomials
from ...clean import in_clean_state
from .lookup import lookup

_SIGN_AND_BIT = -(2**31) + 1


def forward_(z: Tensor, function: Callable[[Tensor], Tensor], position: float) -> None:
    """Overwrite float32 ``z`` with ``function(z)``, the branch in the last bit of negative results."""
    # The sign of z - position, spread over the word, selects the two bits that an output of the left branch has.
    left = (z - position).view(torch.int32)
    left.bitwise_right_shift_(31).bitwise_and_(_SIGN_AND_BIT)
    y = function(z)
    bits = y.view(torch.int32)
    # Arithmetic shift: -1 where y is negative, else 0; minus 1: all bits but the last, else all bits.
    clear = torch.bitwise_right_shift(bits, 31).sub_(1)
    torch.bitwise_and(bits, clear, out=bits)
    torch.bitwise_or(bits, left, out=z.view(torch.int32))


@functools.cache
def derivative(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The derivative from encoded float32 outputs, as a function of one chunk."""
    folded = activation.folded()
    assert folded is not None
    if isinstance(folded.of_distance, Polynomials):
        return _Interpolated(folded, folded.of_distance)
    return lambda y: activation.derivative_given_output(y, torch.float32)


class _Interpolated:
    """``FoldedDerivative`` on encoded float32 outputs, from a table of it.

    Forty Horner steps are forty passes; a table that is linear between its nodes takes one look-up. The nodes are
    uniform in ``v = +-sqrt(y - y_min)``, and on the falling branch's tail in ``w = sqrt(-y)``, in which the derivative
    is smooth down to y = 0. One coordinate c numbers them all, tail first; its integer part is the index, the rest the
    position between.
    """

    TAIL = 2048
    BODY = 12288

    def __init__(self, folded: FoldedDerivative, polynomials: Polynomials) -> None:
        self.high, self.low = folded.origin_parts
        self.margin = folded.margin
        self.body_start, self.body_stop = polynomials.pieces[0].start, polynomials.pieces[-1].stop
        self.scale = self.BODY / (self.body_stop - self.body_start)
        y_boundary = folded.fold.minimum + self.body_start**2
        self.tail_scale = self.TAIL / math.sqrt(-y_boundary)
        self._build(folded)

    @in_clean_state
    def _build(self, folded: FoldedDerivative) -> None:
        w = torch.arange(self.TAIL + 1, dtype=torch.float64) / self.tail_scale
        tail = folded.of_distance(-w * w - folded.fold.minimum, -w * w, torch.ones_like(w, dtype=torch.bool))
        v = self.body_start + torch.arange(self.BODY + 1, dtype=torch.float64) / self.scale
        body = folded.of_distance(v * v, folded.fold.minimum + v * v, v < 0)
        nodes = torch.cat([tail, body])
        steps = nodes.diff(append=nodes[-1:])
        steps[self.TAIL] = 0  # between the tail's last node and the body's first there is no interval
        self.nodes = torch.complex(nodes.float(), steps.float())  # a pair is one look-up
        self.body_offset = torch.tensor(self.TAIL + 1 - self.body_start * self.scale, dtype=torch.float32)

    def __call__(self, y: Tensor) -> Tensor:
        bits = y.view(torch.int32)
        # The last bit, moved to the sign's place where the sign is set: or-ing it into s makes v = -s on the left.
        left = torch.bitwise_left_shift(bits, 31).bitwise_and_(bits)
        v = _sqrt_((y - self.high).sub_(self.low), self.margin).clamp_max_(self.body_stop)
        v.view(torch.int32).bitwise_or_(left)
        del left  # here and below: the memory of a chunk, several of which would show in the peak

        c = torch.add(self.body_offset, v, alpha=self.scale)
        in_tail = v.sub_(self.body_start).view(torch.int32).bitwise_right_shift_(31)
        tail = _sqrt_(y.neg(), _TINY).mul_(self.tail_scale)
        c_bits = c.view(torch.int32)
        c_bits.bitwise_xor_(tail.view(torch.int32).bitwise_xor_(c_bits).bitwise_and_(in_tail))
        del v, in_tail, tail

        # NaN has no index; its fraction is NaN, and so is the result.
        pairs = lookup(self.nodes, c.to(torch.int32).clamp_(0, self.TAIL + self.BODY + 1))
        node, step = torch.view_as_real(pairs).unbind(-1)
        return torch.addcmul(node, c.frac_(), step)


#: Its root is far below the first node of the tail, and rsqrt of it is finite.
_TINY = 1e-30
_HUGE = 1e38


def _sqrt_(x: Tensor, floor: float) -> Tensor:
    """The square root of x, at least ``floor``, in place. torch's rsqrt is several times faster than its sqrt."""
    x.clamp_(floor, _HUGE)  # inf * rsqrt(inf) would be NaN
    return x.mul_(x.rsqrt())
