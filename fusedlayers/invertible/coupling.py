"""Couplings: blocks that have an inverse, around any two networks that have none.

Of two streams one goes through a network, and the result transforms the other. Whoever has both outputs can compute
that result once more, and invert the transformation (Dinh et al. 2014, "NICE"; Gomez et al. 2017; affine: Dinh et al.
2016, "RealNVP").

A block is two halves, one for each stream, and each half is a call of its own (``call.py``). In the backward pass its
network runs once, with its graph, and the result serves both the inverse and the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .inversion import InvertibleCall, InvertibleFunction
from .module import InvertibleModule
from .reshape import halved


class _Coupling(InvertibleModule):
    """What additive and affine couplings share: everything but the transformation of a stream."""

    reversible = True

    def __init__(self, f: nn.Module, g: nn.Module | None = None, *, dim: int = 1) -> None:
        super().__init__()
        for name, network in {"f": f, "g": g}.items():
            if not isinstance(network, nn.Module) and (name == "f" or network is not None):
                raise TypeError(f"{type(self).__name__}: {name} must be an nn.Module, got {network!r}")
        self.f, self.g = f, g
        self.dim = dim

    def parameters_from(self, result: Tensor) -> Any:
        """The parameters of the transformation, from a network's result."""
        raise NotImplementedError

    def transform(self, x: Tensor, parameters: Any) -> Tensor:
        """One stream's output, from what the network made of the other."""
        raise NotImplementedError

    def inverse_transform(self, y: Tensor, parameters: Any) -> Tensor:
        """The stream's input."""
        raise NotImplementedError

    def result_shape(self, stream: Tensor) -> tuple[int, ...]:
        """The shape of the network's result that transforms a stream."""
        raise NotImplementedError

    def function(self, *inputs: Tensor) -> Any:
        return self._through(self._halves(False), inputs)

    def inverse(self, *outputs: Tensor) -> Any:
        return self._through(self._halves(True), outputs)

    def _through(self, halves: list[_Half], values: tuple[Tensor, ...]) -> Any:
        self._check(len(values))
        streams = self._split(*values) if len(values) == 1 else values
        for half in halves:
            streams = half.forward(*streams)
        return self._join(*streams)[0] if len(values) == 1 else streams

    def _steps(self, count: int) -> Iterator[tuple[str, InvertibleFunction]]:
        self._check(count)
        name = type(self).__name__
        if count == 1:
            yield "split", InvertibleFunction(name, self._split, self._join)
        for half in self._halves(self.reversed):
            modules = [self, *half.network.modules()]
            function = InvertibleFunction(name, half.forward, half.inverse, modules=modules, recompute=half.recompute)
            yield ("g" if half.is_second else "f"), function
        if count == 1:
            yield "join", InvertibleFunction(name, self._join, self._split)

    def _check(self, count: int) -> None:
        if count not in (1, 2):
            raise TypeError(f"{type(self).__name__}: takes two tensors, or one that is split, got {count} inputs")

    def _halves(self, is_inverse: bool) -> list[_Half]:
        halves = [_Half(self, self.f, False, is_inverse)]
        if self.g is not None:
            halves.append(_Half(self, self.g, True, is_inverse))
        return halves[::-1] if is_inverse else halves

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return halved(type(self).__name__, x, self.dim)

    def _join(self, *streams: Tensor) -> tuple[Tensor]:
        return (torch.cat(streams, self.dim),)

    def described(self) -> str:
        return f"dim={self.dim}"


@dataclass(frozen=True)
class _Half:
    """One stream goes through the network, and the other one is transformed, or transformed back."""

    coupling: _Coupling
    network: nn.Module
    #: Whether the second stream is transformed.
    is_second: bool
    is_inverse: bool

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._transformed(first, second, self.is_inverse)

    def inverse(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self._transformed(first, second, not self.is_inverse)

    def recompute(self, call: InvertibleCall) -> None:
        """Recompute ``forward``, and the inputs on the way, with one run of the network."""
        values = list(call.recover_outputs())
        place = 1 if self.is_second else 0
        stream = values[place]
        parameters = self._parameters(call.complete_inputs(tuple(values))[1 - place], stream)
        with torch.no_grad():
            values[place] = self._transform(stream, parameters, not self.is_inverse)
        inputs = call.complete_inputs(tuple(values))
        call.pass_to_producers(inputs)
        self._transform(inputs[place], parameters, self.is_inverse)

    def _transformed(self, first: Tensor, second: Tensor, back: bool) -> tuple[Tensor, Tensor]:
        if self.is_second:
            return first, self._transform(second, self._parameters(first, second), back)
        return self._transform(first, self._parameters(second, first), back), second

    def _transform(self, stream: Tensor, parameters: Any, back: bool) -> Tensor:
        transform = self.coupling.inverse_transform if back else self.coupling.transform
        return transform(stream, parameters)

    def _parameters(self, through: Tensor, stream: Tensor) -> Any:
        result = self.network(through)
        expected = self.coupling.result_shape(stream)
        if not isinstance(result, Tensor) or tuple(result.shape) != expected:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{type(self.coupling).__name__}: to transform a stream of shape {tuple(stream.shape)}, "
                f"{type(self.network).__name__} must return a tensor of shape {expected}, but returned {got}"
            )
        return self.coupling.parameters_from(result)


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

    def parameters_from(self, result: Tensor) -> Tensor:
        return result

    def transform(self, x: Tensor, parameters: Tensor) -> Tensor:
        return x + parameters

    def inverse_transform(self, y: Tensor, parameters: Tensor) -> Tensor:
        return y - parameters

    def result_shape(self, stream: Tensor) -> tuple[int, ...]:
        return tuple(stream.shape)


class AffineCoupling(_Coupling):
    """``y1 = x1 exp(tanh(s)) + t`` with ``s, t = f(x2)``, and ``y2`` likewise by ``g(y1)`` (Dinh et al. 2016,
    "RealNVP").

    The scale stays between 1/e and e, so that neither direction amplifies errors by more than that in a block.

    Args:
        f, g: from the shape of one stream to that of the other with twice the size along ``dim``: s, then t.
        dim: along which results are split, and one tensor too.

    Shapes, errors, what is saved: as for ``AdditiveCoupling``.
    """

    def parameters_from(self, result: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = result.chunk(2, self.dim)
        return scale.tanh().exp(), shift

    def transform(self, x: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
        scale, shift = parameters
        return x * scale + shift

    def inverse_transform(self, y: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
        scale, shift = parameters
        return (y - shift) / scale

    def result_shape(self, stream: Tensor) -> tuple[int, ...]:
        dim = self.dim % stream.dim()
        return tuple(size * (2 if i == dim else 1) for i, size in enumerate(stream.shape))
