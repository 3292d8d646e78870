"""The layers that are measured: of models that people train, each with its model's activation."""

from collections.abc import Sequence
from dataclasses import dataclass

#: A CPU is given few tokens and images, so that a whole run ends within ten minutes; they are stated with every result.
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float32")}
#: The memory format that devices of a kind are fast in: torch's default on CPUs.
FORMATS = {"cpu": "contiguous", "cuda": "channels_last"}


@dataclass(frozen=True)
class Dense:
    """``act(x w^T + b)``, or a block around it. ``tokens``: the rows, by the device's kind."""

    name: str
    activation: str
    in_features: int
    hidden_features: int
    tokens: dict[str, int]
    is_gated: bool = False


@dataclass(frozen=True)
class Conv:
    """``act(conv(x, w) + b)``. ``batch``: the images, by the device's kind."""

    name: str
    activation: str
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    batch: dict[str, int]
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def padding(self) -> tuple[int, ...]:
        """What keeps the size, at stride 1 and of odd kernels."""
        return tuple(self.dilation * (size - 1) // 2 for size in self.kernel)


LAYERS = (
    Dense("BERT-base", "gelu", 768, 3072, {"cpu": 512, "cuda": 16 * 512}),
    Dense("BERT-large", "relu", 1024, 4096, {"cpu": 512, "cuda": 16 * 512}),
    Dense("ViT-B", "gelu", 768, 3072, {"cpu": 2 * 197, "cuda": 64 * 197}),  # 197 tokens an image: no tile divides that
    Dense("GPT-2 large", "gelu", 1280, 5120, {"cpu": 512, "cuda": 8 * 1024}),
    Dense("LLaMA-7B-like", "silu", 4096, 11008, {"cpu": 128, "cuda": 2 * 2048}),
)
BLOCKS = (
    Dense("BERT-base", "gelu", 768, 3072, {"cpu": 8 * 512, "cuda": 16 * 512}),
    Dense("GPT-2 large", "gelu", 1280, 5120, {"cpu": 2 * 1024, "cuda": 8 * 1024}),
    Dense("ViT-B", "gelu", 768, 3072, {"cpu": 8 * 197, "cuda": 64 * 197}),
    Dense("LLaMA-7B", "silu", 4096, 11008, {"cpu": 128, "cuda": 2 * 2048}, is_gated=True),
    Dense("Gemma-2B", "gelu", 2048, 16384, {"cpu": 128, "cuda": 2 * 2048}, is_gated=True),
    Dense("T5-base 1.1", "gelu", 768, 2048, {"cpu": 8 * 512, "cuda": 16 * 512}, is_gated=True),
)
#: A CPU is given what it does in some ten milliseconds, forward and backward; a GPU what people train with.
CONVOLUTIONS = (
    Conv("ResNet-50 3x3", "relu", 64, 64, (3, 3), (56, 56), {"cpu": 4, "cuda": 64}),
    Conv("ResNet-50 1x1 stride 2", "relu", 256, 128, (1, 1), (56, 56), {"cpu": 2, "cuda": 64}, stride=2),
    Conv("WaveNet", "tanh", 64, 128, (2,), (16_000,), {"cpu": 1, "cuda": 16}, dilation=8),
    Conv("ResNet3D-18 3x3x3", "relu", 64, 64, (3, 3, 3), (8, 28, 28), {"cpu": 1, "cuda": 8}),
    Conv("MobileNetV2 3x3 depthwise", "relu6", 144, 144, (3, 3), (56, 56), {"cpu": 4, "cuda": 64}, groups=144),
    Conv("ConvNeXt-T 7x7 depthwise", "gelu", 96, 96, (7, 7), (56, 56), {"cpu": 2, "cuda": 64}, groups=96),
    Conv("X3D-M 3x3x3 depthwise", "silu", 108, 108, (3, 3, 3), (8, 28, 28), {"cpu": 1, "cuda": 8}, groups=108),
    Conv("wav2vec 2.0 extractor", "gelu", 512, 512, (3,), (1600,), {"cpu": 1, "cuda": 16}, stride=2),
    Conv(
        "MobileNetV3 3x3 depthwise stride 2", "hardswish", 240, 240, (3, 3), (28, 28), {"cpu": 8, "cuda": 128},
        stride=2, groups=240,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layer in a dtype, and a convolution in a memory format: sequences have one."""

    shape: Dense | Conv
    dtype: str
    format: str = ""

    @property
    def id(self) -> str:
        """Shape, format, activation and dtype: ``model/bert-base/gelu/float32``."""
        gated = "gated-" if isinstance(self.shape, Dense) and self.shape.is_gated else ""
        name = self.shape.name.lower().replace(" ", "-")
        return "/".join(filter(None, ("model", name, self.format, gated + self.shape.activation, self.dtype)))


def cases(shapes: Sequence[Dense | Conv], kind: str) -> list[Case]:
    """Each shape in the dtypes of a device's kind, the main one first."""
    return [Case(shape, dtype, _format(shape, kind)) for dtype in DTYPES[kind] for shape in shapes]


def _format(shape: Dense | Conv, kind: str) -> str:
    if isinstance(shape, Dense):
        return ""
    return "contiguous" if len(shape.kernel) == 1 else FORMATS[kind]
