"""A call's plan is looked up, or decided, and carried out: ``plan, call = plan_for(call); y = plan.run(call)``.

A call's *facts* are one tuple of what can be read off the arguments and this thread in about two microseconds: dtypes,
shapes, which tensors need gradients, autocast, modes. Plans are memoised by facts, so a call that was seen before is
neither checked nor decided again. A call with new facts is checked (``validation.py``) and decided (``decide.py``).

A path (``PATHS``) carries a plan out: calls the operation, the activation, and the autograd Functions around them.
"""

import functools
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch
from .._torch import (
    autocast_is_active,
    compiled_checkpoint,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    is_of_transform,
    torchscript_state,
)
from ..activations import Activation, resolve
from ..activations.table import by_name
from ..kernels.operations import MATMUL, Convolution, Matmul, Mlp, Pointwise
from ..ops.dropout import Dropout
from ..ops.mlp_forward import BlockDropout, Linear, unpacked
from ..ops.mlp_node import MLP
from ..ops.pointwise import BiasAct, place_of
from ..ops.saved_buffers import is_under_checkpoint
from ..utils.caching import BoundedCache
from . import sizes, validation
from .casts import autocast_dtype, with_casts
from .decide import Call, Decision, decide, needs_gradient
from .tracers import followed_by, with_operands

#: Why a call under a checkpoint that writes over its input is left to PyTorch. It may run with a copy the second time,
#: by hooks around it, and the writes to a copy are counted from 0: no number tells whether the output was edited.
COPIED_BY_CHECKPOINT = "it writes over its input, of which a checkpoint around it may hold a copy"

#: Dropouts of fewer numbers save what PyTorch's do: packing a mask takes some ten operations.
LEAST_DROPPED = 1 << 16


class Plan(Decision):
    """A decision that can be carried out."""

    __slots__ = ()

    def run(self, call: Call) -> Tensor:
        """The result of a call with this plan."""
        return PATHS[self.path](self, call if self.cast is None else with_casts(self, call))


#: Plans by facts. A large model has some hundreds; changing lengths and shapes push out the oldest.
_plans: BoundedCache[Plan] = BoundedCache(4096)
_log = logging.getLogger("fusedlayers")


# --- from a call to its plan ------------------------------------------------------------------------------------------


def plan_for(call: Call) -> tuple[Plan, Call]:
    """The plan for a call, and the call as it is computed: with the record of its activation, which is traced where the
    plan does not leave it to PyTorch."""
    operation, tensors, given, *_ = call
    activation = by_name.get(given) if type(given) is str else given
    if type(activation) is not Activation:
        activation = resolve(given, operation.function)
    call = call if activation is given else call._replace(activation=activation)
    is_block, is_compiling = type(operation) is Mlp, torch.compiler.is_compiling()
    is_there = tensors[0] is not None and (tensors[1] is not None or type(operation) is Pointwise)
    is_usual = is_there and not is_compiling
    if is_block:  # under TorchScript sizes are tensors
        is_usual &= tensors[-2] is not None and tensors[-4] is not None and torchscript_state() is None
    for t in tensors:
        is_usual &= t is None or (type(t) in validation.PLAIN_TYPES and not t.is_nested)
    if not is_usual:
        return _checked(call, followed_by() if is_block and not is_compiling else None), call
    facts, because, traced = _facts(call)
    try:
        plan = _plans.get(facts)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        plan = None
    if plan is None:
        plan = _plans.put(facts, _checked(traced, because))
    # PyTorch computes what was given, and not what was traced of it.
    return plan, call if plan.path in ("composite", "by_layer") else traced


def _facts(call: Call) -> tuple[Hashable, str | None, Call]:  # to enter more functions takes longer than these tests
    """The facts of a call; why PyTorch must compute it, or None; and the call with its activation traced."""
    operation, (x, w, *others), activation, save, is_inplace, *_ = call
    shape: Any = x.shape
    limits = sizes.limits_of(x) if x.is_cuda else (sizes.SMALL_BYTES, sizes.MEDIUM_BYTES)
    size = 2  # of a convolution the shape tells
    options: Any = type(operation) is Pointwise and type(operation.dim)
    if type(operation) is not Convolution:
        result_bytes = x.numel() * x.itemsize
        if w is not None:
            rows_bytes = result_bytes // (x.shape[-1:].numel() or 1)
            result_bytes = rows_bytes * w.shape[:1].numel()
        # Lengths of sequences change from call to call: where nothing depends on them, the facts leave them out.
        if type(operation) is Mlp:
            result_bytes //= 2 if operation.is_packed else 1
            shape = len(shape), shape[-1:], rows_bytes.bit_length()
            options = type(operation.dropout), type(operation.chunks)  # True is 1, and is refused
        elif others[1] is None and (w is not None or others[0] is None):
            shape = len(shape), w is not None and shape[-1:]
        size = (result_bytes >= limits[0]) + (result_bytes >= limits[1])
    cast = autocast_is_active() and autocast_dtype(x)
    facts = [operation, options, shape, size, limits, save, is_inplace, cast]
    facts += x.dtype, x.is_cpu or x.device
    for t in (w, *others):
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
    for t in (x, w, *others):
        facts += (None,) if t is None else (t.layout, t.requires_grad, t.is_neg())
        if type(operation) is Mlp and t is not None:
            facts += type(t), t.is_leaf
    return tuple(facts), because, call


def _checked(call: Call, because: str | None) -> Plan:
    validation.check_call(call.operation, call.tensors, call.save)
    plan = Plan(*decide(call, because))
    if not torch.compiler.is_compiling():
        _log.debug("%s: %s", call.operation.function, plan)
    return plan


def _traced(call: Call, least_bytes: int) -> Call:
    """The call with the trace of a user's function, if its result is large enough."""
    operation, tensors, activation, save, is_inplace, *_ = call
    validation.check_call(operation, tensors, save)  # what is traced for z must have a shape and a dtype
    x, w, *_ = tensors
    shape = operation.shape(x, w)
    if not is_inplace and save == "auto" and math.prod(shape) * x.itemsize < least_bytes:
        return call
    dtype = (autocast_dtype(x) if operation.is_cast else None) or x.dtype
    activation, operands, operand_dim = with_operands(activation, shape, dtype, x.device)
    return call._replace(activation=activation, operands=operands, operand_dim=operand_dim)


# --- the paths of a plan ----------------------------------------------------------------------------------------------


def run_in_place(call: Call, dropout: float) -> Tensor:
    """``bias_act`` over its input."""
    x, _, b, _ = call.tensors
    validation.check_tensors("bias_act", {"input": x}, bias=b)
    plan, found = plan_for(call._replace(is_inplace=True))
    validation.check_inplace(x, call.save, dropout)
    # Autograd refuses some views, but only after a Function has written; copy_ asks first.
    if not plan.overwrites or (x._is_view() and needs_gradient(x, b)):
        plan, found = plan_for(call._replace(tensors=(x.clone(), None, b, None)))
        return x.copy_(plan.run(found))  # type: ignore[no-any-return]
    return plan.run(found)


def _composite(plan: Plan, call: Call) -> Tensor:
    """Run a call by PyTorch's own operations."""
    operation, tensors, activation, *_ = call
    if isinstance(operation, Mlp):
        x, (layer, *others), last = _layers(call)
        activated = validation.activated(operation.function, activation, F.linear(x, *layer))
        return F.linear(hidden_of(activated, [F.linear(x, *other) for other in others], operation.dropout), *last)
    return validation.activated(operation.function, activation, _pre_activation(operation, *tensors))


def _pre_activation(operation: Any, x: Tensor, w: Any, b: Tensor | None, residual: Tensor | None) -> Tensor:
    z: Tensor = operation(x, w, b)
    return z if residual is None else z + residual


def _compiled(plan: Plan, call: Call) -> Tensor:
    """Functional operations that save what the plan says, and that the compiler fuses."""
    operation, tensors, activation, *_ = call
    # An exported program is for inference.
    if plan.saved in ("nothing", "eager") or _torch.is_exporting():
        y: Tensor = activation.plain(_pre_activation(operation, *tensors))
    elif plan.saved == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from ..ops.compiled_act import output_saved

        z = _pre_activation(operation, *tensors)
        y = output_saved(z, activation.name, tuple(activation.parameters.items()))
    else:
        y = compiled_checkpoint(lambda *inputs: activation.plain(_pre_activation(operation, *inputs)), *tensors)
    return y


def _without_gradients(plan: Plan, call: Call) -> Tensor:
    """Run a layer by a backend's kernels; nothing is saved, and the output carries no branch bit."""
    operation, (x, w, b, residual), *_ = call
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    z = operation(x, w, b)  # type: ignore[operator]
    return plan.backend.bias_act(
        z, kernel_b, plan.activation, call.operands, residual=residual, dim=plan.dim, encode=False,
        out=z if plan.overwrites else None,
    )  # fmt: skip


def _fused(plan: Plan, call: Call) -> Tensor:
    """Run a layer by a backend's kernels, and a block as one node, for gradients."""
    if plan.block is not None:
        return _block(plan, call)
    operation: Any = call.operation
    given, w, b, residual = call.tensors
    x = given
    if plan.flattens:
        x, residual = operation.flattened(given), None if residual is None else operation.flattened(residual)
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    if type(operation) is Matmul:
        z = F.linear(x, w, b)  # as operation(x, w, b), without its call
    elif w is None and b is None:
        z = x
    else:
        z = operation(x, w, b)
    if residual is not None and plan.saved == "input":
        z, residual = z.add_(residual), None
    if plan.saved != "output":
        origin = (x, w, b, operation) if plan.saved == "recompute" else None
        y: Tensor = BiasAct.apply(plan, z, kernel_b, residual, origin, *call.operands)
    else:
        places = (
            place_of(z) if z.requires_grad else None,
            None if kernel_b is None or not kernel_b.requires_grad else place_of(kernel_b),
            None if residual is None or not residual.requires_grad else place_of(residual),
        )
        y = BiasAct.apply(plan, z, kernel_b, residual, None, *call.operands)
        node: Any = y.grad_fn
        node.places = places
    return operation.unflattened(y, given) if plan.flattens else y


def _block(plan: Plan, call: Call) -> Tensor:
    """A block in one node."""
    operation, (input, *layers), *_ = call
    block = plan.block
    assert block is not None and isinstance(operation, Mlp)
    x = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    *first, w, b = layers
    if operation.dropout:
        dropout = BlockDropout.draw(float(operation.dropout), len(x), w.shape[1], x.dtype, x.device)
        block = block._replace(dropout=dropout)
    y: Tensor = MLP.apply(block, len(first) // 2, x, w, b, *first[::2], *first[1::2], *call.operands)
    return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])


def _by_layer(plan: Plan, call: Call) -> Tensor:
    """A block's layers one by one, each by a plan of its own."""
    operation, tensors, activation, save, *_ = call
    assert isinstance(operation, Mlp)
    if torch.compiler.is_compiling() and needs_gradient(*tensors):
        if save == "recompute":
            again = call._replace(save="auto")
            y: Tensor = compiled_checkpoint(lambda *given: _by_layer(plan, again._replace(tensors=given)), *tensors)
            return y
        x, layers, last = _layers(call)
        if len(layers) > 1 and not operation.dropout and needs_gradient(x, *layers[0], *layers[1]):
            # Else the compiler saves the gate's product with the other half, beside both.
            parts = [F.linear(x, *layer) for layer in layers]
            return F.linear(compiled_checkpoint(lambda gate, up: activation.plain(gate) * up, *parts), *last)
    x, (layer, *others), last = _layers(call)
    save = "auto" if save == "recompute" else save  # which would save more, layer by layer
    first, of_first = plan_for(Call(MATMUL, (x, *layer, None), activation, save))
    activated = first.run(of_first)
    if first.path == "no_grad" and not needs_gradient(x, *(t for other in others for t in other)):
        for other in others:  # the activation's result is nobody else's
            activated.mul_(F.linear(x, *other))
        dropout = operation.dropout
        return F.linear(F.dropout(activated, dropout, inplace=True) if dropout else activated, *last)
    return F.linear(hidden_of(activated, [F.linear(x, *other) for other in others], operation.dropout), *last)


def _layers(call: Call) -> tuple[Tensor, Sequence[Linear], Linear]:
    """The input of a block, its first layers, gate and up of a packed one too, and the last."""
    x, *tensors = call.tensors
    *first, last = (Linear(w, b) for w, b in zip(tensors[::2], tensors[1::2], strict=True))
    return x, unpacked(first) if call.operation.is_packed else first, last  # type: ignore[union-attr]


def hidden_of(activated: Tensor, others: Sequence[Tensor], dropout: float) -> Tensor:
    """The input of a block's last layer: the product with the other half of a gate, and dropout."""
    return dropped(functools.reduce(torch.mul, others, activated), dropout)


def dropped(y: Tensor, p: float) -> Tensor:
    """``F.dropout(y, p)``, which saves a bit for each number of a large y; y itself for 0."""
    if not p:
        return y
    is_large = needs_gradient(y) and type(y) is Tensor and y.numel() >= LEAST_DROPPED and p < 1
    if not is_large or torch.compiler.is_compiling() or followed_by():
        return F.dropout(y, p)
    dropped: Tensor = Dropout.apply(y, p)
    return dropped


#: What carries out each path of a plan.
PATHS: dict[str, Callable[[Plan, Call], Tensor]] = {
    "composite": _composite,
    "compiled": _compiled,
    "no_grad": _without_gradients,
    "fused": _fused,
    "by_layer": _by_layer,
}
