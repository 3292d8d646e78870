"""The functional interface: validate, resolve, dispatch. No arithmetic.

Every call takes one of four routes:

* fused: a backend's kernels under an autograd Function, for ordinary tensors on a device that a backend knows;
* exact: the same kernels without gradients: nothing is kept and the output carries no branch bit;
* traced: under ``torch.compile``, functional operations that keep the same tensors and that Inductor fuses;
* plain: PyTorch's own composite, for everything unusual: activations outside the table, functorch transforms, forward-mode
  differentiation, tensor subclasses (DTensor, nested, fake), meta tensors, devices without a backend.
"""

from __future__ import annotations

import contextlib
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from . import backends
from .activations import DTYPES, Activation, Saved, resolve
from .autograd import BiasAct, DenseBiasAct, along
from .traced import output_saved

SAVES = ("auto", "output", "input", "recompute")
_ORDINARY = (Tensor, Parameter)


def dense_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: object = "gelu",
    *,
    save: str = "auto",
) -> Tensor:
    """``activation(F.linear(input, weight, bias))`` that keeps one hidden-sized buffer.

    The matmul's result is overwritten by the activation's output, and the derivative is had from that output.

    Args:
        input: (..., in), float16, bfloat16, float32 or float64.
        weight: (out, in), of the same dtype and device; under autocast both are cast as ``F.linear`` casts them.
        bias: (out,) or None.
        activation: a name (see ``fusedlayers.activations()``), an ``nn.Module``, a torch function, a
            ``functools.partial``, any callable, or None. What is not in the table is computed by plain PyTorch.
        save: what is kept for backward. "output": y, written over the matmul's buffer (folded activations carry the branch
            in the last mantissa bit of negative outputs). "input": the pre-activation z, exact to the last bit.
            "recompute": neither; z is computed again from ``input``. "auto": "output" where the derivative can be had from
            it within the dtype's rounding floor, else "input".

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError: something that is not a tensor, or not of a floating dtype.
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation, or ``save="output"`` where
            the output does not tell the derivative. Nothing has been written by then.

    Saved: the output or what ``save`` says, ``input`` if the weight needs a gradient, ``weight`` if the input does.

    >>> import torch, fusedlayers as fl
    >>> fl.dense_bias_act(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4), "relu").shape
    torch.Size([2, 4])
    """
    resolved = resolve(activation)
    kind = _check("dense_bias_act", input=input, weight=weight, bias=bias)
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"dense_bias_act: expected input (..., in) and weight (out, in), got {_shape(input)} and {_shape(weight)}; "
            "the input's last dimension must be the weight's second"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"dense_bias_act: expected bias ({weight.shape[0]},) for weight {_shape(weight)}, got {_shape(bias)}"
        )
    cast = _autocast_dtype(input)
    if cast is not None:
        input, weight, bias = _cast(input, cast), _cast(weight, cast), _cast(bias, cast)
    _check_one_dtype("dense_bias_act", input=input, weight=weight, bias=bias)
    keep = _choose_save("dense_bias_act", resolved, save, input.dtype)

    if keep == "nothing":
        return F.linear(input, weight, bias)
    with _without_autocast(input) if cast is not None else _NO_CONTEXT:
        if kind == "plain" or resolved.unfused_because is not None:
            return resolved.plain(F.linear(input, weight, bias))
        if kind == "traced":
            return _traced(lambda x, w, b: F.linear(x, w, b), resolved, keep, input, weight, bias)
        if not _needs_gradient(input, weight, bias):
            return backends.choose(input).linear_act(input, weight, bias, resolved, encode=False)
        result = DenseBiasAct.apply(input, weight, bias, resolved, keep)
        return result[0] if keep == "input" else result


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    activation: object = "gelu",
    *,
    dim: int = -1,
    inplace: bool = False,
    save: str = "auto",
) -> Tensor:
    """``activation(input + bias)``, the bias along ``dim``, in one pass and keeping one buffer.

    Args:
        input: any shape, float16, bfloat16, float32 or float64.
        bias: (input.shape[dim],), of the same dtype and device, or None.
        activation: as for ``dense_bias_act``.
        dim: the dimension along which the bias runs.
        inplace: write the result over ``input``, under the same rules as ``F.relu(inplace=True)``.
        save: as for ``dense_bias_act``; "recompute" keeps ``input`` itself, which ``inplace`` would destroy.

    Returns:
        a tensor like ``input``, in its memory format; ``input`` itself if ``inplace``, or if there is nothing to do.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``.
        RuntimeError: ``inplace`` on a leaf that requires grad, or on a view of one; nothing has been written by then.

    Saved: the output, or what ``save`` says.

    >>> import torch, fusedlayers as fl
    >>> fl.bias_act(torch.zeros(2, 3, 5), torch.ones(3), "relu", dim=1)[0, :, 0]
    tensor([1., 1., 1.])
    """
    resolved = resolve(activation)
    kind = _check("bias_act", input=input, bias=bias)
    _check_one_dtype("bias_act", input=input, bias=bias)
    if bias is not None:
        if not -input.dim() <= dim < input.dim():
            raise ValueError(f"bias_act: dim must lie in [-{input.dim()}, {input.dim()}) for {_shape(input)}, got {dim}")
        if bias.dim() != 1 or bias.shape[0] != input.shape[dim]:
            raise ValueError(
                f"bias_act: expected bias ({input.shape[dim]},) along dim {dim} of {_shape(input)}, got {_shape(bias)}"
            )
    keep = _choose_save("bias_act", resolved, save, input.dtype)
    if inplace:
        if keep == "recompute":
            raise ValueError("bias_act: save='recompute' needs the input, which inplace=True overwrites; drop one of them")
        _check_writable(input)
        if keep != "output" or kind != "fused" or resolved.unfused_because is not None:
            return input.copy_(bias_act(input, bias, resolved, dim=dim, save=save))

    if keep == "nothing":
        return input if bias is None else input + along(bias, dim, input.dim())
    if kind == "plain" or resolved.unfused_because is not None:
        return resolved.plain(input if bias is None else input + along(bias, dim, input.dim()))
    if kind == "traced":
        return _traced(
            lambda x, b: x if b is None else x + along(b, dim, x.dim()), resolved, keep, input, bias
        )
    if not _needs_gradient(input, bias):
        out = input if inplace and _is_dense(input) else torch.empty_like(input)
        y = backends.choose(input).bias_act(input, bias, resolved, dim=dim, encode=False, out=out)
        return input.copy_(y) if inplace and out is not input else y
    result = BiasAct.apply(input, bias, resolved, keep, dim, inplace)
    return result[0] if keep == "input" else result


# --- checks -----------------------------------------------------------------------------------------------------------


def _check(function: str, **tensors: Tensor | None) -> str:
    """Refuse what is not a floating tensor or lies elsewhere than the first; return the route that these tensors take."""
    device = None
    ordinary = True
    for name, tensor in tensors.items():
        if tensor is None:
            if name != "bias":
                raise TypeError(f"{function}: {name} must be a tensor, got None")
            continue
        if not isinstance(tensor, Tensor):
            hint = "; pass None for no bias" if name == "bias" else ""
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}{hint}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{function}: {name} must have a floating dtype ({', '.join(map(str, DTYPES))}), got {tensor.dtype}; "
                "convert it first"
            )
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{function}: {name} is on {tensor.device} but {next(iter(tensors))} is on {device}; move one of them"
            )
        ordinary = ordinary and type(tensor) in _ORDINARY and tensor.layout is torch.strided
    assert device is not None
    if not ordinary or device.type not in backends.DEVICES:
        return "plain"
    if torch.compiler.is_compiling():
        return "traced"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "plain"
    return "fused"


def _check_one_dtype(function: str, **tensors: Tensor | None) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(dtypes.values())) > 1:
        got = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{function}: all tensors must have one dtype, got {got}; convert them, or use torch.autocast")


def _check_writable(tensor: Tensor) -> None:
    # torch makes these checks after a custom Function has written; they belong before.
    base = tensor._base if tensor._base is not None else tensor
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        what = "a leaf" if base is tensor else "a view of a leaf"
        raise RuntimeError(f"bias_act: inplace=True on {what} that requires grad; use inplace=False or detach the input")


def _choose_save(function: str, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    if save not in SAVES:
        raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")
    if activation.is_identity:
        return "nothing"
    if save in ("input", "recompute"):
        return save  # type: ignore[return-value]  # narrowed by the test
    refused = activation.output_refused_because(dtype)
    if refused is None:
        return "output"
    if save == "output":
        raise ValueError(
            f"{function}: save='output' cannot be had for {activation!r} in {dtype}: {refused}; "
            "use save='auto', 'input' or 'recompute'"
        )
    return "input"


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


# --- contexts ---------------------------------------------------------------------------------------------------------

_NO_CONTEXT = contextlib.nullcontext()


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts a matmul's arguments to, or None outside autocast."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.to(dtype)


def _without_autocast(tensor: Tensor) -> torch.autocast:
    # Else the activation's own operations would be cast one by one.
    return torch.autocast(tensor.device.type, enabled=False)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()


def _traced(pre_activation, activation: Activation, save: Saved, *tensors: Tensor | None) -> Tensor:
    if save == "output":
        return output_saved(pre_activation(*tensors), activation.name, tuple(activation.parameters.items()))
    if save == "input":
        return activation.plain(pre_activation(*tensors))
    return checkpoint(lambda *arguments: activation.plain(pre_activation(*arguments)), *tensors, use_reentrant=False)
