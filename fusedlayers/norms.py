"""Norms that save their output: ``layer_norm``, ``rms_norm`` and ``group_norm``, like torch's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import norm_validation, validation
from .backends.norms import GroupNorm, RowNorm
from .norm_plan import plan_norm
from .ops.group_norm import group_norm as run_group_norm
from .ops.row_norm import row_norm


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    save: str = "auto",
) -> Tensor:
    """``F.layer_norm`` that saves its output, which the next layer saves anyway, and not its input.

    The output determines the normalised input, which together with one number for each row is all that backward needs.
    The output does not determine it in columns whose weight is next to 0, or less than a quarter of the bias: there the
    normalised input is saved too. Each call looks at its weights for that; on a GPU each version of them is looked at
    once. Where the variances of the input are far below ``eps`` outputs tell less; on CPUs a call sees that as well.

    Args:
        input: (..., *normalized_shape), float16, bfloat16, float32, or float64 (by PyTorch).
        normalized_shape: the last dimensions of ``input``, which are normalised together.
        weight, bias: of that shape, or None; of the input's dtype, or float32 for 16-bit inputs on CPUs.
        eps: is added to the variance.
        save: "auto"; "output" also where PyTorch would be faster; "input" for what PyTorch saves. "auto" leaves to
            PyTorch results of less than 1 MiB (of RMS norms 512 KiB; on GPUs at least 128 KiB for each
            multiprocessor), and all of them where no kernel serves.

    Returns:
        a contiguous tensor of the input's shape and dtype.

    Raises:
        TypeError: something that is not a tensor, or not of a floating dtype.
        ValueError: shapes or devices that do not fit together, or an unknown ``save``.

    Saved: the output, one number for each row, ``weight`` and ``bias``, none of which may be edited in place before
    backward. Of columns whose output does not determine the input also the normalised input; where these are more than
    a quarter, the input instead of all that.

    Source: Ba, Kiros & Hinton 2016, "Layer Normalization".

    >>> import torch, fusedlayers as fl
    >>> fl.layer_norm(torch.tensor([[1.0, 3.0]]), 2, eps=0.0)
    tensor([[-1.,  1.]])
    """
    shape = norm_validation.normalized_shape("layer_norm", normalized_shape)
    tensors = input, weight, bias
    if not validation.are_usual((input,), (weight, bias)) and has_torch_function(tensors):
        return handle_torch_function(layer_norm, tensors, input, shape, weight, bias, eps, save=save)
    return _apply(RowNorm("layer_norm", shape, eps, is_centred=True), input, weight, bias, save)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounds_first: bool = False,
    save: str = "auto",
) -> Tensor:
    """``F.rms_norm`` that saves its output, which the next layer saves anyway, and not its input.

    Args:
        input, normalized_shape, weight, save: as for ``layer_norm``.
        eps: is added to the mean of the squares; None as in ``F.rms_norm``.
        weight_offset: is added to the weight: 1 for Gemma's norm.
        rounds_first: whether the normalised input is rounded to the input's dtype before the weight multiplies it, as
            in the norms of LLaMA, Mistral and T5. Else 16-bit outputs are rounded once, as in Gemma and ``F.rms_norm``.

    Returns, Raises, Saved: as for ``layer_norm``.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization".

    >>> import torch, fusedlayers as fl
    >>> fl.rms_norm(torch.tensor([[3.0, -3.0]]), 2, eps=0.0)
    tensor([[ 1., -1.]])
    """
    shape = norm_validation.normalized_shape("rms_norm", normalized_shape)
    tensors = input, weight
    if not validation.are_usual((input,), (weight,)) and has_torch_function(tensors):
        return handle_torch_function(
            rms_norm, tensors, input, shape, weight, eps,
            weight_offset=weight_offset, rounds_first=rounds_first, save=save,
        )  # fmt: skip
    norm = RowNorm("rms_norm", shape, eps, is_centred=False, offset=weight_offset, rounds_first=rounds_first)
    return _apply(norm, input, weight, None, save)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    save: str = "auto",
) -> Tensor:
    """``F.group_norm`` that saves its output, and not its input.

    An activation behind it that saves its input saves the same tensor (``fusedlayers.FusedGroupNormAct``).

    Args:
        input: (batch, channels, ...), float16, bfloat16, float32, or float64 (by PyTorch), contiguous or channels-last.
        num_groups: into how many groups the channels are divided.
        weight, bias: (channels,) or None.
        eps: is added to the variance.
        save: as for ``layer_norm``; "auto" leaves results of less than 4 MiB to PyTorch, channels-last
            ones of less than 16 MiB on CPUs.

    Returns:
        a tensor of the input's shape, dtype and layout.

    Raises:
        TypeError, ValueError: as ``layer_norm``; channels that cannot be divided so.

    Saved: the output, one number for each group of a sample, ``weight`` and ``bias``; of channels that do not determine
    their input also the normalised input, as ``layer_norm``.

    Source: Wu & He 2018, "Group Normalization".

    >>> import torch, fusedlayers as fl
    >>> fl.group_norm(torch.tensor([[1.0, 3.0]]), 1, eps=0.0)
    tensor([[-1.,  1.]])
    """
    tensors = input, weight, bias
    if not validation.are_usual((input,), (weight, bias)) and has_torch_function(tensors):
        return handle_torch_function(group_norm, tensors, input, num_groups, weight, bias, eps, save=save)
    norm = GroupNorm(num_groups, eps)
    plan = plan_norm(norm, input, weight, bias, save)
    if plan.path != "fused":
        return norm(input, weight, bias)
    return run_group_norm(norm, plan.backend, input, weight, bias)


def _apply(norm: RowNorm, x: Tensor, w: Tensor | None, b: Tensor | None, save: str) -> Tensor:
    plan = plan_norm(norm, x, w, b, save)
    return norm(x, w, b) if plan.path != "fused" else row_norm(norm, plan.backend, x, w, b)
