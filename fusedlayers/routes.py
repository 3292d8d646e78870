"""An operation (``backends/operations.py``) and the activation after it: which route a call takes. No arithmetic.

* fused: a backend's kernels under an autograd Function, for ordinary tensors on a device that a backend knows;
* exact: the same kernels without gradients: nothing is kept and the output carries no branch bit;
* traced: under ``torch.compile``, functional operations that keep the same tensors and that Inductor fuses;
* plain: PyTorch's own composite, for everything unusual: activations outside the table, functorch transforms,
  forward-mode differentiation, ``make_fx``, TorchScript traces, selective checkpoints, tensor subclasses (DTensor,
  fake), nested and meta tensors, devices without a backend; and for outputs so small that there is nothing to gain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import backends, validation
from ._torch import (
    PROXY_MODE,
    SELECTIVE_CHECKPOINT_MODES,
    dispatch_mode_at,
    dispatch_mode_count,
    forward_ad_level,
    functorch_is_active,
    infrastructure_mode,
    is_exporting,
    torchscript_state,
)
from .activations import Activation, Saved, WithOperands
from .backends import Backend
from .backends.operations import BatchNorm, Convolution, Matmul, Operation, Recompute, Weight
from .ops.autocast import shared_cast
from .ops.batch_norm import inverse_error_of, norm_act, save_beside_input
from .ops.buffer_reuse import saved_under_hooks
from .ops.pointwise import BiasAct, Conv, Dense, Epilogue, Origin, Writes

SAVES = ("auto", "output", "input", "recompute")

#: Outputs of fewer elements are left to plain PyTorch under ``save="auto"``: the buffer that would be spared is smaller
#: than the Python objects of the autograd node that would spare it.
SMALL = 256


class Inputs(NamedTuple):
    """What a layer is given: ``operation(x, w, b) + residual``."""

    x: Tensor
    w: Weight
    b: Tensor | None
    residual: Tensor | None = None


class Context(NamedTuple):
    """What a call is made under."""

    compiling: bool
    #: Of z.
    dtype: torch.dtype
    #: What autocast, if it is on, casts to.
    cast: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor, *, is_cast: bool = True) -> Context:
        """``is_cast``: whether autocast casts what the operation multiplies."""
        kind = x.device.type
        autocast = is_cast and validation.is_autocast(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast and x.dtype is not torch.float64 else x.dtype
        return cls(torch.compiler.is_compiling(), dtype, dtype if autocast else None)

    def is_plain(self, save: str, count: int, is_ordinary: bool) -> bool:
        """Whether ``count`` elements of z, of tensors that kernels can read or not, are left to plain PyTorch."""
        if self.compiling:
            return not is_ordinary
        return (save == "auto" and count < SMALL) or not is_ordinary or is_transformed()

    def with_operands(self, activation: Activation, shape: Sequence[int], device: torch.device) -> WithOperands:
        """The activation of z of this shape, the tensors that it reads, and the dimension along which these run."""
        if self.compiling or not activation.needs_tracing:
            return WithOperands(activation)
        return with_operands(activation, shape, self.dtype, device)


def composite(operation: Operation, activation: Activation, inputs: Inputs) -> Tensor:
    """What PyTorch computes."""
    return activation.plain(_sum(operation, *inputs))


def _sum(operation: Operation, x: Tensor, w: Weight, b: Tensor | None, residual: Tensor | None) -> Tensor:
    z = operation(x, w, b)
    return z if residual is None else z + residual


def operation_act(
    operation: Operation, inputs: Inputs, activation: Activation, save: str, *, count: int, is_ordinary: bool
) -> Tensor:
    """``activation(operation(x, w, b) + residual)``, which has ``count`` elements, of inputs that have been checked."""
    x, w, b, residual = inputs
    context = Context.of(x, is_cast=operation.is_cast)
    compiling, dtype, cast = context
    # A residual of another dtype than the operation's, which autocast makes, decides on that of the sum.
    is_plain = context.is_plain(save, count, is_ordinary and (residual is None or residual.dtype is dtype))
    params: tuple[Tensor, ...] = ()
    dim = operation.dim
    if not is_plain:
        activation, params, params_dim = context.with_operands(activation, operation.shape(x, w), x.device)
        dim = operation.dim if params_dim is None else params_dim
    keep = choose_save(operation.function, activation, save, dtype)
    if isinstance(operation, BatchNorm) and not compiling:
        if residual is None and not (is_plain or params) and save in ("auto", "output") and needs_gradient(x, w, b):
            inverse_error = inverse_error_of(activation, x)
            if inverse_error is not None:
                return norm_act(operation, x, w, b, activation, inverse_error)
        if save == "auto" and keep != "nothing":
            keep = save_beside_input(activation, dtype, has_residual=residual is not None)

    if is_plain or keep == "nothing" or not activation.is_fusible:
        return composite(operation, activation, inputs)
    if compiling:
        if keep == "recompute" and isinstance(operation, BatchNorm):
            # An average's part is read from the count: there the graph breaks, and torch's checkpoint is none of the
            # compiler's any more, but counts again in the backward pass.
            operation = operation.counted()
        return traced(functools.partial(_sum, operation), activation, keep, *inputs)
    if not needs_gradient(*inputs, *params):
        return _exact(operation, inputs, activation, params, dim, cast)
    if dim == operation.dim:
        folded = Inputs(operation.flattened(x), w, b, None if residual is None else operation.flattened(residual))
        return operation.unflattened(_fused(operation, folded, activation, params, keep, cast), x)
    z, again = operation.with_recompute(x, w, b)
    if keep == "recompute" and cast is None:
        origin = Origin(x, w, b, again)
        return BiasAct.apply(z, None, residual, activation, keep, dim, "a new buffer", origin, *params)
    z = z if residual is None else z + residual
    return BiasAct.apply(z, None, None, activation, "input", dim, "a new buffer", None, *params)


def _exact(
    operation: Operation,
    inputs: Inputs,
    activation: Activation,
    params: tuple[Tensor, ...],
    dim: int,
    cast: torch.dtype | None,
) -> Tensor:
    """The layer without gradients; ``cast`` is what autocast, if it is on, casts to."""
    x, w, b, residual = inputs
    backend = backends.choose(x, activation)
    if cast is not None and isinstance(operation, Matmul):
        x, w, b, cast = x.to(cast), w.to(cast), None if b is None else b.to(cast), None
    if not (cast is not None or params or residual is not None):
        return backend.operation_act(operation, x, w, b, activation)
    z = operation(x, w, b)
    return backend.bias_act(z, None, activation, params, residual=residual, dim=dim, encode=False, out=z)


def _fused(
    operation: Operation,
    inputs: Inputs,
    activation: Activation,
    params: tuple[Tensor, ...],
    keep: Saved,
    cast: torch.dtype | None,
) -> Tensor:
    """The layer on folded inputs, for gradients; ``cast`` is what autocast, if it is on, casts to."""
    x, w, b, residual = inputs
    backend = backends.choose(x, activation)
    # Where the kernel adds the bias, the operation does not.
    kernel_b = b if backend.ADDS_BIAS and operation.leaves_bias and keep != "input" else None
    operation_b = b if kernel_b is None else None
    if cast is not None:
        # Whatever torch can cast it does: a weight that is used many times is then cast, and kept, once.
        kernel_b = None if kernel_b is None else kernel_b.to(cast)
        x = x.to(cast) if keep == "recompute" else x
        if keep == "output" and isinstance(operation, Matmul):
            x, w = shared_cast(x, cast), shared_cast(w, cast)
    writes: Writes = "a new buffer" if keep == "input" else "over z"
    again: Recompute
    if keep == "output" and residual is None and _has_epilogue(operation, backend, x, w, kernel_b, activation):
        z, again, writes = Dense.apply(x, w, operation_b, Epilogue(kernel_b, activation)), operation.__call__, "nothing"
    elif cast is not None:
        z, again = operation.with_recompute(x, w, operation_b)
    else:
        z, again = with_recompute(operation, backend, x, w, operation_b)
    if residual is not None and keep == "input":
        z, residual = z.add_(residual), None
    # z can be recomputed if it must, or where that costs no memory: an operation whose x and w both need gradients has
    # saved them (under autocast its casts of them, under hooks what those made of them), and a bias that is a parameter
    # is alive anyway.
    free = cast is None and x.requires_grad and (w is None or w.requires_grad) and (b is None or b.is_leaf)
    free = free and not saved_under_hooks()
    known = keep == "recompute" or (keep == "output" and free and residual is None)
    origin = Origin(x, w, operation_b, again) if known else None
    return BiasAct.apply(z, kernel_b, residual, activation, keep, operation.dim, writes, origin, *params)


def _has_epilogue(
    operation: Operation, backend: Backend, x: Tensor, w: Weight, b: Tensor | None, activation: Activation
) -> bool:
    return isinstance(operation, Matmul) and backend.has_epilogue(x, w, b, activation, encode=True)


def with_recompute(
    operation: Operation, backend: Backend, x: Tensor, w: Weight, b: Tensor | None
) -> tuple[Tensor, Recompute]:
    """``operation.with_recompute(x, w, b)``, by a Function where that is faster, or keeps less, than torch's own."""
    if isinstance(operation, Matmul) and backend.has_faster_linear(x, w):
        return Dense.apply(x, w, b), operation
    needs_both = x.requires_grad and w is not None and w.requires_grad
    if isinstance(operation, Convolution) and not needs_both and operation.padding_in_numbers(w) is not None:
        return Conv.apply(x, w, b, operation), operation.__call__
    return operation.with_recompute(x, w, b)


def with_operands(
    activation: Activation, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> WithOperands:
    """A user's function made into an activation for z of this shape and dtype, with the tensors that it reads."""
    # Here, because tracing takes parts of torch whose import takes a second.
    from .activations.custom import trace_activation

    return trace_activation(activation, tuple(shape), dtype, device)


def is_transformed() -> bool:
    """Whether a transform or a tracer, or a selective checkpoint, wants to see plain operations."""
    return is_followed() or (dispatch_mode_count() > 0 and _is_selectively_checkpointed())


def is_followed() -> bool:
    """Whether functorch, forward-mode differentiation, ``make_fx`` or TorchScript's tracer follows what is computed."""
    return (
        functorch_is_active()
        or forward_ad_level() >= 0
        or torchscript_state() is not None
        or infrastructure_mode(PROXY_MODE) is not None
    )


def _is_selectively_checkpointed() -> bool:
    """Whether results of the operations that a policy names are kept, a matmul's say, for the time when the others are
    computed again. None of them may be written over. (``checkpoint/selective.py`` has modes of its own.)"""
    modes = map(dispatch_mode_at, range(dispatch_mode_count()))
    return any(isinstance(mode, SELECTIVE_CHECKPOINT_MODES) or getattr(mode, "keeps_results", False) for mode in modes)


def choose_save(function: str, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    if save not in SAVES:
        raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")
    if activation.is_identity:
        return "nothing"
    if save == "input" or save == "recompute":
        return save  # type: ignore[return-value]  # a str that the test has narrowed
    refused = activation.output_refusal(dtype)
    if refused is None:
        return "output"
    if save == "output":
        raise ValueError(
            f"{function}: save='output' cannot be had for {activation!r} in {dtype}: {refused}; "
            "use save='auto', 'input' or 'recompute'"
        )
    return "input"


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def traced(
    pre_activation: Callable[..., Tensor], activation: Activation, save: Saved, *tensors: Tensor | None
) -> Tensor:
    # An exported program is for inference.
    if not needs_gradient(*tensors) or is_exporting():
        return activation.plain(pre_activation(*tensors))
    if save == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from .ops.compiled import output_saved

        return output_saved(pre_activation(*tensors), activation.name, tuple(activation.parameters.items()))
    if save == "input":
        return activation.plain(pre_activation(*tensors))
    return checkpoint(lambda *arguments: activation.plain(pre_activation(*arguments)), *tensors, use_reentrant=False)
