"""``python -m bench fit``: whole models within budgets, by ``fl.fit``, by checkpoints of blocks, and by torch.compile's
activation memory budget.

torch's own checkpoint is put around as many of the model's blocks, from the first on, as it takes to save no more than
a part of what eager PyTorch saves. What that saves is the budget of the others: ``fit`` chooses a plan; and, by
``python -m bench fit-compiled``, the compiler gets the same part for its own budget, and the same bytes by
``fit_compiled``. All variants of a budget take turns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

from . import measure, zoo
from .grid import Benchmark
from .measure import Setting, Variant
from .zoo import of_transformers as hf

DEFINITIONS = {
    "budget": "the part of eager's saved bytes that is allowed: what the checkpoints save, if they can save as little",
    "saved_bytes": "kept for the backward pass by a forward pass and its loss, without inputs, parameters and buffers",
    "predicted_bytes": "what fit predicted for its plan",
    "predicted_ratio": "the time of a step that fit predicted, over eager's",
    "planning_s": "how long fit took",
    "checkpoint": "torch's own, not reentrant, around the first blocks, as many as it takes",
    "compile": "torch.compile with activation_memory_budget",
    "fit_compiled": "torch.compile with the activation_memory_budget that fit_compiled has found for the bytes",
    "ratio": "median over rounds of time / eager's (compiled variants: compiled's) in the same round, with quartiles",
}
#: Parts of eager's saved bytes.
BUDGETS = (0.7, 0.5, 0.3)


@dataclass(frozen=True)
class Case:
    """A model, and the paths of the containers of its blocks."""

    id: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    blocks: tuple[str, ...]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


_STAGES = tuple(f"encoder.stages.{stage}.layers" for stage in range(4))
_SIZES = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 256}
_BERT = hf("Bert", **{**zoo.SMALL_BERT, **_SIZES})
_VIT = hf("ViT", **_SIZES, image_size=128, intermediate_size=1024)
_MISTRAL = hf("Mistral", **{**zoo.MISTRAL, **_SIZES, "intermediate_size": 896})
CASES = (
    Case("encoder/float32", partial(zoo.build, _encoder, (4, 256, 256)), ("layers",)),
    Case("bert/float32", partial(zoo.build, _BERT, (4, 256)), ("encoder.layer",)),
    Case("mistral/float32", partial(zoo.build, _MISTRAL, (4, 256)), ("layers",)),
    Case("mistral/bfloat16", partial(zoo.build, _MISTRAL, (4, 256), dtype=torch.bfloat16), ("layers",)),
    Case("vit/float32", partial(zoo.build, _VIT, (8, 3, 128, 128)), ("layers",)),
    Case("resnet-50/float32", partial(zoo.build, hf("ResNet"), (4, 3, 128, 128)), _STAGES),
    # As wide as such models are. What a recomputation costs the host is nothing here, and one or two percent above.
    Case("vit-768/float32", partial(zoo.build, hf("ViT", num_hidden_layers=6), (4, 3, 224, 224)), ("layers",)),
    Case("resnet-50-224/float32", partial(zoo.build, hf("ResNet"), (8, 3, 224, 224)), _STAGES),
)


def loss_of(result: Any) -> Tensor:
    """The loss, for ``fit`` too, so that what it predicts is what is measured here."""
    return zoo.first(result).square().mean()


@dataclass(frozen=True)
class Subject:
    """A model and its input. ``compiled``: what is called in the model's place."""

    model: nn.Module
    x: Tensor
    compiled: Callable[..., Any] | None = None

    def loss(self) -> Tensor:
        return loss_of((self.compiled or self.model)(self.x))

    def step(self) -> None:
        self.loss().backward()
        self.model.zero_grad(set_to_none=True)

    def saved(self) -> int:
        return saved_bytes(self.loss, exclude=[self.model, self.x])

    def variant(self) -> Variant:
        return Variant({"forward_backward": self.step}, forward=self.loss, own=[self.model, self.x])

    def twin(self) -> Subject:
        """One that shares the parameters."""
        return Subject(zoo.twin(self.model), self.x)


def measure_case(case: Case, setting: Setting, *, compiles: bool = False) -> dict[str, Any]:
    """The JSON row of a case."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = case.build()
    eager = Subject(model.to(setting.device).train(), x.to(setting.device))
    saved, rows = eager.saved(), []
    for part in BUDGETS[1:2] if setting.quick else BUDGETS:
        allowed = int(part * saved)
        subjects = {"eager": eager}
        checkpointed = next((s for s in with_checkpoints(eager, case.blocks) if s.saved() <= allowed), None)
        if checkpointed is not None:
            subjects["checkpoint"], allowed = checkpointed, checkpointed.saved()
        makers = {name: subject.variant for name, subject in subjects.items()}
        facts: dict[str, Any] = {}
        makers["fit"] = partial(_fitted, eager, allowed, facts)
        timing = {"min_rounds": 7, "max_rounds": 50, "warm_up": 1}
        found = measure.compare(makers, setting, **timing)
        found["fit"] |= facts
        if checkpointed is None:
            found["checkpoint"] = {"skipped": "the budget is below what checkpoints of all blocks save"}
        if compiles:
            torch._dynamo.reset()
            found |= measure.compare(_compiled(eager, allowed, allowed / saved), setting, **timing)
        rows.append({"budget": round(allowed / saved, 4), "variants": found})
    return {"id": case.id, "saved_bytes": saved, "budgets": rows}


def _fitted(eager: Subject, allowed: int, facts: dict[str, Any]) -> Variant:
    """The model after ``fit``; ``facts`` gets what it has predicted."""
    subject = eager.twin()
    began = time.perf_counter()
    report = fl.fit(subject.model, subject.x, memory_budget_bytes=allowed, loss=loss_of)
    facts["planning_s"] = round(time.perf_counter() - began, 1)
    assert report.eager is not None
    facts["predicted_bytes"] = report.predicted.bytes
    facts["predicted_ratio"] = round(report.predicted.time_ms / report.eager.time_ms, 4)
    facts["recomputed"] = list(report.recomputed)
    return subject.variant()


def _compiled(eager: Subject, allowed: int, part: float) -> dict[str, Callable[[], Variant]]:
    """Without a budget, which is the baseline; with that part for the compiler's; and with what holds the bytes."""

    def with_part(part: float) -> Variant:
        own = eager.twin()
        return dataclasses.replace(own, compiled=measure.compiled(own.model, part)).variant()

    def within_bytes() -> Variant:
        own = eager.twin()
        report = fl.fit_compiled(own.model, own.x, memory_budget_bytes=allowed, loss=loss_of, dynamic=False)
        return dataclasses.replace(own, compiled=measure.compiled(own.model, backend=report.backend)).variant()

    return {"compiled": partial(with_part, 1.0), "compile": partial(with_part, part), "fit_compiled": within_bytes}


def with_checkpoints(eager: Subject, paths: Sequence[str]) -> Iterator[Subject]:
    """Twins with checkpoints around the first block, the first two, and so on."""
    for number in range(1, len(_blocks(eager.model, paths)) + 1):
        subject = eager.twin()
        for block in _blocks(subject.model, paths)[:number]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield subject


def _blocks(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    return [block for path in paths for block in model.get_submodule(path).children()]


def line(row: dict[str, Any]) -> Iterator[str]:
    for entry in row["budgets"]:
        cells = []
        for name, variant in entry["variants"].items():
            if "saved_bytes" not in variant:
                cells.append(f"{name}: {variant.get('error') or variant.get('skipped')}")
                continue
            part, ratio = variant["saved_bytes"] / row["saved_bytes"], variant["forward_backward"]["ratio"]
            cells.append(f"{name} {part:.1%} {ratio:.2f}x")
        yield f"{row['id']:<18} {entry['budget']:.1%}: {' | '.join(cells)}"


def _benchmark(name: str, *, compiles: bool) -> Benchmark:
    return Benchmark(
        name,
        DEFINITIONS,
        cases=lambda kind: CASES,
        measure=partial(measure_case, compiles=compiles),
        lines=line,
        budget_seconds=1100.0,
        case_seconds=12.0,
        packages=("transformers",),
    )


BENCHMARKS = {"fit": _benchmark("fit", compiles=False), "fit-compiled": _benchmark("fit_compiled", compiles=True)}
