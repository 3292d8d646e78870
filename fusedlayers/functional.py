"""The functional interface: dense and convolution layers, activations and MLP blocks.

A public function says what is asked for, and has it planned and carried out (``calls/``), where the
arguments of calls that are new are checked. What has a ``__torch_function__`` of its own, as proxies of ``torch.fx``
and some subclasses of tensors have, is asked first.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .activations import resolve
from .calls import validation
from .calls.decide import Call
from .calls.plan import dropped, plan_for, run_in_place
from .kernels.operations import MATMUL, Mlp, Pointwise


def dense_bias_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: object = "gelu",
    *,
    residual: Tensor | None = None,
    dropout: float = 0.0,
    save: str = "auto",
) -> Tensor:
    """``activation(F.linear(input, weight, bias) + residual)`` that keeps one hidden-sized buffer.

    Computes the activation in place over the matmul's result; backward evaluates the derivative from the saved output.

    Args:
        input: (..., in), float16, bfloat16, float32, or float64 (by PyTorch).
        weight: (out, in), of the same dtype and device; under autocast both are cast as ``F.linear`` casts them.
        bias: (out,) or None.
        activation: a name (see ``fusedlayers.activations()``; case, hyphens and underscores do not matter), an
            ``nn.Module``, a torch function, a ``functools.partial``, any callable, or None. A function that has no name
            is traced, and computed by plain PyTorch if it is not pointwise. It is looked at in points that are 1/512
            apart, from -8 to 8, and farther apart outside: a spike between them may be missed.
        residual: (..., out), or None: added before the activation.
        dropout: the probability with which outputs are dropped, and the others divided by one less it, as ``F.dropout``
            does with the same numbers; 0 in evaluation. Saved are the activation's output and, of a large one, a bit
            for each number.
        save: what is kept for backward. "output": y, written over the matmul's buffer (folded activations carry the
            branch in the last mantissa bit of negative outputs). "input": the pre-activation z, unrounded.
            "recompute": neither; z is computed again from ``input``. "auto": "output" where the derivative follows
            from it with at most three times GELU's error, else "input"; but a result of less than 512 KiB (on GPUs 128
            KiB for each multiprocessor) is left to PyTorch, which saves what it usually saves: of gelu z. So is one of
            relu, tanh or sigmoid of less than 2 MiB (on GPUs 32 MiB): of these PyTorch saves y.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError: something that is not a tensor, or not of a floating dtype.
        ValueError: shapes, dtypes or devices that do not fit together, an unknown activation, or ``save="output"``
            where the output does not determine the derivative. Nothing has been written by then.

    Saved: the output or what ``save`` says, ``input`` if the weight needs a gradient, ``weight`` if the input does.

    >>> import torch, fusedlayers as fl
    >>> fl.dense_bias_act(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4), "relu").shape
    torch.Size([2, 4])
    """
    tensors = (input, weight, bias, residual)
    if has_torch_function(tensors) and not validation.are_usual(*tensors):
        record = resolve(activation, "dense_bias_act")
        if not record.is_fusible:  # it has no name in a graph
            z = dense_bias_act(input, weight, bias, None, residual=residual)
            return dropped(record.plain(z), dropout)
        return handle_torch_function(
            dense_bias_act, tensors, input, weight, bias, record, residual=residual, dropout=dropout, save=save
        )
    if dropout:
        validation.check_dropout("dense_bias_act", dropout)
    plan, call = plan_for(Call(MATMUL, tensors, activation, save))
    return dropped(plan.run(call), dropout) if dropout else plan.run(call)


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
    dropout: float = 0.0,
    save: str = "auto",
) -> Tensor:
    """``activation(conv(input, weight, bias) + residual)`` that keeps one buffer of the output's size.

    The convolution, of one to three spatial dimensions, is the vendor's (cuDNN, oneDNN). The activation is computed in
    place over its result; backward evaluates the derivative from the saved output.

    Args:
        input: (batch, in, ...) or (in, ...), with one to three spatial dimensions; float16, bfloat16, float32, or
            float64 (by PyTorch).
        weight: (out, in / groups, ...), of the same dtype and device; under autocast cast as ``F.conv2d`` casts them.
        bias: (out,) or None.
        activation: as for ``dense_bias_act``. Tensors of its own that run along channels have the shape (out, 1, ...).
        stride, padding, dilation, groups: as for ``F.conv2d``; padding may be "same" or "valid".
        residual: like the result, or None: added before the activation.
        dropout: as for ``dense_bias_act``.
        save: as for ``dense_bias_act``.

    Returns:
        (batch, out, ...) or (out, ...), of the same dtype, in the memory format that the convolution gives it.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``. Nothing has been written by then.

    Saved: the output or what ``save`` says, and what PyTorch's convolution saves: ``input`` and ``weight``.

    >>> import torch, fusedlayers as fl
    >>> fl.conv_bias_act(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), None, "silu", stride=2, padding=1).shape
    torch.Size([2, 4, 4, 4])
    """
    tensors = (input, weight, bias, residual)
    if has_torch_function(tensors) and not validation.are_usual(*tensors):  # a proxy does not tell its dimensions
        record = resolve(activation, "conv_bias_act")
        if not record.is_fusible:
            z = conv_bias_act(input, weight, bias, None, stride, padding, dilation, groups, residual=residual)
            return dropped(record.plain(z), dropout)
        return handle_torch_function(
            conv_bias_act, tensors, input, weight, bias, record, stride, padding, dilation, groups,
            residual=residual, dropout=dropout, save=save,
        )  # fmt: skip
    try:
        make = validation.convolution if torch.compiler.is_compiling() else _convolution
        convolution = make(weight.dim() - 2, stride, padding, dilation, groups)
    except (TypeError, AttributeError):  # a list, which cannot be hashed; or a weight that is not a tensor
        validation.check_tensors("conv_bias_act", {"input": input, "weight": weight}, bias=bias, residual=residual)
        convolution = validation.convolution(weight.dim() - 2, stride, padding, dilation, groups)
    if dropout:
        validation.check_dropout("conv_bias_act", dropout)
    plan, call = plan_for(Call(convolution, tensors, activation, save))
    return dropped(plan.run(call), dropout) if dropout else plan.run(call)


#: A look-up that enters no Python function; typed, because 1.0 is refused where 1 is not.
_convolution = functools.lru_cache(256, typed=True)(validation.convolution)


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    activation: object = "gelu",
    *,
    dim: int = -1,
    inplace: bool = False,
    dropout: float = 0.0,
    save: str = "auto",
) -> Tensor:
    """``activation(input + bias)``, the bias along ``dim``, in one pass and keeping one buffer.

    Args:
        input: any shape, float16, bfloat16, float32, or float64 (by PyTorch).
        bias: (input.shape[dim],), of the same dtype and device, or None.
        activation: as for ``dense_bias_act``.
        dim: the dimension along which the bias runs.
        inplace: write the result over ``input``, under the same rules as ``F.relu(inplace=True)``.
        dropout: as for ``dense_bias_act``; not with ``inplace``.
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
    tensors = (input, bias)
    if has_torch_function(tensors) and not validation.are_usual(*tensors):
        record = resolve(activation, "bias_act")
        if not record.is_fusible and bias is None and not inplace:
            return dropped(record.plain(input), dropout)
        return handle_torch_function(
            bias_act, tensors, *tensors, record, dim=dim, inplace=inplace, dropout=dropout, save=save
        )
    call = Call(Pointwise(-1 if bias is None else dim), (input, None, bias, None), activation, save)
    if inplace:
        return run_in_place(call, dropout)
    if dropout:
        validation.check_dropout("bias_act", dropout)
    plan, call = plan_for(call)
    return dropped(plan.run(call), dropout) if dropout else plan.run(call)


def mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: object = "gelu",
    *,
    dropout: float = 0.0,
    save: str = "auto",
    chunks: int | None = None,
) -> Tensor:
    """``F.linear(dropout(activation(F.linear(input, weight1, bias1))), weight2, bias2)`` that keeps one hidden buffer.

    Args:
        input: (..., in), float16, bfloat16, float32, or float64 (by PyTorch).
        weight1: (hidden, in), of the same dtype and device; under autocast all are cast as ``F.linear`` casts them.
        bias1: (hidden,) or None.
        weight2: (out, hidden).
        bias2: (out,) or None.
        activation: as for ``fusedlayers.dense_bias_act``.
        dropout: the probability with which hidden numbers are dropped, the same ones as by ``F.dropout``; 0 in
            evaluation. A bit for each is saved.
        save: what is saved of the hidden layer. "output": what the activation returns. "input": what it is given, from
            which backward recomputes the other. "recompute": nothing; forward and backward run over chunks of rows (as
            "auto" where a weight is frozen or computed).
            "auto": "output" where the derivative follows from it with at most three times GELU's error, else "input".
        chunks: into how many chunks the rows are cut where something hidden is needed for a moment only. None: 16 on
            CPUs; on GPUs, where each chunk launches kernels of its own, one, or with "recompute" as many as have 32 MiB
            hidden each, up to 16.

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError, ValueError: as ``dense_bias_act``.

    Saved: one hidden buffer or none, ``input`` if ``weight1`` needs a gradient, and the weights that gradients go
    through. Backward writes over the buffer, unless the graph is kept for another backward pass. Where a weight
    is frozen or computed, or no gradient is needed, the block runs layer by layer, as ``dense_bias_act``, ``F.linear``.

    >>> import torch, fusedlayers as fl
    >>> fl.mlp(torch.ones(2, 3), torch.ones(8, 3), None, torch.ones(3, 8), None, "relu")
    tensor([[24., 24., 24.],
            [24., 24., 24.]])
    """
    tensors = input, weight1, bias1, weight2, bias2
    if has_torch_function(tensors):
        record = resolve(activation, "mlp")
        known = record if record.is_fusible else activation
        return handle_torch_function(mlp, tensors, *tensors, known, dropout=dropout, save=save, chunks=chunks)
    plan, call = plan_for(Call(Mlp("mlp", dropout, chunks), tensors, activation, save))
    return plan.run(call)


def gated_mlp(
    input: Tensor,
    weight_gate: Tensor,
    bias_gate: Tensor | None,
    weight_up: Tensor | None,
    bias_up: Tensor | None,
    weight_down: Tensor,
    bias_down: Tensor | None,
    activation: object = "silu",
    *,
    dropout: float = 0.0,
    save: str = "auto",
    chunks: int | None = None,
) -> Tensor:
    """``F.linear(dropout(activation(gate) * up), weight_down, bias_down)`` with ``gate = F.linear(input, weight_gate,
    bias_gate)`` and ``up`` likewise, that keeps two hidden buffers (Shazeer 2020: SwiGLU, GEGLU, ReGLU, GLU, and with
    ``activation=None`` bilinear).

    Args:
        input: (..., in), float16, bfloat16, float32, or float64 (by PyTorch).
        weight_gate, weight_up: (hidden, in); or both in ``weight_gate``, (2 hidden, in), the gate's rows first, and
            None for ``weight_up`` and ``bias_up``.
        bias_gate, bias_up: (hidden,) or None; (2 hidden,) for packed weights.
        weight_down, bias_down: (out, hidden), and (out,) or None.
        activation, dropout, chunks: as for ``fusedlayers.mlp``.
        save: "input": gate and up. "recompute": neither; forward and backward run over chunks of rows. "auto": "input".

    Returns:
        (..., out), of the same dtype.

    Raises:
        TypeError, ValueError: as ``fusedlayers.mlp``; ``save="output"``: a product does not determine its factors.

    Saved: as ``fusedlayers.mlp``, but two hidden buffers.

    >>> import torch, fusedlayers as fl
    >>> w = torch.ones(8, 3)
    >>> fl.gated_mlp(torch.ones(2, 3), w, None, w, None, w.t(), None, "relu")[0]
    tensor([72., 72., 72.])
    """
    tensors = input, weight_gate, bias_gate, weight_up, bias_up, weight_down, bias_down
    if has_torch_function(tensors):
        record = resolve(activation, "gated_mlp")
        known = record if record.is_fusible else activation
        return handle_torch_function(gated_mlp, tensors, *tensors, known, dropout=dropout, save=save, chunks=chunks)
    if weight_up is None and bias_up is not None:
        raise ValueError("gated_mlp: bias_up without weight_up; packed weights have packed biases, in bias_gate")
    given = tensors if weight_up is not None else (*tensors[:3], *tensors[5:])
    block = Mlp("gated_mlp", dropout, chunks, is_gated=True, is_packed=weight_up is None)
    plan, call = plan_for(Call(block, given, activation, save))
    return plan.run(call)
