"""Decides what a call does: which path it takes, what is saved for backward, and why.

Two things are decided later: whether backward may overwrite a buffer (``ops/buffer_reuse.py``), and what a block
that runs layer by layer asks of its layers (``execute.py``).

A ``PlanKey`` names what the decision depends on; ``call.py`` reads it off a call. ``make_plan`` is a pure function of
the key, so a layer can also ask what it would do for typical inputs, and ``repr`` prints the answer.

A plan holds no tensors. What changes from call to call is not part of it: who owns a buffer in backward, the seed of a
dropout, and what depends on values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from . import backends, validation
from .activations import KEPT_BY_TORCH, Activation, Saved
from .backends import Backend
from .backends.operations import GATE, Operation, Pointwise
from .sizes import MEDIUM_BYTES, SMALL_BYTES, Limits, Size
from .utils.formatting import whole_size_text

#: Of a function that a layer would keep both sides of.
_KEEPS_LESS = "PyTorch keeps less than its input and its output, which this layer would keep"

Path = Literal["composite", "compiled", "no_grad", "in_place", "fused"]
"""How a call is computed.

* "composite": by PyTorch's own operations, which save what they save;
* "compiled": by functional operations that the compiler fuses;
* "no_grad": by a backend's kernels, saving nothing;
* "in_place": by PyTorch's own operations, the activation in place, which saves its result;
* "fused": by a backend's kernels under an autograd Function.
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
    limits: Limits = Limits(SMALL_BYTES, MEDIUM_BYTES)
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
    #: Whether a node of this package makes the pre-activation, saving less than torch's.
    has_own_node: bool = False
    #: Whether the operation returns a view of its result.
    returns_view: bool = False
    #: Whether the operation makes a new tensor; bias_act without a bias does not.
    makes_z: bool = True


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
    backend: Backend = None  # type: ignore[assignment]  # nor this
    #: The dtype that autocast casts to, or None.
    cast: torch.dtype | None = None
    #: The dimension of z along which the bias and the activation's own tensors run.
    dim: int = -1
    #: Whether the activation's kernel adds the bias, and not the operation.
    bias_in_kernel: bool = False
    #: Whether a node of this package makes z.
    has_own_node: bool = False
    #: Whether x is flattened first. Otherwise the operation returns a view, and autograd makes a copy where a view is
    #: overwritten.
    flattens: bool = False
    #: Whether y is written over z.
    overwrites: bool = False
    #: Whether backward can recompute z from the operation's own arguments.
    keeps_origin: bool = False
    is_hooked: bool = False
    #: Whose call it is, for errors in backward.
    function: str = ""

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return f"Plan(path={self.path!r}, saved={self.saved!r}, reason={self.reason!r})"


def plain(because: str) -> Plan:
    """The plan of a call that PyTorch computes, and saves for."""
    return Plan("composite", "eager", f"not fused: {because}")


def make_plan(key: PlanKey) -> Plan:
    """The decision.

    Raises:
        ValueError: an unknown ``save``, or ``save="output"`` where the output does not determine the derivative.
    """
    operation, activation, save, dtype, backend, needs, *_ = key
    saved = choose_save(operation.function, activation, save, dtype)
    left = _left_to_pytorch(key)
    if left is not None:
        return left
    reason = describe(activation, save, dtype)
    if saved == "nothing":
        return Plan("composite", "eager", reason)
    if operation == GATE and any(needs) and not key.is_compiling:
        dim = -1 if key.operand_dim is None else key.operand_dim
        return Plan("fused", "input", "saves gate and up", activation, backend, dim=dim)
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
            overwrites=overwrites and (saved == "output" or not is_pointwise),
        )
    flattens = key.returns_view and is_along
    torch_makes_z = key.makes_z and not key.is_inplace and not key.has_own_node
    path: Path = "fused"
    # Under hooks nobody would notice an edit of what PyTorch's operation has saved: where PyTorch's own layers do not
    # save it, their result may be edited.
    is_noticed = not key.is_hooked or activation.name in KEPT_BY_TORCH
    if saved == "output" and activation.in_place is not None and key.size != "large" and torch_makes_z and is_noticed:
        path = "in_place"
    # Then the activation's node may hold them too, at no cost.
    holds_arguments = key.saves_arguments and not is_pointwise and key.cast is None and not key.is_hooked
    return Plan(
        path,
        saved,
        reason,
        activation,
        backend,
        key.cast,
        dim,
        bias_in_kernel=saved != "input" and is_along and operation.leaves_bias and (is_pointwise or backend.ADDS_BIAS),
        has_own_node=key.has_own_node and key.cast is None,
        flattens=flattens,
        overwrites=overwrites and is_along and saved != "input",
        # Second derivatives then go through the exact z and not the rounded y.
        keeps_origin=saved == "recompute" or (saved == "output" and holds_arguments and not key.has_residual),
        is_hooked=key.is_hooked,
        function=operation.function,
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


def describe(activation: Activation, save: str, dtype: torch.dtype, device: torch.device | None = None) -> str:
    """What ``choose_save`` has chosen, and why, for people. With a device, it says where PyTorch computes instead."""
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
    if (because := _slow_there(activation, save, dtype, device)) is not None:
        return f"not fused: {because}"
    return "saves the output (last bit = side of minimum)" if activation.is_folded else "saves the output"


def _left_to_pytorch(key: PlanKey) -> Plan | None:
    """The plan where PyTorch computes the call, or None."""
    activation = key.activation
    because = key.plain_because or activation.fallback_reason
    if because is None and key.is_compiling:
        if activation.needs_tracing:
            return plain("torch.compile sees a user's function as it is")
        return None
    if because is None and key.save == "auto" and activation.torch_keeps_less and key.operation != GATE:
        because = _KEEPS_LESS
    is_small = key.size == "small" and key.save == "auto" and not key.is_inplace
    because = because or _slow_because(key, may_build=not is_small)
    if because is None and is_small:
        because = f"results of less than {whole_size_text(key.limits.medium)} are left to PyTorch"
    return None if because is None else plain(because)


def _slow_because(key: PlanKey, *, may_build: bool) -> str | None:
    """Why saving the output would take several times PyTorch's time, or None."""
    if key.save != "auto" or not any(key.needs) or key.activation.output_refusal(key.dtype) is not None:
        return None
    return key.backend.slow_because(key.activation, key.dtype, may_build=may_build)


def _slow_there(activation: Activation, save: str, dtype: torch.dtype, device: torch.device | None) -> str | None:
    """The same of a layer on a device, before anything is built; None if that is not known."""
    return None if device is None or save != "auto" else backends.slow_on(device, dtype, activation)
