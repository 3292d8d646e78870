"""What the property tests run on: each kind of layer with its input, and the same in plain PyTorch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve


class BiasAct(nn.Module):
    """``fl.bias_act`` with a bias of its own, or none."""

    def __init__(self, activation: Any, channels: int = 0, **options: Any) -> None:
        super().__init__()
        self.activation, self.options = activation, options
        self.bias = nn.Parameter(torch.randn(channels)) if channels else None

    def forward(self, input: Tensor) -> Tensor:
        return fl.bias_act(input, self.bias, self.activation, **self.options)


class Subject(NamedTuple):
    """A kind of layer.

    ``make(activation, **options)`` makes it, ``eager(layer, activation, x)`` is what it computes, by plain PyTorch and
    with its parameters.
    """

    make: Callable[..., Any]
    shape: tuple[int, ...]
    eager: Callable[[Any, Callable[[Tensor], Tensor], Tensor], Tensor]
    #: How many numbers the activation's input has, or those of a gate.
    hidden: Callable[[Any, Tensor], int]

    def input(self, dtype: torch.dtype = torch.float32, *, trains: bool = True, seed: int = 0) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
        return x.requires_grad_(trains)


def _conv(m: Any, x: Tensor) -> Tensor:
    call = (F.conv1d, F.conv2d, F.conv3d)[m.weight.dim() - 3]
    return call(x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups)


def _mlp(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return m.fc2(act(m.fc1(x)))


def _gated(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return m.down_proj(act(m.gate_proj(x)) * m.up_proj(x))


def _packed(m: Any, act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = m.gate_up_proj(x).chunk(2, -1)
    return m.down_proj(act(gate) * up)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


SUBJECTS: dict[str, Subject] = {
    "dense": Subject(
        lambda act, **options: fl.FusedDenseAct(12, 40, act, **options),
        (30, 12),
        lambda m, act, x: act(F.linear(x, m.weight, m.bias)),
        lambda m, x: 40 * _rows(x),
    ),
    "dense, three dimensions": Subject(
        lambda act, **options: fl.FusedDenseAct(12, 40, act, bias=False, **options),
        (5, 6, 12),
        lambda m, act, x: act(F.linear(x, m.weight)),
        lambda m, x: 40 * _rows(x),
    ),
    "conv": Subject(
        lambda act, **options: fl.FusedConvAct2d(3, 8, 3, stride=2, padding=1, activation=act, **options),
        (4, 3, 11, 11),
        lambda m, act, x: act(_conv(m, x)),
        lambda m, x: 4 * 8 * 36,
    ),
    "conv, one dimension": Subject(
        lambda act, **options: fl.FusedConvAct1d(4, 8, 3, groups=2, padding="same", activation=act, **options),
        (4, 4, 50),
        lambda m, act, x: act(_conv(m, x)),
        lambda m, x: 4 * 8 * 50,
    ),
    "bias": Subject(
        lambda act, **options: BiasAct(act, 40, **options),
        (30, 40),
        lambda m, act, x: act(x + m.bias),
        lambda m, x: x.numel(),
    ),
    "bias along channels": Subject(
        lambda act, **options: BiasAct(act, 8, dim=1, **options),
        (4, 8, 9, 9),
        lambda m, act, x: act(x + m.bias[:, None, None]),
        lambda m, x: x.numel(),
    ),
    "activation": Subject(
        lambda act, **options: BiasAct(act, **options), (30, 40), lambda m, act, x: act(x), lambda m, x: x.numel()
    ),
    "mlp": Subject(
        lambda act, **options: fl.FusedMLP(12, 40, 7, act, **options), (30, 12), _mlp, lambda m, x: 40 * _rows(x)
    ),
    "gated mlp": Subject(
        lambda act, **options: fl.FusedGatedMLP(12, 40, 7, act, bias=True, **options),
        (5, 6, 12),
        _gated,
        lambda m, x: 2 * 40 * _rows(x),
    ),
    "packed gated mlp": Subject(
        lambda act, **options: fl.FusedGatedMLP(12, 40, 7, act, bias=True, packed=True, **options),
        (30, 12),
        _packed,
        lambda m, x: 2 * 40 * _rows(x),
    ),
}


class Swish(nn.Module):
    """Reads a trainable tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.5))

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.beta * z)


#: Saved by their output, by a folded one, by their input; a user's own, with trainable tensors too; left to PyTorch;
#: none at all.
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "tanh": lambda: "tanh",
    "elu": nn.ELU,
    "gelu": lambda: "gelu",
    "silu": lambda: F.silu,
    "leaky_relu": lambda: nn.LeakyReLU(-0.5),
    "sine": lambda: torch.sin,
    "prelu": nn.PReLU,
    "swish": Swish,
    "softmax": lambda: nn.Softmax(-1),
    "none": lambda: None,
}


class Twins(NamedTuple):
    """A layer, the same computed by PyTorch, and in float64."""

    subject: Subject
    own: Any
    eager: Callable[[Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    sources: list[Tensor]
    exact_sources: list[Tensor]
    dtype: torch.dtype
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, name: str, activation: str, dtype: torch.dtype = torch.float32, **options: Any) -> "Twins":
        subject = SUBJECTS[name]
        torch.manual_seed(0)
        own = subject.make(ACTIVATIONS[activation](), **options).to(dtype)
        other, exact = copy.deepcopy(own), copy.deepcopy(own).double()
        for parameter, (key, _) in zip(own.parameters(), list(other.named_parameters()), strict=True):
            path, _, last = key.rpartition(".")
            setattr(other.get_submodule(path), last, parameter)
        return cls(
            subject,
            own,
            lambda x: subject.eager(other, resolve(other.activation).plain, x),
            lambda x: subject.eager(exact, resolve(exact.activation).plain, x),
            list(own.parameters()),
            list(exact.parameters()),
            dtype,
            (own, other, exact),
        )

    def input(self, **options: Any) -> Tensor:
        return self.subject.input(self.dtype, **options)

    def gradients(self, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> list[Tensor]:
        """The result, and the gradients of x and of the parameters."""
        sources = [x, *(self.exact_sources if call is self.exact else self.sources)]
        for source in sources:
            source.grad = None
        y = call(x)
        y.backward(dy.to(y.dtype))
        found = [source.grad for source in sources]
        assert all(gradient is not None for gradient in found)
        return [y.detach(), *found]  # type: ignore[list-item]  # as has just been asserted


#: What rounded outputs, and a branch in the last bit, may add to the error of a gradient, by dtype, of its norm.
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_as_exact(
    ours: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], floor: float = 0.0
) -> None:
    """No result errs more than twice what eager PyTorch's errs, plus a floor, by their norms."""
    for number, (one, other, right) in enumerate(zip(ours, eager, exact, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape
        norm = float(right.norm())
        error, torchs = (float((t.double() - right).norm()) for t in (one, other))
        assert error <= 2 * torchs + (floor + 1e-6) * norm, number
