"""Decides what a call does: which path it takes, what is saved for backward, and why. Nothing else decides.

A call is described in two steps. Its *facts* are one tuple of what can be read off the arguments and this thread in
about two microseconds: dtypes, shapes, which tensors need gradients, autocast, modes. Plans are memoised by facts, so a
call that was seen before is neither checked nor decided again. A call with new facts is checked (``validation.py``) and
becomes a ``PlanKey``, which names what the decision depends on. ``make_plan`` is a pure function of the key, so a layer
can also ask what it would do for typical inputs, and ``repr`` prints the answer.

A plan holds no tensors. What changes from call to call is not part of it: who owns a buffer in backward, the seed of a
dropout, and what depends on values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import asking, backends, validation
from ._torch import (
    PROXY_MODE,
    SELECTIVE_CHECKPOINT_MODES,
    autocast_is_active,
    dispatch_mode_at,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    infrastructure_mode,
    onednn_is_enabled,
    saved_tensors_hooks_on_top,
    torchscript_state,
)
from .activations import Activation, Saved, WithOperands, measure_inverse_error
from .backends import Backend
from .backends.operations import (
    MATMUL,
    BatchNorm,
    Convolution,
    Matmul,
    Operation,
    Pointwise,
    Weight,
)
from .backends.torch import operations as torch_operations
from .ops import batch_norm
from .utils.bounded_cache import BoundedCache

#: Results of fewer bytes are left to plain PyTorch under ``save="auto"``: at most so much is forgone by a call. A fused
#: call costs the time of an autograd.Function in Python. Forward and backward of 64 -> 256 features, float32, relu and
#: tanh, one thread (AMD EPYC), took 1.34 to 1.49 times eager's time at 64 KiB, 1.22 to 1.31 at 128 KiB, 1.14 to 1.20 at
#: 256 KiB.
SMALL_BYTES = 128 << 10
#: Of smaller results the activation is PyTorch's own in-place operation, where that saves its result. Forward and
#: backward as above with relu, tanh, leaky_relu and elu took 0.94 to 1.02 times eager's time from 128 KiB to 1 MiB, the
#: autograd.Function 1.05 to 1.31 times. From 2 MiB on that is the faster one, because it writes dz over y.
MEDIUM_BYTES = 2 << 20

Size = Literal["small", "medium", "large"]
"""How many bytes a result has: less than ``SMALL_BYTES``, less than ``MEDIUM_BYTES``, or more."""

Path = Literal["composite", "compiled", "no_grad", "in_place", "fused", "tells_input"]
"""How a call is computed.

* "composite": by PyTorch's own operations, which save what they save;
* "compiled": by functional operations that the compiler fuses;
* "no_grad": by a backend's kernels, saving nothing;
* "in_place": by PyTorch's own operations, the activation in place, which saves its result;
* "fused": by a backend's kernels under an autograd Function;
* "tells_input": a batch norm under an autograd Function that saves its output and computes its input from that.
"""


class Needs(NamedTuple):
    """Which arguments need gradients; none does while gradients are switched off."""

    x: bool = True
    w: bool = True
    b: bool = True
    residual: bool = False
    operands: bool = False


class PlanKey(NamedTuple):
    """What the decision for a layer, or for ``bias_act``, depends on."""

    #: What comes before the activation, without tensors.
    operation: Operation
    #: The record; of a user's function the traced one.
    activation: Activation
    #: What the caller asks for.
    save: str
    #: Of the pre-activation.
    dtype: torch.dtype
    backend: Backend
    needs: Needs = Needs()
    #: Why only PyTorch's own operations will do, or None.
    plain_because: str | None = None
    #: Whether ``torch.compile`` traces the call.
    is_compiling: bool = False
    size: Size = "large"
    #: Whether a batch norm's input is large enough for a look at its values.
    is_large: bool = True
    #: The dtype that autocast casts to, or None where it is off.
    cast: torch.dtype | None = None
    has_residual: bool = False
    #: The dimension of the pre-activation along which the activation's own tensors run, if the bias does not, or None.
    operand_dim: int | None = None
    #: Whether the operation saves its arguments for its own gradients.
    saves_arguments: bool = False
    #: Whether saved tensors pass through saved-tensor hooks.
    is_hooked: bool = False
    #: Whether the result is to be written over the input.
    is_inplace: bool = False
    #: Whether a node of this package makes the pre-activation, faster or saving less than torch's.
    has_own_node: bool = False
    #: Whether the operation returns a view of its result.
    returns_view: bool = False
    #: Whether the operation's result is a new tensor, and not the argument.
    is_new: bool = True


class Plan(NamedTuple):
    """What a layer's call does."""

    path: Path
    #: What the activation saves: "output" y, "input" the pre-activation z, "recompute" neither, "nothing" where none is
    #: needed, "eager" for what PyTorch saves.
    saved: Saved | Literal["eager"]
    #: What is saved and why, for people.
    reason: str
    #: The record, and who computes; None where PyTorch computes.
    activation: Activation = None  # type: ignore[assignment]  # nobody reads it there
    backend: Backend = None  # type: ignore[assignment]
    #: The dtype that autocast casts to, or None.
    cast: torch.dtype | None = None
    #: The dimension of z along which the bias and the activation's own tensors run.
    dim: int = -1
    #: Whether the activation's kernel adds the bias, and not the operation.
    bias_in_kernel: bool = False
    #: Whether a node of this package makes z.
    has_own_node: bool = False
    #: Whether the backend may apply the activation in its matmul.
    may_have_epilogue: bool = False
    #: Whether x is flattened to the shape for which the operation returns no view, which cannot be overwritten.
    flattens: bool = False
    #: Whether y is written over z.
    overwrites: bool = False
    #: Whether backward can recompute z from the operation's own arguments.
    keeps_origin: bool = False
    is_hooked: bool = False

    def __str__(self) -> str:
        return self.reason


def make_plan(key: PlanKey) -> Plan:
    """The decision.

    Raises:
        ValueError: an unknown ``save``, or ``save="output"`` where the output does not determine the derivative.
    """
    operation, activation, save, dtype, backend, needs, *_ = key
    saved = choose_save(operation.function, activation, save, dtype)
    plain_because = _plain_because(key)
    if plain_because is not None:
        return Plan("composite", "eager", f"not fused: {plain_because}")
    if isinstance(operation, BatchNorm) and not key.is_compiling:
        reason = describe_norm(activation, save, dtype)
        tells_input = _tells_input(activation, save, dtype)
        if tells_input and key.is_large and not key.has_residual and any(needs[:3]):
            return Plan("tells_input", "output", reason, activation, backend, dim=operation.dim)
        if save == "auto" and saved != "nothing":
            saved = save_beside_input(activation, dtype, has_residual=key.has_residual)
        if tells_input:
            why = "a residual was added" if key.has_residual else "it is small"
            reason = f"saves its input{' and the output' if saved == 'output' else ''}: {why}"
    else:
        reason = describe(activation, save, dtype)
    if saved == "nothing":
        return Plan("composite", "eager", reason)
    if key.is_compiling:
        # The compiler chooses what it saves of an activation's input, or instead of it.
        kept: Saved | Literal["eager"] = "eager" if saved == "input" else saved
        return Plan("compiled", kept if any(needs) else "nothing", reason, activation)

    dim = operation.dim if key.operand_dim is None else key.operand_dim
    is_along = key.operand_dim is None
    is_pointwise = isinstance(operation, Pointwise)
    # The result of an operation is the package's own to overwrite, and an input is the caller's.
    overwrites = key.is_inplace if is_pointwise else True
    if not any(needs):
        return Plan(
            "no_grad",
            "nothing",
            "saves nothing: no gradient is needed",
            activation,
            backend,
            key.cast,
            dim,
            bias_in_kernel=is_along and operation.leaves_bias and (is_pointwise or backend.ADDS_BIAS),
            overwrites=overwrites and saved == "output" if is_pointwise else True,
        )
    flattens = key.returns_view and is_along
    is_in_place = saved == "output" and activation.in_place is not None and key.size == "medium" and key.is_new
    if is_in_place and not key.has_own_node and not key.is_inplace:
        return Plan("in_place", saved, reason, activation, flattens=flattens)
    saves_arguments = key.saves_arguments and not is_pointwise and key.cast is None and not key.is_hooked
    return Plan(
        "fused",
        saved,
        reason,
        activation,
        backend,
        key.cast,
        dim,
        bias_in_kernel=saved != "input" and is_along and operation.leaves_bias and (is_pointwise or backend.ADDS_BIAS),
        has_own_node=key.has_own_node and key.cast is None,
        may_have_epilogue=backend.HAS_EPILOGUES and operation is MATMUL and saved == "output" and not key.has_residual,
        flattens=flattens,
        overwrites=overwrites and is_along and saved != "input",
        # Second derivatives then go through the exact z and not the rounded y.
        keeps_origin=saved == "recompute" or (saved == "output" and saves_arguments and not key.has_residual),
        is_hooked=key.is_hooked,
    )


def choose_save(function: str, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    """What is saved of an activation where gradients need something.

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
        raise validation.output_refused(function, activation, dtype, refused)
    return "input"


def describe(activation: Activation, save: str, dtype: torch.dtype) -> str:
    """What ``choose_save`` has chosen, and why, for people."""
    if activation.fallback_reason is not None:
        return f"not fused: {activation.fallback_reason}"
    if activation.is_identity:
        return "saves nothing"
    if save == "recompute":
        return "saves nothing and recomputes"
    if save == "input":
        return "saves the input"
    refused = activation.output_refusal(dtype)
    if refused is not None:  # choose_save refuses "output"; a layer may have got another dtype since
        return f"{'cannot save the output' if save == 'output' else 'saves the input'}: {refused}"
    return "saves the output (branch in its last bit)" if activation.is_folded else "saves the output"


def _plain_because(key: PlanKey) -> str | None:
    """Why PyTorch computes the call, or None."""
    activation = key.activation
    if key.plain_because is not None or activation.fallback_reason is not None:
        return key.plain_because or activation.fallback_reason
    if key.is_compiling:
        return "torch.compile sees a user's function as it is" if activation.needs_tracing else None
    if key.size == "small" and key.save == "auto" and not key.is_inplace:
        return f"results of less than {SMALL_BYTES >> 10} KiB are left to PyTorch"
    return None


# --- batch norms ------------------------------------------------------------------------------------------------------


def _tells_input(activation: Activation, save: str, dtype: torch.dtype) -> bool:
    """Whether a batch norm's output determines its input."""
    if save not in ("auto", "output") or activation.operand_dims:
        return False
    return measure_inverse_error(activation, dtype) is not None


def save_beside_input(activation: Activation, dtype: torch.dtype, *, has_residual: bool = False) -> Saved:
    """What is saved besides a batch norm's input, where outputs do not determine that: an output that the next layer
    saves anyway, or nothing. The pre-activation is then recomputed in one pass, exactly."""
    refused = activation.output_refusal(dtype)
    return "recompute" if refused is not None or (activation.is_folded and not has_residual) else "output"


def describe_norm(activation: Activation, save: str, dtype: torch.dtype) -> str:
    """What a batch norm saves, and why, for people; for inputs that are large enough."""
    if activation.fallback_reason is not None:
        return f"not fused: {activation.fallback_reason}"
    if save == "input":
        return "saves its input and the activation's"
    if save == "recompute":
        return "saves its input"
    if _tells_input(activation, save, dtype):
        return "saves the output, which tells the input"
    reason = "do not tell the input" if not activation.has_inverse else "tell the input too coarsely"
    has_output = "output" in (save, save_beside_input(activation, dtype))
    of_dtype = str(dtype).removeprefix("torch.")
    return f"saves its input{' and the output' if has_output else ''}: {of_dtype} outputs {reason}"


# --- from a call to its plan ------------------------------------------------------------------------------------------

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
    #: Who follows the computation and must see PyTorch's own operations, or None.
    follower: str | None = None

    def plan(self) -> Plan:
        """Check the arguments, and decide."""
        validation.check_call(self.operation, self.x, self.w, self.b, self.residual)
        return make_plan(self.key())

    def key(self) -> PlanKey:
        """What the decision depends on."""
        operation, x, w, b, residual, activation, save, *_ = self
        cast = autocast_dtype(x) if operation.is_cast else None
        dtype = cast or x.dtype
        plain_because = validation.unusual_because(x, w, b, residual) or self.follower
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
        return key._replace(
            size=_size(count * x.itemsize),
            is_large=count >= batch_norm.WORTH_IT and not is_capturing(x),
            has_residual=residual is not None,
            operand_dim=other_dim,
            saves_arguments=x.requires_grad and (w is None or w.requires_grad) and (b is None or b.is_leaf),
            is_hooked=saved_tensors_hooks_on_top(True) is not None,
            is_inplace=self.is_inplace,
            has_own_node=_has_own_node(operation, backend, x, w),
            returns_view=operation.returns_view(x),
            is_new=not isinstance(operation, Pointwise) or b is not None,
        )


def plan_dense(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, activation: Activation, save: str, is_usual: bool
) -> Planned:
    """For ``dense_bias_act``. Rows are counted in ``sizes`` by what is decided of them, for lengths change."""
    if not is_usual or torch.compiler.is_compiling() or not x.dim() or not w.dim():
        return plan_for(MATMUL, x, w, b, residual, activation, save, None, is_usual=False)
    shape, size = x.shape, x.numel() * w.shape[0]
    sizes = MATMUL, len(shape) if residual is None else shape, shape[-1], size >= torch_operations.LARGE_MATMUL
    return plan_for(MATMUL, x, w, b, residual, activation, save, sizes, size // max(1, shape[-1]))


def plan_for(
    operation: Operation,
    x: Tensor,
    w: Weight,
    b: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
    save: str,
    sizes: Hashable,
    elements: int | None = None,
    is_inplace: bool = False,
    is_usual: bool = True,
) -> Planned:
    """For a call of any operation.

    Args:
        sizes: what the checks and the decision depend on, of the operation and of the shape of x.
        elements: how many the result has; may be left out where ``sizes`` says so too.
        is_inplace: whether the result is to be written over x.
        is_usual: whether all tensors are plain ones (``validation.are_plain``).
    """
    if not is_usual or torch.compiler.is_compiling():
        call = Call(operation, x, w, b, residual, activation, save, None, is_inplace)
        plan = call.plan()
        if asking.questions:
            asking.answer(plan, lambda: make_plan(call.key()._replace(is_compiling=True, size="large")))
        return plan, activation, ()
    is_plain = activation.needs_tracing or activation.fallback_reason is not None
    # Of what PyTorch computes only the reason is asked for: the record may hold a user's tensors.
    known_activation = activation if not is_plain else activation.fallback_reason
    size_bytes = MEDIUM_BYTES if elements is None else elements * x.itemsize
    operands: tuple[Tensor, ...] = ()
    operand_dim = follower = None
    facts: tuple[Hashable, ...]
    if size_bytes < SMALL_BYTES and save == "auto" and not is_inplace:
        # PyTorch computes it, whatever needs gradients and whoever follows: what the checks depend on is enough.
        facts = (
            sizes,
            known_activation,
            x.dtype,
            x.is_cpu or x.device,
            w is not None and (w.dtype, w.is_cpu or w.device, w.shape),
            b is not None and (b.dtype, b.is_cpu or b.device, b.shape),
            residual is not None and (residual.dtype, residual.is_cpu or residual.device, residual.shape),
            autocast_is_active() and autocast_dtype(x),
        )
    else:
        follower = followed_by()
        if activation.needs_tracing and follower is None:
            validation.check_call(operation, x, w, b, residual)  # what is traced for z must have a shape and a dtype
            shape = operation.shape(x, w)
            elements = math.prod(shape)
            if is_inplace or save != "auto" or elements * x.itemsize >= SMALL_BYTES:
                dtype = (autocast_dtype(x) if operation.is_cast else None) or x.dtype
                activation, operands, operand_dim = with_operands(activation, shape, dtype, x.device)
                is_plain = activation.needs_tracing or activation.fallback_reason is not None
                known_activation = activation if not is_plain else activation.fallback_reason
        facts = (
            sizes,
            size_bytes < SMALL_BYTES,
            size_bytes < MEDIUM_BYTES,
            known_activation,
            save,
            is_inplace,
            operand_dim,
            operands and needs_gradient(*operands),
            x.dtype,
            x.layout,
            x.is_neg() or (b is not None and b.is_neg()),
            x.is_cpu or x.device,
            x.requires_grad,
            w is not None and (w.dtype, w.layout, w.is_cpu or w.device, w.requires_grad, w.shape),
            b is not None and (b.dtype, b.layout, b.is_cpu or b.device, b.requires_grad, b.shape, b.is_leaf),
            residual is not None
            and (
                residual.dtype,
                residual.layout,
                residual.is_cpu or residual.device,
                residual.requires_grad,
                residual.shape,
            ),
            torch.is_grad_enabled(),
            autocast_is_active() and autocast_dtype(x),
            saved_tensors_hooks_on_top(True) is None,
            onednn_is_enabled(),
            follower,
            dispatch_mode_count() and _mode_types(),
            x.is_cuda and is_capturing(x),
        )
    try:
        known = _plans.get(facts)
    except TypeError:  # an option that cannot be hashed, which the checks refuse
        facts, known = (), None
    if known is not None and not asking.questions:
        return known, activation, operands
    call = Call(operation, x, w, b, residual, activation, save, elements, is_inplace, operands, operand_dim, follower)
    plan = _plans.put(facts, call.plan())
    if asking.questions:
        asking.answer(plan, lambda: make_plan(call.key()._replace(is_compiling=True, size="large")))
    return plan, activation, operands


def _size(size_bytes: int) -> Size:
    return "small" if size_bytes < SMALL_BYTES else "medium" if size_bytes < MEDIUM_BYTES else "large"


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


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph records what is done."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    selective = (isinstance(m, SELECTIVE_CHECKPOINT_MODES) or getattr(m, "keeps_results", False) for m in modes)
    # It saves the results of some operations, a matmul's say, which must not be overwritten.
    return "a selective checkpoint saves results of single operations" if any(selective) else None


def _has_own_node(operation: Operation, backend: Backend, x: Tensor, w: Weight) -> bool:
    """Whether a node of this package makes z, faster than torch's own or saving less."""
    if isinstance(operation, Matmul):
        return backend.has_faster_linear(x, w)
    saves_both = x.requires_grad and w is not None and w.requires_grad
    return isinstance(operation, Convolution) and not saves_both and operation.padding_in_numbers(w) is not None
