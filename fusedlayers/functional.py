"""The functional interface: what a user may pass is checked here; ``routes.py`` decides how it is computed.

What has a ``__torch_function__`` of its own (``torch.fx`` proxies, subclasses that ask for it) is asked first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import backends, routes, validation
from .activations import resolve
from .backends.operations import MATMUL, Convolution, elements
from .ops.pointwise import BiasAct, Origin
from .routes import Inputs, choose_save, composite, is_transformed, needs_gradient, operation_act, traced, with_operands
from .utils.layout import along


def dense_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: object = "gelu",
    *,
    residual: Tensor | None = None,
    save: str = "auto",
) -> Tensor:
    """``activation(F.linear(input, weight, bias) + residual)`` that keeps one hidden-sized buffer.

    The matmul's result is overwritten by the activation's output, and the derivative is had from that output.

    Args:
        input: (..., in), float16, bfloat16, float32 or float64.
        weight: (out, in), of the same dtype and device; under autocast both are cast as ``F.linear`` casts them.
        bias: (out,) or None.
        activation: a name (see ``fusedlayers.activations()``), an ``nn.Module``, a torch function, a
            ``functools.partial``, any callable, or None. What is not in the table is computed by plain PyTorch.
        residual: (..., out), or None: added before the activation.
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
    required = (input, weight) if residual is None else (input, weight, residual)
    ordinary = validation.are_ordinary(required, bias)
    if not ordinary:
        validation.check_tensors("dense_bias_act", {"input": input, "weight": weight}, bias=bias, residual=residual)
        if has_torch_function((*required, bias)):
            if not resolved.is_fusible:
                return composite(MATMUL, resolved, Inputs(input, weight, bias, residual))
            tensors = (input, weight, bias)
            return handle_torch_function(
                dense_bias_act, (*required, bias), *tensors, resolved, residual=residual, save=save
            )
        if input.is_nested:  # which does not tell its sizes
            return composite(MATMUL, resolved, Inputs(input, weight, bias, residual))
    validation.check_dense("dense_bias_act", input, weight, bias)
    validation.check_one_dtype(
        "dense_bias_act", input, weight=weight, bias=bias, residual=residual, autocast_casts=True
    )
    if residual is not None:
        validation.check_residual("dense_bias_act", residual, MATMUL.shape(input, weight))
    rows = input.numel() // max(1, input.shape[-1])
    return operation_act(
        MATMUL,
        Inputs(input, weight, bias, residual),
        resolved,
        save,
        count=rows * weight.shape[0],
        is_ordinary=ordinary,
    )


def conv_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: object = "relu",
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    residual: Tensor | None = None,
    save: str = "auto",
) -> Tensor:
    """``activation(conv(input, weight, bias) + residual)`` that keeps one buffer of the output's size.

    The convolution, of one to three spatial dimensions, is the library's (cuDNN, oneDNN). Its result is overwritten by
    the activation's output, and the derivative is had from that output.

    Args:
        input: (batch, in, ...) or (in, ...), with one to three spatial dimensions; float16, bfloat16, float32, float64.
        weight: (out, in / groups, ...), of the same dtype and device; under autocast cast as ``F.conv2d`` casts them.
        bias: (out,) or None.
        activation: as for ``dense_bias_act``. Tensors of its own that run along channels have the shape (out, 1, ...).
        stride, padding, dilation, groups: as for ``F.conv2d``; padding may be "same" or "valid".
        residual: like the result, or None: added before the activation.
        save: as for ``dense_bias_act``.

    Returns:
        (batch, out, ...) or (out, ...), of the same dtype, in the memory format that the convolution gives it.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``. Nothing has been written by then.

    Saved: the output or what ``save`` says, ``input`` if the weight needs a gradient, ``weight`` if the input does.

    >>> import torch, fusedlayers as fl
    >>> fl.conv_bias_act(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), None, "silu", stride=2, padding=1).shape
    torch.Size([2, 4, 4, 4])
    """
    resolved = resolve(activation, "conv_bias_act")
    required = (input, weight) if residual is None else (input, weight, residual)
    ordinary = validation.are_ordinary(required, bias)
    if not ordinary:
        validation.check_tensors("conv_bias_act", {"input": input, "weight": weight}, bias=bias, residual=residual)
        if has_torch_function((*required, bias)):  # of which a proxy does not tell its dimensions
            if not resolved.is_fusible:
                z = conv_bias_act(input, weight, bias, None, stride, padding, dilation, groups, residual=residual)
                return resolved.plain(z)
            return handle_torch_function(
                conv_bias_act, (*required, bias), input, weight, bias, resolved, stride, padding, dilation, groups,
                residual=residual, save=save,
            )  # fmt: skip
    dims = validation.spatial_dims(weight)
    product = Convolution(
        validation.sizes("conv_bias_act", "stride", stride, dims),
        padding if isinstance(padding, str) else validation.sizes("conv_bias_act", "padding", padding, dims, least=0),
        validation.sizes("conv_bias_act", "dilation", dilation, dims),
        groups,
    )
    shape = validation.check_conv(input, weight, bias, product)
    validation.check_one_dtype("conv_bias_act", input, weight=weight, bias=bias, residual=residual, autocast_casts=True)
    if residual is not None:
        validation.check_residual("conv_bias_act", residual, shape)
    return operation_act(
        product,
        Inputs(input, weight, bias, residual),
        resolved,
        save,
        count=elements(shape),
        is_ordinary=ordinary,
    )


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
    ordinary = validation.are_ordinary((input,), bias)
    if not ordinary:
        validation.check_tensors("bias_act", {"input": input}, bias=bias)
        if has_torch_function((input, bias)):
            if not resolved.is_fusible and bias is None and not inplace:
                return resolved.plain(input)
            tensors = (input, bias)
            return handle_torch_function(bias_act, tensors, *tensors, resolved, dim=dim, inplace=inplace, save=save)
    validation.check_one_dtype("bias_act", input, bias=bias)
    if bias is not None:
        validation.check_bias("bias_act", input, bias, dim)
    bias_dim = dim

    def biased(x: Tensor, b: Tensor | None) -> Tensor:
        return x if b is None else x + along(b, bias_dim, x.dim())

    compiling = torch.compiler.is_compiling()
    small = save == "auto" and input.numel() < routes.SMALL and not inplace
    fused = ordinary and not compiling and not small and not is_transformed()
    params: tuple[Tensor, ...] = ()
    if fused and resolved.needs_tracing:
        resolved, params, operand_dim = with_operands(resolved, input.shape, input.dtype, input.device)
        if params and bias is None:
            dim = -1 if operand_dim is None else operand_dim
        elif operand_dim is not None and operand_dim % input.dim() != dim % input.dim():
            if not inplace:
                input, bias = biased(input, bias), None
            dim = operand_dim
    keep = choose_save("bias_act", resolved, save, input.dtype)

    fusible = ordinary and keep != "nothing" and resolved.is_fusible
    fused = fused and fusible
    if inplace:
        if keep == "recompute":
            raise ValueError(
                "bias_act: save='recompute' needs the input, which inplace=True overwrites; drop one of them"
            )
        validation.check_writable("bias_act", input)
        # Autograd refuses some views, but only after a Function has written; copy_ asks first.
        if not fused or keep != "output" or (input._is_view() and needs_gradient(input, bias)):
            return input.copy_(bias_act(input.clone(), bias, activation, dim=bias_dim, save=save))

    if fusible and compiling:
        return traced(biased, resolved, keep, input, bias)
    if not fused:
        return resolved.plain(biased(input, bias))
    if not needs_gradient(input, bias, *params):
        out = input if inplace else None
        return backends.choose(input, resolved).bias_act(input, bias, resolved, params, dim=dim, encode=False, out=out)
    if keep == "input":
        return BiasAct.apply(biased(input, bias), None, None, resolved, keep, dim, "a new buffer", None, *params)
    origin = Origin(input) if keep == "recompute" else None
    writes = "over z" if inplace else "a new buffer"
    return BiasAct.apply(input, bias, None, resolved, keep, dim, writes, origin, *params)
