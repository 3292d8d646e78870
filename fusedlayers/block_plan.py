"""Decides what an MLP block does, as ``plan.py`` does for a layer: once for each situation.

A block runs as one autograd node, ``ops/mlp.py``, where that saves no more than PyTorch. Else it runs layer by layer:
``dense_bias_act`` and what follows, each of which decides for itself. That is so for a frozen first layer, a gate of
which only one half needs gradients, weights that are computed from others, all that PyTorch itself must compute, and
under ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import backends, sizes, validation
from ._torch import autocast_is_active, is_of_transform, torchscript_state
from .activations import Activation, Saved
from .backends import Backend
from .call import autocast_dtype, followed_by, needs_gradient, with_operands
from .ops.mlp_forward import Block, BlockOptions, Linear
from .plan import choose_save, describe
from .utils.bounded_cache import BoundedCache
from .utils.formatting import whole_size_text

#: Into how many chunks the rows of a block are cut, at most, where nobody says. What is hidden and needed for a moment
#: only is made for one of them at a time, in two buffers, or three of a gated block.
CHUNKS = 16


class BlockNeeds(NamedTuple):
    """What needs gradients; nothing does while gradients are switched off."""

    x: bool = True
    #: Any weight of the first layers.
    first_weights: bool = True
    #: Each half of a gate, or the one hidden layer.
    parts: tuple[bool, ...] = (True,)
    last_weight: bool = True
    last_bias: bool = True

    @property
    def hidden(self) -> bool:
        """Whether gradients go through what is hidden."""
        return any(self.parts)

    def hidden_buffers(self, activation: Activation) -> int:
        """How many hidden buffers are saved, at most, if nothing is recomputed."""
        if self.last_weight:
            return len(self.parts) if self.hidden else 1
        return 0 if activation.is_identity and len(self.parts) == 1 else sum(self.parts)


class BlockKey(NamedTuple):
    """What the decision for a block depends on."""

    options: BlockOptions
    activation: Activation
    #: Of the pre-activations.
    dtype: torch.dtype
    backend: Backend
    needs: BlockNeeds
    #: The number of rows; by powers of two, rounded down.
    rows: int
    in_features: int
    hidden_features: int
    out_features: int
    #: Whether one weight holds gate and up.
    is_packed: bool = False
    #: Why only PyTorch's own operations will do, or None.
    plain_because: str | None = None
    #: Why one node will not do, or None.
    by_layer_because: str | None = None
    cast: torch.dtype | None = None
    #: Whether the input is kept by its owner in any case.
    is_input_alive: bool = False
    #: Elements of weights and biases that one node would save, and PyTorch would not.
    extra_elements: int = 0


class BlockPlan(NamedTuple):
    """What a block's call does.

    ``path`` is "fused", one node; "by_layer", each layer by a plan of its own; or "composite", by PyTorch's own
    operations.
    """

    path: Literal["fused", "by_layer", "composite"]
    saved: Saved | Literal["eager"]
    #: What is saved and why, for people.
    reason: str
    #: What the node needs to know besides tensors; of the first path.
    block: Block | None = None
    cast: torch.dtype | None = None

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return f"BlockPlan(path={self.path!r}, saved={self.saved!r}, reason={self.reason!r})"


def make_block_plan(key: BlockKey) -> BlockPlan:
    """The decision.

    Raises:
        ValueError: ``save="output"`` where the output does not determine the derivative.
    """
    options, activation, dtype, _, needs, *_ = key
    saved = choose_block_save(options, activation, dtype)
    reason = describe_block(options, activation, dtype)
    if key.plain_because is not None:
        return BlockPlan("composite", "eager", f"not fused: {key.plain_because}")
    needs_any = needs.hidden or needs.last_weight or needs.last_bias
    if key.by_layer_because is None and not needs_any:
        return BlockPlan("by_layer", "nothing", "saves nothing: no gradient is needed")
    if key.by_layer_because is None and saved == "recompute":
        # For this alone the node saves the input and weights: it must be less than PyTorch saves of what is hidden.
        hidden_elements = key.rows * key.hidden_features * needs.hidden_buffers(activation)
        if _input_elements(key) + key.extra_elements <= hidden_elements:
            return BlockPlan("fused", saved, reason, _block(key, saved), key.cast)
        return make_block_plan(key._replace(options=options._replace(save="auto")))
    because = key.by_layer_because or _by_layer_because(key, saved)
    if because is not None:
        return BlockPlan("by_layer", "eager", f"layer by layer, because {because}")
    return BlockPlan("fused", saved, reason, _block(key, saved), key.cast)


def _input_elements(key: BlockKey) -> int:
    """Of the input, where one node would save it and PyTorch would not."""
    return 0 if key.needs.first_weights or key.is_input_alive else key.rows * key.in_features


def _by_layer_because(key: BlockKey, saved: Saved) -> str | None:
    """Why one node would save more than PyTorch, or None."""
    needs = key.needs
    if saved == "nothing":
        return "there is no activation"
    if not needs.hidden:
        return "nothing before the last layer needs a gradient"
    if _input_elements(key):
        return "the first layer is frozen"
    if not all(needs.parts) and not needs.last_weight:
        return "half of the gate is frozen"
    return "the first layer's weights are no parameters" if key.extra_elements else None


def choose_block_save(options: BlockOptions, activation: Activation, dtype: torch.dtype) -> Saved:
    """What is saved of the hidden layer."""
    if options.save == "recompute":
        return "recompute"  # also without an activation: the last layer saves what it multiplies
    return "input" if options.is_gated else choose_save(options.function, activation, options.save, dtype)


def describe_block(
    options: BlockOptions, activation: Activation, dtype: torch.dtype, device: torch.device | None = None
) -> str:
    """What ``choose_block_save`` has chosen, and why, for people. With a device, it says where PyTorch computes
    instead."""
    if options.save != "output" and (left := activation.left_because(dtype)) is not None:
        return f"not fused: {left}"
    if options.save != "recompute" and options.is_gated:
        return "saves gate and up"
    if options.save != "recompute" and activation.is_identity:
        return "saves the first layer's result"
    return describe(activation, options.save, dtype, device)


def _block(key: BlockKey, saved: Saved) -> Block:
    options = key.options
    has_casts = key.cast is not None
    block = Block(key.activation, saved, options.is_gated, key.is_packed, None, 1, key.backend, is_cast=has_casts)
    wanted = _default_chunks(key, saved) if options.chunks is None else options.chunks
    return block._replace(chunks=_chunks(key, block._replace(chunks=wanted)))


def _default_chunks(key: BlockKey, saved: Saved) -> int:
    least_bytes = key.backend.CHUNK_BYTES
    if not least_bytes:
        return CHUNKS
    hidden_bytes = key.rows * key.hidden_features * key.dtype.itemsize
    return min(CHUNKS, max(1, hidden_bytes // least_bytes)) if saved == "recompute" else 1


def _chunks(key: BlockKey, block: Block) -> int:
    """Into how many chunks rows are cut: one, where more is needed to sum gradients over several than is hidden.

    Sums of 16-bit numbers are made in float32: of each weight's gradient twice the bytes that eager PyTorch needs, and
    what a chunk adds to them has once that. One chunk needs one hidden buffer, and one for each that is not saved,
    where eager PyTorch has as many.
    """
    if key.dtype.itemsize > 2:
        return block.chunks
    recomputes, parts, needs = block.saved == "recompute", len(key.needs.parts), key.needs
    summed = [key.hidden_features * key.in_features] * (parts if recomputes and needs.first_weights else 0)
    summed += [key.hidden_features * key.out_features] * (needs.last_weight and (recomputes or not block.is_whole))
    hidden_buffers = 1 + parts * recomputes
    spared = hidden_buffers * key.hidden_features * (key.rows - block.chunk_rows(key.rows))
    return block.chunks if sum(summed) + max(summed, default=0) <= spared else 1


# --- from a call to its plan ------------------------------------------------------------------------------------------

_plans: BoundedCache[BlockPlan] = BoundedCache(1024)


def plan_block(  # one function: entering another one takes longer than any of these tests
    options: BlockOptions, x: Tensor, first: Sequence[Linear], last: Linear, activation: Activation
) -> tuple[BlockPlan, tuple[Tensor, ...]]:
    """The plan for a block's call, and the tensors that its activation reads."""
    tensors: tuple[Any, ...] = (*chain(*first, last),)  # weights and biases in turn
    is_compiled = torch.compiler.is_compiling()
    is_traced = torchscript_state() is not None  # numbers may be tensors then
    if is_compiled or is_traced or not validation.are_usual((x, *tensors[::2]), tensors[1::2]):
        validation.check_block(options, x, first, last)
        choose_block_save(options, activation, autocast_dtype(x) or x.dtype)  # which may refuse
        found = BlockPlan("by_layer", "eager", "layer by layer, because torch.compile plans the memory itself")
        if not is_compiled:
            because = followed_by() if is_traced else validation.unusual_because(x, *tensors)
            found = BlockPlan("composite", "eager", f"not fused: {because}")
        return found, ()
    shape = x.shape
    if not shape or not first[0].w.dim():
        validation.check_block(options, x, first, last)  # which refuses
    rows = x.numel() // max(1, shape[-1])
    hidden = first[0].w.shape[0] // options.halves(first)
    is_small = options.save == "auto" and rows * hidden * x.itemsize < sizes.small_bytes(x)
    plain_because = by_layer_because = None
    operands: tuple[Tensor, ...] = ()
    facts: list[Any] = [
        is_small,
        options,
        type(options.dropout),  # False is no number, and 4.0 no count
        type(options.chunks),
        shape[-1],
        x.dtype,
        x.is_cpu or x.device,
        autocast_is_active() and autocast_dtype(x),
    ]
    if is_small:
        # PyTorch computes it, whatever needs gradients and whoever follows: what the checks depend on is enough.
        facts.append(activation.fallback_reason)
        for t in tensors:
            facts += (None,) if t is None else (t.dtype, t.is_cpu or t.device, t.shape)
    else:
        plain_because = followed_by()
        if activation.needs_tracing and plain_because is None and x.dtype is not torch.float64:
            validation.check_block(options, x, first, last)  # what is traced must have a shape and a dtype
            dtype = autocast_dtype(x) or x.dtype
            activation, operands, dim = with_operands(activation, (*shape[:-1], hidden), dtype, x.device)
            if dim is not None and dim % len(shape) != len(shape) - 1:
                by_layer_because = "the activation reads tensors along another dimension"
        # Of what PyTorch computes only the reason is asked for: the record may hold a user's tensors.
        is_torchs = activation.needs_tracing or activation.fallback_reason is not None
        facts += [
            activation if not is_torchs else activation.fallback_reason,
            plain_because,
            by_layer_because,
            bool(operands) and needs_gradient(*operands),
            len(shape),
            rows.bit_length(),
            x.layout,
            x.is_neg() or is_of_transform(x),
            x.requires_grad,
            torch.is_grad_enabled(),
        ]
        for t in tensors:
            if t is None:
                facts.append(None)
            else:
                device = t.is_cpu or t.device
                facts += type(t), t.dtype, t.layout, device, t.requires_grad, t.is_leaf, t.is_neg(), t.shape
    key = tuple(facts)
    try:
        cached = _plans.get(key)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        key, cached = (), None
    if cached is None:
        reasons = plain_because, by_layer_because
        cached = _plans.put(key, _decide(options, x, first, last, activation, operands, is_small, *reasons))
    return cached, operands


def _decide(
    options: BlockOptions,
    x: Tensor,
    first: Sequence[Linear],
    last: Linear,
    activation: Activation,
    operands: Sequence[Tensor],
    is_small: bool,
    plain_because: str | None,
    by_layer_because: str | None,
) -> BlockPlan:
    """Check the arguments of a call, and decide."""
    validation.check_block(options, x, first, last)
    halves = options.halves(first)
    cast = autocast_dtype(x)
    parts = [needs_gradient(x, *layer) for layer in first] * halves
    parts[0] = parts[0] or needs_gradient(*operands)
    needs = BlockNeeds(
        needs_gradient(x),
        needs_gradient(*(w for w, _ in first)),
        tuple(parts),
        needs_gradient(last.w),
        needs_gradient(last.b),
    )
    # PyTorch saves a weight where x needs a gradient, and x where a weight does.
    extra = [w for w, _ in first if not (needs.x or (_is_alive(w) and cast is None))]
    extra += [b for _, b in first if b is not None and not _is_alive(b)]
    backend = backends.choose(x, activation)
    plain_because = plain_because or validation.unusual_because(x, *chain(*first, last))
    if plain_because is None and options.save == "auto" and not options.is_gated and activation.is_fusible:
        dtype = cast or x.dtype
        if activation.output_refusal(dtype) is None:
            plain_because = backend.slow_because(activation, dtype, may_build=not is_small)
    if plain_because is None and is_small:
        needed = whole_size_text(sizes.small_bytes(x))
        plain_because = f"hidden layers of less than {needed} are left to PyTorch"
    rows = x.numel() // max(1, x.shape[-1])
    if rows * first[0].w.shape[0] == 0:
        by_layer_because = "there is nothing to compute"
    return make_block_plan(
        BlockKey(
            options,
            activation,
            cast or x.dtype,
            backend,
            needs,
            1 << rows.bit_length() >> 1,
            first[0].w.shape[1],
            last.w.shape[1],
            last.w.shape[0],
            halves == 2,
            plain_because or activation.fallback_reason,
            by_layer_because,
            cast,
            _is_alive(x) and cast is None,
            sum(t.numel() for t in extra),
        )
    )


def _is_alive(tensor: Tensor) -> bool:
    """Whether it is kept by its owner in any case: a parameter, or a leaf that gathers a gradient."""
    return isinstance(tensor, Parameter) or (tensor.is_leaf and tensor.requires_grad)
