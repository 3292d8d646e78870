"""From a call to its plan.

A call's *facts* are one tuple of what can be read off the arguments and this thread in about two microseconds: dtypes,
shapes, which tensors need gradients, autocast, modes. Plans are memoised by facts, so a call that was seen before is
neither checked nor decided again. A call with new facts is checked (``validation.py``), becomes a ``PlanKey``, and is
decided (``plan.py``).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends, sizes, validation
from ._torch import (
    FAKE_MODE,
    PROXY_MODE,
    SELECTIVE_CHECKPOINT_MODES,
    autocast_is_active,
    dispatch_mode_at,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    infrastructure_mode,
    is_of_transform,
    saved_tensors_hooks_on_top,
    torchscript_state,
)
from .activations import Activation, WithOperands
from .backends.operations import MATMUL, Convolution, Operation, Pointwise, Weight
from .ops.edits import is_under_checkpoint
from .plan import Needs, Plan, PlanKey, make_plan
from .utils.bounded_cache import BoundedCache

#: Why a call under a checkpoint that writes over its input is left to PyTorch. It may run with a copy the second time,
#: by hooks around it, and the writes to a copy are counted from 0: no number tells whether the output was edited.
COPIED_BY_CHECKPOINT = "it writes over its input, of which a checkpoint around it may hold a copy"

#: Plans by facts. A large model has some hundreds; changing lengths and shapes push out the oldest.
_plans: BoundedCache[Plan] = BoundedCache(4096)

Planned = tuple[Plan, Activation, tuple[Tensor, ...]]
"""The plan for a call, its activation, and the tensors that this reads."""


class Call(NamedTuple):
    """A layer's call: ``activation(operation(x, w, b) + residual, *operands)``."""

    operation: Operation
    x: Tensor
    w: Weight
    b: Tensor | None
    residual: Tensor | None
    activation: Activation
    save: str
    #: How many elements the result has, or None where only the operation can tell.
    elements: int | None = None
    is_inplace: bool = False
    #: The tensors that the activation reads, and the dimension along which they run.
    operands: tuple[Tensor, ...] = ()
    operand_dim: int | None = None
    #: Why PyTorch's own operations compute it, where the arguments do not say so; or None.
    plain_because: str | None = None

    def plan(self) -> Plan:
        """Check the arguments, and decide."""
        validation.check_call(self.operation, self.x, self.w, self.b, self.residual)
        return make_plan(self.key())

    def key(self) -> PlanKey:
        """What the decision depends on."""
        operation, x, w, b, residual, activation, save, *_ = self
        cast = autocast_dtype(x) if operation.is_cast else None
        dtype = cast or x.dtype
        plain_because = validation.unusual_because(x, w, b, residual) or self.plain_because
        if residual is not None and residual.dtype is not dtype:
            plain_because = plain_because or f"the residual is {residual.dtype} where the sum is {dtype}"
        backend = backends.choose(x, activation)
        needs = Needs(
            needs_gradient(x),
            needs_gradient(w),
            needs_gradient(b),
            needs_gradient(residual),
            needs_gradient(*self.operands),
        )
        bare, is_compiling = operation.without_tensors(), torch.compiler.is_compiling()
        key = PlanKey(bare, activation, save, dtype, backend, needs, plain_because, is_compiling, cast=cast)
        if is_compiling or plain_because is not None:  # sizes may be symbols
            return key
        count = math.prod(operation.shape(x, w)) if self.elements is None else self.elements
        other_dim = self.operand_dim
        if other_dim is not None and (other_dim - operation.dim) % x.dim() == 0:
            other_dim = None
        size, limits = sizes.sized(x, count)
        return key._replace(
            size=size,
            limits=limits,
            has_residual=residual is not None,
            operand_dim=other_dim,
            saves_arguments=x.requires_grad and (w is None or w.requires_grad) and (b is None or b.is_leaf),
            is_hooked=saved_tensors_hooks_on_top(True) is not None,
            is_inplace=self.is_inplace,
            has_own_node=_has_own_node(operation, x, w),
            returns_view=operation.returns_view(x),
            makes_z=not isinstance(operation, Pointwise) or b is not None,
        )


def plan_dense(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, activation: Activation, save: str, is_usual: bool
) -> Planned:
    """For ``dense_bias_act``. The facts leave out the number of rows, because lengths of sequences change from call to
    call."""
    if not is_usual or not x.dim() or not w.dim():
        return plan_for(MATMUL, x, w, b, residual, activation, save, None, is_usual=False)
    shape = x.shape
    shapes = MATMUL, len(shape) if residual is None else shape, shape[-1]
    elements = x.numel() * w.shape[0] // max(1, shape[-1])
    return plan_for(MATMUL, x, w, b, residual, activation, save, shapes, elements)


def plan_for(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    save: str,
    shapes: Hashable,
    elements: int | None = None,
    is_inplace: bool = False,
    is_usual: bool = True,
) -> Planned:
    """For a call of any operation.

    Args:
        shapes: what the checks and the decision depend on, of the operation and of the shape of x.
        elements: how many the result has; may be left out where ``shapes`` say so too.
        is_inplace: whether the result is to be written over x.
        is_usual: ``validation.are_usual`` of all tensors.
    """
    if not is_usual:
        return Call(operation, x, w, b, residual, activation, save, None, is_inplace).plan(), activation, ()
    size, limits = sizes.sized(x, elements)  # where that is None, ``shapes`` say it
    given = activation
    operands: tuple[Tensor, ...] = ()
    operand_dim = plain_because = None
    facts: tuple[Hashable, ...]
    if size == "small" and save == "auto" and not is_inplace:
        # PyTorch computes it, whatever needs gradients and whoever follows: what the checks depend on is enough.
        facts = (
            shapes,
            activation.fallback_reason,
            x.dtype,
            x.is_cpu or x.device,
            w is not None and (w.dtype, w.is_cpu or w.device, w.shape),
            b is not None and (b.dtype, b.is_cpu or b.device, b.shape),
            residual is not None and (residual.dtype, residual.is_cpu or residual.device, residual.shape),
            autocast_is_active() and autocast_dtype(x),
        )
    else:
        plain_because = followed_by()
        if is_inplace and plain_because is None and is_under_checkpoint():
            plain_because = COPIED_BY_CHECKPOINT
        if activation.needs_tracing and plain_because is None and x.dtype is not torch.float64:
            validation.check_call(operation, x, w, b, residual)  # what is traced for z must have a shape and a dtype
            shape = operation.shape(x, w)
            elements = math.prod(shape)
            if is_inplace or save != "auto" or elements * x.itemsize >= limits.medium:
                dtype = (autocast_dtype(x) if operation.is_cast else None) or x.dtype
                activation, operands, operand_dim = with_operands(activation, shape, dtype, x.device)
        is_torchs = activation.needs_tracing or activation.fallback_reason is not None
        facts = (
            shapes,
            limits,
            size,
            # Of what PyTorch computes only the reason is asked for: the record may hold a user's tensors.
            activation if not is_torchs else activation.fallback_reason,
            save,
            is_inplace,
            operand_dim,
            operands and needs_gradient(*operands),
            x.dtype,
            x.layout,
            x.is_neg() or is_of_transform(x),
            x.is_cpu or x.device,
            x.requires_grad,
            w is not None and (w.dtype, w.layout, w.is_cpu or w.device, w.requires_grad, w.is_neg(), w.shape),
            b is not None
            and (b.dtype, b.layout, b.is_cpu or b.device, b.requires_grad, b.is_neg(), b.shape, b.is_leaf),
            residual is not None
            and (
                residual.dtype,
                residual.layout,
                residual.is_cpu or residual.device,
                residual.requires_grad,
                residual.is_neg(),
                residual.shape,
            ),
            torch.is_grad_enabled(),
            autocast_is_active() and autocast_dtype(x),
            saved_tensors_hooks_on_top(True) is None,
            plain_because,
            dispatch_mode_count() and _mode_types(),
        )
    try:
        known = _plans.get(facts)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        facts, known = (), None
    if known is not None:
        return (known, activation, operands) if known.path != "composite" else (known, given, ())
    call = Call(
        operation, x, w, b, residual, activation, save, elements, is_inplace, operands, operand_dim, plain_because
    )
    found = _plans.put(facts, call.plan())
    # PyTorch computes what was given, and not what was traced of it.
    return (found, activation, operands) if found.path != "composite" else (found, given, ())


def with_operands(
    activation: Activation, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """A user's function made into an activation for z of this shape and dtype, with the tensors that it reads."""
    if not activation.needs_tracing:
        return WithOperands(activation)
    # Here, because tracing takes parts of torch whose import takes a second.
    from .activations.custom import trace_activation

    return trace_activation(activation, tuple(shape), dtype, device)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether any needs a gradient, and gradients are switched on."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts a matmul's arguments to, or None where it is off; float64 stays."""
    if not validation.is_autocast(x.device.type):
        return None
    return x.dtype if x.dtype is torch.float64 else torch.get_autocast_dtype(x.device.type)


def followed_by() -> str | None:
    """Who follows what is computed and must see PyTorch's own operations, or None."""
    is_free = (
        not functorch_is_active()
        and forward_ad_level() < 0
        and dispatch_mode_count() == 0
        and torchscript_state() is None
    )
    return None if is_free else _followed_by()


def _mode_types() -> tuple[type, ...]:
    """Of the dispatch modes that are active; one of them may count operators that it knows."""
    return tuple(type(dispatch_mode_at(i)) for i in range(dispatch_mode_count()))


def _followed_by() -> str | None:
    if functorch_is_active():
        return "a transform of torch.func follows the computation"
    if forward_ad_level() >= 0:
        return "forward-mode differentiation follows the computation"
    if torchscript_state() is not None:
        return "TorchScript traces the computation"
    if infrastructure_mode(PROXY_MODE) is not None:
        return "make_fx traces the computation"
    if infrastructure_mode(FAKE_MODE) is not None:
        return "fake tensors stand for the results"
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    selective = (isinstance(m, SELECTIVE_CHECKPOINT_MODES) or getattr(m, "keeps_results", False) for m in modes)
    # It saves the results of some operations, a matmul's say, which must not be overwritten.
    return "a selective checkpoint saves results of single operations" if any(selective) else None


def _has_own_node(operation: Operation, x: Tensor, w: Weight) -> bool:
    """Whether a node of this package makes z, saving less than torch's own."""
    saves_both = x.requires_grad and w is not None and w.requires_grad
    return isinstance(operation, Convolution) and not saves_both and operation.padding_in_numbers(w) is not None
