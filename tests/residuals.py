"""A small model of MLPs and dense layers with activations after them, plain and of fused modules with the same
``state_dict``; and one of batch norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusedlayers as fl

ROWS, WIDTH, HIDDEN = 32, 32, 64


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner[0] if len(inner) == 1 else nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def of_layers() -> nn.Module:
    torch.manual_seed(0)
    dense = [(nn.Linear(WIDTH, WIDTH), activation) for activation in (nn.Mish(), nn.Tanh())]
    return nn.Sequential(Residual(*dense[0]), Residual(MLP()), Residual(GatedMLP()), Residual(*dense[1]))


def of_fused_modules() -> nn.Module:
    dense = [(fl.FusedDenseAct(WIDTH, WIDTH, activation), nn.Identity()) for activation in ("mish", "tanh")]
    mlp, gated = fl.FusedMLP(WIDTH, HIDDEN), fl.FusedGatedMLP(WIDTH, HIDDEN)
    model = nn.Sequential(Residual(*dense[0]), Residual(mlp), Residual(gated), Residual(*dense[1]))
    model.load_state_dict(of_layers().state_dict())
    return model


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


#: Channels of so many numbers in each process that it is worth while to have them again from the output.
CHANNELS, SIZE, IMAGES = 16, 16, 16


def of_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.SiLU()),
        *(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU()),
        nn.Conv2d(CHANNELS, 3, 1),
    )


def images() -> Tensor:
    return torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
