"""The functional interface: check, resolve, choose a route. No arithmetic.

Every call takes one of four routes:

* fused: a backend's kernels under an autograd Function, for ordinary tensors on a device that a backend knows;
* exact: the same kernels without gradients: nothing is kept and the output carries no branch bit;
* traced: under ``torch.compile``, functional operations that keep the same tensors and that Inductor fuses;
* plain: PyTorch's own composite, for everything unusual: activations outside the table, functorch transforms,
  forward-mode differentiation, TorchScript traces, tensor subclasses (DTensor, fake), nested and meta tensors, devices
  without a backend; and for outputs so small that there is nothing to gain.

What has a ``__torch_function__`` of its own (``torch.fx`` proxies, subclasses that ask for it) is asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from . import backends, operands
from .activations import Activation, Saved, Specialised, resolve
from .autograd import BiasAct, Dense, Origin
from .broadcast import along
from .ownership import saved_under_hooks

SAVES = ("auto", "output", "input", "recompute")

#: Outputs of fewer elements are left to plain PyTorch under ``save="auto"``: the buffer that would be spared is smaller
#: than the Python objects of the autograd node that would spare it.
SMALL = 256


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
    resolved = resolve(activation, "dense_bias_act")
    ordinary = operands.are_ordinary((input, weight), bias)
    if not ordinary:
        operands.check_tensors("dense_bias_act", {"input": input, "weight": weight}, bias)
        if has_torch_function((input, weight, bias)):
            if not resolved.is_fusible:
                return resolved.plain(F.linear(input, weight, bias))
            tensors = (input, weight, bias)
            return handle_torch_function(dense_bias_act, tensors, *tensors, resolved, save=save)
        if input.is_nested:  # which does not tell its sizes
            return resolved.plain(F.linear(input, weight, bias))
    operands.check_dense(input, weight, bias)
    operands.check_one_dtype("dense_bias_act", input, weight, bias, autocast_casts=True)
    compiling = torch.compiler.is_compiling()
    if save == "auto" and input.numel() * weight.shape[0] < SMALL * weight.shape[1] and not compiling:
        return resolved.plain(F.linear(input, weight, bias))
    kind = input.device.type
    autocast = operands.is_autocast(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast and input.dtype is not torch.float64 else input.dtype
    plain = not ordinary or (_is_transformed() and not compiling)
    params: tuple[Tensor, ...] = ()
    dim = -1
    if resolved.is_untraced and not plain and not compiling:
        resolved, params, operand_dim = specialised(resolved, (*input.shape[:-1], weight.shape[0]), dtype, input.device)
        dim = -1 if operand_dim is None else operand_dim
    keep = _choose_save("dense_bias_act", resolved, save, dtype)

    if plain or keep == "nothing" or not resolved.is_fusible:
        return resolved.plain(F.linear(input, weight, bias))
    if compiling:
        return _traced(F.linear, resolved, keep, input, weight, bias)
    cast = dtype if autocast else None
    if _needs_gradient(input, weight, bias, *params):
        if dim != -1:
            z = F.linear(input, weight, bias)
            origin = Origin(input, weight, bias) if keep == "recompute" and cast is None else None
            keep = "recompute" if origin is not None else "input"
            return BiasAct.apply(z, None, resolved, keep, dim, False, origin, *params)
        # Two dimensions: the result of F.linear with more is a view, and overwriting a view costs autograd a copy.
        x = input.flatten(0, -2) if input.dim() > 2 else input if input.dim() == 2 else input.unsqueeze(0)
        y = _fused_dense(x, weight, bias, resolved, params, keep, cast)
        return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[-1])
    backend = backends.choose(input, resolved)
    if cast is None and not params:
        return backend.linear_act(input, weight, bias, resolved)
    z = F.linear(input, weight, bias)
    return backend.bias_act(z, None, resolved, params, dim=dim, encode=False, out=z)


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
    resolved = resolve(activation, "bias_act")
    ordinary = operands.are_ordinary((input,), bias)
    if not ordinary:
        operands.check_tensors("bias_act", {"input": input}, bias)
        if has_torch_function((input, bias)):
            if not resolved.is_fusible and bias is None and not inplace:
                return resolved.plain(input)
            tensors = (input, bias)
            return handle_torch_function(bias_act, tensors, *tensors, resolved, dim=dim, inplace=inplace, save=save)
    operands.check_one_dtype("bias_act", input, None, bias)
    if bias is not None:
        operands.check_bias("bias_act", input, bias, dim)
    bias_dim = dim

    def biased(x: Tensor, b: Tensor | None) -> Tensor:
        return x if b is None else x + along(b, bias_dim, x.dim())

    compiling = torch.compiler.is_compiling()
    small = save == "auto" and input.numel() < SMALL and not inplace
    fused = ordinary and not compiling and not small and not _is_transformed()
    params: tuple[Tensor, ...] = ()
    if fused and resolved.is_untraced:
        resolved, params, operand_dim = specialised(resolved, input.shape, input.dtype, input.device)
        if params and bias is None:
            dim = -1 if operand_dim is None else operand_dim
        elif operand_dim is not None and operand_dim % input.dim() != dim % input.dim():
            if not inplace:
                input, bias = biased(input, bias), None
            dim = operand_dim
    keep = _choose_save("bias_act", resolved, save, input.dtype)

    fusible = ordinary and keep != "nothing" and resolved.is_fusible
    fused = fused and fusible
    if inplace:
        if keep == "recompute":
            raise ValueError(
                "bias_act: save='recompute' needs the input, which inplace=True overwrites; drop one of them"
            )
        operands.check_writable("bias_act", input)
        # Autograd refuses some views, but only after a Function has written; copy_ asks first.
        if not fused or keep != "output" or (input._is_view() and _needs_gradient(input, bias)):
            return input.copy_(bias_act(input.clone(), bias, activation, dim=bias_dim, save=save))

    if fusible and compiling:
        return _traced(biased, resolved, keep, input, bias)
    if not fused:
        return resolved.plain(biased(input, bias))
    if not _needs_gradient(input, bias, *params):
        out = input if inplace else None
        return backends.choose(input, resolved).bias_act(input, bias, resolved, params, dim=dim, encode=False, out=out)
    if keep == "input":
        return BiasAct.apply(biased(input, bias), None, resolved, keep, dim, False, None, *params)
    origin = Origin(input) if keep == "recompute" else None
    return BiasAct.apply(input, bias, resolved, keep, dim, inplace, origin, *params)


def specialised(
    activation: Activation, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Specialised:
    """A user's function made into an activation for z of this shape and dtype, with the tensors that it reads."""
    # Here, because tracing takes parts of torch whose import takes a second.
    from .activations.custom import specialise

    return specialise(activation, tuple(shape), dtype, device)


def _fused_dense(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    activation: Activation,
    params: tuple[Tensor, ...],
    keep: Saved,
    cast: torch.dtype | None,
) -> Tensor:
    """The layer on 2-d input, for gradients; ``cast`` is what autocast, if it is on, casts to."""
    backend = backends.choose(x, activation)
    # Where the kernel adds the bias, the matmul does not.
    kernel_b = b if backend.ADDS_BIAS and keep != "input" else None
    matmul_b = b if kernel_b is None else None
    multiply = F.linear
    if cast is not None:
        # Whatever F.linear can cast it does: a weight that is used many times is then cast, and kept, once.
        kernel_b = None if kernel_b is None else kernel_b.to(cast)
        x = x.to(cast) if keep == "recompute" else x
    elif backend.multiplies(x, w):
        multiply = Dense.apply
    z = multiply(x, w, matmul_b)
    # z can be computed again if it must, or where that costs no memory: a matmul whose x and w both need gradients has
    # saved them (under autocast its casts of them, under hooks what those made of them), and a bias that is a parameter
    # is alive anyway.
    free = cast is None and x.requires_grad and w.requires_grad and (b is None or b.is_leaf) and not saved_under_hooks()
    known = keep == "recompute" or (keep == "output" and free)
    origin = Origin(x, w, matmul_b) if known else None
    return BiasAct.apply(z, kernel_b, activation, keep, -1, keep != "input", origin, *params)


def _is_transformed() -> bool:
    """Whether functorch, forward-mode differentiation or TorchScript's tracer wants to see plain operations."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
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


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _traced(
    pre_activation: Callable[..., Tensor], activation: Activation, save: Saved, *tensors: Tensor | None
) -> Tensor:
    # An exported program is for inference. (Torch 2.11 takes is_exporting() for true whenever it compiles.)
    if not _needs_gradient(*tensors) or torch.compiler._is_exporting_flag:
        return activation.plain(pre_activation(*tensors))
    if save == "output":
        # Here, because it registers itself with the compiler, whose import takes a second and sets an environment
        # variable. A trace runs imports as it meets them.
        from .traced import output_saved

        return output_saved(pre_activation(*tensors), activation.name, tuple(activation.parameters.items()))
    if save == "input":
        return activation.plain(pre_activation(*tensors))
    return checkpoint(lambda *arguments: activation.plain(pre_activation(*arguments)), *tensors, use_reentrant=False)
