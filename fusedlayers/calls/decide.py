"""Decides what a call does: which path it takes, what is saved for backward, and why.

A ``Call`` is what is asked for, and a ``Plan`` the answer. ``call.py`` remembers plans by what they depend on. A plan
holds no tensors. What changes from call to call is not part of it: who owns a buffer in backward, the seed of a
dropout, and what depends on values.

Layers and blocks share one record, and the reasons. They are logged (at DEBUG, by "fusedlayers"), and stand in errors;
``repr`` of a layer and ``explain`` say what ``describe`` does.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from .._torch import autocast_is_active
from ..activations import KEPT_BY_TORCH, Activation, Saved
from ..kernels import Backend
from ..kernels.operations import Operation, Pointwise, Weight
from ..ops.mlp_forward import Block, BlockOptions
from ..utils.formatting import size_text
from . import validation
from .sizes import limits_of

#: Of a function that a layer would keep both sides of.
_KEEPS_LESS = "PyTorch keeps less than its input and its output, which this layer would keep"

Path = Literal["composite", "compiled", "no_grad", "fused", "by_layer"]
"""How a call is computed.

* "composite": by PyTorch's own operations, which save what they save;
* "compiled": by functional operations that the compiler fuses;
* "no_grad": by a backend's kernels, saving nothing;
* "fused": by a backend's kernels under an autograd Function;
* "by_layer", of a block: each layer by a plan of its own.
"""


class Call(NamedTuple):
    """A layer's call: ``activation(operation(x, w, b) + residual, *operands)``."""

    operation: Operation
    x: Tensor
    w: Weight
    b: Tensor | None
    residual: Tensor | None
    #: What a user passes; of what is computed the record.
    activation: Any
    save: str = "auto"
    #: Whether the result is to be written over x.
    is_inplace: bool = False
    #: The tensors that the activation reads, and the dimension along which they run.
    operands: tuple[Tensor, ...] = ()
    operand_dim: int | None = None


class Plan(NamedTuple):
    """A call's path, and its saved tensors."""

    path: Path
    #: What the activation saves: "output" y, "input" the pre-activation z, "recompute" neither, "nothing" where none is
    #: needed, "eager" for what PyTorch saves.
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
    #: Whose call it is, for errors in backward.
    function: str = ""
    #: What the node of a block needs to know besides tensors.
    block: Block | None = None

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return f"Plan(path={self.path!r}, saved={self.saved!r}, reason={self.reason!r})"


def plain(because: str) -> Plan:
    """The plan of a call that PyTorch computes, and saves for."""
    return Plan("composite", "eager", f"not fused: {because}")


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether any needs a gradient, and gradients are switched on."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts a matmul's arguments to, or None where it is off; float64 stays."""
    if not autocast_is_active() or not validation.is_autocast(x.device.type):
        return None
    return x.dtype if x.dtype is torch.float64 else torch.get_autocast_dtype(x.device.type)


# --- a layer ----------------------------------------------------------------------------------------------------------


def decide(call: Call, followed_by: str | None) -> Plan:
    """The plan of a layer, or of ``bias_act``, whose tensors fit together.

    Args:
        followed_by: who must see PyTorch's own operations, or None.

    Raises:
        ValueError: an unknown ``save``, or ``save="output"`` where the output does not determine the derivative.
    """
    operation, x, w, b, residual, activation, save, *_ = call
    cast = autocast_dtype(x) if operation.is_cast else None
    dtype, backend = cast or x.dtype, kernels.choose(x, activation)
    is_trained, is_compiling = needs_gradient(x, w, b, residual, *call.operands), torch.compiler.is_compiling()
    is_seen = is_compiling and activation.needs_tracing and save == "output"  # which only a trace shows to be possible
    saved = choose_save(operation.function, activation, "auto" if is_seen else save, dtype)
    because = followed_by or validation.unusual_because(x, w, b, residual) or activation.fallback_reason
    if residual is not None and residual.dtype is not dtype:
        because = because or f"the residual is {residual.dtype} where the sum is {dtype}"
    if because is None and is_compiling and activation.needs_tracing:
        because = "torch.compile sees a user's function as it is"
    if because is None and not is_compiling:
        because = _left_because(call, dtype, backend, is_trained)
    if because is not None:
        return plain(because)
    reason = describe(activation, save, dtype)
    if saved == "nothing":
        return Plan("composite", "eager", reason)
    if is_compiling:
        # The compiler chooses what it saves of an activation's input, or instead of it.
        kept: Saved | Literal["eager"] = "eager" if saved == "input" else saved
        return Plan("compiled", kept if is_trained else "nothing", reason, activation)
    return _by_kernels(call, Plan("fused", saved, reason, activation, backend, cast), is_trained)


def _by_kernels(call: Call, plan: Plan, is_trained: bool) -> Plan:
    """The plan with all that the kernels must know."""
    operation, x, *_ = call
    saved, backend, other_dim = plan.saved, plan.backend, call.operand_dim
    is_along = other_dim is None or (other_dim - operation.dim) % max(1, x.dim()) == 0
    dim = operation.dim if is_along or other_dim is None else other_dim
    is_pointwise = isinstance(operation, Pointwise)
    # The result of an operation is the package's own to overwrite, and an input is the caller's.
    overwrites = call.is_inplace or not is_pointwise
    adds_bias = is_along and (is_pointwise or backend.ADDS_BIAS)
    if not is_trained:
        return plan._replace(
            path="no_grad", saved="nothing", reason="saves nothing: no gradient is needed", dim=dim,
            bias_in_kernel=adds_bias, overwrites=overwrites and (saved == "output" or not is_pointwise),
        )  # fmt: skip
    return plan._replace(
        dim=dim, bias_in_kernel=adds_bias and saved != "input", flattens=operation.returns_view(x) and is_along,
        overwrites=overwrites and is_along and saved != "input", function=operation.function,
    )  # fmt: skip


def _left_because(call: Call, dtype: torch.dtype, backend: Backend, is_trained: bool) -> str | None:
    """Why PyTorch computes what the kernels could compute, or None."""
    operation, x, _, _, _, activation, save, *_ = call
    if save != "auto":
        return None
    if activation.torch_keeps_less:
        return _KEEPS_LESS
    limit, medium = limits_of(x)
    result_bytes = math.prod(operation.shape(x, call.w)) * x.itemsize
    if result_bytes >= limit and activation.name in KEPT_BY_TORCH and not isinstance(operation, Pointwise):
        limit = medium
    is_small = result_bytes < limit and not call.is_inplace
    if is_trained and activation.output_refusal(dtype) is None:
        because = backend.slow_because(activation, dtype, may_build=not is_small)
        if because is not None:
            return because
    return f"results of less than {size_text(limit)} are left to PyTorch" if is_small else None


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
        raise validation.output_refused(function, activation, dtype, refused)
    return "input"


def describe(activation: Activation, save: str, dtype: torch.dtype, device: torch.device | None = None) -> str:
    """The choice of ``choose_save``, and its reason, for people; with a device, also where PyTorch computes instead."""
    left = activation.left_because(dtype)
    if left is not None and (save != "output" or activation.is_identity):  # which is refused
        return f"not fused: {left}"
    if activation.is_identity:
        return "saves nothing"
    if save == "recompute":
        return "saves nothing and recomputes"
    if save == "input":
        return "saves the input"
    refused = activation.output_refusal(dtype)
    if save == "auto" and activation.torch_keeps_less:
        return f"not fused: {_KEEPS_LESS}"
    if refused is not None:  # choose_save refuses "output"; a layer may have got another dtype since
        return f"{'cannot save the output' if save == 'output' else 'saves the input'}: {refused}"
    because = None if device is None or save != "auto" else kernels.slow_on(device, dtype, activation)
    if because is not None:
        return f"not fused: {because}"
    return "saves the output (last bit = side of minimum)" if activation.is_folded else "saves the output"


def describe_block(
    options: BlockOptions, activation: Activation, dtype: torch.dtype, device: torch.device | None = None
) -> str:
    """The saved part of a block's hidden layer, and the reason, as ``describe``."""
    if options.save != "output" and (left := activation.left_because(dtype)) is not None:
        return f"not fused: {left}"
    if options.save != "recompute" and options.is_gated:
        return "saves gate and up"
    if options.save != "recompute" and activation.is_identity:
        return "saves the first layer's result"
    return describe(activation, options.save, dtype, device)
