"""The table of activations: one row for each.

Adding a row is the whole work of adding an activation: kernels, tests and benchmarks iterate over this table.
A row states the derivative in terms of the output y next to the function; "fold" asks for a fit.

A constant that float32 does not hold exactly is written with y's dtype (``full_like``): between two plain numbers
``torch.where`` takes the process-wide default dtype.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..derivative.features import Fold
from ..derivative.folded import FoldedDerivative
from .record import Definition, Native
from .table import register

aten = torch.ops.aten

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
_FLOAT32_MAX = torch.finfo(torch.float32).max
#: Above threshold/beta torch's softplus is linear, so it jumps down by exp(-threshold)/beta there. From this threshold
#: on the jump is below float32's rounding of the derivative.
_SOFTPLUS_SEAMLESS = 16.0


def _given_seamless(beta: float, threshold: float) -> str | None:
    """``parameter_refusal`` of softplus."""
    if beta > 0 and threshold >= _SOFTPLUS_SEAMLESS:
        return None
    return f"with beta = {beta:g} and threshold = {threshold:g} the straight part overlaps the curved one"


def _given_positive(name: str, value: float, below: str) -> str | None:
    """``parameter_refusal`` of an activation that is one-to-one only if a parameter is not negative."""
    return None if value >= 0 else f"with {name} = {value:g} {below}, so the output does not determine the derivative"


def _hardsigmoid(z: Tensor) -> Tensor:
    # F.hardsigmoid has no second derivative.
    return F.relu6(z + 3) / 6


def _squared_relu(z: Tensor) -> Tensor:
    positive = torch.relu(z)
    return positive * positive


def _squared_relu_derivative(y: Tensor) -> Tensor:
    # The root is not evaluated at 0, where its derivative is infinite and the second derivative of this row is 0. An
    # output that overflowed has a large finite slope, because an incoming gradient of 0 must give 0.
    flat = y <= 0
    y = torch.where(y == math.inf, _FLOAT32_MAX, y)
    return torch.where(flat, 0.0, 2 * torch.sqrt(torch.where(flat, 1.0, y)))


def _softsign_derivative(y: Tensor) -> Tensor:
    remainder = 1 - torch.abs(y)
    return remainder * remainder


def gelu_gate(z: Tensor) -> Tensor:
    """The factor of z in its GELU. Here and in ``gelu_tanh_gate`` 1 + erf(z) and 1 + tanh(z) would cancel where GELU
    falls to zero."""
    return 0.5 * torch.erfc(z * -math.sqrt(0.5))


def gelu_tanh_gate(z: Tensor) -> Tensor:
    """The factor of z in GELU's tanh form: 0.5 (1 + tanh(a)) = sigmoid(2a)."""
    return torch.sigmoid(z * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * z * z))


def _mish(z: Tensor) -> Tensor:
    # tanh(log(1 + u)) = n / (n + 2) with u = exp(z), n = u (u + 2). From z = 20 on it is 1; u^2 would overflow at 44.
    u = torch.exp(torch.clamp(z, max=20.0))
    n = u * (u + 2)
    return z * (n / (n + 2))


def _hardswish_derivative(distance: Tensor, y: Tensor, left: Tensor) -> Tensor:
    # y = z (z + 3) / 6, so f' = (2z + 3) / 6 = +-sqrt(24 (y + 3/8)) / 6. Flat outputs (z <= -3) are -0.0.
    slope = torch.sqrt(24 * distance) / 6
    return torch.where(left, torch.where(y == 0, 0.0, -slope), torch.where(y >= 3, 1.0, slope))


DEFINITIONS = (
    # --- piecewise linear ---------------------------------------------------------------------------------------------
    Definition(
        "identity",
        lambda z: z,
        derivative_given_output=torch.ones_like,
        inverse=lambda y: y,
        stands_for=((nn.Identity, {}),),
    ),
    Definition(
        "relu",
        torch.relu,
        derivative_given_output=lambda y: torch.where(y > 0, 1.0, 0.0),
        stands_for=((nn.ReLU, {}), (F.relu, {}), (torch.relu, {})),
        native=Native(
            torch.relu_,
            (aten.threshold_backward, lambda dy, y: (dy, y, 0)),
            lambda dy, z: aten.threshold_backward(dy, z, 0),
            loop=("relu", 0.0),
            is_piecewise=True,
        ),
    ),
    Definition(
        "leaky_relu",
        F.leaky_relu,
        {"negative_slope": 0.01},
        derivative_given_output=lambda y, negative_slope: torch.where(y > 0, 1.0, torch.full_like(y, negative_slope)),
        parameter_refusal=lambda negative_slope: _given_positive(
            "negative_slope", negative_slope, "the function turns at 0"
        ),
        # Without a float32 reciprocal of the slope there is no inverse.
        inverse=lambda y, negative_slope: (
            y * math.nan if abs(negative_slope) < 1e-38 else F.leaky_relu(y, 1 / negative_slope)
        ),
        stands_for=((nn.LeakyReLU, {}), (F.leaky_relu, {})),
        native=Native(
            aten.leaky_relu_.default,
            (aten.leaky_relu_backward, lambda dy, y, negative_slope: (dy, y, negative_slope, True)),
            lambda dy, z, negative_slope: aten.leaky_relu_backward(dy, z, negative_slope, False),
            loop=("leaky_relu", "negative_slope"),
            is_piecewise=True,
        ),
    ),
    Definition(
        "relu6",
        F.relu6,
        derivative_given_output=lambda y: torch.where((y > 0) & (y < 6), 1.0, 0.0),
        stands_for=((nn.ReLU6, {"min_val": 0.0, "max_val": 6.0}), (F.relu6, {})),
        native=Native(aten.relu6_.default, (aten.hardtanh_backward, lambda dy, y: (dy, y, 0, 6)), is_piecewise=True),
    ),
    Definition(
        "hardtanh",
        F.hardtanh,
        {"min_val": -1.0, "max_val": 1.0},
        derivative_given_output=lambda y, min_val, max_val: torch.where((y > min_val) & (y < max_val), 1.0, 0.0),
        flat_levels=("min_val", "max_val"),
        stands_for=((nn.Hardtanh, {}), (nn.ReLU6, {}), (F.hardtanh, {})),
        native=Native(
            aten.hardtanh_.default,
            (aten.hardtanh_backward, lambda dy, y, min_val, max_val: (dy, y, min_val, max_val)),
            is_piecewise=True,
        ),
    ),
    Definition(
        "trelu",
        F.threshold,
        {"threshold": 1.0, "value": 0.0},
        derivative_given_output=lambda y, threshold, value: torch.where(y > max(threshold, value), 1.0, 0.0),
        flat_levels=("value",),  # rounding may lift it above the threshold
        parameter_refusal=lambda threshold, value: (
            None if value <= threshold else "with value > threshold a clamped output looks like one that was kept"
        ),
        stands_for=((nn.Threshold, {}),),  # F.threshold has no defaults
        plain=F.threshold,
        native=Native(
            aten.threshold_.default,
            (aten.threshold_backward, lambda dy, y, threshold, value: (dy, y, max(threshold, value))),
            is_piecewise=True,
        ),
    ),
    Definition(
        "softshrink",
        F.softshrink,
        {"lambd": 0.5},
        derivative_given_output=lambda y, lambd: torch.where(y == 0, 0.0, 1.0),
        stands_for=((nn.Softshrink, {}), (F.softshrink, {})),
    ),
    Definition(
        "hardsigmoid",
        _hardsigmoid,
        derivative_given_output=lambda y: torch.where((y > 0) & (y < 1), torch.full_like(y, 1 / 6), 0.0),
        stands_for=((nn.Hardsigmoid, {}), (F.hardsigmoid, {})),
        native=Native(
            aten.hardsigmoid_.default,
            gradient_given_input=aten.hardsigmoid_backward.default,
            loop=("hardsigmoid", 0.0),
            is_piecewise=True,
        ),
        plain=_hardsigmoid,
    ),
    # --- smooth and monotone ------------------------------------------------------------------------------------------
    Definition(
        "squared_relu",
        _squared_relu,
        derivative_given_output=_squared_relu_derivative,
        native=Native(loop=("squared_relu", 0.0), is_piecewise=True),
    ),
    Definition(
        "tanh",
        torch.tanh,
        derivative_given_output=lambda y: 1 - y * y,
        inverse=torch.atanh,
        stands_for=((nn.Tanh, {}), (torch.tanh, {}), (F.tanh, {})),
        native=Native(torch.tanh_, (aten.tanh_backward, lambda dy, y: (dy, y)), loop=("tanh", 0.0)),
    ),
    Definition(
        "sigmoid",
        torch.sigmoid,
        derivative_given_output=lambda y: y * (1 - y),
        inverse=lambda y: torch.log(y) - torch.log1p(-y),
        stands_for=((nn.Sigmoid, {}), (torch.sigmoid, {}), (F.sigmoid, {})),
        native=Native(torch.sigmoid_, (aten.sigmoid_backward, lambda dy, y: (dy, y)), loop=("sigmoid", 0.0)),
    ),
    Definition(
        "elu",
        F.elu,
        {"alpha": 1.0},
        derivative_given_output=lambda y, alpha: torch.where(y > 0, 1.0, y + alpha),
        parameter_refusal=lambda alpha: _given_positive("alpha", alpha, "the function turns at 0"),
        inverse=lambda y, alpha: torch.clamp(y, min=0) + torch.log1p(torch.clamp(y, max=0) / alpha),
        stands_for=((nn.ELU, {}), (F.elu, {})),
        native=Native(
            aten.elu_.default,
            (aten.elu_backward, lambda dy, y, alpha: (dy, alpha, 1, 1, True, y)),
            lambda dy, z, alpha: aten.elu_backward(dy, alpha, 1, 1, False, z),
            loop=("elu", "alpha"),
        ),
    ),
    Definition(
        "selu",
        F.selu,
        derivative_given_output=lambda y: torch.where(y > 0, _SELU_SCALE, y + _SELU_SCALE * _SELU_ALPHA),
        inverse=lambda y: (
            torch.clamp(y, min=0) * (1 / _SELU_SCALE)
            + torch.log1p(torch.clamp(y, max=0) * (1 / (_SELU_SCALE * _SELU_ALPHA)))
        ),
        stands_for=((nn.SELU, {}), (F.selu, {}), (torch.selu, {})),
        native=Native(torch.selu_, (aten.elu_backward, lambda dy, y: (dy, _SELU_ALPHA, _SELU_SCALE, 1, True, y))),
    ),
    Definition(
        "celu",
        F.celu,
        {"alpha": 1.0},
        derivative_given_output=lambda y, alpha: torch.where(y > 0, 1.0, y / alpha + 1),
        parameter_refusal=lambda alpha: _given_positive("alpha", alpha, "the function grows without bound below 0"),
        inverse=lambda y, alpha: torch.clamp(y, min=0) + alpha * torch.log1p(torch.clamp(y, max=0) / alpha),
        stands_for=((nn.CELU, {}), (F.celu, {}), (torch.celu, {})),
        native=Native(torch.celu_, (aten.elu_backward, lambda dy, y, alpha: (dy, alpha, 1, 1 / alpha, True, y))),
    ),
    Definition(
        "softplus",
        F.softplus,
        {"beta": 1.0, "threshold": 20.0},
        derivative_given_output=lambda y, beta, threshold: -torch.expm1(-beta * y),
        parameter_refusal=_given_seamless,
        inverse=lambda y, beta, threshold: y + torch.log(-torch.expm1(-beta * y)) / beta,
        stands_for=((nn.Softplus, {}), (F.softplus, {})),
        native=Native(loop=("softplus", "beta")),
    ),
    Definition(
        "logsigmoid",
        F.logsigmoid,
        derivative_given_output=lambda y: -torch.expm1(y),
        inverse=lambda y: y - torch.log(-torch.expm1(y)),
        stands_for=((nn.LogSigmoid, {}), (F.logsigmoid, {})),
        native=Native(loop=("logsigmoid", 0.0)),
    ),
    Definition(
        "softsign",
        F.softsign,
        derivative_given_output=_softsign_derivative,
        inverse=lambda y: y / (1 - torch.abs(y)),
        stands_for=((nn.Softsign, {}), (F.softsign, {})),
    ),
    Definition(
        "cbrt",
        lambda z: torch.sign(z) * torch.pow(torch.abs(z), 1 / 3),
        derivative_given_output=lambda y: 1 / (3 * y * y),
        inverse=lambda y: y * y * y,
    ),
    # --- folded: one negative minimum, the output's last bit carries the branch ---------------------------------------
    Definition(
        "gelu",
        lambda z: z * gelu_gate(z),
        derivative_given_output="fold",
        stands_for=((nn.GELU, {"approximate": "none"}), (F.gelu, {}), (F.gelu, {"approximate": "none"})),
        native=Native(gradient_given_input=aten.gelu_backward.default, loop=("gelu", 0.0)),
    ),
    Definition(
        "gelu_tanh",
        lambda z: z * gelu_tanh_gate(z),
        derivative_given_output="fold",
        stands_for=((nn.GELU, {"approximate": "tanh"}), (F.gelu, {"approximate": "tanh"})),
        also_called=("gelu_new", "gelu_pytorch_tanh"),  # in configurations of transformers
        native=Native(
            gradient_given_input=functools.partial(aten.gelu_backward.default, approximate="tanh"),
            loop=("gelu_tanh", 0.0),
        ),
    ),
    Definition(
        "quick_gelu",
        lambda z: z * torch.sigmoid(1.702 * z),
        derivative_given_output="fold",
        native=Native(loop=("swish", 1.702)),
    ),
    Definition(
        "silu",
        F.silu,
        derivative_given_output="fold",
        stands_for=((nn.SiLU, {}), (F.silu, {})),
        also_called=("swish",),
        native=Native(aten.silu_.default, gradient_given_input=aten.silu_backward.default, loop=("swish", 1.0)),
    ),
    Definition(
        "mish",
        _mish,
        derivative_given_output="fold",
        stands_for=((nn.Mish, {}), (F.mish, {})),
        native=Native(gradient_given_input=aten.mish_backward.default, loop=("mish", 0.0)),
    ),
    Definition(
        "hardswish",
        F.hardswish,
        derivative_given_output=FoldedDerivative(Fold(-1.5, -0.375), _hardswish_derivative),
        stands_for=((nn.Hardswish, {}), (F.hardswish, {})),
        native=Native(
            aten.hardswish_.default,
            gradient_given_input=aten.hardswish_backward.default,
            loop=("hardswish", 0.0),
            is_piecewise=True,
        ),
    ),
)
for _definition in DEFINITIONS:
    register(_definition)
