"""Train a model as it is, and after `fuse`, side by side: same weights, same batches, steps taken in turn."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory import peak_bytes, saved_bytes
from ..recipes.fuse import fuse
from .model import ByteTransformer, batches


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run computes. bfloat16 is autocast over float32 parameters."""

    device: torch.device
    dtype: torch.dtype
    activation: str
    steps: int
    batch: int
    context: int
    width: int
    layers: int
    seed: int
    #: Steps end when they have taken so long, both variants' together.
    seconds: float = math.inf


@dataclass
class Outcome:
    """The bytes, times and losses of one variant."""

    saved_bytes: int
    peak_bytes: int
    losses: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Median, because the first steps warm up and other programs disturb some of the rest."""
        return median(self.times_ms)

    def step_ratio(self, other: "Outcome") -> float:
        """Median of the ratios to the other's step of the same turn: how fast a machine is changes between turns."""
        return median(own / others for own, others in zip(self.times_ms, other.times_ms, strict=True))


def seconds_spent(outcomes: dict[str, Outcome]) -> float:
    """The time that all steps have taken."""
    return sum(sum(outcome.times_ms) for outcome in outcomes.values()) / 1e3


class Trainer:
    """One model and its optimizer."""

    def __init__(self, model: ByteTransformer, settings: Settings) -> None:
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
        outcome = Outcome(
            saved_bytes=saved_bytes(self.loss, inputs, targets, exclude=self.model),
            peak_bytes=peak_bytes(self.forward_backward, inputs, targets),
        )
        self.optimizer.zero_grad()
        return outcome


def trainers(settings: Settings) -> dict[str, Trainer]:
    """Make a trainer of a model as it is, "eager", and one of its copy after `fuse`, "fused"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ByteTransformer(settings.width, settings.layers, settings.context, settings.activation)
    made = {name: Trainer(copy.deepcopy(model).to(settings.device), settings) for name in ("eager", "fused")}
    fuse(made["fused"].model)
    return made


def compare(
    settings: Settings, corpus: Tensor, on_step: Callable[[dict[str, Outcome]], None] = lambda outcomes: None
) -> dict[str, Outcome]:
    """Measure and train both models; `on_step` sees the outcomes so far after every step."""
    competitors = trainers(settings)
    outcomes: dict[str, Outcome] = {}
    stream = batches(corpus, settings.batch, settings.context, settings.seed)
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
        on_step(outcomes)
        if seconds_spent(outcomes) >= settings.seconds:
            break
    return outcomes
