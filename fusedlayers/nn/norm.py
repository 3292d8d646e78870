"""Batch norm and the activation after it in one module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..activations import Activation
from ..backends.operations import BatchNorm
from ..functional import batch_norm_act
from ..plan import describe_norm
from .base import FusedAct


class _FusedBatchNormAct(FusedAct):
    """What the batch norms of one to three dimensions share; the next base is torch's."""

    #: What ``nn.BatchNormNd`` makes of its arguments.
    num_features: int
    #: How many dimensions inputs may have, with the batch.
    dims: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        num_features: int,
        activation: object = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        save: str = "auto",
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if process_group is not None and not hasattr(process_group, "size"):
            raise TypeError(
                f"{type(self).__name__}: process_group must be a group of torch.distributed, "
                f"got {type(process_group).__name__}: {process_group!r}"
            )
        self.process_group = process_group
        self._set(activation, save)

    @classmethod
    def _without_values(cls, layer: Any) -> Any:
        fused = cls(
            layer.num_features, None, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
        )
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(fused, name, getattr(layer, name))
        return fused

    def _example_shape(self) -> tuple[int, ...]:
        return 2, self.num_features, *(5 + 2 * i for i in range(self.dims[0] - 2))

    def keeps(self, activation: Activation, dtype: torch.dtype) -> str:
        return describe_norm(activation, self.save, dtype)

    def _dtype(self) -> torch.dtype:
        return torch.get_default_dtype() if self.weight is None else self.weight.dtype

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return norm_layer_act(self, self.dims, input, residual, self.activation, self.save)


def norm_layer_act(
    layer: Any, dims: tuple[int, ...], input: Tensor, residual: Tensor | None, activation: object, save: str
) -> Tensor:
    """``activation(layer(input) + residual)`` for an ``nn.BatchNorm`` of inputs of so many dimensions."""
    return batch_norm_act(BatchNorm.of(layer, dims), input, layer.weight, layer.bias, residual, activation, save)


class FusedBatchNormAct1d(_FusedBatchNormAct, nn.BatchNorm1d):
    """``activation(batch_norm(x) + residual)`` that keeps its output alone, or x and at most its output, for an
    ``nn.BatchNorm1d`` and the activation after it.

    It is an ``nn.BatchNorm1d`` with an activation: the same parameters, buffers, statistics and ``state_dict`` keys.

    Where different inputs of the activation have different outputs (branches of a folded one count), the output y tells
    its input, and that tells the normalised x, which is all that backward asks for: x is not kept. Gradients err by
    float32's rounding then, and by as much as the derivative of a folded activation does. x is kept of channels where
    it would be more, because the weight is near 0 or values lie far out; forward looks at the weights and at the range
    of the values for that, which on a GPU means to wait for them. The bias is saved too, and must not be edited.

    Else batch norm keeps its input x. The activation's input is computed again from it, or is not needed: its output
    tells the derivative, and the next layer keeps that. So any activation costs what ReLU costs at most.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for ``nn.BatchNorm1d``.
        activation: as for ``fusedlayers.conv_bias_act``. A module with parameters becomes a submodule.
        save: what is kept. "output": y where it tells x, else y and x. "recompute": x, from which all is exact.
            "input": x and the pre-activation. "auto": y where it tells x; else x, and y where that tells the derivative
            exactly, with a residual also where it does with a branch bit. An x of fewer than 16384 elements is kept.
        process_group: a process group of ``torch.distributed``, whose processes take their statistics together in
            training, as ``nn.SyncBatchNorm`` does, on CPUs too. First derivatives only.

    Shapes: (batch, channels) or (batch, channels, length) -> the same. ``forward`` takes a second argument of the same
    shape, the residual, which is added before the activation.

    Raises:
        TypeError, ValueError: as ``fusedlayers.conv_bias_act``; one value per channel in training.
    """

    torchs = nn.BatchNorm1d
    dims = (2, 3)


class FusedBatchNormAct2d(_FusedBatchNormAct, nn.BatchNorm2d):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm2d``: (batch, channels, height, width) -> the same.

    >>> import fusedlayers as fl
    >>> fl.FusedBatchNormAct2d(8, "silu").extra_repr()[-56:]
    'activation=silu, saves the output, which tells the input'
    """

    torchs = nn.BatchNorm2d
    dims = (4,)


class FusedBatchNormAct3d(_FusedBatchNormAct, nn.BatchNorm3d):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm3d``: (batch, channels, depth, height, width) -> the same."""

    torchs = nn.BatchNorm3d
    dims = (5,)
