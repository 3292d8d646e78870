"""Batch norm and activation in one node that saves its output alone (Rota Bulo et al. 2018, "In-Place ABN").

The output determines the activation's input z, and z determines the normalised ``xhat = (z - b) / w``, which is all
that batch norm's backward needs. x, the convolution's result, is freed by then.

Outputs are rounded, so z is only as exact as they determine it (``activations/inverse_error.py``). The error reaches
the gradient of x only through ``xhat mean(dz xhat)``, and that of w through ``sum(dz xhat)``. Where it would show, x is
saved: of channels whose w is too small to divide by or whose z gather where the function is flat, and of channels with
values that lie too far out. That takes a look at w, b and the range of z, for which the host waits on a GPU.
Values are assumed to be spread about their mean as normally distributed ones are. Of a channel that has one value
nearly everywhere, just where the function turns, z is only as exact as chance has it.

An error that all z of a channel share adds up in the gradient of w, however small it is. There is one: torch's kernel
for CPUs computes ``z = x scale + shift``, and ``shift`` is rounded. It is known, and subtracted. A backend's own passes
compute ``(x - mean) scale + b`` and have no such error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from .._torch import Node
from ..activations import Activation, InverseError, measure_inverse_error
from ..backends import Backend, GradientRequest, NormPasses
from ..backends.operations import BatchNorm, BatchNormRecompute
from ..backends.torch import inexact_channels
from ..utils.isolation import in_clean_state
from ..utils.layout import along, has_torchs_layout, other_dims
from ..utils.profile_ranges import profile_range, range_name
from ..utils.storages import is_plain
from .buffer_reuse import is_ours_alone, saved_under_hooks
from .edits import expected_from_hooks, saved_tensors
from .place import AtPlace, place_of
from .pointwise import apart, differentiable_gradients, gradients_through, needs_composite

#: Smaller inputs are saved: to find out whether they must be would take longer than to read them.
WORTH_IT = 1 << 14
#: Where x is to be saved of more than this part of the channels, all of it is, as it is, without a copy.
MOST = 0.5
#: How many standard deviations the mean of a channel may be from 0. torch computes z by ``x scale + shift``, which
#: cancel.
CENTRED = 32.0


def inverse_error_of(activation: Activation, x: Tensor) -> InverseError | None:
    """How exactly the layer's outputs determine its input; None where that is too coarse, or not worth a look."""
    if x.numel() < WORTH_IT or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return measure_inverse_error(activation, x.dtype)


@profile_range(lambda norm, x, w, b, activation, *_: range_name("batch_norm", activation.name))
def norm_act(
    norm: BatchNorm,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    activation: Activation,
    inverse_error: InverseError | None,
) -> Tensor:
    """``activation(norm(x, w, b))`` that keeps its output as far as that determines x, and else x."""
    place = None if inverse_error is None or not x.requires_grad else place_of(x)
    y: Tensor = NormAct.apply(x, w, b, place, None, norm, activation, inverse_error, None)
    return y


@profile_range(lambda norm, x, w, b, z, made, activation, *_: range_name("batch_norm", activation.name))
def act_after_norm(
    norm: BatchNorm,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor,
    made: Made,
    activation: Activation,
    inverse_error: InverseError,
) -> Tensor:
    """``activation(z)`` in one node with the batch norm that has made z of x. The norm's own node then has no
    successor, and is freed with what it saved as soon as z is."""
    place = place_of(x) if x.requires_grad else None
    # Without its place in the graph z is a plain input of the new node, which may write over it.
    z = z.detach_() if made.inplace else z.detach()
    y: Tensor = NormAct.apply(x, w, b, place, z, norm, activation, inverse_error, made)
    return y


class Made(NamedTuple):
    """How z was made of x."""

    mean: Tensor
    inverse_std: Tensor
    #: Whether by a backend's passes, and not by torch's kernel.
    in_passes: bool
    #: Whether z is to be written over. It must not be a view then.
    inplace: bool


class NormAct(Node):
    """``activation(norm(x, w, b))``. Saved are y, the statistics, and the channels of x that y does not tell; where
    these are many, x and not y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        place: Tensor | None,
        z: Tensor | None,
        norm: BatchNorm,
        activation: Activation,
        inverse_error: InverseError | None,
        made: Made | None,
    ) -> Tensor:
        backend = backends.choose(x, activation)
        passes = None
        if inverse_error is not None and not norm.is_synchronised:
            passes = backend.norm_passes(x if z is None else z, activation)
        if passes is not None and inverse_error is not None:
            y, known, channels = _forward_in_passes(passes, norm, x, w, b, z, made, inverse_error)
        else:
            y, known, channels = _forward_by_torch(backend, norm, x, w, b, z, made, activation, inverse_error)
        keeps_output = _keeps_output(inverse_error, channels, x)
        is_dirty = made is not None and made.inplace
        if is_dirty:
            ctx.mark_dirty(z)
        if not keeps_output:
            ctx.save_for_backward(None, x, None, known.mean, known.inverse_std, w, b)
        elif channels is None:
            ctx.save_for_backward(y, None, None, known.mean, known.inverse_std, w, b)
        else:
            ctx.save_for_backward(y, x.index_select(1, channels), channels, known.mean, known.inverse_std, w, b)
        ctx.place = place if keeps_output else None
        ctx.settings = norm, activation, backend, saved_under_hooks()
        ctx.expected = expected_from_hooks(y, is_dirty=is_dirty) if keeps_output else None
        is_by_torch = passes is None if made is None else not made.in_passes
        ctx.rounds_shift = is_by_torch and x.is_cpu and has_torchs_layout(x) and _torch_rounds_shift()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        norm, activation, backend, hooked = ctx.settings
        y, x, channels, mean, inverse_std, w, b = saved_tensors(ctx, norm.function, activation)
        needs = ctx.needs_input_grad[:3]
        overwrite = y is not None and not hooked and is_ours_alone(y)
        known = Known(mean, inverse_std, w)
        again = BatchNormRecompute(mean, inverse_std, norm.eps, norm.training)
        if needs_composite(dy):
            if norm.is_synchronised:
                raise RuntimeError(
                    f"{norm.function}: statistics of a process group have no second derivatives, and no gradients in "
                    "batches; leave process_group out, or create_graph and is_grads_batched"
                )
            if y is not None:
                with torch.no_grad():
                    x = _values(backend.inverse(y, activation, None), known, b, x, channels)
            x = x if ctx.place is None else AtPlace.apply(ctx.place, x)
            dx, dw, db = differentiable_norm_gradients(dy, x, w, b, again, activation, norm.dim, needs)
            return dx, dw, db, None, None, None, None, None, None

        if y is not None and not norm.is_synchronised and is_plain(dy):
            passes = backend.norm_passes(y, activation)
            if passes is not None:
                dx, dw, db = _gradients_in_passes(passes, ctx, dy, y, known, b, x, channels, overwrite)
                return dx, dw if needs[1] else None, db if needs[2] else None, None, None, None, None, None, None
        wanted = GradientRequest("input", False, False)
        if y is None:
            dz, *_ = backend.gradient(dy, again(x, w, b), activation, (), wanted._replace(overwrite=True), dim=norm.dim)
        else:
            by_output = not activation.is_folded
            if by_output:
                dz, *_ = backend.gradient(dy, y, activation, (), wanted._replace(saved="output"), dim=norm.dim)
            z = backend.inverse(y, activation, y if overwrite else None)
            if not by_output:
                if channels is not None:
                    z.index_copy_(1, channels, again.of(channels)(x, _of(w, channels), _of(b, channels)))
                dz, *_ = backend.gradient(dy, z, activation, (), wanted, dim=norm.dim)
            x, known = _as_input(z, known, b, x, channels)
        offset = None
        if y is not None and needs[1] and ctx.rounds_shift:
            offset = _offset(Known(mean, inverse_std, w), b, channels)
        asked = (needs[0], needs[1], needs[2] or offset is not None)
        dx, dw, db = norm.gradients(dz, x, known.w, known.mean, known.inverse_std, asked)
        if offset is not None and dw is not None and db is not None:
            dw = (dw.double() - offset * db.double()).to(dw.dtype)
        return dx, dw, db if needs[2] else None, None, None, None, None, None, None


def _forward_in_passes(
    passes: NormPasses,
    norm: BatchNorm,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    made: Made | None,
    inverse_error: InverseError,
) -> tuple[Tensor, Known, Tensor | None]:
    """y, what z is made with, and the channels that y does not tell, in a backend's passes."""
    if made is None:
        mean, inverse_std = norm.statistics(x, passes)
        known, centred = Known(mean, inverse_std, w), math.inf
        y, ends = passes.norm_act(x, mean, known.scale, known.shift(b))
    else:
        assert z is not None
        known, centred = Known(made.mean, made.inverse_std, w), math.inf if made.in_passes else CENTRED
        y = z if made.inplace else torch.empty_like(z)
        ends = passes.act(z, y)
    count = x.numel() // x.shape[1]
    return y, known, passes.inexact_channels(inverse_error, *known, b, ends, count, centred, _epsilon_of_batch(norm))


def _forward_by_torch(
    backend: Backend,
    norm: BatchNorm,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    z: Tensor | None,
    made: Made | None,
    activation: Activation,
    inverse_error: InverseError | None,
) -> tuple[Tensor, Known, Tensor | None]:
    """The same, z by torch's batch norm. y holds no branch where it is not kept."""
    if made is None:
        z, mean, inverse_std = norm.with_statistics(x, w, b)
    else:
        mean, inverse_std, *_ = made
    assert z is not None
    known = Known(mean, inverse_std, w)
    channels = None if inverse_error is None else _inexact_channels(z, known, b, inverse_error, _epsilon_of_batch(norm))
    is_kept = _keeps_output(inverse_error, channels, x)
    out = z if made is None or made.inplace else None
    return backend.bias_act(z, None, activation, dim=norm.dim, encode=is_kept, out=out), known, channels


def _epsilon_of_batch(norm: BatchNorm) -> float:
    """What was added to the variances of the batch; 0 in evaluation, where xhat has another variance than 1 anyway."""
    return norm.eps if norm.training else 0.0


def _keeps_output(inverse_error: InverseError | None, channels: Tensor | None, x: Tensor) -> bool:
    """Whether y is saved, and not all of x."""
    return inverse_error is not None and (channels is None or len(channels) <= MOST * x.shape[1])


def _gradients_in_passes(
    passes: NormPasses,
    ctx: Any,
    dy: Tensor,
    y: Tensor,
    known: Known,
    b: Tensor | None,
    x: Tensor | None,
    channels: Tensor | None,
    overwrite: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of x, w and b from y, and from x of the channels that were kept, in a backend's passes.

    With ``scale = w inverse_std``, and means over a channel, ``dx = scale (dz - mean(dz) - xhat mean(dz xhat))``
    (Ioffe & Szegedy 2015); the statistics are constants where they are not the batch's. xhat is ``(v - center) gain``:
    v is z, or x of a channel that was kept.
    """
    norm, activation, backend, _ = ctx.settings
    dz, v, db, product = passes.gradient(dy, y, known.shift(b), overwrite)
    if x is not None and channels is not None:
        from_input = backend.input_passes(activation, x.dtype)
        assert from_input is not None  # which more functions have
        x = x if has_torchs_layout(x) else x.contiguous()  # hooks bring it back
        factors = (t[channels] for t in (known.mean, known.scale, known.shift(b)))
        own, *sums = from_input.gradient(dy.index_select(1, channels), x, *factors)
        for of_all, of_own in ((dz, own), (v, x)):
            of_all.index_copy_(1, channels, of_own)
        for of_all, of_own in zip((db, product), sums, strict=True):
            of_all.index_copy_(0, channels, of_own)
    dw, *combined = passes.factors(*known, b, db, product, channels, v.numel() // len(db), ctx.rounds_shift)
    if not ctx.needs_input_grad[0]:
        return None, dw, db
    if not norm.training:
        return dz.mul_(along(known.scale, 1, dz.dim())), dw, db
    return passes.combine(dz, v, *combined), dw, db


class Known(NamedTuple):
    """``z = (x - mean) inverse_std w + b``."""

    mean: Tensor
    inverse_std: Tensor
    w: Tensor | None

    @property
    def scale(self) -> Tensor:
        return self.inverse_std if self.w is None else self.inverse_std * self.w

    def shift(self, b: Tensor | None) -> Tensor:
        return torch.zeros_like(self.mean) if b is None else b


def _inexact_channels(
    z: Tensor, known: Known, b: Tensor | None, inverse_error: InverseError, eps: float
) -> Tensor | None:
    """The channels of which outputs do not determine the input, or None; as ``NormPasses.inexact_channels``."""
    found, dims, count = functools.partial(inexact_channels, inverse_error, *known, b), other_dims(z, 1), z.numel()
    smallest, largest = torch.aminmax(z)
    if found((smallest.view(1), largest.view(1)), count // z.shape[1], CENTRED, eps) is None:
        return None  # in most calls, and one pass tells
    return found((z.amin(dims), z.amax(dims)), count // z.shape[1], CENTRED, eps)


def _as_input(
    z: Tensor, known: Known, b: Tensor | None, x: Tensor | None, channels: Tensor | None
) -> tuple[Tensor, Known]:
    """z as the input of a batch norm that has the same gradients: its mean is b, its standard deviation w. The channels
    that were kept are put in its place."""
    mean, inverse_std, w = known
    gain = torch.ones_like(mean) if w is None else w.to(mean.dtype, copy=True)
    center = torch.zeros_like(mean) if b is None else b.to(mean.dtype, copy=True)
    found = center, gain.reciprocal(), gain.square() * inverse_std
    if x is not None and channels is not None:
        z.index_copy_(1, channels, x)
        for theirs, own in zip(found, (mean, inverse_std, gain), strict=True):
            theirs.index_copy_(0, channels, own[channels])
    return z, Known(*found)


def _offset(known: Known, b: Tensor | None, channels: Tensor | None) -> Tensor | None:
    """By how much torch's kernel for CPUs shifts the xhat of each channel, in float64; not those of ``channels``."""
    mean, inverse_std, w = known
    if w is None:
        return None
    scale = (inverse_std * w).double()
    exact = (0.0 if b is None else b.double()) - mean.double() * scale
    offset = (exact.to(inverse_std.dtype).double() - exact) / w.double()
    return offset if channels is None else offset.index_fill_(0, channels, 0.0)


@functools.cache
@in_clean_state
def _torch_rounds_shift() -> bool:
    """Whether this build of torch computes ``x scale + shift`` as ``_offset`` says: with fused multiply-adds."""
    spread = functools.partial(torch.linspace, dtype=torch.float32)
    x = spread(29.0, 31.0, 4096).view(2, 8, 256)
    mean, var, w, b = x.mean((0, 2)), x.var((0, 2)), spread(0.5, 2.0, 8), spread(-1.0, 1.0, 8)
    scale = ((var + 1e-5).rsqrt() * w).double().view(-1, 1)
    shift = (b.double().view(-1, 1) - mean.double().view(-1, 1) * scale).float().double()
    return torch.equal(torch.nn.functional.batch_norm(x, mean, var, w, b), (x.double() * scale + shift).float())


def _values(z: Tensor, known: Known, b: Tensor | None, x: Tensor | None, channels: Tensor | None) -> Tensor:
    """x from z."""
    mean, inverse_std, w = known
    scale = inverse_std.reciprocal() if w is None else (inverse_std * w).reciprocal()
    shift = mean if b is None else mean - b * scale
    found = torch.addcmul(along(shift, 1, z.dim()), z, along(scale, 1, z.dim())).to(z.dtype)
    return found if x is None or channels is None else found.index_copy_(1, channels, x)


def differentiable_norm_gradients(
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    again: BatchNormRecompute,
    activation: Activation,
    dim: int,
    needs: Sequence[bool],
    *,
    create_graph: bool = True,
) -> list[Tensor | None]:
    """The gradients of x, w and b, in operations that autograd can differentiate again."""
    with torch.enable_grad():
        sources = apart(x, w, b)
        z = again(*sources)
        dz, *_ = differentiable_gradients(dy, z, activation, (), (), dim)
        assert dz is not None
        return gradients_through(z, dz, sources, needs, create_graph=create_graph)


def _of(parameter: Tensor | None, channels: Tensor) -> Tensor | None:
    return None if parameter is None else parameter[channels]
