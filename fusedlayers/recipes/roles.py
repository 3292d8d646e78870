"""The roles of modules in a fused model: what runs around, or in the place of, their own forward passes.

* A norm of PyTorch's notes what its node does not tell (``norms.py``).
* A leaf, a user's module without children and matrices, is one operation: backward runs it again (``leaves.py``).
* Unless the model is ``exact``, a leaf that spells an RMS norm out runs as one node (``spelled_norms.py``), and one
  that spells out an activation whose output tells its derivative saves that output: one kernel instead of ten. All that
  such a module reads is looked at anew at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..activations import DTYPES, resolve
from ..calls.decide import Call
from ..calls.plan import plan_for
from ..calls.sizes import is_small
from ..calls.tracers import followed_by
from ..calls.validation import PLAIN_TYPES
from ..kernels.operations import Pointwise
from .leaves import is_leaf, run_leaf
from .norms import is_norm, note_facts
from .region import Region
from .spelled_norms import spelled_norm, twin

Role = Callable[[Region, nn.Module, functools.partial[Any]], Any]
"""From the region, the module, and its own forward pass with its arguments, to the result. It is a function of a
module, for pickles of patches name it."""

_ALONE = Pointwise(-1)


def role_of(module: nn.Module, exact: bool) -> Role | None:
    """The role of a module, or None where it runs as it is, with recipes alone. Nothing is run."""
    if is_norm(module):
        return _norm
    if not is_leaf(module):
        return None
    return run_leaf if exact else _quick_leaf


def _norm(region: Region, module: nn.Module, run: functools.partial[Any]) -> Any:
    y = run()
    note_facts(region, module, y)
    return y


def _quick_leaf(region: Region, module: nn.Module, run: functools.partial[Any]) -> Any:
    x: Any = run.args[0] if len(run.args) == 1 and not run.keywords else None
    if type(x) not in PLAIN_TYPES:
        return run_leaf(region, module, run)
    y = _spelled_activation(region, module, x) if not module._parameters else spelled_norm(module, x)
    return run_leaf(region, module, run) if y is None else y


def _spelled_activation(region: Region, module: Any, x: Tensor) -> Tensor | None:
    """The result of an activation that saves its output; None where the module is none, where the result is small, and
    where a recipe makes x again, so that the output would be one tensor more."""
    if not x.requires_grad or x.dtype not in DTYPES or is_small(x) or x.is_nested or followed_by() is not None:
        return None
    if region.replays(x) or getattr(module, "inplace", False):
        return None
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import without_logging

    with without_logging():  # a module that is no activation is not worth a word
        plan, call = plan_for(Call(_ALONE, (x, None, None, None), resolve(twin(module))))
    return plan.run(call) if plan.path != "composite" and call.activation.is_folded else None
