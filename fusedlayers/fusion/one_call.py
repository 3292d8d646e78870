"""PyTorch's own modules whose forward pass is one call of a function. A region of such a module makes that call itself.

A mode around the module's forward pass would meet the same call. It takes 8 us more, and some 35 us where a convolution
has pushed the interpreter's code out of the caches (Intel Xeon).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.operations import BatchNorm
from .operations import OPERATIONS, Arguments, Operation, Options


class OneCall(NamedTuple):
    """What a class does: ``function(input, **options(module, input))``.

    ``name``: the function's, in ``F``; ``methods``: of the class, those that come before the call; ``options``: None
    for a module that makes another call.
    """

    name: str
    function: Any
    operation: Operation
    methods: dict[str, Callable[..., Tensor]]
    options: Callable[[Any, Any], Options | None]

    def is_made(self, module: nn.Module, args: Arguments, kwargs: Options) -> bool:
        """Whether the module has that from its class. It has not for other arguments, and after the class or the
        function were patched."""
        if len(args) != 1 or kwargs or getattr(F, self.name) is not self.function:
            return False
        for name, method in self.methods.items():
            is_patched = name != "forward" and name in vars(module)  # the instance's forward is the region
            if is_patched or getattr(type(module), name) is not method:
                return False
        return True

    def run(self, module: nn.Module, forward: Callable[..., Tensor], args: Arguments) -> Tensor:
        """The module's result; by its own forward pass where the operation would leave it to PyTorch."""
        options = None if self.operation.is_small(args) else self.options(module, *args)
        if options is None:
            return forward(*args)
        y: Tensor = self.operation.run(self.function, args, options)
        return y


def _one_call(cls: type[nn.Module], name: str, options: Callable[[Any, Any], Options | None]) -> OneCall | None:
    """None where one of both was patched already: then the operation may be in what it calls."""
    function = getattr(F, name)
    methods = {name: getattr(cls, name) for name in ("forward", "_conv_forward") if hasattr(cls, name)}
    is_torchs = not hasattr(function, "__code__") or function.__code__.co_filename == F.__file__
    files = {method.__code__.co_filename for method in methods.values()}
    if not is_torchs or files != {sys.modules[cls.__module__].__file__}:
        return None
    return OneCall(name, function, OPERATIONS[function], methods, options)


def _attributes(*names: str) -> Callable[[Any, Any], Options]:
    return lambda module, x: {name: getattr(module, name) for name in names}


def _of_convolution(module: Any, x: Any) -> Options | None:
    if module.padding_mode != "zeros":
        return None
    return {
        "weight": module.weight,
        "bias": module.bias,
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "groups": module.groups,
    }


def _of_batch_norm(module: Any, x: Any) -> Options:
    """The batch is checked and counted, as the forward pass does before the call."""
    module._check_input_dim(x)
    norm = BatchNorm.of(module, x.dim()).counted()
    return {
        "running_mean": norm.running_mean,
        "running_var": norm.running_var,
        "weight": module.weight,
        "bias": module.bias,
        "training": norm.training,
        "momentum": norm.momentum,
        "eps": norm.eps,
    }


#: By class: the function, and the attributes that are its arguments of the same names.
_CALLED: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ("inplace",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope", "inplace")),
    nn.ReLU6: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val", "inplace")),
    nn.Threshold: ("threshold", ("threshold", "value", "inplace")),
    nn.Softshrink: ("softshrink", ("lambd",)),
    nn.Hardsigmoid: ("hardsigmoid", ("inplace",)),
    nn.ELU: ("elu", ("alpha", "inplace")),
    nn.SELU: ("selu", ("inplace",)),
    nn.CELU: ("celu", ("alpha", "inplace")),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Softsign: ("softsign", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.SiLU: ("silu", ("inplace",)),
    nn.Mish: ("mish", ("inplace",)),
    nn.Hardswish: ("hardswish", ("inplace",)),
    nn.Dropout: ("dropout", ("p", "training", "inplace")),
    nn.LayerNorm: ("layer_norm", ("normalized_shape", "weight", "bias", "eps")),
    nn.RMSNorm: ("rms_norm", ("normalized_shape", "weight", "eps")),
    nn.GroupNorm: ("group_norm", ("num_groups", "weight", "bias", "eps")),
    nn.Linear: ("linear", ("weight", "bias")),
}
_CONVOLUTIONS: dict[type[nn.Module], str] = {nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d"}
_BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _one_calls() -> Iterator[tuple[type[nn.Module], OneCall | None]]:
    for cls, (name, names) in _CALLED.items():
        yield cls, _one_call(cls, name, _attributes(*names))
    for cls, name in _CONVOLUTIONS.items():
        yield cls, _one_call(cls, name, _of_convolution)
    for cls in _BATCH_NORMS:
        yield cls, _one_call(cls, "batch_norm", _of_batch_norm)


#: What the classes do, of which PyTorch's own code was found when this package was imported.
ONE_CALLS = {cls: found for cls, found in _one_calls() if found is not None}
