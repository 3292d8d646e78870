"""Random activations for ``test_functions.py``: expressions of torch's functions, as people write them.

``source(seed)`` is the text of one, in z. ``made(text)`` is the function.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

#: Of one part; {n} stands for a number, {p} for one above 0.
ATOMS = (
    *("torch.tanh({})", "torch.sigmoid({})", "F.silu({})", "F.gelu({})", "F.mish({})", "F.softplus({})", "F.selu({})"),
    *("torch.relu({})", "F.leaky_relu({}, {n})", "F.elu({}, {p})", "F.hardswish({})", "F.hardtanh({})", "F.relu6({})"),
    *("F.hardsigmoid({})", "F.softshrink({}, {p})", "F.softsign({})", "F.threshold({}, {n}, {n})", "torch.erf({})"),
    *("torch.atan({})", "torch.sin({})", "torch.cos({n} * {})", "torch.exp(-({}) ** 2)", "torch.abs({})", "({}) ** 2"),
    *("({}) ** 3", "torch.asinh({})", "torch.log1p(torch.abs({}))", "torch.sqrt(1 + ({}) ** 2)", "torch.sign({})"),
    *("torch.clamp({}, {n}, {n} + 2)", "torch.round({})", "torch.logaddexp({}, torch.zeros_like(z))", "torch.exp({})"),
    *("torch.expm1(torch.clamp({}, max=3))", "torch.heaviside({}, torch.ones(()).to(z))", "1 / (1 + ({}) ** 2)"),
    *("z * torch.sigmoid({})", "z * torch.tanh({})", "z * torch.erf({})", "z * torch.exp({})"),
    *("z + torch.sin({}) ** 2", "z + {n} * {}"),
)
PAIRS = (
    *("{} + {}", "{} - {}", "({}) * ({})", "torch.maximum({}, {})", "torch.minimum({}, {})"),
    *("torch.where(z > {n}, {}, {})", "torch.where(z <= 0, {}, {})", "{} + {n} * ({})", "({}) * torch.sigmoid({})"),
)
#: For factors, shifts and parameters.
FACTORS = (0.01, 0.1, 0.3, 0.5, 1.0, 1.0, 1.0, 1.702, 2.0, 3.0, 10.0)


def source(seed: int) -> str:
    """An activation: one to four atoms, of z or of one another, scaled and shifted."""
    chance = random.Random(seed)

    def number() -> str:
        return repr(chance.choice(FACTORS) * chance.choice((1, 1, -1)))

    def filled(form: str, *parts: str) -> str:
        given = iter(parts)

        def what(brace: re.Match[str]) -> str:
            if brace[1]:
                return number() if brace[1] == "n" else repr(chance.choice(FACTORS))
            return next(given, parts[-1])

        return re.sub(r"\{([np]?)\}", what, form)

    def inner(depth: int) -> str:
        chosen = chance.random()
        if depth and chosen < 0.2:
            return expression(depth - 1)
        return "z" if chosen < 0.7 else f"({number()} * z + {number()})"

    def expression(depth: int) -> str:
        if depth and chance.random() < 0.5:
            return filled(chance.choice(PAIRS), expression(depth - 1), expression(depth - 1))
        return filled(chance.choice(ATOMS), inner(depth))

    text = expression(2)
    if chance.random() < 0.3:
        text = f"{number()} * ({text})"
    if chance.random() < 0.2:
        text = f"{text} + {number()}"
    return text


def made(text: str) -> Callable[[Tensor], Tensor]:
    """The function of z that this is the text of."""
    function: Callable[[Tensor], Tensor] = eval(f"lambda z: {text}", {"torch": torch, "F": F})
    return function
