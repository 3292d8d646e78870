"""MLP blocks as modules whose layers are plain ``nn.Linear``s, which checkpoints and sharding plans find."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..activations import must_call_reason
from ..calls.plan import hidden_of
from ..calls.validation import check_block_options, check_features
from ..functional import bias_act, gated_mlp, mlp
from ..kernels.operations import Mlp
from .layer import WithActivation

_SEPARATE = ("gate_proj", "up_proj")


class FusedBlock(WithActivation):
    """The base of the blocks: the settings, and calls of their layers one by one."""

    is_gated: ClassVar[bool]
    chunks: int | None

    def _set_block(
        self, layers: Mapping[str, Any], activation: object, dropout: float, save: str, chunks: int | None
    ) -> None:
        self.dropout, self.chunks = dropout, chunks
        check_block_options(self._operation(), save)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._set(activation, save)

    @classmethod
    def _of(cls, layers: Mapping[str, Any], activation: object, dropout: float, save: str, chunks: int | None) -> Self:
        """A block of layers that are there, which are shared."""
        for name, layer in layers.items():
            if type(layer) is not nn.Linear:
                raise TypeError(
                    f"{cls.__name__}.from_modules: {name} must be a plain nn.Linear, got {type(layer).__name__}; the "
                    "activation comes second, and a layer that computes something else stays as it is"
                )
        *first, (name, last) = layers.items()
        hidden = last.in_features * (2 if cls.is_gated and len(first) == 1 else 1)
        expected = first[0][1].in_features, hidden
        for other, layer in first:
            found = layer.in_features, layer.out_features
            if found != expected:
                raise ValueError(
                    f"{cls.__name__}.from_modules: {other} makes {found[1]} features of {found[0]}, where {name} with "
                    f"{last.in_features} input features needs {expected[1]} of {expected[0]}; pass layers of one block"
                )
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block._set_block(layers, activation, dropout, save, chunks)
        return block.train(first[0][1].training)

    def layers(self) -> dict[str, Any]:
        """The layers by name, as they are now; the last one makes the output."""
        raise NotImplementedError

    def _operation(self) -> Mlp:
        return Mlp(type(self).__name__, self.dropout, self.chunks, self.is_gated)

    @property
    def _last(self) -> Any:
        return [*self.layers().values()][-1]

    def _parts(self, input: Tensor) -> list[Tensor]:
        """The first layers' results, gate and up where there are two."""
        raise NotImplementedError

    def by_calls(self, input: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The result of the layers called one by one, with ``function`` for the activation if it is given."""
        first, *others = self._parts(input)
        if function is None:
            activated = bias_act(first, None, self.activation, save="auto" if self.save == "recompute" else self.save)
        else:
            activated = function(first)
        y: Tensor = self._last(hidden_of(activated, others, self.dropout if self.training else 0.0))
        return y

    def _example(self) -> tuple[tuple[int, ...], Tensor]:
        return (2, self._last.in_features), self._last.weight

    def extra_repr(self) -> str:
        return self._described(_called_because(self.layers()))


def _called_because(layers: Mapping[str, Any]) -> str | None:
    """Why the layers are called one by one, and nothing is fused but the activation; or None.

    Each call of a block asks, so it enters few functions.
    """
    for name, layer in layers.items():
        if type(layer) is not nn.Linear:
            return f"{name} is a {type(layer).__name__}"
        for of in (layer.weight, layer.bias):
            if isinstance(of, Tensor) and type(of) not in (Tensor, nn.Parameter):
                return f"{name} has a {type(of).__name__}, which may compute something else"
    if must_call_reason(*layers.values()) is None:
        return None
    reasons = {name: must_call_reason(layer) for name, layer in layers.items()}
    return next(f"{name} must be called: {reason}" for name, reason in reasons.items() if reason is not None)


class FusedMLP(FusedBlock):
    """``fc2(dropout(activation(fc1(x))))`` that keeps one hidden buffer, or none (``fusedlayers.mlp``).

    ``fc1`` and ``fc2`` are ``nn.Linear`` modules. Where one of them is replaced by something else, or gets hooks, the
    layers are called one by one.

    Args:
        in_features, hidden_features: sizes.
        out_features: ``in_features`` unless given.
        activation: as for ``fusedlayers.dense_bias_act``. A module with parameters becomes a submodule.
        bias: whether both layers have one.
        dropout: the probability with which hidden numbers are zeroed in training.
        save, chunks: as for ``fusedlayers.mlp``.
        device, dtype: as for ``nn.Linear``.

    Shapes: (..., in_features) -> (..., out_features).

    >>> import fusedlayers as fl
    >>> fl.FusedMLP(4, 16)
    FusedMLP(
      activation=gelu, saves the output (last bit = side of minimum)
      (fc1): Linear(in_features=4, out_features=16, bias=True)
      (fc2): Linear(in_features=16, out_features=4, bias=True)
    )
    """

    is_gated = False
    fc1: Any
    fc2: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: object = "gelu",
        bias: bool = True,
        *,
        dropout: float = 0.0,
        save: str = "auto",
        chunks: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        check_features("FusedMLP", in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        fc1 = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
        fc2 = nn.Linear(hidden_features, out_features, bias, device=device, dtype=dtype)
        self._set_block({"fc1": fc1, "fc2": fc2}, activation, dropout, save, chunks)

    @classmethod
    def from_modules(
        cls,
        fc1: nn.Linear,
        activation: object,
        fc2: nn.Linear,
        *,
        dropout: float = 0.0,
        save: str = "auto",
        chunks: int | None = None,
    ) -> Self:
        """A block of these two layers, which it shares.

        Raises:
            TypeError: one of them is not exactly an ``nn.Linear``.
            ValueError: they do not fit one another.
        """
        return cls._of({"fc1": fc1, "fc2": fc2}, activation, dropout, save, chunks)

    def layers(self) -> dict[str, Any]:
        return {"fc1": self.fc1, "fc2": self.fc2}

    def forward(self, input: Tensor) -> Tensor:
        layers = self.layers()
        if _called_because(layers) is not None:
            return self.by_calls(input)
        first, last = layers.values()
        return mlp(
            input, first.weight, first.bias, last.weight, last.bias, self.activation,
            dropout=self.dropout if self.training else 0.0, save=self.save, chunks=self.chunks,
        )  # fmt: skip

    def _parts(self, input: Tensor) -> list[Tensor]:
        return [self.fc1(input)]


class FusedGatedMLP(FusedBlock):
    """``down_proj(dropout(activation(gate_proj(x)) * up_proj(x)))`` that keeps two hidden buffers, or none
    (``fusedlayers.gated_mlp``): SwiGLU as in LLaMA, GEGLU, ReGLU, GLU.

    The layers are ``nn.Linear`` modules: ``gate_proj``, ``up_proj`` and ``down_proj``, or ``gate_up_proj``, the gate's
    rows first, and ``down_proj``. Where one of them is replaced by something else, or gets hooks, they are called one
    by one.

    Args:
        in_features, hidden_features, out_features, dropout, device, dtype: as for ``FusedMLP``.
        activation: of the gate; as for ``fusedlayers.dense_bias_act``.
        bias: whether all layers have one.
        packed: whether one layer makes gate and up. Tensor parallel plans need two layers: ``ColwiseParallel`` gives
            some processes rows of the gate, and others rows of up.
        save, chunks: as for ``fusedlayers.gated_mlp``.

    Shapes: (..., in_features) -> (..., out_features).

    >>> import fusedlayers as fl
    >>> fl.FusedGatedMLP(4, 16, packed=True)
    FusedGatedMLP(
      activation=silu, saves gate and up
      (gate_up_proj): Linear(in_features=4, out_features=32, bias=False)
      (down_proj): Linear(in_features=16, out_features=4, bias=False)
    )
    """

    is_gated = True
    #: ``gate_up_proj`` if packed, else the other two.
    gate_up_proj: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: object = "silu",
        bias: bool = False,
        *,
        packed: bool = False,
        dropout: float = 0.0,
        save: str = "auto",
        chunks: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        features = {"in_features": in_features, "hidden_features": hidden_features, "out_features": out_features}
        check_features("FusedGatedMLP", **features)
        sizes = {"gate_up_proj": 2 * hidden_features} if packed else dict.fromkeys(_SEPARATE, hidden_features)
        layers = {name: nn.Linear(in_features, size, bias, device=device, dtype=dtype) for name, size in sizes.items()}
        layers["down_proj"] = nn.Linear(hidden_features, out_features, bias, device=device, dtype=dtype)
        self._set_block(layers, activation, dropout, save, chunks)

    @classmethod
    def from_modules(
        cls,
        gate: nn.Linear,
        activation: object,
        up: nn.Linear | None,
        down: nn.Linear,
        *,
        dropout: float = 0.0,
        save: str = "auto",
        chunks: int | None = None,
    ) -> Self:
        """A block of these layers, which it shares; without ``up``, ``gate`` makes both, the gate's rows first.

        Raises:
            TypeError: one of them is not exactly an ``nn.Linear``.
            ValueError: they do not fit one another.
        """
        first = {"gate_up_proj": gate} if up is None else dict(zip(_SEPARATE, (gate, up), strict=True))
        return cls._of({**first, "down_proj": down}, activation, dropout, save, chunks)

    @property
    def packed(self) -> bool:
        """Whether gate and up are one layer."""
        return "gate_up_proj" in self._modules

    def layers(self) -> dict[str, Any]:
        if "gate_up_proj" in self._modules:
            return {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        return {"gate_proj": self.gate_proj, "up_proj": self.up_proj, "down_proj": self.down_proj}

    def forward(self, input: Tensor) -> Tensor:
        layers = self.layers()
        if _called_because(layers) is not None:
            return self.by_calls(input)
        gate, *separate, down = layers.values()
        up, up_bias = (separate[0].weight, separate[0].bias) if separate else (None, None)
        return gated_mlp(
            input, gate.weight, gate.bias, up, up_bias, down.weight, down.bias, self.activation,
            dropout=self.dropout if self.training else 0.0, save=self.save, chunks=self.chunks,
        )  # fmt: skip

    def _parts(self, input: Tensor) -> list[Tensor]:
        if self.packed:
            return list(self.gate_up_proj(input).chunk(2, -1))
        return [self.gate_proj(input), self.up_proj(input)]
