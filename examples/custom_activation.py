"""Train activations of your own, with parameters of their own, and see what they keep for the backward pass.

    python examples/custom_activation.py

An activation is written as ordinary PyTorch. Each of its operations keeps a tensor as large as the layer's output, or
several, so that a network's memory may be many times what ReLU takes. Applied by ``fl.bias_act``, the same module is
one operation; it is not rewritten, and its parameters are trained as before.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes


class SwishBeta(nn.Module):
    """``x * sigmoid(beta x)`` (Ramachandran et al. 2017), with one trainable beta."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class Snake(nn.Module):
    """``x + sin(alpha x)^2 / alpha`` (Ziyin et al. 2020), with a trainable alpha for each channel of (N, C, H, W)."""

    def __init__(self, channels: int, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((channels, 1, 1), alpha))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x) ** 2 / self.alpha


class FractionalSplitting(nn.Module):
    """SELU's two parts, differentiated to a fractional order ``a = 0.1 + 1.8 sigmoid(p)``, with one trainable p.

    Above zero: ``scale x^(1 - a) / Gamma(2 - a)``. Elsewhere: ``alpha scale h^-a`` times the sum over n = 0, 1, 2 of
    ``(-1)^n (1 - exp(x - n h)) Gamma(1 + a) / (n! Gamma(1 - n + a))``. It is written here as it reads: the input is
    split into its two parts, and the terms are added up.
    """

    ALPHA, SCALE = 1.6732, 1.0507  # SELU's
    TERMS = 3

    def __init__(self, order: float = 0.5, h: float = 1.0) -> None:
        super().__init__()
        self.h = h
        self.p = nn.Parameter(torch.logit(torch.tensor((order - 0.1) / 1.8)))

    def order(self) -> Tensor:
        return 0.1 + 1.8 * torch.sigmoid(self.p)

    def forward(self, x: Tensor) -> Tensor:
        a = self.order()
        above = x > 0
        # Where a part is not meant, a number at which its derivative is finite: 0 times infinity would be NaN there.
        upper = torch.where(above, x, 1.0)
        lower = torch.where(above, 0.0, x)
        power = self.SCALE * upper ** (1 - a) * reciprocal_gamma(2 - a)
        terms = torch.zeros_like(x)
        for n in range(self.TERMS):
            sign = (-1.0) ** n / math.factorial(n)
            terms = terms + sign * (1 - torch.exp(lower - n * self.h)) * gamma(1 + a) * reciprocal_gamma(1 - n + a)
        return torch.where(above, power, self.ALPHA * self.SCALE * self.h**-a * terms)


class Fractional(FractionalSplitting):
    """The same function, with less to keep: the sum is ``constant - slope exp(x)``, whose factors are two scalars."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.order()
        factor = self.ALPHA * self.SCALE * self.h**-a * gamma(1 + a)
        weights = [factor * (-1.0) ** n / math.factorial(n) * reciprocal_gamma(1 - n + a) for n in range(self.TERMS)]
        constant = sum(weights)
        slope = sum(weight * math.exp(-n * self.h) for n, weight in enumerate(weights))
        above = x > 0
        power = torch.where(above, x, 1.0) ** (1 - a) * (self.SCALE * reciprocal_gamma(2 - a))
        return torch.where(above, power, constant - slope * torch.exp(x.clamp(max=0.0)))


def gamma(y: Tensor) -> Tensor:
    return 1 / reciprocal_gamma(y)


def reciprocal_gamma(y: Tensor) -> Tensor:
    """``1 / Gamma(y)``, which has no poles; of small and negative y by Gamma(y) Gamma(1 - y) = pi / sin(pi y)."""
    reflect = y < 0.5
    value = torch.exp(torch.lgamma(torch.where(reflect, 1 - y, y)))
    return torch.where(reflect, torch.sin(math.pi * y) * value / math.pi, 1 / value)


#: By name, what makes one for a number of channels. ReLU is what the others are compared with.
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda channels: nn.ReLU(),
    "prelu": nn.PReLU,
    "swish-beta": lambda channels: SwishBeta(),
    "snake": Snake,
    "fractional-splitting": lambda channels: FractionalSplitting(),
    "fractional": lambda channels: Fractional(),
}


class Net(nn.Module):
    """A small convolutional network, with an activation after each batch norm."""

    def __init__(self, name: str, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False) for i, o in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.activations = nn.ModuleList(ACTIVATIONS[name](width) for width in widths)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, activation in zip(self.convs, self.norms, self.activations, strict=True):
            x = self.activate(norm(conv(x)), activation)
        return self.head(x.mean((2, 3)))

    def activate(self, z: Tensor, activation: nn.Module) -> Tensor:
        return activation(z)


class FusedNet(Net):
    """The same network: one line has changed."""

    def activate(self, z: Tensor, activation: nn.Module) -> Tensor:
        return fl.bias_act(z, None, activation, dim=1)


def train(net: Net, steps: int = 20) -> list[float]:
    """Learn to tell ten noisy patterns apart, and return the loss of each step."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(steps):
        labels = torch.randint(10, (32,), generator=generator)
        images = patterns[labels] + torch.randn(32, 3, 32, 32, generator=generator)
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    images = torch.randn(32, 3, 32, 32)
    print("                        saved MiB             loss, first to last")
    print("                        PyTorch  fusedlayers  PyTorch         fusedlayers")
    for name in ACTIVATIONS:
        saved, losses = [], []
        for kind in (Net, FusedNet):
            torch.manual_seed(0)
            net = kind(name)
            saved.append(saved_bytes(net, images, exclude=[images, *net.buffers()]) / 2**20)
            losses.append(train(net))
        spans = [f"{span[0]:.3f} to {span[-1]:.3f}" for span in losses]
        print(f"{name:<24}{saved[0]:<9.1f}{saved[1]:<13.1f}{spans[0]}  {spans[1]}")
    print("The fractional ones jump at zero: a rounding may put an input on its other side, and move the last loss.")


if __name__ == "__main__":
    main()
