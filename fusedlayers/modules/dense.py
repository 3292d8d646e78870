"""A dense layer and its activation in one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..activations import Activation, must_be_called_because, resolve
from ..functional import SAVES, dense_bias_act, specialised


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
            TypeError: ``linear`` is not exactly an ``nn.Linear``, or has hooks or a forward of its own, which would be
                lost.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(
                f"FusedDenseAct.from_modules: expected a plain nn.Linear, got {type(linear).__name__}, which may "
                "compute something else; leave it as it is"
            )
        reason = must_be_called_because(linear)
        if reason is not None:
            raise TypeError(f"FusedDenseAct.from_modules: the nn.Linear must be called: {reason}; leave it as it is")
        fused = cls(linear.in_features, linear.out_features, None, linear.bias is not None, device="meta")
        fused.weight, fused.bias = linear.weight, linear.bias
        fused._set(activation, save)
        return fused.train(linear.training)

    def _set(self, activation: object, save: str) -> None:
        if save not in SAVES:
            raise ValueError(f"FusedDenseAct: save must be one of {', '.join(SAVES)}, got {save!r}")
        resolved = resolve(activation, "FusedDenseAct")
        if save == "output":
            resolved = self._specialised(resolved)
        refused = resolved.output_refused_because(self.weight.dtype) if save == "output" else None
        if refused is not None and not resolved.is_identity:
            raise ValueError(
                f"FusedDenseAct: save='output' cannot be had for {resolved!r} in {self.weight.dtype}: {refused}; "
                "use save='auto', 'input' or 'recompute'"
            )
        self.activation = activation
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        return dense_bias_act(input, self.weight, self.bias, self.activation, save=self.save)

    def _specialised(self, activation: Activation) -> Activation:
        """A user's function made into an activation, as for an input of two dimensions."""
        if not activation.is_untraced:
            return activation
        return specialised(activation, (2, self.out_features), self.weight.dtype).activation

    def extra_repr(self) -> str:
        resolved = self._specialised(resolve(self.activation))
        return f"{super().extra_repr()}, activation={resolved!r}, {resolved.describe(self.save, self.weight.dtype)}"
