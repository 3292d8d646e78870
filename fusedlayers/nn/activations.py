"""Activations that save their output instead of their input: drop-in functions and modules for torch's own.

Each has the name, the parameters and the values of its torch counterpart; ``inplace`` is given by keyword. The modules
are subclasses of torch's, so that ``isinstance`` checks, printing and pickles go on as before.
"""

from typing import Any

from torch import Tensor, nn

from ..activations import activation_of_module, register_stand_in, resolve
from ..functional import bias_act


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu`` that saves its output."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in names:
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return bias_act(input, None, names[approximate])


register_stand_in("gelu", gelu)
register_stand_in("gelu", gelu, {"approximate": "none"})
register_stand_in("gelu_tanh", gelu, {"approximate": "tanh"})


def _drop_in(name: str) -> Any:
    """``F.<name>`` that saves its output: ``function(input, *parameters, inplace=False)`` in torch's order."""
    default = resolve(name)
    assert default.definition is not None
    row, names = default.definition, tuple(default.definition.parameters)

    def function(input: Tensor, *parameters: float, inplace: bool = False, **keywords: float) -> Tensor:
        if len(parameters) > len(names):
            raise TypeError(
                f"{name}() takes {', '.join(('input', *names))}, got {1 + len(parameters)} positional arguments"
            )
        if not parameters and not keywords:
            return bias_act(input, None, default, inplace=inplace)
        bound = dict(zip(names, parameters, strict=False))
        return bias_act(input, None, row.bind(**bound, **keywords), inplace=inplace)

    register_stand_in(name, function)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``{name}({', '.join(('input', *names))}, inplace=False)`` that saves its output."
    return function


silu = _drop_in("silu")
mish = _drop_in("mish")
hardswish = _drop_in("hardswish")
quick_gelu = _drop_in("quick_gelu")
elu = _drop_in("elu")
selu = _drop_in("selu")
celu = _drop_in("celu")
leaky_relu = _drop_in("leaky_relu")
relu6 = _drop_in("relu6")
hardtanh = _drop_in("hardtanh")
hardsigmoid = _drop_in("hardsigmoid")
softplus = _drop_in("softplus")
logsigmoid = _drop_in("logsigmoid")
softsign = _drop_in("softsign")
softshrink = _drop_in("softshrink")
squared_relu = _drop_in("squared_relu")


class _SavesOutput(nn.Module):
    """Overrides a torch activation module's ``forward``; the parameters are read off the module at each call.

    ``resolve`` takes a class that names in ``stands_in_for`` what it computes for that; not its subclasses, which may
    compute something else.
    """

    stands_in_for: type[nn.Module]
    #: Of those that torch lets have it; an attribute that is missing takes ``nn.Module`` a microsecond to look for.
    inplace: bool = False

    def __init_subclass__(cls) -> None:
        if _SavesOutput in cls.__bases__:
            cls.stands_in_for = next(base for base in cls.__mro__ if base.__module__.startswith("torch.nn"))

    def forward(self, input: Tensor) -> Tensor:
        # Not resolve(self): a module with hooks is left to be called, and this is the call.
        record = activation_of_module(self, self.stands_in_for)
        if record is None:  # arguments that torch takes in the constructor and refuses here
            y: Tensor = super().forward(input)
            return y
        return bias_act(input, None, record, inplace=self.inplace)


class GELU(_SavesOutput, nn.GELU):
    """``nn.GELU`` that saves its output."""


class SiLU(_SavesOutput, nn.SiLU):
    """``nn.SiLU`` that saves its output."""


class Mish(_SavesOutput, nn.Mish):
    """``nn.Mish`` that saves its output."""


class Hardswish(_SavesOutput, nn.Hardswish):
    """``nn.Hardswish`` that saves its output. At -inf, where that is NaN, so is the gradient (torch's is 0)."""


class ELU(_SavesOutput, nn.ELU):
    """``nn.ELU`` that saves its output (its input where alpha is negative)."""


class SELU(_SavesOutput, nn.SELU):
    """``nn.SELU`` that saves its output."""


class CELU(_SavesOutput, nn.CELU):
    """``nn.CELU`` that saves its output (its input where alpha is negative)."""


class LeakyReLU(_SavesOutput, nn.LeakyReLU):
    """``nn.LeakyReLU`` that saves its output (its input where the slope is negative)."""


class ReLU6(_SavesOutput, nn.ReLU6):
    """``nn.ReLU6`` that saves its output."""


class Hardtanh(_SavesOutput, nn.Hardtanh):
    """``nn.Hardtanh`` that saves its output."""


class Hardsigmoid(_SavesOutput, nn.Hardsigmoid):
    """``nn.Hardsigmoid`` that saves its output."""


class Softplus(_SavesOutput, nn.Softplus):
    """``nn.Softplus`` that saves its output (its input where the threshold is below 16)."""


class LogSigmoid(_SavesOutput, nn.LogSigmoid):
    """``nn.LogSigmoid`` that saves its output."""


class Softsign(_SavesOutput, nn.Softsign):
    """``nn.Softsign`` that saves its output."""


class Softshrink(_SavesOutput, nn.Softshrink):
    """``nn.Softshrink`` that saves its output."""
