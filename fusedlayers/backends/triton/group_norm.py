"""The gradients of group norm from its output on a GPU, channels side by side or one after the other.

Idea: ``dx = inverse_std (g - mean(g) - xhat mean(g xhat))`` with ``g = dy w`` and means over a group. A first kernel
sums dy xhat and dy over pieces of a sample's channels; a second one adds what belongs to a group; a third one writes
dx; and the sums over all samples are the gradients of w and b. A tile has channels and places. Both layouts are the
same kernels, by other strides.

Cost: y and dy are read twice and dx is written once. A group of a large image does not fit into registers, so that no
single pass could do; the second read of a small one comes from the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...utils.bounded_cache import BoundedCache
from .. import torch as reference
from ..norms import GroupNorm, Kept
from .fallback import or_reference
from .launch import Launch, cdiv, next_power_of_2, on
from .sums import add_up

#: The elements of a tile; its places, where these lie side by side, and else its channels.
TILE, PLACES, CHANNELS = 2048, 1024, 64
#: The places of a channel that a program of the first kernel sums: more pieces make more programs of a small batch.
PIECE = 4096
#: Partial sums of a group that are added at a time.
PARTIAL = 1024

#: By what they depend on.
_launches: BoundedCache[tuple[Launch, Launch, Launch]] = BoundedCache(1024)


@triton.jit
def _normalised(
    y_ptr, offset, inside, channel, place, sample, w_ptr, b_ptr, which_ptr, kept_ptr, kept, channels, count,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """The weight of each channel of a tile, and xhat."""
    present = channel < channels
    gain = tl.full(channel.shape, 1.0, tl.float32)
    if HAS_W:
        gain = tl.where(present, tl.load(w_ptr + channel, mask=present, other=1.0).to(tl.float32), 1.0)
    xhat = tl.load(y_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        xhat -= tl.load(b_ptr + channel, mask=present, other=0.0).to(tl.float32)[:, None]
    xhat = tl.where(inside, xhat / gain[:, None], 0.0)
    if HAS_KEPT:
        which = tl.load(which_ptr + channel, mask=present, other=-1)
        own = (sample * kept + which)[:, None] * count + place[None, :]
        is_kept = inside & (which >= 0)[:, None]
        xhat = tl.where(is_kept, tl.load(kept_ptr + own, mask=is_kept, other=0.0).to(tl.float32), xhat)
    return gain, xhat


@triton.jit(do_not_specialize=["samples", "pieces"])
def group_sums_kernel(
    dy_ptr, y_ptr, w_ptr, b_ptr, which_ptr, kept_ptr, partial_ptr, samples, channels, count, channel_stride,
    place_stride, pieces, kept,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, HAS_KEPT: tl.constexpr, INDEX: tl.constexpr,
    PIECE: tl.constexpr, CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The sums of dy xhat and of dy over a piece of each of a sample's channels: (2, samples x pieces, channels)."""
    program = tl.program_id(0).to(tl.int64)
    sample, piece = program // pieces, program % pieces
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(INDEX)
    of_w = tl.zeros((CHANNELS, PLACES), tl.float32)
    of_b = tl.zeros((CHANNELS, PLACES), tl.float32)
    for step in range(PIECE // PLACES):
        place = (piece * PIECE + step * PLACES + tl.arange(0, PLACES)).to(INDEX)
        inside = (channel < channels)[:, None] & (place < count)[None, :]
        offset = channel[:, None] * channel_stride + place[None, :] * place_stride + sample * channels * count
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        _, xhat = _normalised(
            y_ptr, offset, inside, channel, place, sample, w_ptr, b_ptr, which_ptr, kept_ptr, kept, channels, count,
            HAS_W, HAS_B, HAS_KEPT,
        )  # fmt: skip
        of_w += dy * xhat
        of_b += dy
    partial = partial_ptr + program * channels + channel
    tl.store(partial, tl.sum(of_w, 1), mask=channel < channels)
    tl.store(partial + samples.to(tl.int64) * pieces * channels, tl.sum(of_b, 1), mask=channel < channels)


@triton.jit(do_not_specialize=["samples", "pieces", "size"])
def group_means_kernel(
    partial_ptr, w_ptr, inverse_std_ptr, means_ptr, samples, groups, channels, pieces, size,
    HAS_W: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The means of g and of g xhat over a group of ``size`` numbers, times its inverse_std: (2, samples x groups)."""
    program = tl.program_id(0).to(tl.int64)
    width = channels // groups
    sample, first = program // groups, (program % groups) * width
    slope = tl.zeros((PARTIAL,), tl.float32)
    mean = tl.zeros((PARTIAL,), tl.float32)
    for start in range(0, pieces * width, PARTIAL):
        at = start + tl.arange(0, PARTIAL)
        inside = at < pieces * width
        channel = first + at % width
        own = partial_ptr + (sample * pieces + at // width) * channels + channel
        of_w = tl.load(own, mask=inside, other=0.0)
        of_b = tl.load(own + samples.to(tl.int64) * pieces * channels, mask=inside, other=0.0)
        if HAS_W:
            gain = tl.load(w_ptr + channel, mask=inside, other=0.0).to(tl.float32)
            of_w *= gain
            of_b *= gain
        slope += of_w
        mean += of_b
    factor = tl.load(inverse_std_ptr + program).to(tl.float32) / size
    tl.store(means_ptr + program, tl.sum(mean, 0) * factor)
    tl.store(means_ptr + samples.to(tl.int64) * groups + program, tl.sum(slope, 0) * factor)


@triton.jit(do_not_specialize=["samples", "tiles"])
def group_gradient_kernel(
    dy_ptr, y_ptr, w_ptr, b_ptr, which_ptr, kept_ptr, inverse_std_ptr, means_ptr, dx_ptr, samples, groups, channels,
    count, channel_stride, place_stride, tiles, kept,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, HAS_KEPT: tl.constexpr, INDEX: tl.constexpr,
    CHANNELS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """dx of a tile, from the means of its groups; dx_ptr may be y_ptr."""
    program = tl.program_id(0).to(tl.int64)
    sample = program // tiles
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)).to(INDEX)
    place = (program % tiles * PLACES + tl.arange(0, PLACES)).to(INDEX)
    inside = (channel < channels)[:, None] & (place < count)[None, :]
    offset = channel[:, None] * channel_stride + place[None, :] * place_stride + sample * channels * count
    gain, xhat = _normalised(
        y_ptr, offset, inside, channel, place, sample, w_ptr, b_ptr, which_ptr, kept_ptr, kept, channels, count,
        HAS_W, HAS_B, HAS_KEPT,
    )  # fmt: skip
    group, present = sample * groups + channel // (channels // groups), channel < channels
    inverse_std = tl.load(inverse_std_ptr + group, mask=present, other=0.0).to(tl.float32)
    mean = tl.load(means_ptr + group, mask=present, other=0.0)
    slope = tl.load(means_ptr + samples.to(tl.int64) * groups + group, mask=present, other=0.0)
    dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    dx = dy * (gain * inverse_std)[:, None] - mean[:, None] - xhat * slope[:, None]
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class _Sizes(NamedTuple):
    """Of a tensor: how many samples, channels, and places of each; how far neighbours are apart; and of its tiles."""

    samples: int
    channels: int
    places: int
    channel_stride: int
    place_stride: int
    tile_channels: int
    tile_places: int
    #: Of the places of a channel, those that a program sums.
    piece: int

    @classmethod
    def of(cls, norm: GroupNorm, y: Tensor) -> _Sizes:
        samples, channels, places = norm.extents(y)
        piece = min(PIECE, next_power_of_2(places))
        if y.is_contiguous():
            strides, tile_places = (places, 1), min(PLACES, piece)
            tile_channels = min(TILE // tile_places, next_power_of_2(channels))
        else:
            strides, tile_channels = (1, channels), min(CHANNELS, next_power_of_2(channels))
            tile_places = min(TILE // tile_channels, piece)
        return cls(samples, channels, places, *strides, tile_channels, tile_places, piece)

    @property
    def pieces(self) -> int:
        """How many a channel has."""
        return cdiv(self.places, self.piece)


@or_reference(reference.group_norm_gradient)
def group_norm_gradient(
    norm: GroupNorm,
    dy: Tensor,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
    *,
    needs_x: bool,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of w and of b; y may be overwritten, and dy is laid out like it."""
    sizes = _Sizes.of(norm, y)
    samples, channels, pieces = sizes.samples, sizes.channels, sizes.pieces
    dx = (y if overwrite else torch.empty_like(y)) if needs_x else None
    partial = y.new_empty(2, samples * pieces, channels, dtype=torch.float32)
    means = y.new_empty(2, samples * norm.groups, dtype=torch.float32)
    own = (None, None) if kept is None else (kept.places(channels), kept.xhat)
    parameters = [y if p is None else p.contiguous() for p in (w, b, *own)]  # what is not there is not read
    launches = _of(norm, sizes, dy, y, w, b, inverse_std, kept)
    with on(y):
        launches[0](dy, y, *parameters, partial)
        if dx is not None:
            launches[1](partial, parameters[0], inverse_std, means)
            launches[2](dy, y, *parameters, inverse_std, means, dx)
        dtypes = [p.dtype for p in (w, b) if p is not None]
        sums = add_up(partial, channels, 1, dtypes[0]) if dtypes else None
    if dx is not None:
        torch.autograd.graph.increment_version(dx)
    return dx, None if sums is None else sums[0], None if sums is None else sums[1]


def _of(
    norm: GroupNorm,
    sizes: _Sizes,
    dy: Tensor,
    y: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inverse_std: Tensor,
    kept: Kept | None,
) -> tuple[Launch, Launch, Launch]:
    """The three launches for such tensors."""
    count_kept = 0 if kept is None else len(kept.columns)
    dtypes = tuple(None if t is None else t.dtype for t in (dy, y, w, b, inverse_std))
    key = norm, sizes, count_kept, dtypes, y.get_device(), id(group_sums_kernel)
    known = _launches.get(key)
    if known is not None:
        return known
    samples, channels, places, *strides, tile_channels, tile_places, piece = sizes
    tiles, columns = cdiv(places, tile_places), cdiv(channels, tile_channels)
    has: dict[str, Any] = {"HAS_W": w is not None, "HAS_B": b is not None, "HAS_KEPT": kept is not None}
    tile = {"CHANNELS": tile_channels, "PLACES": tile_places}
    options = {"INDEX": tl.int64 if channels * places >= 2**31 else tl.int32, "num_warps": 4}
    extents = channels, places, *strides
    return _launches.put(
        key,
        (
            Launch(
                group_sums_kernel,
                [samples * sizes.pieces, columns],
                (samples, *extents, sizes.pieces, count_kept),
                {**has, **tile, **options, "PIECE": piece},
            ),
            Launch(
                group_means_kernel,
                [samples * norm.groups],
                (samples, norm.groups, channels, sizes.pieces, places * channels // norm.groups),
                {"HAS_W": w is not None, "PARTIAL": PARTIAL, "num_warps": 4},
            ),
            Launch(
                group_gradient_kernel,
                [samples * tiles, columns],
                (samples, norm.groups, *extents, tiles, count_kept),
                {**has, **tile, **options},
            ),
        ),
    )
