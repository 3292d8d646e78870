"""What a module, or another callable, is as an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..activations import DTYPES, Activation, resolve
from ..activations.resolve import record_of
from ..routes import specialised
from .derived import Mixin

#: Layers that often have an activation after them, and classes made from these.
LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)
#: Whose outputs torch keeps.
KEPT_BY_TORCH = frozenset({"relu", "tanh", "sigmoid"})


def activation_of(module: Any, kind: type[nn.Module]) -> Activation:
    """What a module computes as one of class ``kind``."""
    found = record_of(module, vars(kind).get("stands_in_for", kind))
    if found is not None:
        return found
    twin: Any = object.__new__(kind)
    twin.__dict__ = vars(module)
    return resolve(twin)


class Known(NamedTuple):
    """What a module, or another callable, was found to compute, and its attributes then."""

    activation: Activation
    read: dict[str, object]

    @classmethod
    def of(cls, function: object, activation: Activation) -> Known | None:
        """None for what depends on more than attributes, or is read off a module quickly."""
        if activation.row is None or activation.row.is_users or activation.is_traced or activation.parameters:
            return None
        return cls(activation, {name: value for name, value in vars(function).items() if name not in OF_ANY_MODULE})


#: What a module has whatever it computes.
OF_ANY_MODULE = frozenset(vars(nn.Module()))


def known_of(function: object, known: Known | None) -> Activation | None:
    """What a callable was found to compute, if nothing about it has changed."""
    if known is None or any(vars(function).get(name) is not value for name, value in known.read.items()):
        return None
    return known.activation


def found_in(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Activation | None:
    """What a module or a chain of functions computes, if that is an activation."""
    if isinstance(function, nn.Module):
        if not _may_be_activation(function):
            return None
        kind: Any = function.original if isinstance(function, Mixin) else type(function)
        activation = activation_of(function, kind)
    else:
        activation = resolve(function)
    if not activation.is_untraced:
        return None if activation.is_identity else activation
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import unsaid

    with unsaid():
        found, operands, _ = specialised(activation, shape, dtype if dtype in DTYPES else torch.float32)
    # What is no activation is not worth a word.
    return found if found.is_fusible and not _is_straight(found, operands) else None


def _is_straight(activation: Activation, operands: tuple[Tensor, ...]) -> bool:
    """Whether it does no more than to scale and to shift, of which a layer would keep as much as PyTorch."""
    size = max((p.numel() for p in operands), default=1)
    z = torch.linspace(-4, 4, 9, dtype=torch.float64).unsqueeze(1).expand(9, size)
    y = activation.function(z, *(p.detach().to("cpu", torch.float64).flatten() for p in operands))
    bends = y[2:] - 2 * y[1:-1] + y[:-2]
    return bool((bends.abs() <= 1e-9 * y.abs().max()).all())


def _may_be_activation(module: nn.Module) -> bool:
    if isinstance(module, Mixin) and not module.is_activation:
        return False
    if any(isinstance(inner, LAYERS) for inner in module.modules()) or any(p.dim() > 1 for p in module.parameters()):
        return False
    defined = type(module).__module__  # of a changed one, its own class's
    return defined == "torch.nn.modules.activation" or not defined.startswith("torch.")
