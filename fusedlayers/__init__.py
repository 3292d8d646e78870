"""fusedlayers: bias and activation fused into the layer before them, one hidden-sized buffer instead of three."""

from .activations import activations
from .functional import bias_act, dense_bias_act
from .modules.activations import (
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
from .modules.dense import FusedDenseAct

__version__ = "0.1.0"
