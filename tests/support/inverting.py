"""Small invertible modules, and how their gradients are compared with plain autograd's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl

Values = tuple[Any, ...]

#: In float64, relative: what gradients from computed inputs may err by.
EXACT = 1e-5


class Scale(fl.InvertibleModule):
    """The simplest of them that has a parameter."""

    reversible = True

    def __init__(self, log_scale: float = 0.3) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(log_scale))
        self.runs: list[str] = []

    def function(self, x: Tensor) -> Tensor:
        self.runs.append("function")
        return x * self.log_scale.exp()

    def inverse(self, y: Tensor) -> Tensor:
        self.runs.append("inverse")
        return y / self.log_scale.exp()


def dense(width: int = 4, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


def net(depth: int = 3, width: int = 4) -> fl.InvertibleSequential:
    """Couplings of two streams, of which each is as wide as ``width``: the same at every call."""
    torch.manual_seed(0)
    return fl.InvertibleSequential(*(fl.AdditiveCoupling(dense(width), dense(width)) for _ in range(depth)))


def linears(depth: int, width: int = 16) -> fl.InvertibleSequential:
    return fl.InvertibleSequential(*(fl.InvertibleLinear(width, width) for _ in range(depth)))


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def loss_of(outputs: Any) -> Tensor:
    """Of the outputs that require gradients, with weights of all sizes."""
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    terms = [(y * randn(*y.shape, seed=7 + i, dtype=y.dtype)).sum() for i, y in enumerate(values) if is_float(y)]
    return torch.stack([term.double() for term in terms if term.requires_grad]).sum()


def step(function: Callable[..., Any], inputs: Values, parameters: Sequence[Tensor] = ()) -> list[Tensor | None]:
    """The outputs, and the gradients of the inputs and parameters that require some."""
    leaves = [x.detach().clone().requires_grad_() if is_float(x) else x for x in inputs]
    torch.manual_seed(3)
    outputs = function(*leaves)
    wanted = [x for x in leaves if is_float(x)] + [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(loss_of(outputs), wanted, allow_unused=True)
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*(y.detach() for y in values if is_float(y)), *gradients]


def plain(module: Any) -> Any:
    """A copy that leaves all to autograd."""
    other = copy.deepcopy(module)
    for inner in other.modules():
        if isinstance(inner, fl.InvertibleModule):
            inner.checkpoint = False
    return other


def steps(module: Any, *inputs: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Of a module, and of its plain copy."""
    other = plain(module)
    found, wanted = (step(m, inputs, list(m.parameters())) for m in (module, other))
    for (name, a), b in zip(module.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b), f"{name} is {a}, and after plain autograd {b}"
    return found, wanted


def error(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """Of all in one vector, relative."""
    assert [t is None for t in found] == [t is None for t in wanted]
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    a, b = (torch.cat([t.double().flatten() for t in of]) for of in zip(*pairs, strict=True))
    return float((a - b).norm() / b.norm()) if b.numel() else 0.0


def worst(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> float:
    """Of single tensors, where they are no rounding of zero."""
    assert [t is None for t in found] == [t is None for t in wanted]
    size = max((float(t.norm()) for t in wanted if t is not None and t.numel()), default=0.0)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None and b.numel()]
    return max((error([a], [b]) for a, b in pairs if b.norm() > 1e-9 * size), default=0.0)


def assert_exact(module: Any, *inputs: Any) -> None:
    """In float64, with gradients as plain autograd's, and buffers too."""
    found, wanted = steps(module, *inputs)
    assert worst(found, wanted) <= EXACT
