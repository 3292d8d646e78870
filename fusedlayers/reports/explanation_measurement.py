"""The numbers of an ``Explanation``: bytes and errors, measured on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import Activation, resolve
from ..activations.free_variables import find_variables
from ..calls.sizes import SMALL_BYTES
from ..calls.tracers import with_operands
from ..functional import bias_act
from ..memory import saved_bytes
from ..nn.layer import WithActivation
from ..nn.mlp import FusedBlock, FusedGatedMLP
from ..utils.caching import in_clean_state

#: Inputs that derivatives are compared on: fewer of 16 bits would be left to PyTorch.
COUNT = SMALL_BYTES // 2


@dataclass(frozen=True)
class Accuracy:
    """Errors of the derivative for z ~ N(0, 1), against float64: the norm of the error over that of the derivative, and
    the largest. ``eager`` is PyTorch's own in the same dtype."""

    rms: float
    largest: float
    eager_rms: float
    eager_largest: float


class Samples(NamedTuple):
    """Of one channel, in the order of the inputs z: outputs, derivatives, and these ones' errors, all in float64."""

    z: Tensor
    y: Tensor
    slope: Tensor
    error: Tensor
    eager_error: Tensor


class Subject:
    """An activation, alone or as a layer has it.

    Attributes:
        record: the activation, as a layer in float32 uses it.
        layer: the layer, or None.
        keeps_input: whether the derivative is evaluated from the input, which is kept or computed again.
    """

    def __init__(self, activation: Activation, layer: WithActivation | None) -> None:
        self._activation, self.layer = activation, layer
        self._shape, self.record = self._taken()
        keeps_input = isinstance(layer, FusedGatedMLP) or (layer is not None and layer.save in ("input", "recompute"))
        self.keeps_input = keeps_input or self.record.output_refusal(torch.float32) is not None

    def _taken(self) -> tuple[tuple[int, ...], Activation]:
        """A shape that the function takes: with the channels that its tensors have as second dimension or as last one,
        or any."""
        from ..activations.custom import without_logging  # whose import takes a second

        tensors = find_variables(self._activation.function).tensors
        # No fewer dimensions than a tensor has, which would add its own to the result.
        ones = [1] * max((tensor.dim() - 2 for tensor in tensors), default=0)
        for channels in sorted({size for tensor in tensors for size in tensor.shape if size > 1}, reverse=True):
            rest = -(-COUNT // channels)
            images = [(8, channels, *[4] * dims, -(-rest // (8 * 4**dims))) for dims in (2, 1, 0)]
            for shape in (*images, (*ones, rest, channels)):
                with without_logging():
                    record = self._specialised(shape)
                if record.is_fusible:
                    return shape, record
        shape = (*ones, COUNT // 64, 64)
        return shape, self._specialised(shape)

    def _specialised(self, shape: tuple[int, ...]) -> Activation:
        if not self._activation.needs_tracing:
            return self._activation
        return with_operands(resolve(self._in(torch.float32)[1]), shape, torch.float32).activation

    def _in(self, dtype: torch.dtype) -> tuple[Callable[..., Tensor], object]:
        """The function as PyTorch computes it, and the one to hand to a layer, with tensors of this dtype."""
        if not self._activation.needs_tracing or self._activation.definition is not None:
            return self._activation.plain, self._activation
        from ..activations.custom import own_tensors  # with it come parts of torch whose import takes a second

        variables = find_variables(self._activation.function)
        function = variables.rebind(own_tensors(variables, dtype))
        return function, function

    @in_clean_state
    def measure(self, dtype: torch.dtype) -> tuple[tuple[float, float], Accuracy, Samples | None]:
        """Bytes saved for each element between two layers, PyTorch's and here; errors; and samples, where as many
        elements are returned. Errors of the function are raised."""
        z = torch.randn(self._shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        (function, activation), exact_function = self._in(dtype), self._in(torch.float64)[0]
        save = "auto" if self.layer is None else self.layer.save
        if save == "auto" and isinstance(self.layer, FusedGatedMLP):
            save = "input"  # as has the derivative of the block
        here = functools.partial(bias_act, bias=None, activation=activation, save=save)

        y, exact = _derivative(exact_function, z.double())
        errors = [(_derivative(f, z)[1].double() - exact).abs() for f in (here, function)]
        real = exact.isfinite()  # elsewhere there is nothing to compare with
        scale = float(exact[real].norm()) or 1.0
        ours, eager = ((float(error[real].norm()) / scale, float(error[real].max())) for error in errors)

        samples = None
        if y.shape == z.shape:
            channel = next((dim for dim in self.record.operand_dims if dim is not None), -1)
            first = [values.movedim(channel, -1).flatten(0, -2)[:, 0] for values in (z.double(), y, exact, *errors)]
            order = first[0].argsort()
            samples = Samples(*(values[order] for values in first))
        if isinstance(self.layer, FusedBlock):
            sizes = _bytes_of_block(self.layer, function, activation, z)
        else:
            sizes = [_bytes_between_layers(f, z) for f in (function, here)]
        return (sizes[0] / z.numel(), sizes[1] / z.numel()), Accuracy(*ours, *eager), samples


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def _derivative(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the derivative."""
    z = z.clone().requires_grad_()
    y = function(z)
    return y.detach(), torch.autograd.grad(y, z, torch.ones_like(y))[0]


def _bytes_between_layers(function: Callable[[Tensor], Tensor], z: Tensor) -> int:
    """Between an operation that keeps nothing, as a matmul does not keep its result, and one that keeps its input."""
    weight = torch.ones((), dtype=z.dtype, requires_grad=True)
    return saved_bytes(lambda z: function(z + 1) * weight, z.clone().requires_grad_(), exclude=[weight])


def _bytes_of_block(
    layer: FusedBlock, function: Callable[[Tensor], Tensor], activation: object, z: Tensor
) -> list[int]:
    """By the layers one after the other, and by the block, for hidden elements as many as z has."""
    block = type(layer)(8, z.shape[-1], 8, activation, save=layer.save, dtype=z.dtype)
    x = torch.randn(z.numel() // z.shape[-1], 8, dtype=z.dtype)
    by_calls = functools.partial(block.by_calls, function=function)
    return [saved_bytes(f, x, exclude=[block, x]) for f in (by_calls, block)]
