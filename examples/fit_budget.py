"""Train a transformer and a ResNet within a part of the memory that they would take, with ``fl.fit``.

    python examples/fit_budget.py [--fraction 0.4] [--of saved] [--steps 3]

Each model is trained twice from the same weights, with the same dropout masks: as it is, and fitted. The losses agree.
"""

import argparse
import copy

import torch
from torch import Tensor, nn

import fusedlayers as fl


class Bottleneck(nn.Module):
    """A ResNet's block."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(x)).relu()


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 128, 128)


def resnet() -> tuple[nn.Module, Tensor]:
    blocks = [Bottleneck(64, 16) for _ in range(6)]
    stem, head = nn.Conv2d(3, 64, 3, 2, 1), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(stem, *blocks, *head), torch.randn(4, 3, 64, 64)


def train(model: nn.Module, x: Tensor, steps: int) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fraction", type=float, default=0.4)
    parser.add_argument("--of", default="saved", choices=["saved", "peak"])
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    for make in (transformer, resnet):
        torch.manual_seed(0)
        model, x = make()
        fitted = copy.deepcopy(model)
        print(fl.fit(fitted, x, fraction=options.fraction, of=options.of))
        as_it_is, within = train(model, x, options.steps), train(fitted, x, options.steps)
        print(f"\nlosses as it is: {as_it_is[0]:.4f} to {as_it_is[-1]:.4f}")
        print(f"losses fitted:   {within[0]:.4f} to {within[-1]:.4f}\n")


if __name__ == "__main__":
    main()
