"""Train a small convolutional network on scikit-learn's handwritten digits, and see what it keeps for backward.

    python examples/train_digits.py [--epochs 20]

Once with PyTorch's pairs of convolution and SiLU, which keep the input of the activation and its output, and once with
``fl.FusedConvAct2d``, which keeps the output. Both start from the same seed and see the same batches.
"""

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

BATCH = 32


class Net(nn.Module):
    """(N, 1, 8, 8) -> (N, 10), over convolutions that each have an activation."""

    def __init__(self, widths: tuple[int, ...] = (32, 32, 64, 64)) -> None:
        super().__init__()
        channels = (1, *widths)
        strides = [1, 1, 2, 1]
        self.features = nn.Sequential(*map(self.layer, channels, widths, strides))
        self.head = nn.Linear(widths[-1] * 4 * 4, 10)

    def layer(self, inside: int, outside: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, padding=1), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class FusedNet(Net):
    """The same network: one line has changed."""

    def layer(self, inside: int, outside: int, stride: int) -> nn.Module:
        # A batch is small, and would be left to PyTorch, which is faster then.
        return fl.FusedConvAct2d(inside, outside, 3, "silu", stride, padding=1, save="output")


class Digits(NamedTuple):
    """1,797 images of 8 x 8, between 0 and 1; a fifth of them, drawn by chance, is for the test."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> "Digits":
        found = load_digits()
        images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
        labels = torch.from_numpy(found.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, rest = order[: len(order) // 5], order[len(order) // 5 :]
        return cls(images[rest], labels[rest], images[test], labels[test])


def train(net: Net, digits: Digits, epochs: int) -> float:
    """Return the seconds that an epoch took."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(digits.labels), generator=generator).split(BATCH):
            loss = F.cross_entropy(net(moved(digits.images[batch], generator)), digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return (time.perf_counter() - start) / epochs


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image turned and shifted a little, by chance: what an eight of 8 x 8 pixels may also look like."""
    angle = 0.5 * (torch.rand(len(images), generator=generator) - 0.5)
    x, y = 0.25 * (torch.rand(2, len(images), generator=generator) - 0.5)
    rows = [torch.stack([angle.cos(), -angle.sin(), x], 1), torch.stack([angle.sin(), angle.cos(), y], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


@torch.no_grad()
def accuracy(net: Net, digits: Digits) -> float:
    return float((net(digits.test_images).argmax(1) == digits.test_labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs

    digits = Digits.load()
    batch = digits.images[:BATCH]
    print("             test accuracy  seconds an epoch  saved KiB of a batch")
    for name, kind in {"PyTorch": Net, "fusedlayers": FusedNet}.items():
        torch.manual_seed(0)
        net = kind()
        saved = saved_bytes(net, batch, exclude=[batch]) / 2**10
        seconds = train(net, digits, epochs)
        print(f"{name:<13}{accuracy(net, digits):<15.2%}{seconds:<18.2f}{saved:.0f}")


if __name__ == "__main__":
    main()
