"""A small causal transformer that learns the bytes of Python's standard library, as it is and after ``fuse``, side by
side: same weights, same batches, steps taken in turn.

Attention loses a number for each byte of distance (ALiBi: Press et al. 2022, "Train Short, Test Long"), the same for
all heads. With learned positions the default run knew no more than pairs of bytes after 150 steps (loss 2.45).
"""

import copy
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..memory import peak_bytes, saved_bytes
from ..recipes.fuse import fuse
from ..utils.progress import OnStage

BYTES = 256
HEADS = 4
#: What attention loses for each byte of distance.
PENALTY = 0.2
#: Of weights and batches.
SEED = 0


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes. bfloat16 is autocast over float32 parameters."""

    device: torch.device
    dtype: torch.dtype
    steps: int
    batch: int
    context: int
    width: int
    layers: int
    #: Steps end when they have taken so long, both variants' together.
    seconds: float = math.inf


class RMSNorm(nn.Module):
    """A norm that is spelled out, as many models have it: ``fuse`` runs it again in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * (x * scale).to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to the residual stream: (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([RMSNorm(width), RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.norms[0](x)), "b t (three h d) -> three b h t d", three=3, h=HEADS)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(rearrange(y, "b h t d -> b t (h d)"))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A causal transformer: bytes (batch, time), int64 -> logits (batch, time, 256)."""

    mask: Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(settings.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)
        distance = torch.arange(settings.context)[:, None] - torch.arange(settings.context)
        mask = torch.where(distance < 0, -torch.inf, -PENALTY * distance)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library_bytes() -> Tensor:
    """The `*.py` files of the running interpreter's standard library, joined in order of name: (length,), uint8."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(corpus: Tensor, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random excerpts without end, the same ones in every run: inputs and targets, each (batch, context), int64;
    the targets are the bytes that follow the inputs."""
    generator = torch.Generator().manual_seed(SEED)
    window = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(corpus) - context, (batch, 1), generator=generator)
        excerpts = corpus[starts + window].long()
        yield excerpts[:, :-1], excerpts[:, 1:]


@dataclass
class Outcome:
    """The bytes, times and losses of one variant."""

    saved_bytes: int
    peak_bytes: int
    losses: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)


class Trainer:
    """One model and its optimizer."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.4 / settings.width)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        dtype = self.settings.dtype
        with torch.autocast(self.settings.device.type, dtype, enabled=dtype != torch.float32):
            logits = self.model(inputs)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(inputs, targets)
        loss.backward()
        return loss

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.forward_backward(inputs, targets)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()  # waits for all of the step's work on the device, so that a clock around it is right

    def measure(self, inputs: Tensor, targets: Tensor) -> Outcome:
        """Count the bytes of one forward and backward pass; the model learns nothing from it."""
        self.forward_backward(inputs, targets)  # what the first pass sets up is not part of the figures
        self.optimizer.zero_grad()
        saved = saved_bytes(self.loss, inputs, targets, exclude=self.model)
        outcome = Outcome(saved, peak_bytes(self.forward_backward, inputs, targets))
        self.optimizer.zero_grad()
        return outcome


def trainers(settings: Settings) -> dict[str, Trainer]:
    """Make a trainer of a model as it is, "eager", and one of its copy after `fuse`, "fused"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Transformer(settings)
    made = {name: Trainer(copy.deepcopy(model).to(settings.device), settings) for name in ("eager", "fused")}
    fuse(made["fused"].model)
    return made


def compare(settings: Settings, corpus: Tensor, on_stage: OnStage) -> dict[str, Outcome]:
    """Measure and train both models; `on_stage` is told the losses, and how far it has come, after every step."""
    competitors = trainers(settings)
    outcomes: dict[str, Outcome] = {}
    stream = batches(corpus, settings.batch, settings.context)
    for step in range(settings.steps):
        batch = [part.to(settings.device) for part in next(stream)]
        if step == 0:
            outcomes = {name: trainer.measure(*batch) for name, trainer in competitors.items()}
        # Each goes first every other time: a warm cache and other programs' noise favour neither.
        for name in sorted(competitors, reverse=bool(step % 2)):
            start = time.perf_counter()
            loss = competitors[name].step(*batch)
            outcomes[name].times_ms.append(1e3 * (time.perf_counter() - start))
            outcomes[name].losses.append(loss)
        spent = sum(sum(outcome.times_ms) for outcome in outcomes.values()) / 1e3 / settings.seconds
        losses = ", ".join(f"{name} {outcome.losses[-1]:.3f}" for name, outcome in outcomes.items())
        on_stage(f"step {step + 1}: loss {losses}", min(1.0, max((step + 1) / settings.steps, spent)))
        if spent >= 1:
            break
    return outcomes
