"""Decides what a call does: which path it takes, what is saved for backward, and why.

A ``Call`` is what is asked for, and a ``Decision`` the answer, of layers and blocks alike. A decision holds no tensors.
What changes from call to call is not part of it: who owns a buffer in backward, the seed of a dropout, and what depends
on values.

Reasons are chosen here, but of a layer that nothing calls (``nn``). They are logged (DEBUG, by "fusedlayers"), where
a decision is new, and stand in errors; ``repr`` of a layer and ``explain`` ask about a large call (``describe``).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import kernels
from ..activations import KEPT_BY_TORCH, Activation, Saved
from ..kernels import Backend
from ..kernels.operations import Mlp, Operation, Pointwise
from ..ops.mlp_forward import Block
from ..utils.caching import in_clean_state
from ..utils.formatting import size_text
from . import validation
from .casts import autocast_dtype
from .sizes import limits_of

Path = Literal["composite", "compiled", "no_grad", "fused", "by_layer"]
"""How a call is computed.

* "composite": by PyTorch's own operations, which save what they save;
* "compiled": by functional operations that the compiler fuses;
* "no_grad": by a backend's kernels, saving nothing;
* "fused": by a backend's kernels under an autograd Function;
* "by_layer", of a block: each layer by a plan of its own.
"""

#: Into how many chunks the rows of a block are cut, at most, where nobody says. What is hidden and needed for a moment
#: only is made for one of them at a time, in two buffers, or three of a gated block.
CHUNKS = 16


class Call(NamedTuple):
    """The call ``activation(operation(...), *operands)``, or that of a block."""

    operation: Operation
    #: x, w, b and the residual of a layer; x, and the weight and bias of each layer in turn, of a block.
    tensors: tuple[Any, ...]
    #: What a user passes; of what is computed the record.
    activation: Any
    save: str = "auto"
    #: Whether the result is to be written over x.
    is_inplace: bool = False
    #: The tensors that the activation reads, and the dimension along which they run.
    operands: tuple[Tensor, ...] = ()
    operand_dim: int | None = None


class Decision(NamedTuple):
    """A call's path, and its saved tensors."""

    path: Path
    #: What the activation saves, as ``ops/pointwise.py`` lists; "nothing" where none is needed, "eager": as PyTorch.
    saved: Saved | Literal["eager"]
    #: What is saved and why, for people.
    reason: str
    #: The record, and who computes; None where PyTorch computes.
    activation: Activation = None  # type: ignore[assignment]  # nobody reads it there
    backend: Backend = None  # type: ignore[assignment]  # nor this
    #: The dtype that autocast casts to, or None.
    cast: torch.dtype | None = None
    #: The dimension of z along which the bias and the activation's own tensors run.
    dim: int = -1
    #: Whether the activation's kernel adds the bias, and not the operation.
    bias_in_kernel: bool = False
    #: Whether x is flattened first. Otherwise the operation returns a view, and autograd makes a copy where a view is
    #: overwritten.
    flattens: bool = False
    #: Whether y is written over z.
    overwrites: bool = False
    #: The function that was called, for errors in backward.
    function: str = ""
    #: What the node of a block needs to know besides tensors.
    block: Block | None = None

    def __str__(self) -> str:
        return self.reason


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether any needs a gradient, and gradients are switched on."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def decide(call: Call, because: str | None, *, may_build: bool = True) -> Decision:
    """The decision about a call whose tensors fit together.

    Args:
        because: why PyTorch's own operations must be seen, as the caller has found out, or None.
        may_build: whether code may be built to find out how fast it is.

    Raises:
        ValueError: an unknown ``save``, or ``save="output"`` where the output does not determine the derivative.
    """
    operation, tensors, activation, save, *_ = call
    x, is_block, is_compiling = tensors[0], isinstance(operation, Mlp), torch.compiler.is_compiling()
    cast = autocast_dtype(x) if operation.is_cast else None
    dtype, backend = cast or x.dtype, kernels.choose(x, activation)
    is_trained = needs_gradient(*tensors, *call.operands)
    is_seen = is_compiling and activation.needs_tracing and save == "output"  # which only a trace shows to be possible
    saved = _saved(operation, activation, "auto" if is_seen else save, dtype)
    if is_block and is_compiling:
        return _by_layer("torch.compile plans the memory itself", None)
    because = because or validation.unusual_because(*tensors) or activation.fallback_reason
    if because is None and not is_block and tensors[3] is not None and tensors[3].dtype is not dtype:
        because = f"the residual is {tensors[3].dtype} where the sum is {dtype}"
    if because is None and is_compiling and activation.needs_tracing:
        because = "torch.compile sees a user's function as it is"
    if because is None and save == "auto" and not is_compiling:
        told_by = backend if is_trained and saved == "output" else None
        because = _left_because(call, dtype, told_by, may_build)
    if because is not None:
        return Decision("composite", "eager", f"not fused: {because}")
    reason = _reason(call, saved, dtype)
    decision = Decision("fused", saved, reason, activation, backend, cast)
    if is_block:
        return _of_block(call, decision, is_trained)
    if saved == "nothing":
        return Decision("composite", "eager", reason)
    if is_compiling:
        # The compiler chooses what it saves of an activation's input, or instead of it.
        kept: Saved | Literal["eager"] = "eager" if saved == "input" else saved
        return Decision("compiled", kept if is_trained else "nothing", reason, activation)
    return _of_layer(call, decision, is_trained)


@in_clean_state
def describe(
    activation: Activation,
    save: str,
    dtype: torch.dtype,
    device: torch.device | None = None,
    operation: Operation = Pointwise(-1),  # noqa: B008  # immutable
) -> str:
    """What a trained call with a large result saves, and why, as ``decide`` says; no code is built."""
    device = device if device is not None and device.type in kernels.DEVICES else torch.device("cpu")

    def like(*shape: int) -> Tensor:  # without memory
        return torch.empty((), dtype=dtype, device=device).expand(shape).requires_grad_()

    tensors: tuple[Any, ...] = like(1 << 21, 64), None, None, None
    if isinstance(operation, Mlp):
        layers = [(like(64, 64), None)] * (3 if operation.is_gated else 2)
        tensors = tensors[0], *(tensor for layer in layers for tensor in layer)
    try:
        return decide(Call(operation, tensors, activation, save), None, may_build=False).reason
    except ValueError:  # the layer may have got another dtype since it was made
        return f"cannot save the output: {activation.output_refusal(dtype)}"


def choose_save(function: str, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    """The saved part of an activation where gradients need something.

    Raises:
        ValueError: an unknown ``save``, or ``save="output"`` where the output does not determine the derivative.
    """
    validation.check_save(function, save)
    if activation.is_identity:
        return "nothing"
    if save == "input" or save == "recompute":
        return save  # type: ignore[return-value]  # a str that the test has narrowed
    refused = activation.output_refusal(dtype)
    if refused is None:
        return "output"
    if save == "output":
        raise ValueError(
            f"{function}: save='output' is not possible for {activation!r} in {dtype}: {refused}; "
            "use save='auto', 'input' or 'recompute'"
        )
    return "input"


def _saved(operation: Operation, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    if isinstance(operation, Mlp):
        if save == "recompute":
            return "recompute"  # also without an activation: the last layer saves what it multiplies
        if operation.is_gated:
            return "input"
    return choose_save(operation.function, activation, save, dtype)


def _left_because(call: Call, dtype: torch.dtype, backend: Backend | None, may_build: bool) -> str | None:
    """Why PyTorch computes under ``save="auto"`` what the kernels could compute, or None.

    Args:
        backend: computes the derivative from outputs; None where that is not needed.
    """
    operation, (x, w, *_), activation, *_ = call
    is_layer = not isinstance(operation, Mlp)
    if is_layer and activation.torch_keeps_less:  # than the input and the output, which a layer would keep
        return "PyTorch keeps less than its input and its output, which this layer would keep"
    limit, medium = limits_of(x)
    result_bytes = math.prod(operation.shape(x, w)) * x.itemsize
    if is_layer and result_bytes >= limit and activation.name in KEPT_BY_TORCH and not isinstance(operation, Pointwise):
        limit = medium
    is_small = result_bytes < limit and not call.is_inplace
    slow = None if backend is None else backend.slow_because(activation, dtype, may_build=may_build and not is_small)
    return slow or (f"results of less than {size_text(limit)} are left to PyTorch" if is_small else None)


def _reason(call: Call, saved: Saved, dtype: torch.dtype) -> str:
    """What is saved, and why, for people."""
    activation = call.activation
    if saved == "nothing":
        return "saves nothing"
    if saved == "recompute":
        return "saves nothing and recomputes"
    if isinstance(call.operation, Mlp) and call.operation.is_gated:
        return "saves gate and up"
    if saved == "input":
        return "saves the input" + ("" if call.save == "input" else f": {activation.output_refusal(dtype)}")
    return "saves the output (last bit = side of minimum)" if activation.is_folded else "saves the output"


# --- layers -----------------------------------------------------------------------------------------------------------


def _of_layer(call: Call, decision: Decision, is_trained: bool) -> Decision:
    """The decision with all that the kernels must know."""
    operation, (x, *_), *_ = call
    assert not isinstance(operation, Mlp)
    saved, backend, other_dim = decision.saved, decision.backend, call.operand_dim
    is_along = other_dim is None or (other_dim - operation.dim) % max(1, x.dim()) == 0
    dim = operation.dim if is_along or other_dim is None else other_dim
    is_pointwise = isinstance(operation, Pointwise)
    # The result of an operation is the package's own to overwrite, and an input is the caller's.
    overwrites = call.is_inplace or not is_pointwise
    adds_bias = is_along and (is_pointwise or backend.ADDS_BIAS)
    if not is_trained:
        return decision._replace(
            path="no_grad", saved="nothing", reason="saves nothing: no gradient is needed", dim=dim,
            bias_in_kernel=adds_bias, overwrites=overwrites and (saved == "output" or not is_pointwise),
        )  # fmt: skip
    return decision._replace(
        dim=dim, bias_in_kernel=adds_bias and saved != "input", flattens=operation.returns_view(x) and is_along,
        overwrites=overwrites and is_along and saved != "input", function=operation.function,
    )  # fmt: skip


# --- blocks -----------------------------------------------------------------------------------------------------------


def _by_layer(because: str, cast: torch.dtype | None) -> Decision:
    return Decision("by_layer", "eager", f"layer by layer, because {because}", cast=cast)


def _of_block(call: Call, decision: Decision, is_trained: bool) -> Decision:
    """One node, where it saves no more than PyTorch; else layer by layer."""
    operation, (x, *_), activation, *_ = call
    assert isinstance(operation, Mlp)
    saved, backend, cast = decision.saved, decision.backend, decision.cast
    of_input = cast if operation.is_gated else None  # one cast for both halves
    if not is_trained:
        return Decision("by_layer", "nothing", "saves nothing: no gradient is needed", cast=of_input)
    because = _layers_because(call, decision)
    if because is not None:
        return _by_layer(because, of_input)
    chunks = operation.chunks or CHUNKS
    if operation.chunks is None and backend.CHUNK_BYTES:
        hidden_bytes = _rows(x) * call.tensors[-2].shape[1] * (cast or x.dtype).itemsize
        chunks = min(CHUNKS, max(1, hidden_bytes // backend.CHUNK_BYTES)) if saved == "recompute" else 1
    block = Block(activation, saved, operation.is_gated, operation.is_packed, None, chunks, backend)  # type: ignore[arg-type]
    return decision._replace(block=block._replace(chunks=_chunks(call, block, cast or x.dtype)))


def _layers_because(call: Call, decision: Decision) -> str | None:
    """Why one node would save more than PyTorch, or None: it saves x, the weights and what is hidden."""
    x, *layers = call.tensors
    weights, first_weights, first_biases = layers[::2], layers[:-2:2], layers[1:-2:2]
    if call.operand_dim is not None and (call.operand_dim + 1) % max(1, x.dim()):
        return "the activation reads tensors along another dimension"
    if x.numel() * first_weights[0].numel() == 0:
        return "there is nothing to compute"
    if decision.saved == "nothing":
        return "there is no activation"
    if not all(needs_gradient(w) for w in weights):
        return "a weight is frozen"
    # PyTorch saves a weight where x needs a gradient; parameters, and no casts of them, are alive anyway.
    held = first_biases if needs_gradient(x) else first_biases + first_weights
    is_alive = all(t is None or isinstance(t, Parameter) or (t.is_leaf and t.requires_grad) for t in held)
    is_cast = decision.cast is not None and not needs_gradient(x)
    return None if is_alive and not is_cast else "the first layer's weights are no parameters"


def _rows(x: Tensor) -> int:
    """The number of rows that facts tell apart: by powers of two, rounded down."""
    return 1 << (x.numel() // x.shape[-1]).bit_length() >> 1


def _chunks(call: Call, block: Block, dtype: torch.dtype) -> int:
    """Into how many chunks rows are cut: one, where more is needed to sum gradients over several than is hidden.

    Sums of 16-bit numbers are made in float32: of each weight's gradient twice the bytes that eager PyTorch needs, and
    what a chunk adds to them has once that. One chunk needs one hidden buffer, and one for each that is not saved,
    where eager PyTorch has as many.
    """
    x, last = call.tensors[0], call.tensors[-2]
    hidden, parts = last.shape[1], 2 if block.is_gated else 1
    rows, recomputes = _rows(x), block.saved == "recompute"
    if dtype.itemsize > 2:
        return block.chunks
    summed = [hidden * x.shape[-1]] * (parts * recomputes) + [last.numel()] * (recomputes or not block.is_whole)
    spared = (1 + parts * recomputes) * hidden * (rows - block.chunk_rows(rows))
    return block.chunks if sum(summed) + max(summed, default=0) <= spared else 1
