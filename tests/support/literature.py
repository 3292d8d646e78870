"""Activations from the literature that the table does not hold: what users bring, and what is to become of them.

Each is written from its paper's formula in plain torch operations. ``kind`` is what ``analyse`` is to find for float32
outputs: "monotone", "folded", or "input" where the output does not determine the derivative. Functions with trainable
parameters need their input in any case: the parameters' own gradients do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Published:
    """``function(z, *parameters)``; ``trainable`` gives the parameters' names and initial values."""

    name: str
    function: Callable[..., Tensor]
    kind: str
    why: str
    trainable: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.name

    def with_tensors(self, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
        """The function with tensors of this shape to be trained, as they start."""
        function = self.function
        tensors = [torch.full(shape, value, dtype=dtype, requires_grad=True) for _, value in self.trainable]
        return (lambda z: function(z, *tensors)) if tensors else function


_ABOVE = "rises all the way"
_ONE_DIP = "one negative minimum, as GELU"
_TRAINS = "has trainable parameters"


def _below(z: Tensor) -> Tensor:
    return torch.where(z > 0, 0.0, z)


def _elish(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z * torch.sigmoid(z), torch.expm1(z.clamp(max=0)) * torch.sigmoid(z))


def _srelu(z: Tensor, low: float, below: float, high: float, above: float) -> Tensor:
    return torch.where(z >= high, high + above * (z - high), torch.where(z <= low, low + below * (z - low), z))


def _sqnl(z: Tensor) -> Tensor:
    inner = torch.clamp(z, -2, 2)
    return inner - inner * inner.abs() / 4


def _pau_5_4(z: Tensor, *parameters: float) -> Tensor:
    *numerator, last = parameters[:6]
    b1, b2, b3, b4 = parameters[6:]
    for a in reversed(numerator):
        last = last * z + a
    return last / (1 + (z * (b1 + z * (b2 + z * (b3 + z * b4)))).abs())


def _double_exponential(z: Tensor) -> Tensor:
    return torch.where(z >= 0, z, 1.5 * torch.expm1(z.clamp(max=0)) + 0.5 * torch.expm1(2 * z.clamp(max=0)))


PUBLISHED = (
    # --- monotone -----------------------------------------------------------------------------------------------------
    # Barron, Squareplus: A Softplus-Like Algebraic Rectifier, 2021, with b = 4
    Published("squareplus", lambda z: (z + torch.sqrt(z * z + 4)) / 2, "input", "far from 0 it jumps in steps"),
    # The same, rationalised below 0. (From torch 2.14 on clamp's gradient at its limit is 0.)
    Published(
        "squareplus_stable",
        lambda z: torch.where(
            z > 0, (z + torch.sqrt(z * z + 4)) / 2, 2 / (torch.sqrt(_below(z) ** 2 + 4) - _below(z))
        ),
        "monotone",
        _ABOVE,
    ),
    # Carlile et al., Improving Deep Learning by Inverse Square Root Linear Units, 2017, alpha = 1
    Published("isru", lambda z: z / torch.sqrt(1 + z * z), "monotone", _ABOVE),
    # Wuraola and Patel, SQNL: A New Computationally Efficient Activation Function, 2018
    Published("sqnl", _sqnl, "monotone", "quadratic to plateaus at 1"),
    # Gompertz, 1825, as an activation: Iliev et al., 2018
    Published("gompertz", lambda z: torch.exp(-torch.exp(-z)), "monotone", _ABOVE),
    Published("bent_identity", lambda z: (torch.sqrt(z * z + 1) - 1) / 2 + z, "monotone", _ABOVE),
    Published("erf", torch.erf, "monotone", _ABOVE),
    Published("double_exponential", _double_exponential, "monotone", "two exponentials and a line"),
    Published("relu1", lambda z: F.hardtanh(z, 0, 1), "monotone", "two plateaus"),
    # Liu et al., 2019: natural logarithm rectified linear unit, beta = 1
    Published("nlrelu", lambda z: torch.log1p(torch.relu(z)), "monotone", "a logarithm, and a plateau"),
    Published("srelu_fixed", lambda z: _srelu(z, -1.0, 0.1, 2.0, 0.3), "monotone", "two kinks"),
    # --- folded -------------------------------------------------------------------------------------------------------
    # Basirat and Roth, The Quest for the Golden Activation Function, 2018
    Published("elish", _elish, "input", "its second derivative jumps at 0"),
    # Liu and Di, TanhExp: A Smooth Activation Function, 2020
    Published("tanhexp", lambda z: z * torch.tanh(torch.exp(z)), "folded", _ONE_DIP),
    # Naveen, Phish: A Novel Hyper-Optimizable Activation Function, 2022
    Published("phish", lambda z: z * torch.tanh(F.gelu(z)), "input", "turns twice"),
    # Roy et al., LiSHT, 2019
    Published("lisht", lambda z: z * torch.tanh(z), "input", "its outputs are positive on both sides of its minimum"),
    # Patwardhan et al., ARiA, 2018: alpha = 1.5, beta = 2
    Published("aria2", lambda z: z * torch.pow(1 + torch.exp(-2 * z), -1.5), "folded", _ONE_DIP),
    # Wang et al., Smish, 2022
    Published("smish", lambda z: z * torch.tanh(torch.log1p(torch.sigmoid(z))), "folded", _ONE_DIP),
    # Xu et al., Revise Saturated Activation Functions, 2016
    Published("penalized_tanh", lambda z: torch.tanh(z) * torch.where(z > 0, 1.0, 0.25), "monotone", "a kink at 0"),
    # Chieng et al., Flatten-T Swish, 2018, T = -0.2
    Published("flatten_t_swish", lambda z: torch.relu(z) * torch.sigmoid(z) - 0.2, "monotone", "flat below 0"),
    # --- the output does not tell -------------------------------------------------------------------------------------
    Published("gaussian", lambda z: torch.exp(-z * z), "input", "at a top at 1 an output tells too little"),
    # Ziyin et al., Neural Networks Fail to Learn Periodic Functions, 2020, a = 1
    Published("snake_fixed", lambda z: z + torch.sin(z).square(), "input", "its slope never settles"),
    Published("tanhshrink", lambda z: z - torch.tanh(z), "input", "flat at 0 as z^3"),
    Published("hardshrink", F.hardshrink, "monotone", "jumps, and rises"),
    # --- with trainable parameters ------------------------------------------------------------------------------------
    Published(
        "snake", lambda z, a: z + torch.sin(a * z).square() / a, "input", _TRAINS, (("a", 1.0),)
    ),  # as above, one a per channel
    # Ramachandran et al., Searching for Activation Functions, 2017
    Published("swish_beta", lambda z, beta: z * torch.sigmoid(beta * z), "input", _TRAINS, (("beta", 1.0),)),
    # He et al., Delving Deep into Rectifiers, 2015: a slope per channel
    Published("prelu", lambda z, slope: torch.where(z >= 0, z, slope * z), "input", _TRAINS, (("slope", 0.25),)),
    # The same of the paper's orders, 5 and 4: the most parameters here
    Published(
        "pau_5_4", _pau_5_4, "input", _TRAINS,
        (
            *((f"a{i}", value) for i, value in enumerate((0.03, 0.62, 2.3, 3.1, 1.5, 0.25))),
            *((f"b{i}", value) for i, value in enumerate((1.1, 4.4, 0.87, 0.35), start=1)),
        ),
    ),
    # Ma et al., Activate or Not: Learning Customized Activation, 2021
    Published(
        "acon_c",
        lambda z, p1, p2, beta: (p1 - p2) * z * torch.sigmoid(beta * (p1 - p2) * z) + p2 * z,
        "input",
        _TRAINS,
        (("p1", 1.0), ("p2", 0.0), ("beta", 1.0)),
    ),
)  # fmt: skip

#: Those that have nothing to train.
FIXED = tuple(published for published in PUBLISHED if not published.trainable)
