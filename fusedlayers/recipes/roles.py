"""The roles of modules in a fused model: what runs around or in the place of their own forward passes.

* A norm notes what its node does not tell (``norms.py``).
* A folded activation, PyTorch's or a user's that spells one out, saves its output, which the next layer saves too, so
  that backward computes nothing twice. Where its input is replayed itself, behind a norm, PyTorch's own node saves
  nothing: there a recipe serves.
* A module that spells an RMS norm out runs as one node (``spelled_norms.py``).
* A gate, a module that holds an activation and linear layers, multiplies ``act(a) * b`` in one node, which saves a and
  b. PyTorch's own nodes with recipes save as much, but write three new buffers in backward; the node
  (``ops/replayed_nodes.py``) writes the gradients over a and b. That of ``act(a)`` is made for nothing: whether it is
  multiplied shows later.

Users' modules are leaves: they have no children. All that they read is looked at anew at each call: a module that reads
something else by then, or whose class was given another forward pass, is recognised again. An activation that is left
to PyTorch at a large call runs as it is from then on.

Cost: a function mode around gates, 2 us for each function that they call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import validation
from .._torch import current_function_mode, function_mode_count
from ..activations import DTYPES, Activation, resolve
from ..call import execute, followed_by, plan_for
from ..kernels.operations import GATE, Pointwise
from ..ops.replayed_nodes import can_gate, gate_act
from ..plan import Call, needs_gradient
from ..sizes import is_small
from .norms import is_norm, note_facts
from .region import Region
from .spelled_norms import spelled_norm, twin

if TYPE_CHECKING:
    from .patch import Patch

Run = Callable[[], Any]
"""The module's own forward pass with its arguments."""
Role = Callable[["Patch", Region, nn.Module, Tensor | None, Run], Any]
"""From the module's patch, the region, the module, its argument, where that is one tensor, and its own forward pass to
the result. It is a function of a module, for pickles of patches name it."""

#: PyTorch's classes of folded activations.
_FOLDED = frozenset({nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish})
_ALONE = Pointwise(-1)
_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})


def role_of(module: nn.Module, exact: bool) -> Role | None:
    """The role of a module, or None where it runs as it is, with recipes alone. Nothing is run."""
    if is_norm(module):
        return _norm
    if exact:
        return None
    if _is_gated(module):
        return _gate
    if _may_be_activation(module):
        return _activation
    return _spelled_norm if _is_leaf(module) else None


def _norm(patch: Patch, region: Region, module: nn.Module, x: Tensor | None, run: Run) -> Any:
    y = run()
    note_facts(region, module, y)
    return y


def _spelled_norm(patch: Patch, region: Region, module: nn.Module, x: Tensor | None, run: Run) -> Any:
    y = None if x is None else spelled_norm(module, x)
    return run() if y is None else y


def _is_leaf(module: nn.Module) -> bool:
    """Whether it is a user's module without children, whose tensors have one dimension at most."""
    kind = type(module)
    is_users = not kind.__module__.startswith(("torch.", "fusedlayers.")) and "forward" not in vars(module)
    if not is_users or isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.children()):
        return False
    tensors = (*module.parameters(), *module.buffers())
    return all(sum(size > 1 for size in tensor.shape) <= 1 for tensor in tensors)


# --- activations ------------------------------------------------------------------------------------------------------


def _may_be_activation(module: nn.Module) -> bool:
    if type(module) in _FOLDED:
        return "forward" not in vars(module)
    return _is_leaf(module) and not any(True for _ in module.parameters())


def _activation(patch: Patch, region: Region, module: nn.Module, x: Tensor | None, run: Run) -> Any:
    if x is None or not _is_worth_a_node(region, x):
        return run()
    found = _by_output(module, x)
    if found is None:
        patch.role = None
        return run()
    y, activation = found
    mode = current_function_mode() if function_mode_count() else None
    if type(mode) is _Products and not module._forward_hooks:  # which may hold y
        mode.remember(x, y, activation, region)
    return y


def _is_worth_a_node(region: Region, x: Tensor) -> bool:
    """Whether x is large, and no recipe makes it again."""
    is_ours = x.requires_grad and x.dtype in DTYPES and not is_small(x) and not x.is_nested and followed_by() is None
    return is_ours and not region.replays(x)


def _by_output(module: Any, x: Tensor) -> tuple[Tensor, Activation] | None:
    """The result of the module, and the activation; None where its own code is to run: where PyTorch computes it, where
    it writes over x, and where the class of PyTorch was given another forward pass."""
    kind = type(module)
    if getattr(module, "inplace", False) or (kind in _FOLDED and kind.forward.__module__ != kind.__module__):
        return None
    call = Call(_ALONE, x, None, None, None, resolve(twin(module)))
    if kind in _FOLDED:
        plan, call = plan_for(call)
    else:  # here, because tracing takes parts of torch whose import takes a second
        from ..activations.custom import without_logging

        with without_logging():  # what is no activation is not worth a word
            plan, call = plan_for(call)
    traced = call.activation
    if plan.path == "composite" or not traced.is_folded:
        return None
    return execute(plan, call), traced


# --- gates ------------------------------------------------------------------------------------------------------------


def _is_gated(module: nn.Module) -> bool:
    """Whether a module may multiply the result of its activation by that of a linear layer: it holds both, and layers
    alone."""
    children = [*module.children()]
    linears = [child for child in children if isinstance(child, nn.Linear) or hasattr(child, "base_layer")]
    others = [child for child in children if child not in linears]
    is_flat = not any(True for child in others for _ in child.children())
    is_called_in_turn = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return len(linears) > 1 and is_flat and not is_called_in_turn and any(map(_may_be_activation, others))


def _gate(patch: Patch, region: Region, module: nn.Module, x: Tensor | None, run: Run) -> Any:
    with _Products(region):
        return run()


class _Products(TorchFunctionMode):
    """Meets the products in a gate, in the region of its forward pass: what a checkpoint inside runs again is not
    within this mode, and must compute the same."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._last: tuple[Tensor, Tensor, Activation, tuple[int, int]] | None = None

    def remember(self, z: Tensor, y: Tensor, activation: Activation, region: Region) -> None:
        """``activation(z)``, computed in this region, is y, which may be multiplied next."""
        if region is self._region:
            self._last = z, y, activation, (z._version, y._version)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        last, self._last = self._last, None
        if last is None or kwargs or not any(value is last[1] for value in args):
            self._last = last
        elif func in _PRODUCTS and len(args) == 2:
            z, y, activation, versions = last
            other = args[1] if args[0] is y else args[0]
            product = _product(z, y, other, activation) if (z._version, y._version) == versions else None
            if product is not None:
                return product
        return func(*args, **(kwargs or {}))


def _product(gate: Tensor, y: Tensor, up: Any, activation: Activation) -> Tensor | None:
    """None where PyTorch is to multiply y, ``activation(gate)``."""
    if type(up) is not Tensor or up.shape != gate.shape or up.dtype is not gate.dtype or not up.requires_grad:
        return None
    if y._backward_hooks or y.retains_grad or not validation.are_usual(gate, up):
        return None
    plan, _ = plan_for(Call(GATE, gate, None, None, None, activation))
    if plan.path != "fused" or plan.dim != -1 or not needs_gradient(gate) or not can_gate(gate, up):
        return None
    return gate_act(activation, plan.backend, gate, up, y)
