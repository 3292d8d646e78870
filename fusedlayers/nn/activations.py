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
    """Overrides a torch activation module's ``forward``; the parameters are read off the module at each call."""

    #: The class that ``resolve`` takes a module for. It looks for it in the module's own class: subclasses may compute
    #: something else.
    stands_in_for: type[nn.Module]
    #: Where torch's class has none: ``nn.Module`` takes a microsecond to look for an attribute that is missing.
    inplace: bool = False

    def forward(self, input: Tensor) -> Tensor:
        # Not resolve(self): a module with hooks is left to be called, and this is the call.
        record = activation_of_module(self, self.stands_in_for)
        if record is None:  # arguments that torch takes in the constructor and refuses here
            y: Tensor = super().forward(input)
            return y
        return bias_act(input, None, record, inplace=self.inplace)


def _drop_in_module(torchs: type[nn.Module], note: str = "") -> Any:
    """``torchs`` that saves its output."""
    name = torchs.__name__
    doc = f"``nn.{name}`` that saves its output{note}."
    return type(name, (_SavesOutput, torchs), {"__module__": __name__, "__doc__": doc, "stands_in_for": torchs})


GELU = _drop_in_module(nn.GELU)
SiLU = _drop_in_module(nn.SiLU)
Mish = _drop_in_module(nn.Mish)
Hardswish = _drop_in_module(nn.Hardswish, "; at -inf, where that is NaN, so is the gradient (torch's is 0)")
ELU = _drop_in_module(nn.ELU, " (its input where alpha is negative)")
SELU = _drop_in_module(nn.SELU)
CELU = _drop_in_module(nn.CELU, " (its input where alpha is negative)")
LeakyReLU = _drop_in_module(nn.LeakyReLU, " (its input where the slope is negative)")
ReLU6 = _drop_in_module(nn.ReLU6)
Hardtanh = _drop_in_module(nn.Hardtanh)
Hardsigmoid = _drop_in_module(nn.Hardsigmoid)
Softplus = _drop_in_module(nn.Softplus, " (its input where the threshold is below 16)")
LogSigmoid = _drop_in_module(nn.LogSigmoid)
Softsign = _drop_in_module(nn.Softsign)
Softshrink = _drop_in_module(nn.Softshrink)
