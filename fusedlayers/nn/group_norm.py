"""Group norm that saves its output, alone and with the activation after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import backends
from ..activations import FLOAT64_IS_TORCHS, Activation
from ..functional import bias_act
from ..norm_validation import check_norm_save
from ..norms import group_norm
from ..ops.group_norm import keeps_output
from ..utils.torchscript import refuse_script
from ..validation import check_features
from .base import FusedAct


class GroupNorm(nn.GroupNorm):
    """An ``nn.GroupNorm`` that saves its output and not its input: see ``fusedlayers.group_norm``.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as for ``nn.GroupNorm``.
        save: as for ``fusedlayers.group_norm``.

    >>> import torch, fusedlayers as fl
    >>> fl.GroupNorm(2, 8)(torch.ones(1, 8, 4)).shape
    torch.Size([1, 8, 4])
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        save: str = "auto",
    ) -> None:
        check_norm_save("GroupNorm", save)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **_bias(bias))
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps, save=self.save)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, save={self.save!r}"


def _bias(bias: bool) -> dict[str, Any]:
    """torch 2.11 has no such option."""
    return {} if bias else {"bias": False}


class FusedGroupNormAct(FusedAct):
    """``activation(group_norm(x))`` that keeps the norm's output, from which both backward passes are computed, for an
    ``nn.GroupNorm`` and the activation after it. PyTorch keeps the norm's input besides, unless the activation is one
    of which it keeps the output (relu, tanh, sigmoid).

    It has the parameters, attributes and ``state_dict`` keys of ``nn.GroupNorm``. It is no ``nn.GroupNorm``: what
    exchanges norms by ``isinstance`` would drop the activation.

    Args:
        num_groups, num_channels, eps, affine, bias, device, dtype: as for ``nn.GroupNorm``.
        activation: as for ``fusedlayers.conv_bias_act``. A module with parameters becomes a submodule.
        save: what the norm saves: as for ``fusedlayers.group_norm``.

    Shapes: (batch, channels, ...) -> the same.

    Saved: the norm's output, which is the activation's input, and one number for each group of a sample; the layer
    behind saves the activation's output.

    >>> import fusedlayers as fl
    >>> fl.FusedGroupNormAct(2, 8, "silu").extra_repr()[-40:]
    "activation=silu, saves the norm's output"
    """

    torchs = nn.GroupNorm
    num_groups: int
    num_channels: int
    eps: float
    affine: bool

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        activation: object = "silu",
        eps: float = 1e-5,
        affine: bool = True,
        *,
        bias: bool = True,
        save: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_features("FusedGroupNormAct", num_groups=num_groups, num_channels=num_channels)
        check_norm_save("FusedGroupNormAct", save)
        layer = nn.GroupNorm(num_groups, num_channels, eps, affine, device, dtype, **_bias(bias))
        super().__init__(layer, activation, "auto")
        self.save = save

    def _example_shape(self) -> tuple[int, ...]:
        return 2, self.num_channels, 5, 5

    def keeps(self, activation: Activation, dtype: torch.dtype) -> str:
        if dtype is torch.float64:
            return f"not fused: {FLOAT64_IS_TORCHS}"
        if self.save == "input":
            return "saves the norm's input and output"
        device = self._device() if self.save == "auto" else None
        because = None if device is None else backends.slow_on(device, dtype, None)
        return "saves the norm's output" if because is None else f"not fused: {because}"

    def forward(self, input: Tensor) -> Tensor:
        z = group_norm(input, self.num_groups, self.weight, self.bias, self.eps, save=self.save)
        # The compiler chooses what it keeps, and does not see the node.
        is_kept = torch.compiler.is_compiling() or keeps_output(z)
        return bias_act(z, None, self.activation, dim=1, save="input" if is_kept else "auto")
