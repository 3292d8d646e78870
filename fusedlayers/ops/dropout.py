"""``F.dropout`` that saves a bit for each number, where PyTorch saves a byte, and on CPUs as many as the number has."""

from typing import Any

import torch
from torch import Tensor

from .._torch import Node
from ..kernels import reference


class Dropout(Node):
    """``F.dropout(x, p)``, which drops the same numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y, keep = torch.native_dropout(x, p, True)
        ctx.save_for_backward(reference.packed(keep.as_strided((keep.numel(),), (1,))))  # in the order of its memory
        ctx.size, ctx.stride, ctx.p = keep.size(), keep.stride(), p
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (bits,) = ctx.saved_tensors
        keep = reference.unpacked(bits, ctx.size).as_strided(ctx.size, ctx.stride)
        return grads[0] * keep * (1 / (1 - ctx.p)), None
