"""The models and blocks that are measured, with random weights."""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def of_transformers(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """What makes a model of transformers, which is imported then: the other benchmarks run without it."""

    def make() -> nn.Module:
        hf = importlib.import_module("transformers")
        hf.utils.logging.set_verbosity_error()
        kind = getattr(hf, f"{name}Model")
        model: nn.Module = kind(kind.config_class(**sizes))
        return model

    return make


def build(
    make: Callable[[], nn.Module], shape: tuple[int, ...], *, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Tensor]:
    """A model in training mode and its input: token ids where the shape has two sizes."""
    torch.manual_seed(0)
    with torch.device(device):
        model = make().train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()  # to weights of 1, for which EfficientNet of transformers has N(0, .02)
        x = torch.randint(3, 100, shape) if len(shape) == 2 else torch.randn(shape)
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def first(result: Any) -> Tensor:
    """The tensor of a model's result, or the first of them."""
    return result if isinstance(result, Tensor) else result[0]


def twin(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


#: Sizes of transformers' models.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
SMALL_BERT = {**SMALL, "intermediate_size": 1024}
SMALL_LLAMA = {**SMALL, "intermediate_size": 704, "use_cache": False}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MISTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 1000, "use_cache": False,
}  # fmt: skip
T5 = {
    "d_model": 768, "d_ff": 2048, "num_layers": 2, "num_heads": 12, "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}  # fmt: skip
GEMMA = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "num_hidden_layers": 2, "vocab_size": 1000, "use_cache": False,
}  # fmt: skip
EFFICIENTNET = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class GatedMLP(nn.Module):
    """A LLaMA's, with its names."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(features, hidden, bias=False)
        self.up_proj = nn.Linear(features, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, features, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return y


class SpelledNorm(nn.Module):
    """An RMS norm as transformers' models spell it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class TransformerBlock(nn.Module):
    """LLaMA's with a gate, BERT's without one."""

    def __init__(self, width: int, hidden: int, is_gated: bool) -> None:
        super().__init__()
        norm = SpelledNorm if is_gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), width // 64
        self.mlp = GatedMLP(width, hidden) if is_gated else nn.Sequential(MLP(width, hidden), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Snake(nn.Module):
    """An activation of a user's, with a trained number (Ziyin et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.sin(self.alpha * x) ** 2 / self.alpha
        return y


def convolutions(channels: int = 32, blocks: int = 3, act: Callable[[], nn.Module] = nn.SiLU) -> nn.Module:
    """A convolution, a batch norm and an activation, several times; and one more convolution."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), act()]
    return nn.Sequential(*layers, nn.Conv2d(channels, 8, 1))


class Diffusion(nn.Module):
    """Two residual blocks of a diffusion model's UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(16, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            h = self.convolutions[i](F.silu(self.norms[i](x)))
            x = x + self.convolutions[i + 1](F.silu(self.norms[i + 1](h)))
        return x


class InvertedResidual(nn.Module):
    """A block of MobileNetV3 (Howard et al. 2019): expansion, depthwise convolution, squeeze and excitation."""

    def __init__(self, channels: int, wide: int, kernel: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        depthwise = nn.Conv2d(wide, wide, kernel, padding=kernel // 2, groups=wide, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide), nn.Hardswish())
        squeezed = nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1), nn.Hardsigmoid()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), *squeezed)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(self.expand(x))
        return x + self.project(h * self.squeeze(h))  # type: ignore[no-any-return]


def mobile_net() -> nn.Module:
    blocks = [InvertedResidual(40, 240, 5), InvertedResidual(40, 120, 5)]
    later = [InvertedResidual(80, 480, 3), InvertedResidual(80, 480, 3), InvertedResidual(80, 480, 3)]
    down = nn.Conv2d(40, 80, 1, 2, bias=False), nn.BatchNorm2d(80)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, 4, 1, bias=False), nn.BatchNorm2d(40), nn.Hardswish(), *blocks, *down, *later
    )


class UNet(nn.Module):
    """diffusers' UNet, at one step of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        down, up = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
        make = partial(importlib.import_module("diffusers").UNet2DModel, sample_size=64, layers_per_block=1)
        self.inner = make(block_out_channels=(64, 128, 128), down_block_types=down, up_block_types=up)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x, torch.ones(len(x), device=x.device))[0]
        return y
