"""Layers that keep their outputs for the backward pass, where PyTorch's keep their inputs as well.

For a model that you have: ``fuse(model, inputs)``, ``fit(model, inputs, memory_budget_bytes="8GiB")``, ``unfuse``,
``memory_report`` and ``explain``. By hand: ``FusedDenseAct``, ``FusedMLP``, ``FusedGatedMLP``, ``dense_bias_act``.
"""

from typing import TYPE_CHECKING, Any

from .activations import activation, activations
from .fit.fit import fit
from .fit.fit_compiled import fit_compiled
from .functional import bias_act, conv_bias_act, dense_bias_act, gated_mlp, mlp
from .invertible.activation import InvertibleActivation
from .invertible.coupling import AdditiveCoupling, AffineCoupling
from .invertible.layers import (
    InvertibleBatchNorm1d,
    InvertibleBatchNorm2d,
    InvertibleBatchNorm3d,
    InvertibleConv1d,
    InvertibleConv2d,
    InvertibleConv3d,
    InvertibleLinear,
    orthogonal,
)
from .invertible.module import InvertibleModule, InvertibleSequential, invertible_checkpoint
from .invertible.reshape import (
    InvertibleFlatten,
    InvertibleIdentity,
    InvertiblePad,
    InvertiblePixelShuffle,
    InvertibleSplit,
)
from .nn.activations import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    ReLU6,
    SiLU,
    Softplus,
    Softshrink,
    Softsign,
    celu,
    elu,
    gelu,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    logsigmoid,
    mish,
    quick_gelu,
    relu6,
    selu,
    silu,
    softplus,
    softshrink,
    softsign,
    squared_relu,
)
from .nn.layer import CONV_TYPES, LINEAR_TYPES, FusedConvAct1d, FusedConvAct2d, FusedConvAct3d, FusedDenseAct
from .nn.mlp import FusedGatedMLP, FusedMLP
from .recipes.fuse import fuse, unfuse
from .recipes.save_once import save_once
from .recompute.recompute import sublinear
from .recompute.sublinear import SublinearSequential
from .reports.explanation import explain
from .reports.memory_report import memory_report

if TYPE_CHECKING:
    from .nn.tensor_parallel import FusedColwiseParallel
else:

    def __getattr__(name: str) -> Any:
        if name != "FusedColwiseParallel":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .nn.tensor_parallel import FusedColwiseParallel  # with it comes torch.distributed.tensor

        return FusedColwiseParallel


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__version__ = "0.1.0"

__all__ = [
    "CELU", "CONV_TYPES", "ELU", "GELU", "LINEAR_TYPES", "SELU", "AdditiveCoupling", "AffineCoupling",
    "FusedColwiseParallel", "FusedConvAct1d", "FusedConvAct2d", "FusedConvAct3d", "FusedDenseAct", "FusedGatedMLP",
    "FusedMLP", "Hardsigmoid", "Hardswish", "Hardtanh", "InvertibleActivation", "InvertibleBatchNorm1d",
    "InvertibleBatchNorm2d", "InvertibleBatchNorm3d", "InvertibleConv1d", "InvertibleConv2d", "InvertibleConv3d",
    "InvertibleFlatten", "InvertibleIdentity", "InvertibleLinear", "InvertibleModule", "InvertiblePad",
    "InvertiblePixelShuffle", "InvertibleSequential", "InvertibleSplit", "LeakyReLU", "LogSigmoid", "Mish", "ReLU6",
    "SiLU", "Softplus", "Softshrink", "Softsign", "SublinearSequential", "activation", "activations", "bias_act",
    "celu", "conv_bias_act", "dense_bias_act", "elu", "explain", "fit", "fit_compiled", "fuse", "gated_mlp", "gelu",
    "hardsigmoid", "hardswish", "hardtanh", "invertible_checkpoint", "leaky_relu", "logsigmoid", "memory_report",
    "mish", "mlp", "orthogonal", "quick_gelu", "relu6", "save_once", "selu", "silu", "softplus", "softshrink",
    "softsign", "squared_relu", "sublinear", "unfuse",
]  # fmt: skip
