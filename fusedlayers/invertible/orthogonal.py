"""Weights that stay invertible while they are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ..utils.formatting import described


def at_least(weight: Tensor, least: float) -> Tensor:
    """Values nearer to zero than ``least`` are moved that far away from it, without a change of sign. Their gradient is
    that of the moved value, so that training can move them out."""
    moved = torch.where(weight.abs() < least, torch.copysign(torch.full_like(weight, least), weight), weight)
    return weight + (moved - weight).detach()


class NonZero(nn.Module):
    """Keeps values away from zero, for ``torch.nn.utils.parametrize``."""

    def __init__(self, least: float = 1e-3) -> None:
        super().__init__()
        if not least > 0:
            raise ValueError(f"NonZero: least must be positive, got {least!r}")
        self.least = least

    def forward(self, weight: Tensor) -> Tensor:
        return at_least(weight, self.least)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored for a weight that is assigned."""
        return weight

    def extra_repr(self) -> str:
        return f"least={self.least:g}"


#: Torch's other choice for matrices that are not square, "householder", holds signs on a diagonal and truncates them to
#: integers: after a single step of weight decay, which makes 0.9999 of a 1, the weight is zero.
_MAP = "matrix_exp"


def orthogonal(module: nn.Module, name: str = "weight") -> nn.Module:
    """Hold a weight orthogonal while it is trained, and return the module.

    A layer with such a weight preserves norms, and so the errors of inputs that are computed from its outputs: a deep
    stack of them drifts by rounding alone. Weights of more than two dimensions, as those of convolutions, count as
    matrices of their first dimension and the rest.

    It is ``torch.nn.utils.parametrizations.orthogonal`` (Lezcano-Casado 2019).

    Raises:
        TypeError: ``module`` has no tensor of this name.
        ValueError: the weight has fewer than two dimensions.

    >>> import fusedlayers as fl
    >>> layer = fl.orthogonal(fl.InvertibleLinear(8, 8))
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"orthogonal: expected a module with a tensor {name!r}, got {described(module)}")
    if weight.dim() < 2:
        raise ValueError(f"orthogonal: {name} is no matrix, but has shape {tuple(weight.shape)}")
    if weight.dim() == 2:
        return parametrizations.orthogonal(module, name, _MAP)
    matrix = nn.Module()
    matrix.weight = nn.Parameter(weight.detach().flatten(1))
    inner = parametrizations.orthogonal(matrix, orthogonal_map=_MAP)
    registered: Any = inner.parametrizations
    of_matrix = registered.weight[0]
    parametrize.register_parametrization(module, name, _OfMatrix(of_matrix, tuple(weight.shape)))
    return module


class _OfMatrix(nn.Module):
    """A parametrization of matrices for weights of a shape."""

    def __init__(self, of_matrix: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.of_matrix, self.shape = of_matrix, shape

    def forward(self, weight: Tensor) -> Tensor:
        found: Tensor = self.of_matrix(weight.flatten(1)).view(self.shape)
        return found

    def right_inverse(self, weight: Tensor) -> Tensor:
        of_matrix: Any = self.of_matrix
        found: Tensor = of_matrix.right_inverse(weight.flatten(1)).view(self.shape)
        return found
