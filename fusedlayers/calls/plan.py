"""A layer's call: its plan is looked up, or decided, and carried out.

A call's *facts* are one tuple of what can be read off the arguments and this thread in about two microseconds: dtypes,
shapes, which tensors need gradients, autocast, modes. Plans are memoised by facts, so a call that was seen before is
neither checked nor decided again. A call with new facts is checked (``validation.py``) and decided (``plan.py``).

A path (``PATHS``) carries a plan out: calls the operation, the activation, and the autograd Functions around them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import _torch
from .._torch import (
    FAKE_MODE,
    PROXY_MODE,
    SAVED,
    SELECTIVE_CHECKPOINT_MODES,
    autocast_is_active,
    compiled_checkpoint,
    dispatch_mode_at,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    infrastructure_mode,
    is_of_transform,
    saved_tensors_hooks_on_top,
    torchscript_state,
)
from ..activations import Activation, WithOperands, resolve
from ..activations.table import by_name
from ..kernels.operations import Convolution, Matmul, Operation, Pointwise
from ..ops.dropout import Dropout
from ..ops.pointwise import BiasAct, Origin, place_of
from ..ops.saved_buffers import is_under_checkpoint
from ..utils.caching import BoundedCache
from . import sizes, validation
from .decide import Call, Plan, autocast_dtype, decide, needs_gradient

#: Why a call under a checkpoint that writes over its input is left to PyTorch. It may run with a copy the second time,
#: by hooks around it, and the writes to a copy are counted from 0: no number tells whether the output was edited.
COPIED_BY_CHECKPOINT = "it writes over its input, of which a checkpoint around it may hold a copy"

#: Dropouts of fewer numbers save what PyTorch's do: packing a mask takes some ten operations.
LEAST_DROPPED = 1 << 16

#: Plans by facts. A large model has some hundreds; changing lengths and shapes push out the oldest.
_plans: BoundedCache[Plan] = BoundedCache(4096)
_log = logging.getLogger("fusedlayers")


def execute(plan: Plan, call: Call) -> Tensor:
    """The result of a call, by its plan."""
    return PATHS[plan.path](plan, call)


def run_in_place(call: Call, dropout: float) -> Tensor:
    """``bias_act`` over its input."""
    validation.check_tensors("bias_act", {"input": call.x}, bias=call.b)
    plan, found = plan_for(call._replace(is_inplace=True))
    validation.check_inplace(call.x, call.save, dropout)
    # Autograd refuses some views, but only after a Function has written; copy_ asks first.
    if not plan.overwrites or (call.x._is_view() and needs_gradient(call.x, call.b)):
        return call.x.copy_(execute(*plan_for(call._replace(x=call.x.clone()))))
    return execute(plan, found)


# --- from a call to its plan ------------------------------------------------------------------------------------------


def plan_for(call: Call) -> tuple[Plan, Call]:
    """The plan for a call, and the call as it is computed: with the record of its activation, which is traced where the
    plan does not leave it to PyTorch."""
    given = call.activation
    activation = by_name.get(given) if type(given) is str else given
    if type(activation) is not Activation:
        activation = resolve(given, call.operation.function)
    call = call if activation is given else call._replace(activation=activation)
    is_there = call.x is not None and (call.w is not None or type(call.operation) is Pointwise)
    is_usual = is_there and not torch.compiler.is_compiling()
    for t in call[1:5]:
        is_usual &= t is None or (type(t) in validation.PLAIN_TYPES and not t.is_nested)
    if not is_usual:
        return _checked(call, None), call
    facts, because, traced = _facts(call)
    try:
        plan = _plans.get(facts)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        plan = None
    if plan is None:
        plan = _plans.put(facts, _checked(traced, because))
    # PyTorch computes what was given, and not what was traced of it.
    return plan, call if plan.path == "composite" else traced


def _facts(call: Call) -> tuple[Hashable, str | None, Call]:  # to enter more functions takes longer than these tests
    """The facts of a call; why PyTorch must compute it, or None; and the call with its activation traced."""
    operation, x, w, b, residual, activation, save, is_inplace, *_ = call
    shape: Any = x.shape
    limits = sizes.limits_of(x) if x.is_cuda else (sizes.SMALL_BYTES, sizes.MEDIUM_BYTES)
    size = 2  # of a convolution the shape tells
    if type(operation) is not Convolution:
        result_bytes = x.numel() * x.itemsize
        if w is not None:
            result_bytes = result_bytes // (x.shape[-1:].numel() or 1) * w.shape[:1].numel()
        size = (result_bytes >= limits[0]) + (result_bytes >= limits[1])
        # Lengths of sequences change from call to call: where nothing depends on them, the facts leave them out.
        if residual is None and (w is not None or b is None):
            shape = len(shape), w is not None and shape[-1:]
    cast = autocast_is_active() and autocast_dtype(x)
    facts = [operation, w is None and type(operation.dim), shape, size, limits, save, is_inplace, cast]
    facts += x.dtype, x.is_cpu or x.device
    for t in (w, b, residual):
        facts += (None,) if t is None else (t.dtype, t.is_cpu or t.device, t.shape)
    if not size and save == "auto" and not is_inplace:
        # PyTorch computes it, whatever needs gradients and whoever follows.
        return (*facts, activation.fallback_reason), None, call
    is_followed = functorch_is_active() or forward_ad_level() >= 0 or dispatch_mode_count() or torchscript_state()
    because = followed_by() if is_followed else None
    if is_inplace and because is None and is_under_checkpoint():
        because = COPIED_BY_CHECKPOINT
    if activation.needs_tracing and because is None and x.dtype is not torch.float64:
        call = _traced(call, limits[0])
        activation = call.activation
        facts += call.operand_dim, needs_gradient(*call.operands)
    is_torchs = activation.needs_tracing or activation.fallback_reason is not None
    # Of what PyTorch computes only the reason is asked for: the record may hold a user's tensors.
    facts += because, activation.fallback_reason if is_torchs else activation, torch.is_grad_enabled()
    facts += (is_of_transform(x),)
    for t in (x, w, b, residual):
        facts += (None,) if t is None else (t.layout, t.requires_grad, t.is_neg())
    return tuple(facts), because, call


def _checked(call: Call, because: str | None) -> Plan:
    validation.check_call(*call[:5])
    plan = decide(call, because)
    if not torch.compiler.is_compiling():
        _log.debug("%s: %s", call.operation.function, plan)
    return plan


def _traced(call: Call, least_bytes: int) -> Call:
    """The call with the trace of a user's function, if its result is large enough."""
    operation, x, w, b, residual, activation, save, is_inplace, *_ = call
    validation.check_call(operation, x, w, b, residual)  # what is traced for z must have a shape and a dtype
    shape = operation.shape(x, w)
    if not is_inplace and save == "auto" and math.prod(shape) * x.itemsize < least_bytes:
        return call
    dtype = (autocast_dtype(x) if operation.is_cast else None) or x.dtype
    activation, operands, operand_dim = with_operands(activation, shape, dtype, x.device)
    return call._replace(activation=activation, operands=operands, operand_dim=operand_dim)


def with_operands(
    activation: Activation, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """A user's function made into an activation for z of this shape and dtype, with the tensors that it reads."""
    if not activation.needs_tracing:
        return WithOperands(activation)
    # Here, because tracing takes parts of torch whose import takes a second.
    from ..activations.custom import trace_activation

    return trace_activation(activation, tuple(shape), dtype, device)


def followed_by() -> str | None:
    """The active tracer or transform that must see PyTorch's own operations, or None."""
    if functorch_is_active():
        return _torch.UNSEEN or "a transform of torch.func follows the computation"
    if forward_ad_level() >= 0:
        return "forward-mode differentiation follows the computation"
    if torchscript_state() is not None:
        return "TorchScript traces the computation"
    if not dispatch_mode_count():
        return None
    if infrastructure_mode(PROXY_MODE) is not None:
        return "make_fx traces the computation"
    if infrastructure_mode(FAKE_MODE) is not None:
        return "fake tensors stand for the results"
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    selective = (isinstance(m, SELECTIVE_CHECKPOINT_MODES) or getattr(m, "keeps_results", False) for m in modes)
    # It saves the results of some operations, a matmul's say, which must not be overwritten.
    return "a selective checkpoint saves results of single operations" if any(selective) else None


# --- the paths of a plan ----------------------------------------------------------------------------------------------


def _composite(plan: Plan, call: Call) -> Tensor:
    """By PyTorch's own operations."""
    operation, x, w, b, residual, activation, *_ = call
    z = operation(x, w, b)
    return validation.activated(operation.function, activation, z if residual is None else z + residual)


def _compiled(plan: Plan, call: Call) -> Tensor:
    """Functional operations that save what the plan says, and that the compiler fuses."""
    operation, x, w, b, residual, activation, *_ = call

    def pre_activation(x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None) -> Tensor:
        z = operation(x, w, b)
        return z if residual is None else z + residual

    # An exported program is for inference.
    if plan.saved in ("nothing", "eager") or _torch.is_exporting():
        y: Tensor = activation.plain(pre_activation(x, w, b, residual))
    elif plan.saved == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from ..ops.compiled_act import output_saved

        z, parameters = pre_activation(x, w, b, residual), tuple(activation.parameters.items())
        y = output_saved(z, activation.name, parameters)
    else:
        y = compiled_checkpoint(lambda *inputs: activation.plain(pre_activation(*inputs)), x, w, b, residual)
    return y


def _without_gradients(plan: Plan, call: Call) -> Tensor:
    """By a backend's kernels; nothing is saved, and the output carries no branch bit."""
    operation, x, w, b, residual, *_ = call
    if plan.cast is not None and type(operation) is Matmul:
        x, w, b = x.to(plan.cast), w.to(plan.cast), None if b is None else b.to(plan.cast)
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    z = operation(x, w, b)
    return plan.backend.bias_act(
        z, kernel_b, plan.activation, call.operands, residual=residual, dim=plan.dim, encode=False,
        out=z if plan.overwrites else None,
    )  # fmt: skip


def _fused(plan: Plan, call: Call) -> Tensor:
    """By a backend's kernels, for gradients."""
    operation, given, w, b, residual, _, _, _, operands, _ = call
    x, residual = _flattened(operation, given, residual) if plan.flattens else (given, residual)
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    if plan.cast is not None:
        # What torch can cast it casts: a weight that is used many times is then cast, and saved, once.
        kernel_b = None if kernel_b is None else kernel_b.to(plan.cast)
        x = x.to(plan.cast) if plan.saved == "recompute" else x
        if plan.saved == "output" and type(operation) is Matmul:
            x, w = shared_cast(x, plan.cast), shared_cast(w, plan.cast)
    if type(operation) is Matmul:
        z = F.linear(x, w, b)  # as operation(x, w, b), without its call
    elif w is None and b is None:
        z = x
    else:
        z = operation(x, w, b)
    if residual is not None and plan.saved == "input":
        z, residual = z.add_(residual), None
    if plan.saved != "output":
        origin = Origin(x, w, b, operation.__call__) if plan.saved == "recompute" else None
        y: Tensor = BiasAct.apply(plan, z, kernel_b, residual, origin, *operands)
    else:
        places = (
            place_of(z) if z.requires_grad else None,
            None if kernel_b is None or not kernel_b.requires_grad else place_of(kernel_b),
            None if residual is None or not residual.requires_grad else place_of(residual),
        )
        y = BiasAct.apply(plan, z, kernel_b, residual, None, *operands)
        node: Any = y.grad_fn
        node.places = places
    return operation.unflattened(y, given) if plan.flattens else y


def shared_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, for the dtype that autocast casts to; of a matrix whose cast torch caches, that cast.

    While autocast is on, torch casts a parameter once for all who use it, and saves that one cast. ``parameter.to``
    makes another each time, and torch has no function that returns its own; but operations save it: it is read from the
    node of a product that computes nothing.
    """
    is_trained = tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()
    is_shared = is_trained and torch.is_autocast_cache_enabled()
    if tensor.dtype is not torch.float32 or tensor.dim() != 2 or not is_shared:
        return tensor.to(dtype)
    nothing = torch.empty(tensor.shape[1], 0, dtype=dtype, device=tensor.device, requires_grad=True)
    # Saved-tensor hooks, a checkpoint's for one, would replace the cast.
    with saved_tensors_hooks(lambda t: t, lambda t: t) if saved_tensors_hooks_on_top(True) else nullcontext():
        cast = getattr(torch.mm(tensor, nothing).grad_fn, SAVED + "self", None)
    return cast if cast is not None and cast.dtype is dtype else tensor.to(dtype)


def _flattened(operation: Operation, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return operation.flattened(x), None if residual is None else operation.flattened(residual)


#: What carries out each path of a plan.
PATHS: dict[str, Callable[[Plan, Call], Tensor]] = {
    "composite": _composite,
    "compiled": _compiled,
    "no_grad": _without_gradients,
    "fused": _fused,
}


# --- with dropout -----------------------------------------------------------------------------------------------------


def run_dropout(call: Call, p: float) -> Tensor:
    """``F.dropout`` of what a call computes."""
    validation.check_dropout(call.operation.function, p)
    return dropped(execute(*plan_for(call)), p)


def dropped(y: Tensor, p: float) -> Tensor:
    """``F.dropout(y, p)``, which saves a bit for each number of a large y; y itself for 0."""
    if not p:
        return y
    is_large = needs_gradient(y) and type(y) is Tensor and y.numel() >= LEAST_DROPPED and p < 1
    if not is_large or torch.compiler.is_compiling() or followed_by():
        return F.dropout(y, p)
    dropped: Tensor = Dropout.apply(y, p)
    return dropped
