"""A dense layer and its activation in one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..functional import dense_bias_act
from ..validation import check_dropout, check_features
from .layer import FusedAct


class FusedDenseAct(FusedAct):
    """``activation(x W^T + b)`` that keeps one hidden-sized buffer, for an ``nn.Linear`` and the activation after it.

    It has the parameters, initialisation, attributes and ``state_dict`` keys of ``nn.Linear``, so checkpoints load
    either way. It is no ``nn.Linear``: what exchanges linear layers by ``isinstance`` would drop the activation.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        activation: as for ``fusedlayers.dense_bias_act``. A module with parameters becomes a submodule.
        dropout: the probability with which outputs are dropped in training, as by an ``nn.Dropout`` behind it.
        save: as for ``fusedlayers.dense_bias_act``.

    Shapes: (..., in_features) -> (..., out_features).

    >>> import fusedlayers as fl
    >>> fl.FusedDenseAct(3, 4, "silu")
    FusedDenseAct(in_features=3, out_features=4, bias=True, activation=silu,
    saves the output (last bit = side of minimum))
    """

    torchs = nn.Linear
    in_features: int
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: object = "gelu",
        bias: bool = True,
        *,
        dropout: float = 0.0,
        save: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_features("FusedDenseAct", in_features=in_features, out_features=out_features)
        check_dropout("FusedDenseAct", dropout)
        super().__init__(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype), activation, save)
        if dropout:
            self.dropout = dropout

    def _example_shape(self) -> tuple[int, ...]:
        return 2, self.out_features

    def forward(self, input: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return dense_bias_act(input, self.weight, self.bias, self.activation, dropout=dropout, save=self.save)


#: Dense layers, torch's and this library's: for code that chooses parameters or their first values by the class.
LINEAR_TYPES = (nn.Linear, FusedDenseAct)
