"""Carries out a plan (``plan.py``): calls the operation, the activation, and the autograd Functions around them.

What changes from call to call and is no part of a plan, a dropout's seed for one, is made here. Of a block that runs
layer by layer each layer asks for a plan of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _torch, backends, validation
from .activations import DTYPES, Activation
from .backends.operations import MATMUL, Matmul, Operation, Pointwise, Weight
from .block_plan import BlockPlan
from .call import autocast_dtype, followed_by, needs_gradient, plan_dense, plan_for
from .ops.autocast import shared_cast
from .ops.conv import Conv
from .ops.dropout import act_dropout, drop, has_torchs_mask, serves
from .ops.mlp import MLP
from .ops.mlp_forward import Block, BlockDropout, BlockOptions, Linear, unpacked
from .ops.place import InputPlace, place_of
from .ops.pointwise import BiasAct, Origin
from .plan import Plan
from .sizes import is_small
from .utils.compiled_checkpoint import compiled_checkpoint
from .utils.profile_ranges import profile_range, range_name

Operands = Sequence[Tensor]


def dropped(y: Tensor, p: float) -> Tensor:
    """``F.dropout(y, p)`` that keeps a bit for each element; by PyTorch where that cannot be, or is not worth a node in
    Python."""
    is_ours = validation.are_usual((y,)) and needs_gradient(y)
    is_ours = is_ours and y.dtype in DTYPES and not is_small(y)
    is_ours = is_ours and followed_by() is None and validation.unusual_because(y) is None
    if not is_ours or not has_torchs_mask(y, p):
        return F.dropout(y, p) if p else y
    return drop(y, p, backends.choose(y))


def run_dropout(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    p: float,
    save: str,
) -> Tensor:
    """``F.dropout(activation(operation(x, w, b) + residual), p)``, the last two in one node where outputs allow it."""
    given, is_view = x, not torch.compiler.is_compiling() and operation.returns_view(x)
    if is_view:
        x, residual = _flattened(operation, x, residual)
    is_own = not (isinstance(operation, Pointwise) and b is None and residual is None)
    z = operation(x, w, b)
    if residual is not None:
        z = z + residual if z is x or residual.dtype is not z.dtype else z.add_(residual)
    along = Pointwise(operation.dim)
    is_usual = validation.are_usual((z,))
    plan, record, operands = plan_for(
        along, z, None, None, None, activation, save, (along, z.dim()), z.numel(), False, is_usual
    )
    if plan.path in ("fused", "in_place") and plan.saved == "output" and not operands and serves(z, record, p):
        y = act_dropout(z, record, p, plan.backend or backends.choose(z, record), is_own)
    else:
        y = dropped(POINTWISE[plan.path](plan, along, z, None, None, None, record, operands), p)
    return operation.unflattened(y, given) if is_view else y


def _composite(
    plan: Plan | None, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """By PyTorch's own operations."""
    z = operation(x, w, b)
    return validation.activated(operation.function, activation, z if residual is None else z + residual)


def _sum(operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None) -> Tensor:
    z = operation(x, w, b)
    return z if residual is None else z + residual


def _in_place(
    plan: Plan, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """By PyTorch's own operations, the activation in place."""
    assert activation.in_place is not None
    given = x
    if plan.flattens:
        x, residual = _flattened(operation, x, residual)
    z = operation(x, w, b)
    y = activation.in_place(z if residual is None else z.add_(residual))
    return operation.unflattened(y, given) if plan.flattens else y


def _flattened(operation: Operation, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return operation.flattened(x), None if residual is None else operation.flattened(residual)


def _fused(
    plan: Plan, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """By a backend's kernels, for gradients."""
    given = x
    if plan.flattens:
        x, residual = _flattened(operation, x, residual)
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    if plan.cast is not None:
        # What torch can cast it casts: a weight that is used many times is then cast, and saved, once.
        kernel_b = None if kernel_b is None else kernel_b.to(plan.cast)
        x = x.to(plan.cast) if plan.saved == "recompute" else x
        if plan.saved == "output" and isinstance(operation, Matmul):
            x, w = shared_cast(x, plan.cast), shared_cast(w, plan.cast)
    z = Conv.apply(x, w, b, operation) if plan.has_own_node else operation(x, w, b)
    if residual is not None and plan.saved == "input":
        z, residual = z.add_(residual), None
    origin = Origin(x, w, b, operation.__call__) if plan.keeps_origin else None
    keeps_place = origin is None and plan.saved == "output"
    place = InputPlace.of(z, kernel_b, residual) if keeps_place else None
    y: Tensor = BiasAct.apply(plan, z, kernel_b, residual, origin, *operands)
    if place is not None:
        node: Any = y.grad_fn
        node.place = place
    return operation.unflattened(y, given) if plan.flattens else y


def _fused_pointwise(
    plan: Plan, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """By a backend's kernel, for gradients, where nothing but a bias comes before the activation."""
    if not plan.bias_in_kernel:
        x, b = operation(x, None, b), None
    origin = Origin(x, None, None, operation.__call__) if plan.keeps_origin else None
    place = None
    if origin is None and plan.saved == "output":  # InputPlace.of, without its calls: an activation alone may be small
        of_z = place_of(x) if x.requires_grad else None
        place = [of_z, None if b is None or not b.requires_grad else place_of(b)]
    y: Tensor = BiasAct.apply(plan, x, b, None, origin, *operands)
    if place is not None:
        node: Any = y.grad_fn
        node.place = place
    return y


def _without_gradients(
    plan: Plan, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """By a backend's kernels; nothing is saved, and the output carries no branch bit."""
    backend, cast = plan.backend, plan.cast
    if cast is not None and isinstance(operation, Matmul):
        x, w, b = x.to(cast), w.to(cast), None if b is None else b.to(cast)
    kernel_b, b = (b, None) if plan.bias_in_kernel else (None, b)
    z = operation(x, w, b)
    out = z if plan.overwrites else None
    return backend.bias_act(z, kernel_b, activation, operands, residual=residual, dim=plan.dim, encode=False, out=out)


def _compiled(
    plan: Plan, operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None,
    activation: Activation, operands: Operands,
) -> Tensor:  # fmt: skip
    """Functional operations that save what the plan says, and that the compiler fuses."""
    pre_activation = functools.partial(_sum, operation)
    # An exported program is for inference.
    if plan.saved in ("nothing", "eager") or _torch.is_exporting():
        return activation.plain(pre_activation(x, w, b, residual))
    if plan.saved == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from .ops.compiled import output_saved

        y: Tensor = output_saved(
            pre_activation(x, w, b, residual), activation.name, tuple(activation.parameters.items())
        )
    else:
        y = compiled_checkpoint(lambda *inputs: activation.plain(pre_activation(*inputs)), x, w, b, residual)
    return y


def _range_name(plan: Plan, operation: Operation, *arguments: Any) -> str:
    *_, activation, _ = arguments
    return range_name(operation.function, activation.name)


_in_profiles = profile_range(_range_name)
#: What carries out each path of a plan: ``activation(operation(x, w, b) + residual, *operands)``.
PATHS: dict[str, Callable[..., Tensor]] = {
    "composite": _composite,
    "compiled": _compiled,
    "no_grad": _in_profiles(_without_gradients),
    "in_place": _in_profiles(_in_place),
    "fused": _in_profiles(_fused),
}
#: The same for ``activation(x + b, *operands)``.
POINTWISE: dict[str, Callable[..., Tensor]] = {**PATHS, "fused": _in_profiles(_fused_pointwise)}


# --- blocks -----------------------------------------------------------------------------------------------------------


def run_block(
    plan: BlockPlan,
    options: BlockOptions,
    input: Tensor,
    first: Sequence[Linear],
    last: Linear,
    activation: Activation,
    operands: Operands,
) -> Tensor:
    """An MLP block."""
    if plan.path == "composite":
        layers = _apart(options, first)
        activated = validation.activated(options.function, activation, F.linear(input, *layers[0]))
        others = [F.linear(input, *layer) for layer in layers[1:]] if options.is_gated else ()
        return after_activation(activated, others, options.dropout, last)
    if plan.block is None:
        return run_by_layer(options, input, first, last, activation)
    return _whole_block(plan, plan.block, options, input, first, last, operands)


@profile_range(lambda plan, block, options, *_: range_name(options.function, block.activation.name))
def _whole_block(
    plan: BlockPlan,
    block: Block,
    options: BlockOptions,
    input: Tensor,
    first: Sequence[Linear],
    last: Linear,
    operands: Operands,
) -> Tensor:
    """In one node."""
    x = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    if plan.cast is not None:
        x, *casts = (shared_cast(t, plan.cast) for t in (x, *(w for w, _ in (*first, last))))
        *first, last = (Linear(w, b) for w, (_, b) in zip(casts, (*first, last), strict=True))
    if options.dropout:
        dropout = BlockDropout.draw(float(options.dropout), len(x), last.w.shape[1], x.dtype, x.device)
        block = block._replace(dropout=dropout)
    weights, biases = zip(*first, strict=True)
    y: Tensor = MLP.apply(block, len(first), x, *last, *weights, *biases, *operands)
    return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])


def run_by_layer(
    options: BlockOptions, input: Tensor, first: Sequence[Linear], last: Linear, activation: Activation
) -> Tensor:
    """An MLP block layer by layer, each of which decides for itself."""
    if not torch.compiler.is_compiling():
        return _layers(options, input, first, last, activation)
    if options.save != "recompute":
        return _compiled_layers(options, input, first, last, activation)
    options = options._replace(save="auto")
    if not needs_gradient(input, *(t for layer in (*first, last) for t in layer)):
        return _compiled_layers(options, input, first, last, activation)
    by_layer = functools.partial(_compiled_layers, options, activation=activation)
    y: Tensor = compiled_checkpoint(by_layer, input, first, last)
    return y


def _layers(
    options: BlockOptions, input: Tensor, first: Sequence[Linear], last: Linear, activation: Activation
) -> Tensor:
    (w, b), *others = _apart(options, first)
    cast = autocast_dtype(input) if others else None
    input = input if cast is None else shared_cast(input, cast)  # once for both halves of a gate
    save = "auto" if options.save == "recompute" else options.save  # which would save more, layer by layer
    is_trained = needs_gradient(input, w, b, *(t for layer in others for t in layer))
    if options.dropout and not others and is_trained and activation.is_fusible and not torch.compiler.is_compiling():
        return F.linear(run_dropout(MATMUL, input, w, b, None, activation, options.dropout, save), *last)
    is_usual = validation.are_usual((input, w), (b,))
    plan, record, operands = plan_dense(input, w, b, None, activation, save, is_usual)
    activated = PATHS[plan.path](plan, MATMUL, input, w, b, None, record, operands)
    if plan.path == "no_grad" and not is_trained:  # it is nobody else's
        for other in others:
            activated.mul_(F.linear(input, *other))
        return F.linear(F.dropout(activated, options.dropout, inplace=True) if options.dropout else activated, *last)
    return after_activation(activated, [F.linear(input, *other) for other in others], options.dropout, last)


def _compiled_layers(
    options: BlockOptions, input: Tensor, first: Sequence[Linear], last: Linear, activation: Activation
) -> Tensor:
    layers = _apart(options, first)
    if len(layers) == 1 or options.dropout or not needs_gradient(input, *layers[0], *layers[1]):
        return _layers(options, input, first, last, activation)
    # Else the compiler saves the gate's product with the other half, beside both.
    parts = [F.linear(input, *layer) for layer in layers]
    hidden = compiled_checkpoint(lambda gate, up: activation.plain(gate) * up, *parts)
    return F.linear(hidden, *last)


def _apart(options: BlockOptions, first: Sequence[Linear]) -> Sequence[Linear]:
    return unpacked(first) if options.is_gated and len(first) == 1 else first


def after_activation(activated: Tensor, others: Sequence[Tensor], dropout: float, last: Linear | nn.Module) -> Tensor:
    """The rest of a block: the product with the other half of a gate, PyTorch's dropout, and the last layer."""
    hidden = activated
    for other in others:
        hidden = hidden * other
    hidden = F.dropout(hidden, dropout) if dropout else hidden
    return last(hidden) if isinstance(last, nn.Module) else F.linear(hidden, *last)
