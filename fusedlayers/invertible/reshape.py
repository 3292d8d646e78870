"""Invertible modules without arithmetic: they pass on, reshape, pad, split and join. All of them are exact."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..calls.validation import is_whole
from .module import InvertibleModule


class InvertibleIdentity(InvertibleModule):
    """Its inputs, one or several, as they are."""

    reversible = True

    def function(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 else inputs

    def inverse(self, *outputs: Any) -> Any:
        return self.function(*outputs)


class InvertibleFlatten(InvertibleModule, nn.Flatten):
    """``nn.Flatten``: dimensions from ``start_dim`` to ``end_dim`` become one.

    Args:
        start_dim, end_dim: as for ``nn.Flatten``.
        unflattened: the sizes of these dimensions; with them the module is reversible.
    """

    num_outputs = 1

    def __init__(self, start_dim: int = 1, end_dim: int = -1, *, unflattened: Sequence[int] | None = None) -> None:
        super().__init__(start_dim, end_dim)
        self.unflattened = None if unflattened is None else tuple(unflattened)

    @property
    def reversible(self) -> bool:  # type: ignore[override]  # elsewhere an attribute of the class
        return self.unflattened is not None

    def function(self, x: Tensor) -> tuple[Tensor, torch.Size]:
        return x.flatten(self.start_dim, self.end_dim), x.shape

    def inverse(self, y: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        if shape is not None:
            return y.reshape(shape)
        if self.unflattened is None:
            raise ValueError("InvertibleFlatten: the inverse needs the sizes of what was flattened; pass unflattened=")
        dims = y.dim() + len(self.unflattened) - 1  # of the input, from whose end start_dim may be counted
        x: Tensor = y.unflatten(self.start_dim % dims, self.unflattened)
        return x


class InvertiblePixelShuffle(InvertibleModule, nn.PixelShuffle):
    """``nn.PixelShuffle``: (..., C r^2, H, W) -> (..., C, H r, W r). Reversed it is ``nn.PixelUnshuffle``, which puts
    pixels into channels: it goes before blocks of a lower resolution."""

    reversible = True

    def function(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, self.upscale_factor)

    def inverse(self, y: Tensor) -> Tensor:
        return F.pixel_unshuffle(y, self.upscale_factor)


class InvertiblePad(InvertibleModule):
    """``F.pad``; the inverse cuts the padding off.

    Args:
        pad: sizes for the last dimensions, from the last one on, as for ``F.pad``; none negative.
        mode, value: as for ``F.pad``.

    Raises:
        ValueError: ``pad`` is no pairs of whole numbers, or one is negative, which would lose values.
    """

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        super().__init__()
        if not isinstance(pad, Sequence) or len(pad) % 2 or not all(is_whole(size) and size >= 0 for size in pad):
            raise ValueError(
                "InvertiblePad: pad must be pairs of sizes, none of them negative, such as (1, 1) for the last "
                f"dimension, got {pad!r}"
            )
        self.pad, self.mode, self.value = tuple(pad), mode, value

    def function(self, x: Tensor) -> Tensor:
        return F.pad(x, self.pad, self.mode, self.value if self.mode == "constant" else None)

    def inverse(self, y: Tensor) -> Tensor:
        for k in range(0, len(self.pad), 2):
            dim = -1 - k // 2
            y = y.narrow(dim, self.pad[k], y.shape[dim] - self.pad[k] - self.pad[k + 1])
        return y

    def described(self) -> str:
        return f"pad={self.pad}" + (f", mode={self.mode!r}" if self.mode != "constant" else "")


class InvertibleSplit(InvertibleModule):
    """One tensor as two, along ``dim``; the first has the larger half. Reversed it joins them.

    Shapes: (..., C, ...) -> (..., ceil(C / 2), ...), (..., floor(C / 2), ...).
    """

    reversible = True

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def function(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return halved("InvertibleSplit", x, self.dim)

    def inverse(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second], self.dim)

    def described(self) -> str:
        return f"dim={self.dim}"


def halved(name: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Both halves of x along a dimension; the first is the larger one where its size is odd."""
    size = x.shape[dim]
    if size < 2:
        raise ValueError(f"{name}: dimension {dim} of {tuple(x.shape)} cannot be halved")
    first, second = x.split([size - size // 2, size // 2], dim)
    return first, second
