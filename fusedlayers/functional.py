"""The functional interface: validate, resolve, dispatch. No arithmetic.

Every call takes one of four routes:

* fused: a backend's kernels under an autograd Function, for ordinary tensors on a device that a backend knows;
* exact: the same kernels without gradients: nothing is kept and the output carries no branch bit;
* traced: under ``torch.compile``, functional operations that keep the same tensors and that Inductor fuses;
* plain: PyTorch's own composite, for everything unusual: activations outside the table, functorch transforms,
  forward-mode differentiation, tensor subclasses (DTensor, nested, fake), meta tensors, devices without a backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from . import backends
from .activations import DTYPES, Activation, Saved, resolve
from .autograd import BiasAct, Dense, Origin
from .broadcast import along

SAVES = ("auto", "output", "input", "recompute")

#: Outputs of fewer elements are left to plain PyTorch under ``save="auto"``: the buffer that would be spared is smaller
#: than the Python objects of the autograd node that would spare it.
SMALL = 256
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
        save: what is kept for backward. "output": y, written over the matmul's buffer (folded activations carry the
            branch in the last mantissa bit of negative outputs). "input": the pre-activation z, exact to the last bit.
            "recompute": neither; z is computed again from ``input``. "auto": "output" where the derivative can be had
            from it within the dtype's rounding floor, else "input"; fewer than 256 outputs are left to plain PyTorch.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError: something that is not a tensor, or not of a floating dtype.
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation, or ``save="output"``
            where the output does not tell the derivative. Nothing has been written by then.

    Saved: the output or what ``save`` says, ``input`` if the weight needs a gradient, ``weight`` if the input does.

    >>> import torch, fusedlayers as fl
    >>> fl.dense_bias_act(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4), "relu").shape
    torch.Size([2, 4])
    """
    resolved = resolve(activation)
    route = _route("dense_bias_act", input, weight, bias)
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"dense_bias_act: expected input (..., in) and weight (out, in), got {_shape(input)} and {_shape(weight)}; "
            "the input's last dimension must be the weight's second"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ValueError(
            f"dense_bias_act: expected bias ({weight.shape[0]},) for weight {_shape(weight)}, got {_shape(bias)}"
        )
    autocast = input.device.type != "meta" and torch.is_autocast_enabled(input.device.type)  # torch refuses for meta
    if autocast and resolved.unfused_because is None:
        # As F.linear is cast. The activation's own operations must not be cast once more, one by one.
        dtype = torch.get_autocast_dtype(input.device.type)

        def cast(tensor: Tensor) -> Tensor:
            return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)

        with torch.autocast(input.device.type, enabled=False):
            return dense_bias_act(cast(input), cast(weight), None if bias is None else cast(bias), resolved, save=save)
    if not autocast:
        _check_one_dtype("dense_bias_act", input, weight, bias)
    keep = _choose_save("dense_bias_act", resolved, save, input.dtype)

    if keep == "nothing":
        return F.linear(input, weight, bias)
    small = save == "auto" and input.numel() * weight.shape[0] < SMALL * weight.shape[1]
    if route == "plain" or resolved.unfused_because is not None or (small and route == "fused"):
        return resolved.plain(F.linear(input, weight, bias))
    if route == "traced":
        return _traced(lambda x, w, b: F.linear(x, w, b), resolved, keep, input, weight, bias)
    backend = backends.choose(input)
    if not _needs_gradient(input, weight, bias):
        return backend.linear_act(input, weight, bias, resolved)

    # Two dimensions: the result of F.linear with more is a view, and overwriting a view costs autograd a copy.
    x = input.flatten(0, -2) if input.dim() > 2 else input if input.dim() == 2 else input.unsqueeze(0)
    late = bias if backend.ADDS_BIAS and keep != "input" else None
    early = bias if late is None else None
    z = Dense.apply(x, weight, early, backend) if backend.multiplies(x, weight) else F.linear(x, weight, early)
    y = BiasAct.apply(z, late, resolved, keep, -1, keep != "input", _origin(x, weight, early, late, keep))
    return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])


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
    route = _route("bias_act", input, None, bias)
    _check_one_dtype("bias_act", input, None, bias)
    if bias is not None:
        if not -input.dim() <= dim < input.dim():
            raise ValueError(
                f"bias_act: dim must lie in [-{input.dim()}, {input.dim()}) for {_shape(input)}, got {dim}"
            )
        if bias.dim() != 1 or bias.shape[0] != input.shape[dim]:
            raise ValueError(
                f"bias_act: expected bias ({input.shape[dim]},) along dim {dim} of {_shape(input)}, got {_shape(bias)}"
            )
    keep = _choose_save("bias_act", resolved, save, input.dtype)
    small = save == "auto" and input.numel() < SMALL and not inplace
    fused = route == "fused" and resolved.unfused_because is None and not small
    if inplace:
        if keep == "recompute":
            raise ValueError(
                "bias_act: save='recompute' needs the input, which inplace=True overwrites; drop one of them"
            )
        _check_writable(input)
        # Autograd refuses some views, but only after a Function has written; copy_ asks first.
        if not fused or keep != "output" or (input._is_view() and _needs_gradient(input, bias)):
            z = input.clone() if bias is None else input + along(bias, dim, input.dim())
            return input.copy_(bias_act(z, None, resolved, save=save))

    def biased(x: Tensor, b: Tensor | None) -> Tensor:
        return x if b is None else x + along(b, dim, x.dim())

    if keep == "nothing":
        return biased(input, bias)
    if route == "traced" and resolved.unfused_because is None:
        return _traced(biased, resolved, keep, input, bias)
    if not fused:
        return resolved.plain(biased(input, bias))
    if not _needs_gradient(input, bias):
        out = input if inplace else None
        return backends.choose(input).bias_act(input, bias, resolved, dim=dim, encode=False, out=out)
    if keep == "input":
        return BiasAct.apply(biased(input, bias), None, resolved, keep, dim, False, None)
    return BiasAct.apply(input, bias, resolved, keep, dim, inplace, Origin(input) if keep == "recompute" else None)


# --- checks -----------------------------------------------------------------------------------------------------------


def _route(function: str, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> str:
    """The route that these tensors take. What is no floating tensor, or not on the input's device, is refused."""
    complete = input is not None and (weight is not None or function == "bias_act")
    ordinary = complete and _is_ordinary(input, input) and _is_ordinary(weight, input) and _is_ordinary(bias, input)
    if not ordinary:
        _refuse(function, input, weight, bias)
        return "plain"
    if torch.compiler.is_compiling():
        return "traced"
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return "plain"
    return "fused"


def _is_ordinary(tensor: Tensor | None, input: Tensor) -> bool:
    """Whether ``tensor`` is absent, or one that kernels can read and that lies where the input does."""
    return tensor is None or (
        type(tensor) in _ORDINARY
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and tensor.device == input.device
        and input.device.type in backends.DEVICES
    )


def _refuse(function: str, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if tensor is None and (name == "bias" or (name == "weight" and function == "bias_act")):
            continue
        if not isinstance(tensor, Tensor):
            hint = "; pass None for no bias" if name == "bias" else ""
            raise TypeError(f"{function}: {name} must be a tensor, got {type(tensor).__name__}{hint}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{function}: {name} must have a floating dtype ({', '.join(map(str, DTYPES))}), got {tensor.dtype}; "
                "convert it first"
            )
        if tensor.device != input.device:
            raise ValueError(
                f"{function}: {name} is on {tensor.device} but input is on {input.device}; move one of them"
            )


def _check_one_dtype(function: str, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    dtype = input.dtype
    if (weight is not None and weight.dtype is not dtype) or (bias is not None and bias.dtype is not dtype):
        named = (("input", input), ("weight", weight), ("bias", bias))
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in named if tensor is not None)
        raise ValueError(f"{function}: all tensors must have one dtype, got {got}; convert them, or use torch.autocast")


def _check_writable(tensor: Tensor) -> None:
    # torch makes these checks after a custom Function has written; they belong before.
    base = tensor._base if tensor._base is not None else tensor
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        what = "a leaf" if base is tensor else "a view of a leaf"
        raise RuntimeError(
            f"bias_act: inplace=True on {what} that requires grad; use inplace=False or detach the input"
        )


def _choose_save(function: str, activation: Activation, save: str, dtype: torch.dtype) -> Saved:
    if save not in SAVES:
        raise ValueError(f"{function}: save must be one of {', '.join(SAVES)}, got {save!r}")
    if activation.is_identity:
        return "nothing"
    if save == "input" or save == "recompute":
        return save  # type: ignore[return-value]  # a str that the test has narrowed
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


# --- routes -----------------------------------------------------------------------------------------------------------


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _origin(x: Tensor, w: Tensor, early: Tensor | None, late: Tensor | None, keep: Saved) -> Origin | None:
    """What z can be computed from again: for "recompute", and where it costs no memory to know.

    The matmul saves x and w if both need gradients. A bias that is a parameter is alive anyway; a cast copy is not.
    """
    bias = early if late is None else late
    free = x.requires_grad and w.requires_grad and (bias is None or bias.is_leaf)
    return Origin(x, w, early) if keep == "recompute" or (keep == "output" and free) else None


def _traced(
    pre_activation: Callable[..., Tensor], activation: Activation, save: Saved, *tensors: Tensor | None
) -> Tensor:
    if not _needs_gradient(*tensors):
        return activation.plain(pre_activation(*tensors))
    if save == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from .traced import output_saved

        return output_saved(pre_activation(*tensors), activation.name, tuple(activation.parameters.items()))
    if save == "input":
        return activation.plain(pre_activation(*tensors))
    return checkpoint(lambda *arguments: activation.plain(pre_activation(*arguments)), *tensors, use_reentrant=False)
