"""What the fused modules share: an activation and a choice of what is saved, and in ``FusedAct`` a layer of torch."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..activations import DTYPES, Activation, must_call_reason, resolve
from ..call import with_operands
from ..plan import choose_save, describe
from ..validation import check_save


class WithActivation(nn.Module):
    """A module that has an activation, a choice of what is saved, and says so."""

    activation: object
    save: str

    def _example_shape(self) -> tuple[int, ...]:
        """A shape that the activation's results may have."""
        raise NotImplementedError

    def _example_tensor(self) -> Tensor:
        """A parameter, whose dtype and device are the layer's."""
        raise NotImplementedError

    def keeps(self, activation: Activation, dtype: torch.dtype) -> str:
        """What the layer would keep of the activation in ``dtype``, in a few words."""
        return describe(activation, self.save, dtype, self._example_tensor().device)

    def _set(self, activation: object, save: str) -> None:
        name = type(self).__name__
        check_save(name, save)
        resolved = resolve(activation, name)
        if save == "output":
            choose_save(name, self._specialised(resolved), save, self._example_tensor().dtype)  # which may refuse
        self.activation = activation
        self.save = save

    def _specialised(self, activation: Activation) -> Activation:
        if not activation.needs_tracing:
            return activation
        return with_operands(activation, self._example_shape(), self._example_tensor().dtype).activation


#: The attributes that every module has.
_OF_ANY_MODULE = vars(nn.Module()).keys()


class FusedAct(WithActivation):
    """A layer and its activation in one module, with the parameters and attributes of torch's layer.

    It is no subclass of that layer: code that exchanges or folds layers by ``isinstance`` would drop the activation.
    A layer of torch's is made and taken over, so that its constructor checks the arguments and draws the first values.
    """

    #: The layer without the activation. Its methods that only read attributes serve here too.
    torchs: ClassVar[Any]
    weight: Any
    bias: Any
    #: The probability with which outputs are dropped in training.
    dropout: float = 0.0

    def __init__(self, layer: nn.Module, activation: object, save: str) -> None:
        super().__init__()
        self._take_over(layer, activation, save)

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
        if layer.weight.dtype not in DTYPES:
            raise TypeError(
                f"{cls.__name__}.from_modules: {layer.weight.dtype} is no floating dtype; leave it as it is"
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
        resolved, torchs = self._specialised(resolve(self.activation)), self.torchs.extra_repr(self)
        kept = self.keeps(resolved, self._example_tensor().dtype)
        dropped = [f"dropout={self.dropout}"] if self.dropout else []
        return ", ".join([torchs, f"activation={resolved!r}", *dropped, kept])

    def _example_tensor(self) -> Tensor:
        weight: Tensor = self.weight
        return weight
