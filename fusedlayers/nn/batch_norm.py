"""Batch norm and the activation after it in one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..activations import Activation
from ..backends.operations import BatchNorm
from ..functional import batch_norm_act
from ..plan import describe_norm
from ..utils.formatting import described
from ..validation import check_features
from .base import FusedAct


class FusedBatchNormAct(FusedAct):
    """What the batch norms of one to three dimensions share."""

    #: As of ``nn.BatchNormNd``: 2 since ``num_batches_tracked`` is in ``state_dict``.
    _version = 2
    num_features: int
    eps: float
    momentum: float | None
    affine: bool
    track_running_stats: bool
    running_mean: Any
    running_var: Any
    num_batches_tracked: Any
    process_group: Any = None
    #: How many dimensions inputs may have, with the batch.
    dims: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        num_features: int,
        activation: object = "relu",
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        save: str = "auto",
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_features(type(self).__name__, num_features=num_features)
        layer = self.torchs(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        super().__init__(layer, activation, save)
        if process_group is not None and not hasattr(process_group, "size"):
            raise TypeError(
                f"{type(self).__name__}: process_group must be a group of torch.distributed, "
                f"got {described(process_group)}"
            )
        self.process_group = process_group

    def reset_running_stats(self) -> None:
        """Forget the batches that were seen, as torch's layer does."""
        self.torchs.reset_running_stats(self)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        # As torch's, which is no method of ours: checkpoints before version 2 do not count batches.
        if (local_metadata.get("version") or 1) < 2 and self.track_running_stats:
            count = self.num_batches_tracked
            is_counted = count is not None and not count.is_meta
            state_dict.setdefault(f"{prefix}num_batches_tracked", count if is_counted else torch.tensor(0))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    def _example_shape(self) -> tuple[int, ...]:
        return 2, self.num_features, *(5 + 2 * i for i in range(self.dims[0] - 2))

    def keeps(self, activation: Activation, dtype: torch.dtype) -> str:
        return describe_norm(activation, self.save, dtype, self._device())

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return norm_layer_act(self, self.dims, input, residual, self.activation, self.save)


def norm_layer_act(
    layer: Any, dims: tuple[int, ...], input: Tensor, residual: Tensor | None, activation: object, save: str
) -> Tensor:
    """``activation(layer(input) + residual)`` for an ``nn.BatchNorm`` of inputs of so many dimensions."""
    norm = BatchNorm.of(layer, input.dim() if isinstance(input, Tensor) else 0, dims)
    return batch_norm_act(norm, input, layer.weight, layer.bias, residual, activation, save)


class FusedBatchNormAct1d(FusedBatchNormAct):
    """``activation(batch_norm(x) + residual)`` that keeps its output alone, or x and at most its output, for an
    ``nn.BatchNorm1d`` and the activation after it.

    It has the parameters, buffers, statistics, attributes and ``state_dict`` keys of ``nn.BatchNorm1d``. It is no
    ``nn.BatchNorm1d``: what exchanges or folds batch norms by ``isinstance`` would drop the activation.

    What backward needs of it is kept in one of two ways.

    y alone, where different inputs of the activation have different outputs (branches of a folded one count). Then y
    determines the activation's input, and that the normalised x, which is all that backward asks for. Gradients err by
    float32's rounding, and by as much as the derivative of a folded activation does. Along the normalised input they
    err by up to 1.4e-5 of the norm of dy times the gain (PyTorch's: 2.5e-7), for weights from 0.05 to 2 and biases from
    -2 to 2. x is kept of channels whose weight is near 0 or whose values lie far out: there the error would be larger.
    Forward looks at the weights and the range of the values for that. On a GPU the host would wait for them: there x is
    kept, unless ``save="output"`` asks for y. Under ``torch.compile`` x is kept too.

    Else x, and at most y. The activation's input is computed again from x, or y determines the derivative, and the next
    layer keeps y anyway. So any activation costs at most what ReLU costs.

    The bias must not be edited between forward and backward.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as for ``nn.BatchNorm1d``.
        activation: as for ``fusedlayers.conv_bias_act``. A module with parameters becomes a submodule.
        save: what is kept.
            "output": y where it determines x, else y and x.
            "recompute": x, from which the rest is computed again, exactly.
            "input": x and the activation's input.
            "auto": y where it determines x, on CPUs. Else x, and also y where y determines the derivative exactly (with
            a residual, with a branch bit too); of large results x alone, if there is no residual and a kernel has the
            function (on CPUs those have all in 16 bits). Results of less than 2 MiB (channels-last: 8; on GPUs: 128 KiB
            for each multiprocessor) are PyTorch's, and an x of fewer than 16384 elements is kept.
        process_group: a process group of ``torch.distributed``, whose processes take their statistics together in
            training, as ``nn.SyncBatchNorm`` does, on CPUs too. First derivatives only.

    Shapes: (batch, channels) or (batch, channels, length) -> the same. ``forward`` takes a second argument of the same
    shape, the residual, which is added before the activation.

    Raises:
        TypeError, ValueError: as ``fusedlayers.conv_bias_act``; one value per channel in training.
    """

    torchs = nn.BatchNorm1d
    dims = (2, 3)


class FusedBatchNormAct2d(FusedBatchNormAct):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm2d``: (batch, channels, height, width) -> the same.

    >>> import fusedlayers as fl
    >>> fl.FusedBatchNormAct2d(8, "silu").extra_repr()[-61:]
    'activation=silu, saves the output, which determines the input'
    """

    torchs = nn.BatchNorm2d
    dims = (4,)


class FusedBatchNormAct3d(FusedBatchNormAct):
    """As ``FusedBatchNormAct1d``, for an ``nn.BatchNorm3d``: (batch, channels, depth, height, width) -> the same."""

    torchs = nn.BatchNorm3d
    dims = (5,)


#: Batch norms, torch's and this library's: for code that chooses parameters or their first values by the class.
NORM_TYPES = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(FusedBatchNormAct1d, FusedBatchNormAct2d, FusedBatchNormAct3d),
)
