"""PyTorch's own modules whose forward pass is one call of a function. A region of such a module makes that call itself.

A mode around the module's forward pass would meet the same call. It takes 8 us more, and some 35 us where a convolution
has pushed the interpreter's code out of the caches (Intel Xeon).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .operations import OPERATIONS, Arguments, Operation, Options


class OneCall(NamedTuple):
    """What a class does: ``function(input, **options(module, input))``.

    ``name``: the function's, in ``F``; ``forward``: the class's forward pass; ``options``: None where the module's own
    code is to run.
    """

    name: str
    function: Any
    operation: Operation
    forward: Callable[..., Tensor]
    options: Callable[[Any, Any], Options | None]

    def run(self, module: nn.Module, args: Arguments, kwargs: Options, kinds: Set[str]) -> Tensor | None:
        """The module's result, its operation being among the ``kinds`` that keep less; None where its own code is to
        run: for other arguments, and after the class or the function were patched."""
        if self.operation.kind not in kinds or len(args) != 1 or kwargs or type(module).forward is not self.forward:
            return None
        options = self.options(module, *args) if getattr(F, self.name) is self.function else None
        y: Tensor | None = None if options is None else self.operation.run(self.function, args, options)
        return y


def _one_call(kind: type[nn.Module], name: str, options: Callable[[Any, Any], Options | None]) -> OneCall:
    function = getattr(F, name)
    return OneCall(name, function, OPERATIONS[function], kind.forward, options)


def _attributes(*names: str) -> Callable[[Any, Any], Options]:
    return lambda module, x: {name: getattr(module, name) for name in names}


def _batch_norm_options(module: Any, x: Any) -> Options | None:
    """In training, where the module counts the batches."""
    if not module.training or module.momentum is None:
        return None
    module._check_input_dim(x)
    is_tracked = module.track_running_stats
    if is_tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    return {
        "running_mean": module.running_mean if is_tracked else None,
        "running_var": module.running_var if is_tracked else None,
        "weight": module.weight,
        "bias": module.bias,
        "training": True,
        "momentum": module.momentum,
        "eps": module.eps,
    }


def _one_calls() -> Iterator[tuple[type[nn.Module], OneCall]]:
    attributes: dict[type[nn.Module], tuple[str, ...]] = {
        nn.ReLU: ("relu", "inplace"),
        nn.LeakyReLU: ("leaky_relu", "negative_slope", "inplace"),
        nn.ReLU6: ("hardtanh", "min_val", "max_val", "inplace"),
        nn.Hardtanh: ("hardtanh", "min_val", "max_val", "inplace"),
        nn.Threshold: ("threshold", "threshold", "value", "inplace"),
        nn.Softshrink: ("softshrink", "lambd"),
        nn.Hardsigmoid: ("hardsigmoid", "inplace"),
        nn.ELU: ("elu", "alpha", "inplace"),
        nn.SELU: ("selu", "inplace"),
        nn.CELU: ("celu", "alpha", "inplace"),
        nn.Softplus: ("softplus", "beta", "threshold"),
        nn.LogSigmoid: ("logsigmoid",),
        nn.Softsign: ("softsign",),
        nn.GELU: ("gelu", "approximate"),
        nn.SiLU: ("silu", "inplace"),
        nn.Mish: ("mish", "inplace"),
        nn.Hardswish: ("hardswish", "inplace"),
        nn.Dropout: ("dropout", "p", "training", "inplace"),
        nn.LayerNorm: ("layer_norm", "normalized_shape", "weight", "bias", "eps"),
        nn.RMSNorm: ("rms_norm", "normalized_shape", "weight", "eps"),
        nn.GroupNorm: ("group_norm", "num_groups", "weight", "bias", "eps"),
    }
    for kind, (name, *names) in attributes.items():
        yield kind, _one_call(kind, name, _attributes(*names))
    norms: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    for kind in norms:
        yield kind, _one_call(kind, "batch_norm", _batch_norm_options)


#: By class.
ONE_CALLS = dict(_one_calls())
