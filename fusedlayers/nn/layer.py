"""A layer and its activation in one module: dense layers and convolutions.

``WithActivation`` is what all fused modules share, ``FusedAct`` what these share: a layer of torch's.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import Activation, must_call_reason, resolve
from ..calls.decide import choose_save, describe
from ..calls.tracers import with_operands
from ..calls.validation import check_dropout, check_features, check_save, check_tensors, check_window
from ..functional import conv_bias_act, dense_bias_act
from ..kernels.operations import Operation, Pointwise


class WithActivation(nn.Module):
    """A module that has an activation, a choice of what is saved, and says so."""

    activation: object
    save: str

    dropout: float

    def _example(self) -> tuple[tuple[int, ...], Tensor]:
        """A shape that the activation's results may have; and a parameter, whose dtype and device are the layer's."""
        raise NotImplementedError

    def _operation(self) -> Operation:
        return Pointwise(-1)

    def keeps(self, activation: Activation, dtype: torch.dtype) -> str:
        """The part of the activation that the layer would keep in ``dtype``, in a few words."""
        return describe(activation, self.save, dtype, self._example()[1].device, self._operation())

    def _described(self, called_because: str | None = None) -> str:
        """The activation, dropout, and what is saved, unless layers are called one by one for this reason."""
        activation, kept = resolve(self.activation), f"not fused: {called_because}"
        if called_because is None:
            activation = self._specialised(activation)
            kept = self.keeps(activation, self._example()[1].dtype)
        dropped = [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([f"activation={activation!r}", *dropped, kept])

    def _set(self, activation: object, save: str) -> None:
        name = type(self).__name__
        check_save(name, save)
        check_tensors(name, {"weight": self._example()[1]})
        resolved = resolve(activation, name)
        if save == "output":
            choose_save(name, self._specialised(resolved), save, self._example()[1].dtype)  # which may refuse
        self.activation = activation
        self.save = save

    def _specialised(self, activation: Activation) -> Activation:
        shape, parameter = self._example()
        return with_operands(activation, shape, parameter.dtype).activation


#: The attributes that every module has.
_OF_ANY_MODULE = vars(nn.Module()).keys()


class FusedAct(WithActivation):
    """A layer and its activation in one module, with the parameters and attributes of torch's layer.

    A layer of torch's is made and taken over, so that its constructor checks the arguments and draws the first values.
    """

    #: The layer without the activation. Its methods that only read attributes serve here too.
    torchs: ClassVar[Any]
    weight: Any
    bias: Any
    #: The probability with which outputs are dropped in training.
    dropout: float = 0.0

    def __init__(self, layer: nn.Module, activation: object, save: str, dropout: float) -> None:
        super().__init__()
        check_dropout(type(self).__name__, dropout)
        self._take_over(layer, activation, save)
        if dropout:
            self.dropout = dropout

    def _take_over(self, layer: nn.Module, activation: object, save: str) -> None:
        """Share what a layer of torch's has, and compute the activation too."""
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, parameter)
        for name, value in vars(layer).items():
            if name not in _OF_ANY_MODULE:
                setattr(self, name, value)
        self._set(activation, save)

    @classmethod
    def from_modules(cls, layer: Any, activation: object, *, save: str = "auto") -> Self:
        """A fused layer that shares the parameters of ``layer``; ``activation`` as for the constructor.

        Raises:
            TypeError: ``layer`` is not exactly torch's, or has hooks or a forward of its own, which would be lost.
        """
        expected = f"nn.{cls.torchs.__name__}"
        if type(layer) is not cls.torchs:
            raise TypeError(
                f"{cls.__name__}.from_modules: expected a plain {expected}, got {type(layer).__name__}, which may "
                "compute something else; leave it as it is"
            )
        reason = must_call_reason(layer)
        if reason is not None:
            raise TypeError(f"{cls.__name__}.from_modules: the {expected} must be called: {reason}; leave it as it is")
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        fused._take_over(layer, activation, save)
        return fused.train(layer.training)

    def reset_parameters(self) -> None:
        """Draw first values, as torch's layer does."""
        self.torchs.reset_parameters(self)

    def extra_repr(self) -> str:
        return f"{self.torchs.extra_repr(self)}, {self._described()}"


# --- dense layers -----------------------------------------------------------------------------------------------------


class FusedDenseAct(FusedAct):
    """``activation(x W^T + b)`` that keeps one hidden-sized buffer, for an ``nn.Linear`` and the activation after it.

    It has the parameters, initialisation, attributes and ``state_dict`` keys of ``nn.Linear``, so checkpoints load
    either way. It is not a subclass of ``nn.Linear``, because code that exchanges linear layers would drop the
    activation.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        activation: as for ``fusedlayers.dense_bias_act``. A module with parameters becomes a submodule.
        dropout: the probability with which outputs are dropped in training, as by an ``nn.Dropout`` after it.
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
        layer = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        super().__init__(layer, activation, save, dropout)

    def _example(self) -> tuple[tuple[int, ...], Tensor]:
        return (2, self.out_features), self.weight

    def forward(self, input: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return dense_bias_act(input, self.weight, self.bias, self.activation, dropout=dropout, save=self.save)


#: Dense layers, torch's and this library's: for code that chooses parameters or their first values by the class.
LINEAR_TYPES = (nn.Linear, FusedDenseAct)


# --- convolutions -----------------------------------------------------------------------------------------------------

_Sizes = int | Sequence[int]


class FusedConvAct(FusedAct):
    """The base of the convolutions of one to three dimensions."""

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
        layer = self.torchs(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device=device, dtype=dtype,
        )  # fmt: skip
        super().__init__(layer, activation, save, dropout)

    def _example(self) -> tuple[tuple[int, ...], Tensor]:
        return (2, self.out_channels, *(5 + 2 * i for i in range(len(self.stride)))), self.weight

    def _sides(self) -> list[int]:
        """The padding of both sides of each dimension, from the last one to the first."""
        given: Any = self.padding
        if given == "valid":
            return [0, 0] * len(self.stride)
        windows = zip(self.dilation, self.kernel_size, strict=True)
        totals = [d * (k - 1) for d, k in windows] if given == "same" else [2 * p for p in given]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]

    def forward(self, input: Tensor) -> Tensor:
        padding: _Sizes | str = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._sides(), mode=self.padding_mode)
            padding = 0  # for every dimension
        dropout = self.dropout if self.training else 0.0
        return conv_bias_act(
            input, self.weight, self.bias, self.activation, self.stride, padding, self.dilation, self.groups,
            dropout=dropout, save=self.save,
        )  # fmt: skip


class FusedConvAct1d(FusedConvAct):
    """``activation(conv1d(x))`` that keeps one buffer, for an ``nn.Conv1d`` and the activation after it.

    It has the parameters, initialisation, attributes and ``state_dict`` keys of ``nn.Conv1d``, so checkpoints load
    either way. It is not a subclass of ``nn.Conv1d``, because code that exchanges convolutions would drop the
    activation.

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
