"""What a module, or another callable, is as an activation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import ConvBase, NormBase
from ..activations import DTYPES, Activation, resolve
from ..activations.free_variables import find_variables
from ..activations.lookup import activation_of_module
from ..activations.python_values import user_classes
from ..activations.record import WithOperands
from ..call import with_operands
from ..nn.base import FusedAct
from ..utils.module_state import in_mode
from .attributes import Attributes
from .chain import Chain
from .derived import Mixin

#: Layers that often have an activation after them, and classes made from these.
LAYERS = (nn.Linear, ConvBase, NormBase, FusedAct)
#: Whose outputs torch keeps.
_KEPT_BY_TORCH = frozenset({"relu", "tanh", "sigmoid"})
#: Functions outside the table of which torch keeps the outputs too, where a layer would keep its input.
_OF_THEIR_RESULT = frozenset({"exp", "exp_", "expm1", "exp2", "sqrt", "sqrt_", "rsqrt", "reciprocal", "tan"})


def is_kept_by_torch(activation: Activation) -> bool:
    """Whether torch keeps its output anyway, so that alone there is nothing to spare."""
    return activation.row is not None and activation.row.name in _KEPT_BY_TORCH


def activation_of(module: Any, kind: type[nn.Module]) -> Activation:
    """What a module computes as one of class ``kind``."""
    found = activation_of_module(module, vars(kind).get("stands_in_for", kind))
    if found is not None:
        return found
    if torch.compiler.is_compiling():  # which sees what it computes, but not how a twin is made
        return Activation(kind.__name__, functools.partial(kind.forward, module), needs_tracing=True)
    twin: Any = object.__new__(kind)
    twin.__dict__ = vars(module)
    return resolve(twin)


class Known(NamedTuple):
    """What a module, or a chain, was found to compute, if its class and its attributes tell that: looking at all that
    code may read (``find_variables``) takes 25 us, and the compiler cannot do it while it follows a model. What others
    compute is found out at every call.

    ``attributes``: None of a chain, which does not change.
    """

    activation: Activation
    kind: type
    attributes: Attributes | None

    @classmethod
    def of(cls, function: Any, activation: Activation) -> Known | None:
        row = activation.row
        if row is None or row.is_custom or activation.is_traced or activation.parameters or not _is_told(function):
            return None
        if found_in(function, (2, 6), torch.float64) is not activation:  # which the model may be changed to
            return None
        return cls(activation, type(function), None if isinstance(function, Chain) else Attributes.of(function))


def known_of(function: Any, known: Known | None) -> Activation | None:
    """What a callable was found to compute, if nothing about it has changed."""
    if known is None or (function.original if isinstance(function, Mixin) else type(function)) is not known.kind:
        return None
    is_same = known.attributes is None or known.attributes.are_still_of(function)
    return known.activation if is_same else None


def _is_told(function: Any) -> bool:
    """Whether its class and its attributes tell what it computes: it is of a library's class, and holds nothing that
    could change and still be the same object."""
    if isinstance(function, Chain):
        return True
    kind: Any = type(function)
    variables = find_variables(function)
    return not (len(variables.objects) > 1 or variables.tensors or variables.refusal or user_classes(kind))


def found_in(function: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype) -> Activation | None:
    """What a module or a chain of functions computes, if that is an activation, and the same in training and
    evaluation."""
    if isinstance(function, Chain) and function.__name__ in _OF_THEIR_RESULT:
        return None
    if isinstance(function, nn.Module):
        if not _may_be_activation(function):
            return None
        kind: Any = function.original if isinstance(function, Mixin) else type(function)
        activation = activation_of(function, kind)
    else:
        activation = resolve(function)
    if not activation.needs_tracing:
        return None if activation.is_identity else activation
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    def found_now() -> WithOperands:
        return with_operands(activation, shape, dtype if dtype in DTYPES else torch.float32)

    with without_logging():
        found, operands, _ = found_now()
        if not found.is_fusible or _is_straight(found, operands):
            return None  # what is no activation is not worth a word
        if isinstance(function, nn.Module):
            for training in (True, False):
                with in_mode(function, training):
                    if not _are_same(found, found_now().activation):
                        return None
    return found


def _are_same(one: Activation, other: Activation) -> bool:
    """Whether they are one activation of the table, or traces with the same operations."""
    if one.is_traced and other.is_traced:
        codes: list[Any] = [one.function, other.function]
        return bool(codes[0].code == codes[1].code)
    return one is other


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
