"""Gates in a module that holds an activation and linear layers: ``act(a) * b`` as one node, which saves a and b.

PyTorch's own nodes with recipes save as much, but write three new buffers in backward. This node, of
``ops/replayed_nodes.py``, writes the gradients over a and b. That of ``act(a)`` is made for nothing: whether it is
multiplied shows later.

Cost: a function mode around these modules, 2 us for each function that they call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import validation
from .._torch import current_function_mode, function_mode_count
from ..activations import Activation
from ..call import plan_for
from ..kernels.operations import GATE
from ..ops.replayed_nodes import can_gate, gate_act
from ..plan import Call, needs_gradient
from .leaves import may_be_activation
from .region import Region

_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})


class Gates(TorchFunctionMode):
    """Meets the products in such a module, in the region of its forward pass: what a checkpoint inside runs again is
    not within this mode, and must compute the same."""

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


def current_gates() -> Gates | None:
    """The mode that is around what runs now."""
    mode = current_function_mode() if function_mode_count() else None
    return mode if type(mode) is Gates else None


def is_gated(module: nn.Module) -> bool:
    """Whether a module may multiply the result of its activation by that of a linear layer: it holds both, and layers
    alone."""
    children = [*module.children()]
    linears = [child for child in children if isinstance(child, nn.Linear) or hasattr(child, "base_layer")]
    others = [child for child in children if child not in linears]
    is_flat = not any(True for child in others for _ in child.children())
    is_called_in_turn = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return len(linears) > 1 and is_flat and not is_called_in_turn and any(map(may_be_activation, others))


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
