"""``python -m bench fit``: whole models within budgets, by ``fl.fit``, by checkpoints of blocks, and by torch.compile's
activation memory budget.

torch's own checkpoint is put around as many of the model's blocks, from the first on, as it takes to save no more than
a part of what eager PyTorch saves. What that saves is the budget of the others: ``fit`` chooses a plan; and, with
``--compile``, the compiler gets the same part for its own budget, and the same bytes by ``fit_compiled``. All variants
of a budget take turns.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

from . import RESULTS, grid, machine, measure

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
BUDGET_SECONDS = 1100.0
_CASE_SECONDS = 12.0


@dataclass(frozen=True)
class Case:
    """A model, and the paths of the containers of its blocks: "," is between several, "|" between names of one."""

    id: str
    build: Callable[[], tuple[nn.Module, dict[str, Tensor] | Tensor]]
    blocks: str


def _of_transformers(name: str, *, inputs: str, shape: tuple[int, ...], dtype: str, **sizes: Any) -> Any:
    import transformers as hf  # here, because the other benchmarks run without it

    attention = {} if name == "ResNet" else {"attn_implementation": "sdpa"}
    model = hf.AutoModel.from_config(getattr(hf, f"{name}Config")(**sizes), dtype=getattr(torch, dtype), **attention)
    given = torch.randn(shape) if inputs == "pixel_values" else torch.randint(3, 1000, shape)
    return model, {inputs: given}


def _encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, "gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 256, 256)


def _stages() -> str:
    return ",".join(f"encoder.stages.{stage}.layers" for stage in range(4))


_SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 6}
_TEXT = partial(_of_transformers, inputs="input_ids", shape=(4, 256), vocab_size=1000, **_SIZES)
_MISTRAL = partial(_TEXT, "Mistral", intermediate_size=896, num_key_value_heads=2, use_cache=False)
_IMAGES = partial(_of_transformers, inputs="pixel_values", dtype="float32")
CASES = (
    Case("encoder/float32", _encoder, "layers"),
    Case("bert/float32", partial(_TEXT, "Bert", dtype="float32", intermediate_size=1024), "encoder.layer"),
    Case("mistral/float32", partial(_MISTRAL, dtype="float32"), "layers"),
    Case("mistral/bfloat16", partial(_MISTRAL, dtype="bfloat16"), "layers"),
    Case(
        "vit/float32",
        partial(_IMAGES, "ViT", shape=(8, 3, 128, 128), image_size=128, intermediate_size=1024, **_SIZES),
        "layers|encoder.layer",
    ),
    Case("resnet-50/float32", partial(_IMAGES, "ResNet", shape=(4, 3, 128, 128)), _stages()),
    # As wide as such models are. What a recomputation costs the host is nothing here, and one or two percent above.
    Case(
        "vit-768/float32",
        partial(_IMAGES, "ViT", shape=(4, 3, 224, 224), **{**_SIZES, "hidden_size": 768, "num_attention_heads": 12}),
        "layers|encoder.layer",
    ),
    Case("resnet-50-224/float32", partial(_IMAGES, "ResNet", shape=(8, 3, 224, 224)), _stages()),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'mistral'")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes a case on a CPU")
    parser.add_argument("--quick", action="store_true", help="one budget and few rounds: to see that it works")
    parser.add_argument("--budget", type=float, metavar="SECONDS", default=BUDGET_SECONDS, help="start no case after")
    parser.add_argument("--out", type=Path, help="folder for the results; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [case for case in CASES if re.search(options.only or "", case.id)]
    if not todo:
        print(f"bench fit: no case matches --only {options.only!r}; there are {[case.id for case in CASES]}")
        return 2
    out = options.out
    if out is None and not (options.only or options.quick):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    subject = "fit_compiled" if options.compile else "fit"
    result = grid.begin(subject, device, DEFINITIONS, quick=options.quick, not_run=[case.id for case in todo])
    machine.warn_if_busy(result)
    for case, _, _ in grid.until(time.monotonic() + options.budget, todo):
        row = measure_case(case, device, quick=options.quick, compiles=options.compile)
        grid.add(result, row, out)
        print("\n".join(_lines(row)), flush=True)
    if out is not None:
        print(f"\nwrote {out / f'{subject}.json'}")
    return 0


def loss_of(result: Any) -> Tensor:
    """For ``fit`` too, so that what it predicts is what is measured here."""
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first.square().mean()


@dataclass(frozen=True)
class Subject:
    """``part``: the compiler's budget, which it asks for at each call; ``run``: the compiled model."""

    model: nn.Module
    inputs: Any
    part: float | None = None
    run: Callable[..., Any] | None = None

    def loss(self) -> Tensor:
        if self.part is None:
            return self._loss()
        from torch._functorch import config

        with config.patch(activation_memory_budget=self.part):
            return self._loss()

    def _loss(self) -> Tensor:
        run = self.run or self.model
        return loss_of(run(**self.inputs) if isinstance(self.inputs, dict) else run(self.inputs))

    def step(self) -> None:
        self.loss().backward()
        self.model.zero_grad(set_to_none=True)

    def saved(self) -> int:
        return saved_bytes(self.loss, exclude=[self.model, self.inputs])

    def copy(self, part: float | None = None) -> Subject:
        """One that shares the parameters."""
        return Subject(copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()}), self.inputs, part)


def measure_case(case: Case, device: torch.device, *, quick: bool = False, compiles: bool = False) -> dict[str, Any]:
    """The JSON row of a case."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, inputs = case.build()
        given = {k: v.to(device) for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.to(device)
    eager = Subject(model.to(device).train(), given)
    saved = eager.saved()
    rows = []
    for part in BUDGETS[1:2] if quick else BUDGETS:
        subjects: dict[str, Subject] = {"eager": eager}
        found: dict[str, Any] = {"eager": {"saved_bytes": saved}}
        allowed = int(part * saved)
        checkpointed = next((s for s in with_checkpoints(eager, case.blocks) if s.saved() <= allowed), None)
        if checkpointed is None:
            found["checkpoint"] = {"skipped": "the budget is below what checkpoints of all blocks save"}
        else:
            subjects["checkpoint"], found["checkpoint"] = checkpointed, {}
            allowed = checkpointed.saved()
        fitted = eager.copy()
        try:
            began = time.perf_counter()
            report = fl.fit(fitted.model, given, memory_budget_bytes=allowed, loss=loss_of)
            planning_s = time.perf_counter() - began
            assert report.eager is not None
            subjects["fit"] = fitted
            found["fit"] = {
                "predicted_bytes": report.predicted.bytes,
                "predicted_ratio": round(report.predicted.time_ms / report.eager.time_ms, 4),
                "planning_s": round(planning_s, 1),
                "recomputed": list(report.recomputed),
            }
        except ValueError as error:
            found["fit"] = grid.failed(error)
        _measure(subjects, found, "eager", device, quick)
        if compiles:
            _measure_compiled(eager, allowed, allowed / saved, found, device, quick)
        rows.append({"budget": round(allowed / saved, 4), "variants": found})
    return {"id": case.id, "saved_bytes": saved, "budgets": rows}


def _measure(
    subjects: dict[str, Subject], found: dict[str, Any], baseline: str, device: torch.device, quick: bool
) -> None:
    seconds = 0.0 if quick else _CASE_SECONDS
    steps = {name: subject.step for name, subject in subjects.items()}
    times = measure.interleave(steps, device, seconds=seconds, min_rounds=2 if quick else 7, max_rounds=50, warm_up=1)
    for name, values in times.items():
        found.setdefault(name, {})["forward_backward"] = measure.summary(values, times[baseline])
        found[name]["saved_bytes"] = subjects[name].saved()


def _measure_compiled(
    eager: Subject, allowed: int, part: float, found: dict[str, Any], device: torch.device, quick: bool
) -> None:
    def within_bytes() -> Subject:
        own = eager.copy()
        report = fl.fit_compiled(own.model, own.inputs, memory_budget_bytes=allowed, loss=loss_of, dynamic=False)
        found["fit_compiled"] = {"activation_memory_budget": report.activation_memory_budget}
        return dataclasses.replace(own, run=measure.compiled(own.model, backend=report.backend))

    def with_part(part: float) -> Subject:
        own = eager.copy(part)
        return dataclasses.replace(own, run=measure.compiled(own.model))

    makers: dict[str, Callable[[], Subject]] = {
        "fit_compiled": within_bytes,
        "compiled": partial(with_part, 1.0),
        "compile": partial(with_part, part),
    }
    subjects = {}
    torch._dynamo.reset()
    for name, make in makers.items():
        try:
            subject = make()
            subject.step()
            subjects[name] = subject
        except Exception as error:
            found[name] = grid.failed(error)
    if "compiled" not in subjects:
        return
    try:
        _measure(subjects, found, "compiled", device, quick)
    except Exception as error:
        found["compiled"] = grid.failed(error)


def with_checkpoints(eager: Subject, paths: str) -> Iterator[Subject]:
    """With checkpoints around the first block, the first two, and so on."""
    count = len(_blocks(eager.model, paths))
    for number in range(1, count + 1):
        subject = eager.copy()
        for block in _blocks(subject.model, paths)[:number]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield subject


def _blocks(model: nn.Module, paths: str) -> list[nn.Module]:
    modules = dict(model.named_modules())
    found = [list(modules[path].children()) for part in paths.split(",") for path in part.split("|") if path in modules]
    return [block for blocks in found for block in blocks]


def _lines(row: dict[str, Any]) -> Iterator[str]:
    for entry in row["budgets"]:
        cells = []
        for name, variant in entry["variants"].items():
            if "saved_bytes" not in variant or "forward_backward" not in variant:
                cells.append(f"{name}: {variant.get('error') or variant.get('skipped')}")
                continue
            part, ratio = variant["saved_bytes"] / row["saved_bytes"], variant["forward_backward"]["ratio"]
            cells.append(f"{name} {part:.1%} {ratio:.2f}x")
        yield f"{row['id']:<18} {entry['budget']:.1%}: {' | '.join(cells)}"
