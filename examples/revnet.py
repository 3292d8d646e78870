"""Train an invertible network on handwritten digits, whose memory does not grow with its depth.

    python examples/revnet.py [--epochs 6]

A reversible network (Gomez et al. 2017) of additive couplings: pixels go into channels, invertible 1x1 convolutions mix
these, and couplings of two ordinary convolutional networks do the work. The backward pass computes the inputs of each
block from its outputs, so that only the last output is kept. ``check`` says beforehand how far that is from the inputs.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

BATCH = 64


def network(channels: int) -> nn.Module:
    """A coupling's: it need not have an inverse. The last batch norm begins with zero weights, so that a block begins
    as the identity, and a deep network learns from the start."""
    net = nn.Sequential(
        fl.FusedConvAct2d(channels, channels, 3, "silu", padding=1),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
    )
    nn.init.zeros_(net[-1].weight)
    return net


class RevNet(nn.Module):
    """(N, 1, 8, 8) -> (N, 10)."""

    def __init__(self, depth: int, channels: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels // 4, 3, padding=1)
        blocks: list[fl.InvertibleModule] = [fl.InvertiblePixelShuffle(2).reverse()]  # (N, 8, 8, 8) -> (N, 32, 4, 4)
        for number in range(depth):
            if number % 4 == 0:
                blocks.append(fl.InvertibleConv2d(channels, channels, 1))
            blocks.append(fl.AdditiveCoupling(network(channels // 2), network(channels // 2)))
        self.blocks = fl.InvertibleSequential(*blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,797 images of 8 x 8, between 0 and 1, and their labels; a fifth of them, drawn by chance, is for the test."""
    found = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return (images[rest], labels[rest]), (images[test], labels[test])


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> tuple[float, float]:
    """Return the last loss, and the seconds that an epoch took."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters())
    steps = epochs * -(-len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            loss = F.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return loss.item(), (time.perf_counter() - start) / max(epochs, 1)


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    return float((net(images).argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs

    rest, test = digits()
    batch = rest[0][:BATCH]
    print("saved KiB of a batch by stem, blocks and head, by depth:")
    for depth in (4, 16, 64):
        net = RevNet(depth)
        kept = saved_bytes(net, batch, exclude=[net, batch])
        net.blocks.checkpoint = False
        plain = saved_bytes(net, batch, exclude=[net, batch])
        print(f"  {depth:<4}invertible {kept / 2**10:<8.0f}plain {plain / 2**10:.0f}")

    print("\n             test accuracy  last loss  seconds an epoch")
    for name, is_invertible in {"plain": False, "invertible": True}.items():
        torch.manual_seed(0)
        net = RevNet(8)
        net.blocks.checkpoint = is_invertible  # as it is by default, or left to autograd
        loss, seconds = train(net, *rest, epochs)
        print(f"{name:<13}{accuracy(net, *test):<15.2%}{loss:<11.4f}{seconds:.2f}")

    # As the backward pass will: inputs from the last output, by all blocks.
    net.train()
    report = net.blocks.check(net.stem(batch))
    print(f"\nafter training, inputs drift by {report.drift:.1e}, gradients by {report.gradient_error:.1e}")


if __name__ == "__main__":
    main()
