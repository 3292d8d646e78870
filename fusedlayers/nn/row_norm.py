"""Layer norm and RMS norm that save their output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..norm_validation import check_norm_save
from ..norms import layer_norm, rms_norm
from ..utils.torchscript import refuse_script


class LayerNorm(nn.LayerNorm):
    """An ``nn.LayerNorm`` that saves its output and not its input: see ``fusedlayers.layer_norm``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for ``nn.LayerNorm``.
        save: as for ``fusedlayers.layer_norm``.

    >>> import fusedlayers as fl
    >>> fl.LayerNorm(8)
    LayerNorm((8,), eps=1e-05, elementwise_affine=True..., save='auto')
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        save: str = "auto",
    ) -> None:
        check_norm_save("LayerNorm", save)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, save=self.save)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, save={self.save!r}"


class RMSNorm(nn.RMSNorm):
    """An ``nn.RMSNorm`` that saves its output and not its input: see ``fusedlayers.rms_norm``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as for ``nn.RMSNorm``.
        weight_offset, rounds_first, save: as for ``fusedlayers.rms_norm``. With an offset of 1, as in Gemma, weights
            begin at 0.

    >>> import fusedlayers as fl
    >>> fl.RMSNorm(8, eps=1e-6, rounds_first=True)
    RMSNorm((8,), eps=1e-06, elementwise_affine=True, rounds_first=True, save='auto')
    """

    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        rounds_first: bool = False,
        save: str = "auto",
    ) -> None:
        check_norm_save("RMSNorm", save)
        self.weight_offset, self.rounds_first, self.save = weight_offset, rounds_first, save
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """The factors, of which the weight is one less its offset, begin at 1."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(
            x, self.normalized_shape, self.weight, self.eps,
            weight_offset=self.weight_offset, rounds_first=self.rounds_first, save=self.save,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        options += ", rounds_first=True" if self.rounds_first else ""
        return f"{super().extra_repr()}{options}, save={self.save!r}"
