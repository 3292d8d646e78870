"""Tensor parallelism for dense layers with an activation. Importing this imports ``torch.distributed.tensor``."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel

from .layer import FusedDenseAct


class FusedColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` that takes a ``FusedDenseAct`` too: each process has some of its output features.

    The weight and the bias are sharded by rows, parameters of the activation are replicated. Activations of DTensors
    are computed by plain PyTorch. There is no rowwise style: the activation needs the sum over all processes.

    Args:
        input_layouts, output_layouts, use_local_output: as for ``ColwiseParallel``.

    Raises:
        NotImplementedError: the module is not a ``FusedDenseAct``, ``nn.Linear`` or ``nn.Embedding``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FusedDenseAct):
            return super()._apply(module, device_mesh)
        return distribute_module(
            module,
            device_mesh,
            self._partition,
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )

    def _partition(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if not isinstance(module, FusedDenseAct):
            return  # the activation's
        for own, parameter in [*module.named_parameters(recurse=False)]:
            sharded: Any = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(own, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
