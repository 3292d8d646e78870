"""Modules without children that compute an activation: PyTorch's classes, and users' that spell one out.

A folded activation saves its output, which the next layer saves too, so that backward computes nothing twice. Where
its input is replayed itself, behind a norm, PyTorch's own node saves nothing: there a recipe serves.

A user's module is traced, for the shape that it is given: parameters may run along one of its dimensions (channels).
At each call its free variables (``activations/free_variables.py``) are found anew: a module that reads something else
by then, or whose class was given another forward pass, is looked at again. One that was not recognised at its first
large call runs as it is from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import validation
from ..activations import DTYPES, Activation, activation_of_module
from ..call import execute, followed_by, plan_for, with_operands
from ..kernels.operations import Pointwise
from ..plan import Call
from ..sizes import is_small
from .region import Region

#: PyTorch's classes of folded activations.
_FOLDED = frozenset({nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish})
_ALONE = Pointwise(-1)
_NO_HOOKS = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}


def is_leaf(module: nn.Module) -> bool:
    """Whether it is a user's module without children, whose tensors have one dimension at most. Nothing is run."""
    kind = type(module)
    is_plain = not any(True for _ in module.children()) and not isinstance(module, torch.jit.ScriptModule)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers.")) and "forward" not in vars(module)
    tensors = (*module.parameters(), *module.buffers())
    return is_plain and is_users and all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


def twin(module: nn.Module) -> Any:
    """The module as it would be without its patch, and without hooks: who calls the module runs these."""
    found: Any = object.__new__(type(module))
    found.__dict__ = {**vars(module), **_NO_HOOKS}
    for name in ("forward", "extra_repr", "__prepare_scriptable__"):
        found.__dict__.pop(name, None)
    return found


def may_be_activation(module: nn.Module) -> bool:
    """Whether a module may compute a folded activation: nothing is run."""
    if type(module) in _FOLDED:
        return "forward" not in vars(module)
    return is_leaf(module) and not any(True for _ in module.parameters())


def is_activation(module: nn.Module, x: Tensor) -> bool:
    """Whether it does, of inputs like x, and edits none."""
    if type(module) in _FOLDED:
        return True
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    with without_logging():  # what is no activation is not worth a word
        found = with_operands(_spelled_out(module), x.shape, x.dtype).activation
        return found.is_fusible and found.is_folded


def may_save_output(region: Region, args: Any, kwargs: Any) -> bool:
    """Whether a call is one of a large tensor, whose values nobody replays."""
    if len(args) != 1 or kwargs or type(args[0]) is not Tensor or not args[0].requires_grad or is_small(args[0]):
        return False
    (x,) = args
    is_ours = x.dtype in DTYPES and followed_by() is None and validation.are_usual(x)
    return is_ours and not region.replays(x)


def activated(module: Any, x: Tensor) -> tuple[Tensor, Activation] | None:
    """What the module computes, and the activation; None where its own code is to run: where PyTorch computes it, where
    it writes over x, and where the class of PyTorch was given another forward pass."""
    kind = type(module)
    if getattr(module, "inplace", False) or (kind in _FOLDED and kind.forward.__module__ != kind.__module__):
        return None
    record = activation_of_module(module, kind) if kind in _FOLDED else _spelled_out(module)
    if record is None:
        return None
    plan, call = plan_for(Call(_ALONE, x, None, None, None, record))
    traced = call.activation
    if plan.path == "composite" or not traced.is_folded:
        return None
    return execute(plan, call), traced


def _spelled_out(module: nn.Module) -> Activation:
    """The module's function, which may be an activation."""
    return Activation(type(module).__name__, twin(module), needs_tracing=True)
