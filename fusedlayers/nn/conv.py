"""A convolution and its activation in one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import conv_bias_act
from ..validation import check_dropout, check_features, check_window
from .layer import FusedAct

_Sizes = int | Sequence[int]


class FusedConvAct(FusedAct):
    """What the convolutions of one to three dimensions share."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Sizes,
        activation: object = "relu",
        stride: _Sizes = 1,
        padding: _Sizes | str = 0,
        dilation: _Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        dropout: float = 0.0,
        save: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        name = type(self).__name__
        check_features(name, in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_window(name, kernel_size=kernel_size, stride=stride, dilation=dilation)
        check_dropout(name, dropout)
        layer = self.torchs(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device=device, dtype=dtype,
        )  # fmt: skip
        super().__init__(layer, activation, save)
        if dropout:
            self.dropout = dropout

    def _example_shape(self) -> tuple[int, ...]:
        return 2, self.out_channels, *(5 + 2 * i for i in range(len(self.stride)))

    def forward(self, input: Tensor) -> Tensor:
        return conv_act(self, input, self.activation, self.save, self.dropout if self.training else 0.0)


def conv_act(layer: Any, input: Tensor, activation: object, save: str, dropout: float = 0.0) -> Tensor:
    """``F.dropout(activation(layer(input)), dropout)`` for an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0  # for every dimension
    return conv_bias_act(
        input, layer.weight, layer.bias, activation, layer.stride, padding, layer.dilation, layer.groups,
        dropout=dropout, save=save,
    )  # fmt: skip


class FusedConvAct1d(FusedConvAct):
    """``activation(conv1d(x))`` that keeps one buffer, for an ``nn.Conv1d`` and the activation after it.

    It has the parameters, initialisation, attributes and ``state_dict`` keys of ``nn.Conv1d``, so checkpoints load
    either way. It is no ``nn.Conv1d``: what exchanges convolutions by ``isinstance`` would drop the activation.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            for ``nn.Conv1d``.
        activation: as for ``fusedlayers.conv_bias_act``. A module with parameters becomes a submodule.
        save: as for ``fusedlayers.conv_bias_act``.

    Shapes: (batch, in_channels, length) -> (batch, out_channels, new length), or all without the batch.
    """

    torchs = nn.Conv1d


class FusedConvAct2d(FusedConvAct):
    """``activation(conv2d(x))`` that keeps one buffer, for an ``nn.Conv2d`` and the activation after it; as
    ``FusedConvAct1d``.

    Shapes: (batch, in_channels, height, width) -> (batch, out_channels, new height, new width), or without the batch.

    >>> import fusedlayers as fl
    >>> fl.FusedConvAct2d(3, 8, kernel_size=3, activation="relu", padding=1)
    FusedConvAct2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), activation=relu, saves the output)
    """

    torchs = nn.Conv2d


class FusedConvAct3d(FusedConvAct):
    """``activation(conv3d(x))`` that keeps one buffer, for an ``nn.Conv3d`` and the activation after it; as
    ``FusedConvAct1d``.

    Shapes: (batch, in_channels, depth, height, width) -> (batch, out_channels, ...), or without the batch.
    """

    torchs = nn.Conv3d


#: Convolutions, torch's and this library's: for code that chooses parameters or their first values by the class.
CONV_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, FusedConvAct1d, FusedConvAct2d, FusedConvAct3d)
