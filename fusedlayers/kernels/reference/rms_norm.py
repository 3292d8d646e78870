"""RMS norm and its gradients by torch's operations, on blocks of rows that fit into a CPU's cache.

Idea: a block is read once from memory, and the operations that follow find it in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..interface import RmsNormOptions

#: Numbers of a block: 1 MiB of float32. Forward and backward of (4096, 1024) in float32 took one core of a busy machine
#: 26 ms with blocks of 2^15 numbers, 13 with 2^18, 10 with 2^19 and 23 on whole tensors; spelled out 48.
BLOCK = 1 << 18


def rms_norm(options: RmsNormOptions, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """The norm of contiguous x, and by how much each row was multiplied."""
    columns, wide = x.shape[-1], torch.promote_types(x.dtype, torch.float32)
    rows, y = x.view(-1, columns), torch.empty_like(x)
    inverse_std = x.new_empty(len(rows), 1, dtype=wide)
    # torch multiplies 16-bit numbers with each other faster than with float32.
    gain = w if options.rounds_first and not options.offset else options.gain(w, wide)
    for part in _blocks(rows):
        given, own, out = rows[part].to(wide), inverse_std[part], y.view(-1, columns)[part]
        own.copy_(given.square().mean(1, keepdim=True).add_(options.eps).rsqrt_())
        xhat = torch.mul(given, own, out=out if x.dtype is wide else given)
        if options.rounds_first:
            xhat = out.copy_(xhat)
        if gain is not None:
            xhat.mul_(gain)
        out.copy_(xhat)  # which is nothing where it is that already
    return y, inverse_std


def rms_norm_gradient(
    options: RmsNormOptions, dy: Tensor, x: Tensor, w: Tensor | None, inverse_std: Tensor, *, needs_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x, and of w in float32 or wider: ``dx = inverse_std (g - xhat mean(g xhat))`` with
    ``g = dy (offset + w)``."""
    columns, wide = x.shape[-1], inverse_std.dtype
    rows = x.view(-1, columns)
    gain = options.gain(w, wide)
    dx = torch.empty_like(rows) if needs_x else None
    dw = None if w is None else torch.zeros(columns, dtype=wide, device=x.device)
    for part in _blocks(rows):
        g, own = dy.view(-1, columns)[part].to(wide), inverse_std[part]
        xhat = rows[part] * own
        product = g * xhat
        if dw is not None:
            dw += product.sum(0)
        if dx is not None:
            slope = (product if gain is None else product.mul_(gain)).mean(1, keepdim=True)
            g = g if gain is None else torch.mul(g, gain, out=product)
            dx[part] = torch.mul(g, own, out=product).addcmul_(xhat, slope * own, value=-1)
    return None if dx is None else dx.view(x.shape), dw


def _blocks(rows: Tensor) -> Iterator[slice]:
    height = max(1, BLOCK // rows.shape[1]) if rows.is_cpu else len(rows)
    for start in range(0, len(rows), height):
        yield slice(start, start + height)
