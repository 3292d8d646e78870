"""An MLP block's call: its plan is looked up, or decided, and carried out, as ``call.py`` does for a layer.

A block runs as one autograd node, ``ops/mlp_node.py``, where all of it is trained: it then saves no more than
PyTorch. Else it runs layer by layer: ``dense_bias_act`` and what follows, each of which decides for itself. That is so
for frozen weights, weights that are computed from others, and under ``torch.compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from .. import kernels
from .._torch import (
    autocast_is_active,
    compiled_checkpoint,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    is_of_transform,
    torchscript_state,
)
from ..activations import Activation, Saved, resolve
from ..activations.table import by_name
from ..kernels.operations import MATMUL
from ..ops.mlp_forward import Block, BlockDropout, BlockOptions, Linear, unpacked
from ..ops.mlp_node import MLP
from ..utils.caching import BoundedCache
from ..utils.formatting import size_text
from . import sizes, validation
from .decide import Call, Plan, autocast_dtype, choose_save, describe_block, needs_gradient, plain
from .plan import dropped, execute, followed_by, plan_for, shared_cast, with_operands

#: Into how many chunks the rows of a block are cut, at most, where nobody says. What is hidden and needed for a moment
#: only is made for one of them at a time, in two buffers, or three of a gated block.
CHUNKS = 16

_plans: BoundedCache[Plan] = BoundedCache(1024)


class BlockCall(NamedTuple):
    """A block's call: ``linear(dropout(activation(linear(x, *first[0]))), *last)``, or with a gate."""

    options: BlockOptions
    x: Tensor
    first: Sequence[Linear]
    last: Linear
    #: What a user passes; of what is computed the record.
    activation: Any
    #: The tensors that the activation reads, and the dimension along which they run.
    operands: tuple[Tensor, ...] = ()
    operand_dim: int | None = None


def run_block(call: BlockCall) -> Tensor:
    """The result of a block."""
    plan, call, traced = plan_block(call)
    if plan.path == "fused":
        return _whole_block(plan, traced)
    if plan.path == "composite":
        options, x, first, last, activation, *_ = call
        layers = _separate(options, first)
        activated = validation.activated(options.function, activation, F.linear(x, *layers[0]))
        others = [F.linear(x, *layer) for layer in layers[1:]] if options.is_gated else ()
        return after_activation(activated, others, options.dropout, last)
    return _by_layer(call)


# --- from a call to its plan ------------------------------------------------------------------------------------------


def plan_block(call: BlockCall) -> tuple[Plan, BlockCall, BlockCall]:
    """The plan for a block's call, the call with the record of its activation, and with that traced."""
    options, x, first, last, given, *_ = call
    activation = by_name.get(given) if type(given) is str else given
    if type(activation) is not Activation:
        activation = resolve(given, options.function)
    call = call if activation is given else call._replace(activation=activation)
    tensors: tuple[Any, ...] = (x, *chain(*first, last))  # weights and biases in turn
    is_there = x is not None and first[0].w is not None and first[-1].w is not None and last.w is not None
    if not is_there or torchscript_state() is not None or not validation.are_usual(*tensors):  # sizes may be tensors
        validation.check_block(options, x, first, last)
        choose_block_save(options, activation, autocast_dtype(x) or x.dtype)  # which may refuse
        if torch.compiler.is_compiling():
            return _layers_plan("torch.compile plans the memory itself"), call, call
        return plain(followed_by() or str(validation.unusual_because(*tensors))), call, call
    facts, because, traced = _facts(call, tensors)
    try:
        plan = _plans.get(facts)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        plan = None
    return plan or _plans.put(facts, _decide(traced, because)), call, traced


def _facts(call: BlockCall, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], str | None, BlockCall]:
    """The facts of a call; why PyTorch must compute it, or None; and the call with its activation traced."""
    options, x, first, last, activation, *_ = call
    shape, small_bytes = x.shape, sizes.small_bytes(x) if x.is_cuda else sizes.SMALL_BYTES
    hidden = first[0].w.shape[:1].numel() // options.halves(first)
    rows = x.numel() // (shape[-1:].numel() or 1)
    cast = autocast_is_active() and autocast_dtype(x)
    # False is no number, and 4.0 no count.
    facts: list[Any] = [options, type(options.dropout), type(options.chunks), small_bytes, len(shape), shape[-1:], cast]
    for t in tensors:
        facts += (None,) if t is None else (t.dtype, t.is_cpu or t.device, None if t is x else t.shape)
    if options.save == "auto" and rows * hidden * x.itemsize < small_bytes:
        # PyTorch computes it, whatever needs gradients and whoever follows.
        reason = f"hidden layers of less than {size_text(small_bytes)} are left to PyTorch"
        return (*facts, activation.fallback_reason), reason, call
    is_followed = functorch_is_active() or forward_ad_level() >= 0 or dispatch_mode_count()
    because = followed_by() if is_followed else None
    if activation.needs_tracing and because is None and x.dtype is not torch.float64:
        validation.check_block(options, x, first, last)  # what is traced must have a shape and a dtype
        found = with_operands(activation, (*shape[:-1], hidden), cast or x.dtype, x.device)
        activation = found.activation
        call = call._replace(activation=activation, operands=found.operands, operand_dim=found.dim)
        facts += found.dim, needs_gradient(*found.operands)
    # Of what PyTorch computes only the reason is asked for: the record may hold a user's tensors.
    is_torchs = activation.needs_tracing or activation.fallback_reason is not None
    facts += because, activation.fallback_reason if is_torchs else activation, torch.is_grad_enabled()
    facts += rows.bit_length(), is_of_transform(x)
    for t in tensors:
        facts += (None,) if t is None else (type(t), t.layout, t.requires_grad, t.is_neg(), t.is_leaf)
    return tuple(facts), because, call


def _decide(call: BlockCall, because: str | None) -> Plan:
    """Check the arguments of a call, and decide.

    Raises:
        ValueError: ``save="output"`` where the output does not determine the derivative.
    """
    options, x, first, last, activation, operands, operand_dim = call
    tensors = (x, *chain(*first, last))
    validation.check_block(options, x, first, last)
    cast = autocast_dtype(x)
    dtype, backend = cast or x.dtype, kernels.choose(x, activation)
    saved = choose_block_save(options, activation, dtype)
    because = because or validation.unusual_because(*tensors) or activation.fallback_reason
    by_output = options.save == "auto" and not options.is_gated
    if because is None and by_output and activation.output_refusal(dtype) is None:
        because = backend.slow_because(activation, dtype)
    if because is not None:
        return plain(because)
    if not needs_gradient(*tensors, *operands):
        return Plan("by_layer", "nothing", "saves nothing: no gradient is needed")
    if operand_dim is not None and (operand_dim + 1) % max(1, x.dim()):
        return _layers_plan("the activation reads tensors along another dimension")
    found = _layers_because(call, saved)
    if found is not None:
        return _layers_plan(found)
    is_packed = options.halves(first) == 2
    chunks = options.chunks or CHUNKS
    if options.chunks is None and backend.CHUNK_BYTES:
        hidden_bytes = _rows(x) * last.w.shape[1] * dtype.itemsize
        chunks = min(CHUNKS, max(1, hidden_bytes // backend.CHUNK_BYTES)) if saved == "recompute" else 1
    block = Block(activation, saved, options.is_gated, is_packed, None, chunks, backend, is_cast=cast is not None)
    block = block._replace(chunks=_chunks(call, block))
    return Plan("fused", saved, describe_block(options, activation, dtype), activation, backend, cast, block=block)


def _layers_plan(because: str) -> Plan:
    return Plan("by_layer", "eager", f"layer by layer, because {because}")


def _layers_because(call: BlockCall, saved: Saved) -> str | None:
    """Why one node would save more than PyTorch, or None: it saves x, the weights and what is hidden."""
    x, first, last = call.x, call.first, call.last
    if x.numel() * first[0].w.numel() == 0:
        return "there is nothing to compute"
    if saved == "nothing":
        return "there is no activation"
    if not all(needs_gradient(w) for w, _ in (*first, last)):
        return "a weight is frozen"
    # PyTorch saves a weight where x needs a gradient; parameters, and no casts of them, are alive anyway.
    held = [b for _, b in first] + [w for w, _ in first if not needs_gradient(x)]
    is_alive = all(t is None or isinstance(t, Parameter) or (t.is_leaf and t.requires_grad) for t in held)
    is_cast = autocast_dtype(x) is not None and not needs_gradient(x)
    return None if is_alive and not is_cast else "the first layer's weights are no parameters"


def _rows(x: Tensor) -> int:
    """The number of rows that facts tell apart: by powers of two, rounded down."""
    return 1 << (x.numel() // x.shape[-1]).bit_length() >> 1


def choose_block_save(options: BlockOptions, activation: Activation, dtype: torch.dtype) -> Saved:
    """The saved part of the hidden layer."""
    if options.save == "recompute":
        return "recompute"  # also without an activation: the last layer saves what it multiplies
    return "input" if options.is_gated else choose_save(options.function, activation, options.save, dtype)


def _chunks(call: BlockCall, block: Block) -> int:
    """Into how many chunks rows are cut: one, where more is needed to sum gradients over several than is hidden.

    Sums of 16-bit numbers are made in float32: of each weight's gradient twice the bytes that eager PyTorch needs, and
    what a chunk adds to them has once that. One chunk needs one hidden buffer, and one for each that is not saved,
    where eager PyTorch has as many.
    """
    x, last = call.x, call.last
    dtype, hidden, parts = autocast_dtype(x) or x.dtype, last.w.shape[1], 2 if block.is_gated else 1
    rows, recomputes = _rows(x), block.saved == "recompute"
    if dtype.itemsize > 2:
        return block.chunks
    summed = [hidden * x.shape[-1]] * (parts * recomputes) + [last.w.numel()] * (recomputes or not block.is_whole)
    spared = (1 + parts * recomputes) * hidden * (rows - block.chunk_rows(rows))
    return block.chunks if sum(summed) + max(summed, default=0) <= spared else 1


# --- the paths of a plan ----------------------------------------------------------------------------------------------


def _whole_block(plan: Plan, call: BlockCall) -> Tensor:
    """In one node."""
    options, input, first, last, _, operands, _ = call
    block = plan.block
    assert block is not None
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


def _by_layer(call: BlockCall) -> Tensor:
    """Layer by layer, each of which decides for itself."""
    options, input, first, last, activation, *_ = call
    if not torch.compiler.is_compiling() or not needs_gradient(input, *chain(*first, last)):
        return _layers(call)
    if options.save == "recompute":
        again = call._replace(options=options._replace(save="auto"))
        by_layer = lambda x, first, last: _by_layer(again._replace(x=x, first=first, last=last))
        y: Tensor = compiled_checkpoint(by_layer, input, first, last)
        return y
    layers = _separate(options, first)
    if len(layers) == 1 or options.dropout or not needs_gradient(input, *layers[0], *layers[1]):
        return _layers(call)
    # Else the compiler saves the gate's product with the other half, beside both.
    parts = [F.linear(input, *layer) for layer in layers]
    return F.linear(compiled_checkpoint(lambda gate, up: activation.plain(gate) * up, *parts), *last)


def _layers(call: BlockCall) -> Tensor:
    options, input, first, last, activation, *_ = call
    (w, b), *others = _separate(options, first)
    cast = autocast_dtype(input) if others else None
    input = input if cast is None else shared_cast(input, cast)  # once for both halves of a gate
    save = "auto" if options.save == "recompute" else options.save  # which would save more, layer by layer
    is_trained = needs_gradient(input, w, b, *(t for layer in others for t in layer))
    plan, layer = plan_for(Call(MATMUL, input, w, b, None, activation, save))
    activated = execute(plan, layer)
    if plan.path == "no_grad" and not is_trained:  # it is nobody else's
        for other in others:
            activated.mul_(F.linear(input, *other))
        return F.linear(F.dropout(activated, options.dropout, inplace=True) if options.dropout else activated, *last)
    return after_activation(activated, [F.linear(input, *other) for other in others], options.dropout, last)


def _separate(options: BlockOptions, first: Sequence[Linear]) -> Sequence[Linear]:
    """The first layers, gate and up of a packed one too."""
    return unpacked(first) if options.is_gated and len(first) == 1 else first


def after_activation(activated: Tensor, others: Sequence[Tensor], dropout: float, last: Linear | nn.Module) -> Tensor:
    """The rest of a block: the product with the other half of a gate, PyTorch's dropout, and the last layer."""
    hidden = functools.reduce(torch.mul, others, activated)
    hidden = dropped(hidden, dropout)
    return last(hidden) if isinstance(last, nn.Module) else F.linear(hidden, *last)
