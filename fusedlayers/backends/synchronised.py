"""Batch norm's statistics, and its gradients, over the batches of all processes of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.layout import along, others


class Statistics(NamedTuple):
    """Of each channel over all processes, in float32 or wider."""

    mean: Tensor
    var: Tensor
    #: How many values a channel has.
    size: Tensor


def statistics(x: Tensor, group: Any) -> Statistics:
    """Of x: (batch, channels, ...), which may be empty in some processes.

    Means and variances are gathered, and not sums of squares, which would cancel (Chan, Golub & LeVeque 1979).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // max(1, x.shape[1])
    if count:
        var, mean = torch.var_mean(wide, others(x, 1), correction=0)
    else:
        var = mean = wide.new_zeros(x.shape[1])
    own = torch.cat([mean, var, mean.new_tensor([count])])
    gathered = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(gathered.unbind()), own, group=group)
    means, variances, counts = gathered.split([len(mean), len(mean), 1], 1)
    part = counts / counts.sum()
    mean = (part * means).sum(0)
    var = (part * (variances + (means - mean).square())).sum(0)
    return Statistics(mean, var, counts.sum())


def gradients(
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
