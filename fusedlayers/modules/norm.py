"""Batch norm and the activation after it in one module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import operands
from ..activations import Activation, resolve
from ..products import BatchNorm
from ..routes import product_act
from .fused import FusedAct


class _FusedBatchNormAct(FusedAct):
    """What the batch norms of one to three dimensions share; the next base is torch's."""

    #: What ``nn.BatchNormNd`` makes of its arguments.
    num_features: int
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    #: A shape of inputs, without channels.
    example: ClassVar[tuple[int, ...]]
    _check_input_dim: Any

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
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
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
        batch, *rest = self.example
        return batch, self.num_features, *rest

    def _keeps(self, activation: Activation) -> str:
        refused = activation.output_refused_because(self._dtype())
        return "recompute" if self.save == "auto" and refused is not None else self.save

    def _dtype(self) -> torch.dtype:
        return torch.get_default_dtype() if self.weight is None else self.weight.dtype

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        activation = resolve(self.activation, name)
        required = (input,) if residual is None else (input, residual)
        is_ordinary = operands.are_ordinary(required, self.weight)
        if not is_ordinary:
            operands.check_tensors(name, {"input": input}, None, residual)
        self._check_input_dim(input)
        if residual is not None:
            operands.check_residual(name, residual, tuple(input.shape))
            operands.check_one_dtype(name, input, None, None, residual)
        by_batch = self.training or self.running_mean is None
        if by_batch and input.numel() == input.shape[1]:
            raise ValueError(f"{name}: one value per channel has no variance, got {tuple(input.shape)} in training")
        uses_running = not self.training or self.track_running_stats
        norm = BatchNorm(
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            by_batch,
            self._counted(),
            self.eps,
            input.dim(),
        )
        return product_act(
            norm, input, self.weight, self.bias, residual, activation, self.save,
            count=input.numel(), is_ordinary=is_ordinary,
        )  # fmt: skip

    def _counted(self) -> float:
        """Count the batch; what part it takes of the running statistics."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # their average
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0


class FusedBatchNormAct1d(_FusedBatchNormAct, nn.BatchNorm1d):
    """``activation(batch_norm(x) + residual)`` that keeps x and at most its output, for an ``nn.BatchNorm1d`` and the
    activation after it.

    It is an ``nn.BatchNorm1d`` with an activation: the same parameters, buffers, statistics and ``state_dict`` keys.
    Batch norm keeps its input x anyway. The activation's input is computed again from it, or is not needed: its output
    tells the derivative, and the next layer keeps that. So an activation, whatever it is, costs what ReLU costs.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for ``nn.BatchNorm1d``.
        activation: as for ``fusedlayers.conv_bias_act``. A module with parameters becomes a submodule.
        save: what is kept besides x. "output": the output y. "recompute": nothing. "input": the pre-activation. "auto":
            "output" where the derivative can be had from it within the dtype's rounding floor, else "recompute".

    Shapes: (batch, channels) or (batch, channels, length) -> the same. ``forward`` takes a second argument of the same
    shape, the residual, which is added before the activation.

    Raises:
        TypeError, ValueError: as ``fusedlayers.conv_bias_act``; one value per channel in training.
    """

    torchs = nn.BatchNorm1d
    example = (2,)


class FusedBatchNormAct2d(_FusedBatchNormAct, nn.BatchNorm2d):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm2d``: (batch, channels, height, width) -> the same.

    >>> import fusedlayers as fl
    >>> fl.FusedBatchNormAct2d(8, "relu").extra_repr()[-36:]
    'activation=relu, saves the output'
    """

    torchs = nn.BatchNorm2d
    example = (2, 5, 7)


class FusedBatchNormAct3d(_FusedBatchNormAct, nn.BatchNorm3d):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm3d``: (batch, channels, depth, height, width) -> the same."""

    torchs = nn.BatchNorm3d
    example = (2, 5, 7, 9)
