"""Batch norms: the activation's passes beside torch's own, which here are several operations each."""

from __future__ import annotations

from torch import Tensor

from ...activations import Activation
from ...utils.layout import along


def norm_act(z: Tensor, activation: Activation) -> None:
    """None: ``bias_act`` serves."""


def norm_gradient(dy: Tensor, y: Tensor, activation: Activation, center: Tensor, overwrite: bool) -> None:
    """None: ``inverse`` and ``gradient`` serve."""


def norm_combine(dz: Tensor, z: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``scale dz + slope z + offset`` over dz, the factors along the channels."""
    scale, slope, offset = (along(t, 1, dz.dim()) for t in (scale, slope, offset))
    return dz.mul_(scale).addcmul_(z, slope).add_(offset)
