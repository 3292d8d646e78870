"""Couplings: any two networks, without an inverse of their own, in a block that has one.

Of two streams one goes through a network, and the other is moved by the result. Whoever has both outputs can compute
that result again, and move it back (Dinh et al. 2014, "NICE"; Gomez et al. 2017; affine: Dinh et al. 2016, "RealNVP").

A block is two halves, one for each stream, and each a call of its own (``call.py``): its network runs once in the
backward pass, with its graph, and what comes of it serves both the inverse and the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.free_state import FreeState
from .call import InvertibleCall, InvertibleFunction
from .module import InvertibleModule


class _Coupling(InvertibleModule):
    """What additive and affine ones share: all but how a stream is moved."""

    reversible = True

    def __init__(self, f: nn.Module, g: nn.Module | None = None, *, dim: int = 1) -> None:
        super().__init__()
        for name, network in {"f": f, "g": g}.items():
            if not isinstance(network, nn.Module) and (name == "f" or network is not None):
                raise TypeError(f"{type(self).__name__}: {name} must be an nn.Module, got {network!r}")
        self.f, self.g = f, g
        self.dim = dim

    def parameters_from(self, result: Tensor) -> Any:
        """What a network's result moves the other stream by."""
        raise NotImplementedError

    def transform(self, x: Tensor, by: Any) -> Tensor:
        raise NotImplementedError

    def inverse_transform(self, y: Tensor, by: Any) -> Tensor:
        raise NotImplementedError

    def result_shape(self, moved: Tensor) -> tuple[int, ...]:
        """The shape of the network's result, for a stream that is moved."""
        raise NotImplementedError

    def function(self, *inputs: Tensor) -> Any:
        values = self._split(inputs)
        for half in self._halves(False):
            values = half.function(*values)
        return self._joined(inputs, values)

    def inverse(self, *outputs: Tensor) -> Any:
        values = self._split(outputs)
        for half in self._halves(True):
            values = half.function(*values)
        return self._joined(outputs, values)

    def _steps(self, count: int) -> Iterator[tuple[str, InvertibleFunction]]:
        self._check(count)
        name = type(self).__name__
        if count == 1:
            yield "split", InvertibleFunction(name, self._split_one, self._join_two)
        for half in self._halves(self.reversed):
            free_state = FreeState((self, *half.network.modules()))
            yield (
                half.name,
                InvertibleFunction(
                    name, half.function, half.inverse, free_state=free_state, seed=self.seed, recompute=half.recompute
                ),
            )
        if count == 1:
            yield "join", InvertibleFunction(name, self._join_two, self._split_one)

    def _check(self, count: int) -> None:
        if count not in (1, 2):
            raise TypeError(f"{type(self).__name__}: takes two tensors, or one that is split, got {count} inputs")

    def _halves(self, inverse: bool) -> list[_Half]:
        halves = [_Half(self, self.f, False, inverse)]
        if self.g is not None:
            halves.append(_Half(self, self.g, True, inverse))
        return halves[::-1] if inverse else halves

    def _split(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        self._check(len(values))
        if len(values) == 2:
            return values
        return self._split_one(*values)

    def _split_one(self, x: Tensor) -> tuple[Any, ...]:
        size = x.shape[self.dim]
        if size < 2:
            raise ValueError(f"{type(self).__name__}: dimension {self.dim} of {tuple(x.shape)} cannot be split in two")
        return x.split([size - size // 2, size // 2], self.dim)

    def _join_two(self, *streams: Tensor) -> tuple[Any, ...]:
        return (torch.cat(streams, self.dim),)

    def _joined(self, inputs: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        return torch.cat(values, self.dim) if len(inputs) == 1 else values

    def described(self) -> str:
        return f"dim={self.dim}"


@dataclass(frozen=True)
class _Half:
    """A stream goes through the network, and the other one is moved, or moved back."""

    coupling: _Coupling
    network: nn.Module
    #: Whether the second stream is moved.
    is_second: bool
    is_inverse: bool

    @property
    def name(self) -> str:
        return "g" if self.is_second else "f"

    def function(self, first: Tensor, second: Tensor) -> tuple[Any, ...]:
        return self._apply(first, second, self.is_inverse)

    def inverse(self, first: Tensor, second: Tensor) -> tuple[Any, ...]:
        return self._apply(first, second, not self.is_inverse)

    def recompute(self, call: InvertibleCall) -> None:
        """The function again, and its inputs on the way."""
        values = list(call.recover_outputs())
        place = 1 if self.is_second else 0
        moved = values[place]
        by = self._parameters(call.complete_inputs(tuple(values))[1 - place], moved)
        with torch.no_grad():
            values[place] = self._transform(moved, by, not self.is_inverse)
        inputs = call.complete_inputs(tuple(values))
        call.pass_to_producers(inputs)
        self._transform(inputs[place], by, self.is_inverse)

    def _apply(self, first: Tensor, second: Tensor, back: bool) -> tuple[Any, ...]:
        if self.is_second:
            return first, self._transform(second, self._parameters(first, second), back)
        return self._transform(first, self._parameters(second, first), back), second

    def _transform(self, stream: Tensor, by: Any, back: bool) -> Tensor:
        return self.coupling.inverse_transform(stream, by) if back else self.coupling.transform(stream, by)

    def _parameters(self, through: Tensor, moved: Tensor) -> Any:
        result = self.network(through)
        expected = self.coupling.result_shape(moved)
        if not isinstance(result, Tensor) or tuple(result.shape) != expected:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{type(self.coupling).__name__}: to move a stream of shape {tuple(moved.shape)}, "
                f"{type(self.network).__name__} must return a tensor of shape {expected}, but returned {got}"
            )
        return self.coupling.parameters_from(result)


class AdditiveCoupling(_Coupling):
    """``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)`` (Gomez et al. 2017, equation 6).

    The networks may be any modules, with batch norms, dropout and fused layers in them. Each runs once forward and once
    more in the backward pass. Sums amplify errors little: a deep stack drifts slowly, in float32 too.

    Args:
        f, g: from the shape of one stream to that of the other. Without g the second stream stays as it is.
        dim: along which one tensor is split.

    Shapes: two tensors -> two tensors of the same shapes, or one -> one, whose halves along ``dim`` are the streams.
    Two are cheaper: nothing has to be joined.

    Raises:
        TypeError, ValueError: a network that is no module, or that returns another shape.

    Saved for the backward pass: the outputs, until another invertible module takes them.

    >>> import torch, fusedlayers as fl
    >>> block = fl.AdditiveCoupling(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> y1, y2 = block(torch.randn(2, 4), torch.randn(2, 4))
    """

    def parameters_from(self, result: Tensor) -> Tensor:
        return result

    def transform(self, x: Tensor, by: Tensor) -> Tensor:
        return x + by

    def inverse_transform(self, y: Tensor, by: Tensor) -> Tensor:
        return y - by

    def result_shape(self, moved: Tensor) -> tuple[int, ...]:
        return tuple(moved.shape)


class AffineCoupling(_Coupling):
    """``y1 = x1 exp(tanh(s)) + t`` with ``s, t = f(x2)``, and ``y2`` likewise by ``g(y1)`` (Dinh et al. 2016,
    "RealNVP").

    The scale stays between 1/e and e, so that neither direction amplifies errors by more than that for each block.

    Args:
        f, g: from the shape of one stream to that of the other with twice the size along ``dim``: s, and behind it t.
        dim: along which results are split, and one tensor too.

    Shapes, errors, what is saved: as for ``AdditiveCoupling``.
    """

    def parameters_from(self, result: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = result.chunk(2, self.dim)
        return scale.tanh().exp(), shift

    def transform(self, x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
        return x * by[0] + by[1]

    def inverse_transform(self, y: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
        return (y - by[1]) / by[0]

    def result_shape(self, moved: Tensor) -> tuple[int, ...]:
        dim = self.dim % moved.dim()
        return tuple(size * (2 if i == dim else 1) for i, size in enumerate(moved.shape))
