"""ResNet-18 for images of CIFAR's size, with an activation of one's choice.

After He et al. 2015 (arXiv 1512.03385), with a 3x3 stem and no pooling before the first stage, as is usual for 32x32.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

MakeNormAct = Callable[[int], nn.Module]
"""From a number of channels a batch norm and its activation, which takes a residual to add in between."""


class BatchNormAct(nn.BatchNorm2d):
    """Batch norm and activation as eager PyTorch has them, their parameters named as in ``FusedBatchNormAct2d``."""

    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__(channels)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        z = super().forward(x)
        return self.activation(z if residual is None else z + residual)


class BasicBlock(nn.Module):
    """``act(bn(conv(act(bn(conv(x))))) + shortcut(x))``."""

    def __init__(self, in_channels: int, channels: int, stride: int, make_norm_act: MakeNormAct) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm_act1 = make_norm_act(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_act2 = make_norm_act(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm_act1(self.conv1(x))
        return self.norm_act2(self.conv2(hidden), self.shortcut(x))


class ResNet(nn.Module):
    """``(N, 3, H, W) -> (N, classes)``, with two blocks for each of ``widths``."""

    def __init__(self, make_norm_act: MakeNormAct, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.norm_act = make_norm_act(widths[0])
        blocks = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [
                BasicBlock(channels, width, 2 if stage else 1, make_norm_act),
                BasicBlock(width, width, 1, make_norm_act),
            ]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(self.norm_act(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))


def resnet18(make_norm_act: MakeNormAct, *, widths: tuple[int, ...] = (64, 128, 256, 512), classes: int = 10) -> ResNet:
    """A network of 18 layers with weights: stem, four stages of two blocks of two, and head."""
    assert len(widths) == 4, widths
    return ResNet(make_norm_act, widths, classes)
