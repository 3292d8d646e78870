"""What is measured: the hidden layers of models people train, and a few fixed cases."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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


MODELS = (
    Shape("BERT-base", 768, 3072, {"cpu": 512, "cuda": 16 * 512}),
    Shape("BERT-large", 1024, 4096, {"cpu": 512, "cuda": 16 * 512}),
    Shape("GPT-2 large", 1280, 5120, {"cpu": 512, "cuda": 8 * 1024}),
    Shape("ViT-B", 768, 3072, {"cpu": 2 * 197, "cuda": 64 * 197}),  # 197 tokens an image: no tile divides that
    Shape("LLaMA-7B-like", 4096, 11008, {"cpu": 128, "cuda": 2 * 2048}),
)
ACCEPTANCE = Shape("768 to 3072", 768, 3072, {"cpu": 4096, "cuda": 4096})
SMALL = Shape("100x100", 100, 100, {"cpu": 100, "cuda": 100})  # NNlib.jl's benchmark of its fused layer: tanh, float32
CALL = Shape("4x4", 4, 4, {"cpu": 4, "cuda": 4})  # no work to speak of: what is left is the call


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

    @property
    def host_time(self) -> bool:
        """Whether to time with the wall clock, because the launches and not the kernels are what takes time."""
        return self.shape in (CALL, SMALL)


def cases(kind: str, dtypes: tuple[str, ...] = ()) -> Iterator[Case]:
    """The grid, what matters most first: a run that is cut short still has that."""
    dtypes = dtypes or DTYPES[kind]
    for activation in ("gelu", "relu", "tanh"):
        yield Case("call_overhead", CALL, activation, "float32")
    yield Case("small", SMALL, "tanh", "float32")
    for dtype in dtypes:
        for activation in ("gelu", "relu", "tanh"):
            yield Case("acceptance", ACCEPTANCE, activation, dtype)
    for dtype in dtypes:
        for activation in ACTIVATIONS:
            for shape in MODELS:
                yield Case("model", shape, activation, dtype)
