"""PyTorch's own modules whose forward pass is one call of a function. A region of such a module makes that call itself.

A mode around the module's forward pass would meet the same call. It takes 8 us more, and some 35 us where a convolution
has pushed the interpreter's code out of the caches (Intel Xeon).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..backends.operations import BatchNorm
from .operations import OPERATIONS, Arguments, Operation, Options


class OneCall(NamedTuple):
    """What a class does: ``function(input, **options(module, input))``.

    ``name``: the function's, in ``F``; ``forward``: the class's forward pass.
    """

    name: str
    function: Any
    operation: Operation
    forward: Callable[..., Tensor]
    options: Callable[[Any, Any], Options]

    def run(self, module: nn.Module, args: Arguments, kwargs: Options, kinds: Set[str]) -> Tensor | None:
        """The module's result, its operation being among the ``kinds`` that keep less; None where its own code is to
        run: for other arguments, and after the class or the function were patched."""
        if self.operation.kind not in kinds or len(args) != 1 or kwargs or type(module).forward is not self.forward:
            return None
        if getattr(F, self.name) is not self.function:
            return None
        y: Tensor = self.operation.run(self.function, args, self.options(module, *args))
        return y


def _one_call(cls: type[nn.Module], name: str, options: Callable[[Any, Any], Options]) -> OneCall | None:
    """None where one of both was patched already: then the operation may be in what it calls."""
    function, forward = getattr(F, name), cls.forward
    is_torchs = not hasattr(function, "__code__") or function.__code__.co_filename == F.__file__
    if not is_torchs or forward.__code__.co_filename != sys.modules[cls.__module__].__file__:
        return None
    return OneCall(name, function, OPERATIONS[function], forward, options)


def _attributes(*names: str) -> Callable[[Any, Any], Options]:
    return lambda module, x: {name: getattr(module, name) for name in names}


def _begun_batch_norm(module: Any, x: Any) -> Options:
    """The batch is checked and counted, as the forward pass does before the call; the options of that."""
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
}
_BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _one_calls() -> Iterator[tuple[type[nn.Module], OneCall | None]]:
    for cls, (name, names) in _CALLED.items():
        yield cls, _one_call(cls, name, _attributes(*names))
    for cls in _BATCH_NORMS:
        yield cls, _one_call(cls, "batch_norm", _begun_batch_norm)


#: What the classes do, of which PyTorch's own code was found when this package was imported.
ONE_CALLS = {cls: found for cls, found in _one_calls() if found is not None}
