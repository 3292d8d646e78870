"""What is measured: the hidden layers of models people train, and a few fixed cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import MAIN_FORMAT

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "tanh": torch.tanh,
}

#: A CPU is given few tokens, so that a whole run ends within ten minutes; they are stated with every result.
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Shape:
    name: str
    in_features: int
    hidden_features: int
    tokens: dict[str, int]  # device kind -> rows

    def rows(self, kind: str, quick: bool) -> int:
        """How many rows a device is given, and of these a few where it has to be quick."""
        return max(4, self.tokens[kind] // 32) if quick else self.tokens[kind]


MODELS = (
    Shape("BERT-base", 768, 3072, {"cpu": 512, "cuda": 16 * 512}),
    Shape("BERT-large", 1024, 4096, {"cpu": 512, "cuda": 16 * 512}),
    Shape("GPT-2 large", 1280, 5120, {"cpu": 512, "cuda": 8 * 1024}),
    Shape("ViT-B", 768, 3072, {"cpu": 2 * 197, "cuda": 64 * 197}),  # 197 tokens an image: no tile divides that
    Shape("LLaMA-7B-like", 4096, 11008, {"cpu": 128, "cuda": 2 * 2048}),
)


@dataclass(frozen=True)
class Case:
    """A row of the grid: ``act(x w^T + b)``, ``x: (tokens, in_features)`` and ``w: (hidden_features, in_features)``."""

    group: str
    shape: Shape
    activation: str
    dtype: str

    @property
    def id(self) -> str:
        """Group, shape, activation and dtype: ``model/bert-base/gelu/float32``."""
        return "/".join((self.group, self.shape.name.lower().replace(" ", "-"), self.activation, self.dtype))


def cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[Case]:
    """The grid, what matters most first: a run that is cut short still has that."""
    for dtype in dtypes or DTYPES[kind]:
        for activation in ACTIVATIONS:
            for shape in MODELS:
                yield Case("model", shape, activation, dtype)


# --- MLP blocks -------------------------------------------------------------------------------------------------------

MLP_SHAPES = (
    Shape("BERT-base", 768, 3072, {"cpu": 8 * 512, "cuda": 16 * 512}),
    Shape("GPT-2 large", 1280, 5120, {"cpu": 2 * 1024, "cuda": 8 * 1024}),
    Shape("ViT-B", 768, 3072, {"cpu": 8 * 197, "cuda": 64 * 197}),
)
GATED_SHAPES = (
    Shape("LLaMA-7B", 4096, 11008, {"cpu": 128, "cuda": 2 * 2048}),
    Shape("Gemma-2B", 2048, 16384, {"cpu": 128, "cuda": 2 * 2048}),
    Shape("T5-base 1.1", 768, 2048, {"cpu": 8 * 512, "cuda": 16 * 512}),
)


@dataclass(frozen=True)
class BlockCase:
    """A row of the grid of blocks: ``act(x w1^T) w2^T``, or with a gate."""

    group: str
    shape: Shape
    is_gated: bool
    activation: str
    dtype: str

    @property
    def id(self) -> str:
        """Group, shape, activation and dtype: ``model/bert-base/gelu/float32``."""
        gated = "gated-" if self.is_gated else ""
        return "/".join(
            (self.group, self.shape.name.lower().replace(" ", "-"), f"{gated}{self.activation}", self.dtype)
        )


def block_cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[BlockCase]:
    """The models with their own activations."""
    for dtype in dtypes or DTYPES[kind]:
        for shape in MLP_SHAPES:
            yield BlockCase("model", shape, False, "gelu", dtype)
        for shape, activation in zip(GATED_SHAPES, ("silu", "gelu", "gelu"), strict=True):
            yield BlockCase("model", shape, True, activation, dtype)


# --- convolutions -----------------------------------------------------------------------------------------------------

#: Each with every shape; and those that only the models have which they are from.
CONV_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
}
MODELS_ACTIVATIONS = {**CONV_ACTIVATIONS, "relu6": F.relu6, "tanh": torch.tanh}

#: By spatial dimensions; torch has no other format for one.
FORMATS: dict[int, dict[str, torch.memory_format]] = {
    1: {"contiguous": torch.contiguous_format},
    2: {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last},
    3: {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d},
}


@dataclass(frozen=True)
class ConvShape:
    name: str
    activation: str  # the model's own
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    batch: dict[str, int]  # device kind -> images
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def padding(self) -> tuple[int, ...]:
        """What keeps the size, at stride 1 and of odd kernels."""
        return tuple(self.dilation * (size - 1) // 2 for size in self.kernel)


#: A CPU is given what it does in some ten milliseconds, forward and backward; a GPU what people train with.
CONVOLUTIONS = (
    ConvShape("ResNet-50 3x3", "relu", 64, 64, (3, 3), (56, 56), {"cpu": 4, "cuda": 64}),
    ConvShape("ResNet-50 3x3 stride 2", "relu", 128, 128, (3, 3), (56, 56), {"cpu": 2, "cuda": 64}, stride=2),
    ConvShape("ResNet-50 1x1", "relu", 256, 64, (1, 1), (56, 56), {"cpu": 4, "cuda": 64}),
    ConvShape("ResNet-50 1x1 stride 2", "relu", 256, 128, (1, 1), (56, 56), {"cpu": 2, "cuda": 64}, stride=2),
    ConvShape("ConvNeXt-T 7x7 depthwise", "gelu", 96, 96, (7, 7), (56, 56), {"cpu": 2, "cuda": 64}, groups=96),
    ConvShape("ConvNeXt-T 1x1", "gelu", 96, 384, (1, 1), (56, 56), {"cpu": 2, "cuda": 64}),
    ConvShape("MobileNetV2 3x3 depthwise", "relu6", 144, 144, (3, 3), (56, 56), {"cpu": 4, "cuda": 64}, groups=144),
    ConvShape(
        "MobileNetV3 3x3 depthwise stride 2", "hardswish", 240, 240, (3, 3), (28, 28), {"cpu": 8, "cuda": 128},
        stride=2, groups=240,
    ),
    ConvShape("WaveNet", "tanh", 64, 128, (2,), (16_000,), {"cpu": 1, "cuda": 16}, dilation=8),
    ConvShape("wav2vec 2.0 extractor", "gelu", 512, 512, (3,), (1600,), {"cpu": 1, "cuda": 16}, stride=2),
    ConvShape("ResNet3D-18 3x3x3", "relu", 64, 64, (3, 3, 3), (8, 28, 28), {"cpu": 1, "cuda": 8}),
    ConvShape("X3D-M 3x3x3 depthwise", "silu", 108, 108, (3, 3, 3), (8, 28, 28), {"cpu": 1, "cuda": 8}, groups=108),
)  # fmt: skip


@dataclass(frozen=True)
class ConvCase:
    """A row of the grid: ``act(conv(x, w) + b)``."""

    group: str
    shape: ConvShape
    format: str
    activation: str
    dtype: str

    @property
    def id(self) -> str:
        """Group, shape, format, activation and dtype: ``model/resnet-50-3x3/channels_last/relu/float32``."""
        name = self.shape.name.lower().replace(" ", "-")
        return f"{self.group}/{name}/{self.format}/{self.activation}/{self.dtype}"


def conv_cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[ConvCase]:
    """The grid, what matters most first: each shape with its model's activation, and then with the others; the first
    format of every shape before the second of any."""
    formats = {dims: sorted(names, key=lambda name: name != MAIN_FORMAT[kind]) for dims, names in FORMATS.items()}
    shapes = [
        (dtype, shape, formats[len(shape.kernel)][number])
        for dtype in dtypes or DTYPES[kind]
        for number in range(2)
        for shape in CONVOLUTIONS
        if number < len(formats[len(shape.kernel)])
    ]
    for dtype, shape, name in shapes:
        yield ConvCase("model", shape, name, shape.activation, dtype)
    for dtype, shape, name in shapes:
        for activation in CONV_ACTIVATIONS:
            if activation != shape.activation:
                yield ConvCase("other", shape, name, activation, dtype)
