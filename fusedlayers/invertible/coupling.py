"""Couplings: blocks that have an inverse, around any two networks that have none.

Of two streams one goes through a network, and the result transforms the other. Both outputs suffice to compute that
result once more, and to invert the transformation (Dinh et al. 2014, "NICE"; Gomez et al. 2017; affine: Dinh et al.
2016, "RealNVP").

A block is two halves, one for each stream, and each half is a call of its own (``inversion.py``). In the backward pass
its network runs once, with its graph, and the result serves both the inverse and the gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..utils.module_state import modules_in
from .inversion import InvertibleCall, InvertibleFunction
from .module import InvertibleModule
from .reshape import halved


class _Coupling(InvertibleModule):
    """Additive and affine couplings, but for how a stream follows from a network's result."""

    reversible = True
    #: How many numbers a network returns for each one of the stream that it transforms.
    results_each: ClassVar[int]

    def __init__(self, f: nn.Module, g: nn.Module | None = None, *, dim: int = 1) -> None:
        super().__init__()
        for name, network in {"f": f, "g": g}.items():
            if not isinstance(network, nn.Module) and (name == "f" or network is not None):
                raise TypeError(f"{type(self).__name__}: {name} must be an nn.Module, got {network!r}")
        self.f, self.g = f, g
        self.dim = dim

    def scale_and_shift(self, result: Tensor) -> tuple[Tensor | None, Tensor]:
        """The transformation of a stream, from a network's result."""
        raise NotImplementedError

    def function(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._through(inputs, is_inverse=False)

    def inverse(self, *outputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self._through(outputs, is_inverse=True)

    def _through(self, values: tuple[Tensor, ...], is_inverse: bool) -> Tensor | tuple[Tensor, ...]:
        for function in self._calls(len(values), is_inverse):
            values = function.forward(*values)
        return values[0] if len(values) == 1 else values

    def _functions(self, count: int) -> list[InvertibleFunction]:
        return self._calls(count, self.reversed)

    def _calls(self, count: int, is_inverse: bool) -> list[InvertibleFunction]:
        name = type(self).__name__
        if count not in (1, 2):
            raise TypeError(f"{name}: takes two tensors, or one that is split, got {count} inputs")
        halves = [_Half(self, self.f, 0, is_inverse)]
        if self.g is not None:
            halves.insert(0 if is_inverse else 1, _Half(self, self.g, 1, is_inverse))
        calls = [
            InvertibleFunction(
                name, half.forward, half.inverse, modules=[self, *modules_in(half.network)], recompute=half.recompute
            )
            for half in halves
        ]
        if count == 2:
            return calls
        split, join = (lambda x: halved(name, x, self.dim)), (lambda *streams: (torch.cat(streams, self.dim),))
        return [InvertibleFunction(name, split, join), *calls, InvertibleFunction(name, join, split)]

    def described(self) -> str:
        return f"dim={self.dim}"


@dataclass(frozen=True)
class _Half:
    """One stream goes through the network, and the other one, which ``place`` says, is transformed, or back."""

    coupling: _Coupling
    network: nn.Module
    place: int
    is_inverse: bool

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return self._transformed(streams, *self._scale_and_shift(streams), self.is_inverse)

    def inverse(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return self._transformed(streams, *self._scale_and_shift(streams), not self.is_inverse)

    def recompute(self, call: InvertibleCall) -> None:
        """Recompute ``forward``, and the inputs on the way, with one run of the network."""
        outputs = call.recover_outputs()
        scale, shift = self._scale_and_shift(call.complete_inputs(outputs))
        with torch.no_grad():
            inputs = call.complete_inputs(self._transformed(outputs, scale, shift, not self.is_inverse))
        call.pass_to_producers(inputs)
        self._transformed(inputs, scale, shift, self.is_inverse)

    def _transformed(
        self, streams: tuple[Tensor, ...], scale: Tensor | None, shift: Tensor, back: bool
    ) -> tuple[Tensor, ...]:
        x = streams[self.place]
        if back:
            y = x - shift if scale is None else (x - shift) / scale
        else:
            y = x + shift if scale is None else x * scale + shift
        return (streams[0], y) if self.place else (y, streams[1])

    def _scale_and_shift(self, streams: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor]:
        """The scale and shift in the network's result, whose shape is checked."""
        coupling, stream = self.coupling, streams[self.place]
        result = self.network(streams[1 - self.place])
        expected = list(stream.shape)
        if coupling.results_each > 1:
            expected[coupling.dim] *= coupling.results_each
        if not isinstance(result, Tensor) or list(result.shape) != expected:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{type(coupling).__name__}: to transform a stream of shape {tuple(stream.shape)}, "
                f"{type(self.network).__name__} must return a tensor of shape {tuple(expected)}, but returned {got}"
            )
        return coupling.scale_and_shift(result)


class AdditiveCoupling(_Coupling):
    """``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)`` (Gomez et al. 2017, equation 6).

    The networks may be any modules, with batch norms, dropout and fused layers in them. Each runs once in the
    forward and once in the backward pass. Sums amplify errors little: a deep stack drifts slowly, in float32 too.

    Args:
        f, g: from the shape of one stream to that of the other. Without g the second stream stays as it is.
        dim: along which one tensor is split.

    Shapes: two tensors -> two tensors of the same shapes, or one -> one, whose halves along ``dim`` are the streams.
    Two are cheaper: nothing has to be concatenated.

    Raises:
        TypeError, ValueError: a network that is no module, or that returns another shape.

    Saved for the backward pass: the outputs, unless they go into another invertible module.

    >>> import torch, fusedlayers as fl
    >>> block = fl.AdditiveCoupling(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> y1, y2 = block(torch.randn(2, 4), torch.randn(2, 4))
    """

    results_each = 1

    def scale_and_shift(self, result: Tensor) -> tuple[None, Tensor]:
        return None, result


class AffineCoupling(_Coupling):
    """``y1 = x1 exp(tanh(s)) + t`` with ``s, t = f(x2)``, and ``y2`` likewise by ``g(y1)`` (Dinh et al. 2016,
    "RealNVP").

    The scale stays between 1/e and e, so that neither direction amplifies errors by more than that in a block.

    Args:
        f, g: from the shape of one stream to that of the other with twice the size along ``dim``: s, then t.
        dim: along which results are split, and one tensor too.

    Shapes, errors, what is saved: as for ``AdditiveCoupling``.
    """

    results_each = 2

    def scale_and_shift(self, result: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = result.chunk(2, self.dim)
        return scale.tanh().exp(), shift
