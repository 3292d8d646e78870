"""What comes before an activation: a matmul, a convolution or a batch norm, ``z = operation(x, w, b)``, by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._torch import batch_norm_with_statistics
from ..utils.layout import along, other_dims

if TYPE_CHECKING:
    from .base import ChannelPasses

Sizes = tuple[int, ...]
Weight = Any
"""A tensor; of a batch norm without one None."""
Recompute = Callable[[Tensor, Weight, Tensor | None], Tensor]
"""Computes z once more from x, w and b, for the backward pass."""


class Matmul:
    """``x w^T + b``: (..., in), (out, in), (out,) -> (..., out)."""

    function = "dense_bias_act"
    #: Whether b may as well be added by whoever comes after.
    leaves_bias = True
    #: Whether autocast casts x, w and b.
    is_cast = True
    #: The dimension of z, from the end, along which the bias runs.
    dim = -1

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """Of z."""
        return *x.shape[:-1], w.shape[0]

    def without_tensors(self) -> Matmul:
        return self

    def returns_view(self, x: Tensor) -> bool:
        """Whether z is a view of the result."""
        return x.dim() != 2

    def flattened(self, x: Tensor) -> Tensor:
        """x in two dimensions: the result of ``F.linear`` with more is a view, and overwriting a view costs autograd a
        copy. z and what is added to it are folded alike."""
        return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x.unsqueeze(0)

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


MATMUL = Matmul()


class Convolution(NamedTuple):
    """``conv(x, w) + b`` with one to three spatial dimensions: (batch, in, ...), (out, in / groups, ...), (out,) ->
    (batch, out, ...), or all of it without the batch."""

    stride: Sizes
    #: Numbers, or "same" or "valid".
    padding: Sizes | str
    dilation: Sizes
    groups: int
    leaves_bias: bool = True
    is_cast: bool = True

    @property
    def function(self) -> str:
        return "conv_bias_act"

    @property
    def dim(self) -> int:
        """The dimension of z, from the end, along which the bias runs."""
        return -len(self.stride) - 1

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.stride) - 1]
        return call(x, w, b, self.stride, self.padding, self.dilation, self.groups)

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """Of z. A size may be negative, if the kernel is larger than what it is moved over."""
        dims = len(self.stride)
        *leading, _ = x.shape[:-dims]
        if self.padding == "same":
            return *leading, w.shape[0], *x.shape[-dims:]
        padding = (0,) * dims if isinstance(self.padding, str) else self.padding
        moved = zip(x.shape[-dims:], w.shape[-dims:], self.stride, padding, self.dilation, strict=True)
        found = [(size + 2 * p - d * (kernel - 1) - 1) // s + 1 for size, kernel, s, p, d in moved]
        return *leading, w.shape[0], *found

    def padding_in_numbers(self, w: Tensor) -> Sizes | None:
        """What both ends of each dimension are padded by; None where "same" pads one end more than the other."""
        if not isinstance(self.padding, str):
            return self.padding
        spare = [apart * (kernel - 1) for kernel, apart in zip(w.shape[2:], self.dilation, strict=True)]
        if self.padding == "valid":
            return (0,) * len(spare)
        return None if any(size % 2 for size in spare) else tuple(size // 2 for size in spare)

    def gradients(self, dz: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """Of x, w and b; None where not needed. Needs a padding in numbers, and of x and w what the others are of."""
        padding = self.padding_in_numbers(w)
        sizes = self.stride, padding, self.dilation, False, (0,) * len(self.stride), self.groups
        found: list[Tensor | None] = torch.ops.aten.convolution_backward(dz, x, w, (w.shape[0],), *sizes, needs)
        return found

    def without_tensors(self) -> Convolution:
        return self

    def returns_view(self, x: Tensor) -> bool:
        """Whether z is a view of the result."""
        return x.dim() != len(self.stride) + 2

    def flattened(self, x: Tensor) -> Tensor:
        """x with a batch: without, the result is a view."""
        return x if x.dim() == len(self.stride) + 2 else x.unsqueeze(0)

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.dim() == y.dim() else y.squeeze(0)


#: Of x, w and b.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
#: Numbers of dimensions that ``batch_norm`` takes; each module of PyTorch takes fewer.
ANY_DIMS = (2, 3, 4, 5)


class BatchNorm(NamedTuple):
    """``(x - mean) / sqrt(var + eps) * w + b`` along the second dimension, as ``F.batch_norm``, whose arguments these
    are: by the statistics of the batch, of which the running ones take a part, or by these. In a process group those
    of the batch are of the batches of all its processes."""

    running_mean: Tensor | None
    running_var: Tensor | None
    #: How many batches the running statistics have seen, this one not included; None where nobody counts.
    batches: Tensor | None
    training: bool
    #: The batch's part of the running statistics; None for that which makes them averages.
    momentum: float | None
    eps: float
    group: Any = None
    #: How many dimensions inputs may have, with the batch.
    allowed_dims: tuple[int, ...] = ANY_DIMS
    #: How many dimensions x has.
    dims: int = 0
    leaves_bias: bool = False
    is_cast: bool = False

    @classmethod
    def of(cls, layer: Any, dims: int, allowed_dims: tuple[int, ...] = ANY_DIMS) -> BatchNorm:
        """That of an ``nn.BatchNorm``, as it is now, for an input with so many dimensions."""
        training, tracks, mean, var = layer.training, layer.track_running_stats, layer.running_mean, layer.running_var
        reads_running = tracks or not training
        return cls(
            mean if reads_running else None,
            var if reads_running else None,
            layer.num_batches_tracked if training and tracks else None,
            training or (mean is None and var is None),
            layer.momentum,
            layer.eps,
            getattr(layer, "process_group", None),
            allowed_dims,
            dims,
        )

    @property
    def function(self) -> str:
        return "batch_norm" if self.allowed_dims == ANY_DIMS else f"FusedBatchNormAct{self.allowed_dims[-1] - 2}d"

    @property
    def dim(self) -> int:
        """The dimension of z, from the end, along which channels run."""
        return 1 - self.dims

    @property
    def is_synchronised(self) -> bool:
        # One process alone has plain batch norm, as in ``nn.SyncBatchNorm``: its own variance may be none at all.
        return self.group is not None and self.training and dist.get_world_size(self.group) > 1

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        assert self.group is None or not self.is_synchronised
        # What F.batch_norm calls; its checks are among those of validation.py.
        part, is_cudnn = self._counted(), torch.backends.cudnn.enabled
        return torch.batch_norm(x, w, b, self.running_mean, self.running_var, self.training, part, self.eps, is_cudnn)

    def with_recompute(self, x: Tensor, w: Weight, b: Tensor | None) -> tuple[Tensor, Recompute]:
        """z, and what computes it again: by the statistics of now, for torch does not notice when they are updated."""
        if not self.training:
            mean, var = (None if s is None else s.clone() for s in (self.running_mean, self.running_var))
            return self(x, w, b), self._replace(running_mean=mean, running_var=var).__call__
        z, mean, inverse_std = self.with_statistics(x, w, b)
        return z, BatchNormRecompute(mean, inverse_std, self.eps, True).__call__

    def with_statistics(self, x: Tensor, w: Weight, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """z, and what x was normalised by: the mean, and the reciprocal of the standard deviation."""
        if not self.training:
            assert self.running_mean is not None and self.running_var is not None
            return self(x, w, b), self.running_mean.clone(), (self.running_var + self.eps).rsqrt_()
        part = self._counted()
        if self.is_synchronised:
            mean, var, count = _synchronised_statistics(x, self.group)
            self.update_running(mean, var * (count / (count - 1)), part)
            w, b = (None if p is None else p.to(mean.dtype) for p in (w, b))
            return F.batch_norm(x, mean, var, w, b, False, 0.0, self.eps), mean, (var + self.eps).rsqrt_()
        # What F.batch_norm calls, which keeps the statistics to itself.
        z, mean, inverse_std, *_ = batch_norm_with_statistics(
            x, w, b, self.running_mean, self.running_var, True, part, self.eps, torch.backends.cudnn.enabled
        )
        return z, mean, inverse_std

    def statistics(self, x: Tensor, passes: ChannelPasses) -> tuple[Tensor, Tensor]:
        """What x is normalised by, of the batch in a backend's passes."""
        if not self.training:
            assert self.running_mean is not None and self.running_var is not None
            wide = torch.promote_types(self.running_mean.dtype, torch.float32)
            mean, var = (t.to(wide, copy=True) for t in (self.running_mean, self.running_var))
            return mean, var.add_(self.eps).rsqrt_()
        return passes.statistics(x, self, self._counted())

    def gradients(
        self, dz: Tensor, x: Tensor, w: Weight, mean: Tensor, inverse_std: Tensor, needs: Sequence[bool]
    ) -> Gradients:
        """Of x, w and b; None where not needed."""
        backward = torch.ops.aten.native_batch_norm_backward.default
        if self.is_synchronised:
            w = None if w is None else w.to(mean.dtype)
            if dz.numel():
                _, dw, db = backward(dz, x, w, None, None, mean, inverse_std, True, self.eps, [False, True, True])
            else:  # torch divides by the number of values
                dw, db = torch.zeros_like(mean), torch.zeros_like(mean)
            scale = inverse_std if w is None else inverse_std * w
            dx = _synchronised_gradients(dz, x, scale, mean, inverse_std, (dw, db), self.group)
            return dx, dw if needs[1] else None, db if needs[2] else None
        if self.training:
            found: Gradients = backward(dz, x, w, None, None, mean, inverse_std, True, self.eps, needs)
            return found
        # dx by a batch norm that does nothing but multiply; the others are the same in both modes.
        factor, one = inverse_std if w is None else inverse_std * w, torch.ones_like(mean)
        dx, _, _ = backward(dz, x, factor, one, one, None, None, False, 0.0, [needs[0], False, False])
        _, dw, db = backward(dz, x, w, None, None, mean, inverse_std, True, self.eps, [False, *needs[1:]])
        return dx, dw, db

    def update_running(self, mean: Tensor, var: Tensor, part: float) -> None:
        """Of the running statistics the batch's take this part."""
        if self.running_mean is not None and self.running_var is not None:
            for running, own in ((self.running_mean, mean), (self.running_var, var)):  # lerp_ makes NaN of infinities
                # torch's own nodes save them too, and its kernels leave the version as it is.
                values = running.data
                wide = values.to(torch.promote_types(running.dtype, own.dtype))  # itself, unless that is wider
                wide.mul_(1 - part).add_(own, alpha=part)
                if wide is not values:
                    values.copy_(wide)  # rounded once, as torch does

    def counted(self) -> BatchNorm:
        """The same with this batch counted already: for who may compute it twice."""
        return self._replace(momentum=self._counted(), batches=None)

    def _counted(self) -> float:
        """Count the batch; what part it takes of the running statistics."""
        if self.batches is not None:
            self.batches.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.batches)
        return self.momentum or 0.0

    def without_tensors(self) -> BatchNorm:
        return self._replace(running_mean=None, running_var=None, batches=None, group=None)

    def facts(self) -> Hashable:
        """What of it the checks and a plan depend on."""
        mean, var = self.running_mean, self.running_var
        return (
            self.training,
            self.eps,
            self.allowed_dims,
            mean is not None and (mean.dtype, mean.shape, mean.is_cpu or mean.device),
            var is not None and (var.dtype, var.shape, var.is_cpu or var.device),
        )

    def returns_view(self, x: Tensor) -> bool:
        return False

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        """Of z."""
        return tuple(x.shape)

    def flattened(self, x: Tensor) -> Tensor:
        return x

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class Pointwise(NamedTuple):
    """``x + b``, b along ``dim``: what comes before an activation that stands alone."""

    dim: int
    function: str = "bias_act"
    leaves_bias: bool = True
    is_cast: bool = False

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        return x if b is None else x + along(b, self.dim, x.dim())

    def without_tensors(self) -> Pointwise:
        return self

    def returns_view(self, x: Tensor) -> bool:
        return False

    def shape(self, x: Tensor, w: Weight) -> Sizes:
        return tuple(x.shape)

    def flattened(self, x: Tensor) -> Tensor:
        return x

    def unflattened(self, y: Tensor, x: Tensor) -> Tensor:
        return y


#: What the activation of a gate is applied to.
GATE = Pointwise(-1, "gated_act")


class BatchNormRecompute(NamedTuple):
    """Batch norm by statistics that are known, and do not count again among the running ones."""

    mean: Tensor
    inverse_std: Tensor
    eps: float
    #: Whether they are those of the batch.
    training: bool

    def __call__(self, x: Tensor, w: Weight, b: Tensor | None) -> Tensor:
        if self.training and (torch.is_grad_enabled() or self.inverse_std.dtype.itemsize == 2):
            # The statistics depend on x, and statistics of 16 bits say too little.
            return F.batch_norm(x, None, None, w, b, True, 0.0, self.eps)
        # Those of a process group are in float32.
        w, b = (None if p is None else p.to(self.mean.dtype) for p in (w, b))
        return F.batch_norm(x, self.mean, _variance(self.inverse_std, self.eps), w, b, False, 0.0, self.eps)

    def of(self, channels: Tensor) -> BatchNormRecompute:
        """For these channels of x alone."""
        return self._replace(mean=self.mean[channels], inverse_std=self.inverse_std[channels])


def _variance(inverse_std: Tensor, eps: float) -> Tensor:
    return inverse_std.reciprocal().square_().sub_(eps)  # its square may be out of range


# --- batch norm over the batches of all processes of a group ----------------------------------------------------------


class _Statistics(NamedTuple):
    """Of each channel over all processes, in float32 or wider."""

    mean: Tensor
    var: Tensor
    #: How many values a channel has.
    size: Tensor


def _synchronised_statistics(x: Tensor, group: Any) -> _Statistics:
    """Of x: (batch, channels, ...), which may be empty in some processes.

    Means and variances are gathered, and not sums of squares, which would cancel (Chan, Golub & LeVeque 1979).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // max(1, x.shape[1])
    if count:
        var, mean = torch.var_mean(wide, other_dims(x, 1), correction=0)
    else:
        var = mean = wide.new_zeros(x.shape[1])
    own = torch.cat([mean, var, mean.new_tensor([count])])
    gathered = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(gathered.unbind()), own, group=group)
    means, variances, counts = gathered.split([len(mean), len(mean), 1], 1)
    part = counts / counts.sum()
    mean = (part * means).sum(0)
    var = (part * (variances + (means - mean).square())).sum(0)
    return _Statistics(mean, var, counts.sum())


def _synchronised_gradients(
    dz: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inverse_std: Tensor, own: tuple[Tensor, Tensor], group: Any
) -> Tensor:
    """The gradient of x: ``scale (dz - mean(dz) - xhat mean(dz xhat))``, means over all processes; ``own`` are this
    process's sums of ``dz xhat`` and dz."""
    count = dz.numel() // max(1, dz.shape[1])
    sums = torch.cat([*own, own[0].new_tensor([count])]).to(torch.promote_types(own[0].dtype, torch.float32))
    dist.all_reduce(sums, group=group)
    by_xhat, by_one, total = sums.split([len(mean), len(mean), 1])
    of_x = -scale * inverse_std * by_xhat / total
    constant = -scale * by_one / total - of_x * mean
    dx = torch.addcmul(along(constant, 1, dz.dim()), dz.to(sums.dtype), along(scale, 1, dz.dim()))
    return dx.addcmul_(x.to(sums.dtype), along(of_x, 1, dz.dim())).to(dz.dtype)


Operation = Matmul | Convolution | BatchNorm | Pointwise


def elements(shape: Sizes) -> int:
    """How many elements a tensor of this shape has."""
    return math.prod(shape)
