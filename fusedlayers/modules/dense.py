"""A dense layer and its activation in one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..activations import resolve
from ..functional import SAVES, dense_bias_act


class FusedDenseAct(nn.Linear):
    """``activation(x W^T + b)`` that keeps one hidden-sized buffer, for an ``nn.Linear`` and the activation after it.

    It is an ``nn.Linear`` with an activation: the same parameters, initialisation and ``state_dict`` keys, so
    checkpoints load either way.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        activation: as for ``fusedlayers.dense_bias_act``. A module with parameters becomes a submodule.
        save: as for ``fusedlayers.dense_bias_act``.

    Shapes: (..., in_features) -> (..., out_features).

    >>> import fusedlayers as fl
    >>> fl.FusedDenseAct(3, 4, "silu")
    FusedDenseAct(in_features=3, out_features=4, bias=True, activation=silu, saves the output (branch in its last bit))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: object = "gelu",
        bias: bool = True,
        *,
        save: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set(activation, save)

    @classmethod
    def from_modules(cls, linear: nn.Linear, activation: object, *, save: str = "auto") -> FusedDenseAct:
        """A fused layer that shares the parameters of ``linear``; ``activation`` as for the constructor.

        Raises:
            TypeError: ``linear`` is not exactly an ``nn.Linear``, or has hooks: what those do would be lost.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"FusedDenseAct.from_modules: expected a plain nn.Linear, got {type(linear).__name__}, which may "
                "compute something else; leave it as it is"
            )
        if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
            raise TypeError(
                "FusedDenseAct.from_modules: the nn.Linear has hooks, which would be lost; remove them first"
            )
        fused = cls(linear.in_features, linear.out_features, None, linear.bias is not None, device="meta")
        fused.weight, fused.bias = linear.weight, linear.bias
        fused._set(activation, save)
        return fused.train(linear.training)

    def _set(self, activation: object, save: str) -> None:
        if save not in SAVES:
            raise ValueError(f"FusedDenseAct: save must be one of {', '.join(SAVES)}, got {save!r}")
        resolve(activation)  # raises for what is no activation
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        return dense_bias_act(input, self.weight, self.bias, self.activation, save=self.save)

    def extra_repr(self) -> str:
        resolved = resolve(self.activation)
        return f"{super().extra_repr()}, activation={resolved!r}, {resolved.describe(self.save, self.weight.dtype)}"
