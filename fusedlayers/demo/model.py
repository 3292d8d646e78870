"""A small causal transformer over bytes: pre-norm, scaled dot-product attention, MLP ratio 4.

The norms and the first layer of each MLP, the one with the activation, are handed in: PyTorch's and `EagerDenseAct`, or
this package's. Both hold their parameters under the same names, so one `state_dict` fits both models.

Position enters as a penalty on distance (ALiBi: Press et al. 2022, "Train Short, Test Long"). With learned positions
the default run knew no more than pairs of bytes after 150 steps (loss 2.45); with the penalty it is there after 25.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..activations import resolve

BYTES = 256
HEADS = 4


class Layers(NamedTuple):
    """What differs between two models."""

    dense_act: Callable[[int, int, str], nn.Module]
    norm: Callable[[int], nn.Module]


class EagerDenseAct(nn.Linear):
    """What people write today: a linear layer, then the activation as a second operation. (..., in) -> (..., out)."""

    def __init__(self, in_features: int, out_features: int, activation: str) -> None:
        super().__init__(in_features, out_features)
        self.activation = resolve(activation).plain  # torch's own function, which keeps the least

    def forward(self, input: Tensor) -> Tensor:
        return self.activation(super().forward(input))


EAGER = Layers(EagerDenseAct, nn.LayerNorm)


class Attention(nn.Module):
    """Causal multi-head self-attention that prefers near bytes. (batch, time, width) -> (batch, time, width)."""

    penalty: Tensor

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        slopes = 4.0 ** -torch.arange(HEADS)
        distance = torch.arange(context)[:, None] - torch.arange(context)
        penalty = torch.where(distance < 0, -torch.inf, -slopes[:, None, None] * distance)
        # Four dimensions, because the CPU's flash attention takes 2 or 4; with 3, torch quietly keeps all the scores.
        self.register_buffer("penalty", penalty[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=HEADS)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.penalty)
        result: Tensor = self.out(rearrange(y, "b h t d -> b t (h d)"))
        return result


class Block(nn.Module):
    """Attention and an MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, width: int, context: int, layers: Layers, activation: str) -> None:
        super().__init__()
        self.attention = nn.Sequential(layers.norm(width), Attention(width, context))
        self.mlp = nn.Sequential(
            layers.norm(width), layers.dense_act(width, 4 * width, activation), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


class ByteTransformer(nn.Sequential):
    """Predict each next byte. (batch, context), int64 -> (batch, context, 256) logits."""

    def __init__(self, width: int, blocks: int, context: int, layers: Layers, activation: str) -> None:
        super().__init__(
            nn.Embedding(BYTES, width),
            *[Block(width, context, layers, activation) for _ in range(blocks)],
            layers.norm(width),
            nn.Linear(width, BYTES),
        )
