"""Modules without children that compute an activation: PyTorch's classes, and those that spell one out.

A folded activation saves its output, which the next layer saves too, so that backward computes nothing twice. Where
its input is replayed itself, behind a norm, PyTorch's own node saves nothing: there a recipe serves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import validation
from ..activations import DTYPES, Activation
from ..activations.lookup import activation_of_module
from ..backends.operations import Pointwise
from ..call import followed_by, plan_for
from ..execute import POINTWISE
from ..sizes import is_small
from .region import Region
from .spelled_activations import activation_of, is_recognised
from .users_modules import has_parameters, is_leaf

#: PyTorch's classes of folded activations.
_FOLDED = frozenset({nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish})
_ALONE = Pointwise(-1)


def may_be_activation(module: nn.Module) -> bool:
    """Whether a module may compute a folded activation: nothing is run."""
    if type(module) in _FOLDED:
        return "forward" not in vars(module)
    return is_leaf(module) and not has_parameters(module)


def is_activation(module: nn.Module, x: Tensor) -> bool:
    """Whether it does, of inputs like x."""
    return type(module) in _FOLDED or is_recognised(module, x.dtype, x.shape)


def may_save_output(region: Region, args: Any, kwargs: Any) -> bool:
    """Whether a call is one of a large tensor, whose values nobody replays."""
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or not args[0].requires_grad or is_small(args[0]):
        return False
    (x,) = args
    is_ours = x.dtype in DTYPES and followed_by() is None and validation.are_usual((x,), ())
    return is_ours and not region.replays(x)


def activated(module: Any, x: Tensor) -> tuple[Tensor, Activation] | None:
    """What the module computes, and the activation; None where its own code is to run: where PyTorch computes it, where
    it writes over x, and where the class of PyTorch was given another forward pass."""
    kind = type(module)
    if getattr(module, "inplace", False) or (kind in _FOLDED and kind.forward.__module__ != kind.__module__):
        return None
    record = activation_of_module(module, kind) if kind in _FOLDED else activation_of(module)
    if record is None:
        return None
    shapes = _ALONE, x.dim()
    plan, traced, operands = plan_for(_ALONE, x, None, None, None, record, "auto", shapes, x.numel())
    if plan.path == "composite" or traced.writes_argument or not traced.is_folded:
        return None
    return POINTWISE[plan.path](plan, _ALONE, x, None, None, None, traced, operands), traced
