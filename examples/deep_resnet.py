"""Train ResNet-18 to ResNet-152 in a fraction of the memory, by running parts of the network again.

    python examples/deep_resnet.py [--depth 152] [--images 16] [--pixels 64] [--steps 2]

The network (He et al. 2015, arXiv 1512.03385) is one sequence of stem, blocks and head, which ``nn.Sequential`` runs
once, and ``fl.SublinearSequential`` partly twice. What it keeps is a matter of choice: as little as can be, the results
of convolutions, or as much as a budget allows. All variants begin with the same weights and see the same images, and
their losses are the same.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import peak_bytes

MakeNormAct = Callable[[int], nn.Module]
"""From a number of channels a batch norm and its activation, which takes a residual to add in between."""


class BatchNormAct(nn.BatchNorm2d):
    """Batch norm and activation, with a residual in between."""

    def __init__(self, channels: int, activation: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.activation = nn.ReLU(inplace=True) if activation is None else activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        z = super().forward(x)
        return self.activation(z if residual is None else z + residual)


class Block(nn.Module):
    """``act(bn(conv(...)) + shortcut(x))``, over convolutions of these (channels, kernel, stride)."""

    def __init__(self, channels: int, convolutions: list[tuple[int, int, int]], make_norm_act: MakeNormAct) -> None:
        super().__init__()
        self.convs, self.norm_acts = nn.ModuleList(), nn.ModuleList()
        inside, total_stride = channels, 1
        for outside, kernel, stride in convolutions:
            self.convs.append(nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False))
            self.norm_acts.append(make_norm_act(outside))
            inside, total_stride = outside, total_stride * stride
        self.shortcut = nn.Sequential()
        if total_stride != 1 or channels != inside:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, inside, 1, total_stride, bias=False), nn.BatchNorm2d(inside)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for conv, norm_act in zip(self.convs[:-1], self.norm_acts[:-1], strict=True):
            hidden = norm_act(conv(hidden))
        return self.norm_acts[-1](self.convs[-1](hidden), self.shortcut(x))


def basic(channels: int, width: int, stride: int, make_norm_act: MakeNormAct) -> Block:
    return Block(channels, [(width, 3, stride), (width, 3, 1)], make_norm_act)


def bottleneck(channels: int, width: int, stride: int, make_norm_act: MakeNormAct) -> Block:
    return Block(channels, [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)], make_norm_act)


#: By depth: the kind of block, how many times its width it puts out, and how many there are in each stage.
DEPTHS = {
    18: (basic, 1, (2, 2, 2, 2)),
    34: (basic, 1, (3, 4, 6, 3)),
    50: (bottleneck, 4, (3, 4, 6, 3)),
    101: (bottleneck, 4, (3, 4, 23, 3)),
    152: (bottleneck, 4, (3, 8, 36, 3)),
}


def resnet(
    depth: int,
    make_norm_act: MakeNormAct = BatchNormAct,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    classes: int = 1000,
    is_small: bool = False,
) -> list[nn.Module]:
    """Stem, blocks and head, for a ``Sequential``: (N, 3, H, W) -> (N, classes). For small images the stem keeps the
    resolution, as is usual for CIFAR's."""
    make_block, factor, counts = DEPTHS[depth]
    if is_small:
        stem = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), make_norm_act(widths[0])]
    else:
        stem = [nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False), make_norm_act(widths[0])]
        stem.append(nn.MaxPool2d(3, 2, padding=1))
    parts: list[nn.Module] = [nn.Sequential(*stem)]
    channels = widths[0]
    for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
        for number in range(count):
            parts.append(make_block(channels, width, 2 if stage and not number else 1, make_norm_act))
            channels = factor * width
    return [*parts, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))]


def variants(depth: int) -> dict[str, nn.Sequential]:
    """The same network in several containers; each draws the same weights."""

    def parts() -> list[nn.Module]:
        torch.manual_seed(0)
        return resnet(depth)

    return {
        "nn.Sequential": nn.Sequential(*parts()),
        "sublinear": fl.SublinearSequential(*parts()),
        "sublinear, cheap": fl.SublinearSequential(*parts(), recompute="cheap"),
    }


def step(net: nn.Module, images: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad(set_to_none=False)
    loss = F.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=152, choices=DEPTHS)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(1)
    images = torch.randn(options.images, 3, options.pixels, options.pixels)
    labels = torch.randint(1000, (options.images,))
    print(f"ResNet-{options.depth}    peak MiB  seconds a step  loss, first to last")
    for name, net in variants(options.depth).items():
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        losses = [step(net, images, labels, optimizer)]  # which also makes the plan and the gradients
        # What is allocated beside weights and gradients.
        peak = peak_bytes(lambda net=net, optimizer=optimizer: step(net, images, labels, optimizer)) / 2**20
        start = time.perf_counter()
        losses += [step(net, images, labels, optimizer) for _ in range(options.steps)]
        seconds = (time.perf_counter() - start) / options.steps
        print(f"{name:<18}{peak:<10.0f}{seconds:<16.2f}{losses[0]:.4f} to {losses[-1]:.4f}")
    print("(So deep and new a network is chaotic: roundings change its later losses.)")


if __name__ == "__main__":
    main()
