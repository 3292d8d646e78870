"""``python -m bench models``: whole models of the transformers package, eager and with one line of this library.

Four variants share one set of random weights: the model as it is; with output-saving activations in place of its own
(``fl.GELU``, ``fl.SiLU``), which is what the optiacts package does; after ``fl.fuse(model, inputs)``; and after
``fl.fuse(model, inputs, save="recompute")``, where it finds whole MLPs.

Attention is PyTorch's own, without dropout: with it, on CPUs, PyTorch stores the probabilities, which are more than
anything else. Bytes are the same in each run; what times are worth depends on who else computes, so that
``--bytes-only`` leaves them out.
"""

import argparse
import copy
import gc
import importlib.metadata
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.fusion.report import Replaced, Skipped
from fusedlayers.memory import peak_bytes, saved_bytes

from . import RESULTS, grid, machine, measure

BASELINE, ACTIVATIONS, OURS, RECOMPUTE = VARIANTS = ("eager", "activations", "fusedlayers", "recompute")
DEFINITIONS = {
    "model": "random weights, training mode, PyTorch's attention (sdpa), batch norms with weights of 1",
    "activations": "each GELU and SiLU module exchanged for one that saves its output",
    "fusedlayers": "after fuse(model, inputs), which is shown two of a batch",
    "recompute": "the same with save='recompute'",
    "places": "what was fused or exchanged, by pattern",
    "time": "microseconds of forward+backward by the wall clock: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass by a forward pass, without inputs, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward, gradients included, over what lived before",
    "target": "by how much less a variant shall save than eager does, as a share",
}

#: What transformers calls activations that keep their input, and the drop-ins that keep their output.
DROP_INS = {"GELUActivation": fl.GELU, "SiLUActivation": fl.SiLU}

# Seconds that a case is timed at most, unless fewest rounds take longer: a step of the largest takes a CPU seconds.
_CASE_SECONDS = {"cpu": 30.0, "cuda": 8.0}
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 50

#: Start no case after so many seconds. On a CPU the last case, which may begin just before, takes minutes.
BUDGET_SECONDS = {"cpu": 500.0, "cuda": 300.0}

# How far a variant may be from eager (norm of the difference over the norm) and still be worth measuring: no test of
# accuracy. A stack of layers carries a difference in the last bit far: four in bfloat16 to 1.2e-2. EfficientNet-B0 in
# bfloat16 differs from float64 by 9e-2 in eager's outputs and 1.7e-1 in its gradients, and here by as much.
_SAME = {"float32": 1e-2, "bfloat16": 2.5e-1}


@dataclass(frozen=True)
class Case:
    """A model and what it is given.

    ``config``: the name of transformers' class; ``sizes`` are its arguments where they are not the defaults, and
    ``small`` those of a quick run. ``tokens``: of a sequence; None for images. ``layers``: how many there are; of
    several numbers the first that fits in memory. ``target``: see ``DEFINITIONS``.
    """

    model: str
    config: str
    batch: int
    tokens: int | None = None
    dtype: str = "float32"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    target: Mapping[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Model, dtype and batch: ``bert-base/float32/4``."""
        return f"{re.sub('[^a-z0-9]+', '-', self.model.lower())}/{self.dtype}/{self.batch}"


_TOKENS, _PIXELS, _SMALL_TOKENS, _SMALL_PIXELS = 512, 224, 16, 32
_SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL_TEXT = {**_SMALL, "vocab_size": 100}
_SMALL_DECODER = {**_SMALL_TEXT, "num_key_value_heads": 2}

_bert = partial(Case, config="BertConfig", tokens=_TOKENS, small=_SMALL_TEXT)
_NO_ATTENTION_DROPOUT = {"attention_probs_dropout_prob": 0.0}
_mistral = partial(
    Case,
    "Mistral, 1024 wide",
    "MistralConfig",
    batch=1,
    tokens=1024,
    sizes={"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2},
    small=_SMALL_DECODER,
    layers=(4,),
)
_BERT_4 = _bert("BERT-base", batch=4, sizes=_NO_ATTENTION_DROPOUT, target={OURS: 0.20})
_BERT_16 = _bert("BERT-base", batch=16, sizes=_NO_ATTENTION_DROPOUT, target={OURS: 0.20})
_OTHERS = (
    _mistral(dtype="float32", target={OURS: 0.29, RECOMPUTE: 0.55}),
    _mistral(dtype="bfloat16", target={OURS: 0.26, RECOMPUTE: 0.55}),
    Case("ViT-B", "ViTConfig", batch=4, small={**_SMALL, "image_size": _SMALL_PIXELS}, target={OURS: 0.22}),
    Case("ConvNeXt-T", "ConvNextConfig", batch=4, small={"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    Case("ResNet-50", "ResNetConfig", batch=4, small={"hidden_sizes": [32, 64], "depths": [1, 1]}),
    Case(
        "EfficientNet-B0",
        "EfficientNetConfig",
        batch=4,
        sizes={"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": _PIXELS, "hidden_dim": 1280},
        small={"depth_coefficient": 0.1, "image_size": _SMALL_PIXELS},
        target={OURS: 0.50},
    ),
)
#: Two narrow layers each, whose operations take little longer than what a fused place adds to them.
_NARROW_SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 4}
_NARROW_DECODER = {**_NARROW_SIZES, "num_key_value_heads": 2, "vocab_size": 1000}
_narrow = partial(Case, batch=1, tokens=256, sizes=_NARROW_DECODER, small=_SMALL_DECODER)
_NARROW = (
    Case(
        "BERT with dropouts, narrow",
        "BertConfig",
        batch=4,
        tokens=256,
        sizes=_NARROW_SIZES,
        small=_SMALL_TEXT,
        target={OURS: 0.26},
    ),
    _narrow("Gemma 3, narrow", "Gemma3TextConfig", sizes={**_NARROW_DECODER, "head_dim": 128}, target={OURS: 0.45}),
    _narrow("Qwen 3, narrow", "Qwen3Config", sizes={**_NARROW_DECODER, "head_dim": 128}, target={OURS: 0.45}),
    _narrow("Mixtral, narrow", "MixtralConfig", sizes={**_NARROW_DECODER, "num_local_experts": 4}, target={OURS: 0.25}),
)
_WITHOUT_ATTENTION = ("ConvNextConfig", "ResNetConfig", "EfficientNetConfig")

#: What optiacts reports: BERT-base with dropout in its attention, 16 sequences of 512 tokens, and Mistral-7B.
_AS_OPTIACTS = (
    _bert("BERT-base, attention dropout", batch=16, target={OURS: 0.231}),
    Case(
        "Mistral-7B",
        "MistralConfig",
        batch=1,
        tokens=4096,
        dtype="bfloat16",
        small=_SMALL_DECODER,
        layers=(32, 24, 16, 8, 4, 2, 1),
        target={OURS: 0.157},
    ),
)


#: How many times a CPU's batch a GPU gets, in bfloat16: with less its host has more to do than itself.
_BATCH_ON_GPUS = 32


def cases(kind: str) -> list[Case]:
    """The largest last: it is what the time budget may cut off."""
    if kind != "cuda":
        return [_BERT_4, *_OTHERS, *_NARROW, _BERT_16]
    # One of the two Mistrals, which differ in their dtype alone.
    others = [case for case in (_BERT_4, *_OTHERS) if (case.model, case.dtype) != (_OTHERS[0].model, "float32")]
    wide = [replace(case, dtype="bfloat16", batch=_BATCH_ON_GPUS * case.batch) for case in others]
    return [*wide, _BERT_16, *_AS_OPTIACTS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", metavar="REGEX", help="cases whose id matches, e.g. 'bert-base/float32/4'")
    parser.add_argument(
        "--variants", help=f"comma-separated, of {','.join(VARIANTS)} (default: all); eager is always measured"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--bytes-only", action="store_true", help="no times, for a machine that others use too")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds: to see that it works")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help=f"start no case after this (default: {BUDGET_SECONDS})"
    )
    parser.add_argument("--out", type=Path, help="folder for models.json; a full run has a default")


def main(options: argparse.Namespace) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    todo = [case for case in cases(device.type) if re.search(options.only or "", case.id)]
    if not todo:
        known = [case.id for case in cases(device.type)]
        print(f"bench models: no case matches --only {options.only!r}; there are {known}")
        return 2
    asked = VARIANTS if options.variants is None else options.variants.split(",")
    variants = [name for name in VARIANTS if name == BASELINE or name in asked]
    out = options.out
    # A part must not replace a committed result of all: it is written only where the user says.
    if out is None and not (options.only or options.quick or options.bytes_only or set(VARIANTS) - set(variants)):
        out = RESULTS / machine.slug(device, torch.get_num_threads())
    budget = BUDGET_SECONDS[device.type] if options.budget is None else options.budget
    result = run(
        todo,
        device,
        variants=variants,
        quick=options.quick,
        timed=not options.bytes_only,
        budget_seconds=budget,
        out=out,
    )
    print("\n".join(acceptance(result)))
    if out is not None:
        print(f"\nwrote {out / 'models.json'}")
    return 0


def run(
    todo: Iterable[Case],
    device: torch.device,
    *,
    variants: Iterable[str] | None = None,
    quick: bool = False,
    timed: bool = True,
    budget_seconds: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure the cases in order, within the budget, and write ``out/models.json`` after each."""
    todo = list(todo)
    variants = VARIANTS if variants is None else list(variants)
    end = time.monotonic() + (BUDGET_SECONDS[device.type] if budget_seconds is None else budget_seconds)
    result = grid.begin("models", device, DEFINITIONS, quick=quick, not_run=[case.id for case in todo])
    result["versions"]["transformers"] = importlib.metadata.version("transformers")
    if timed:
        machine.warn_if_busy(result)
    for case, _, _ in grid.until(end, todo):
        try:
            row = measure_case(case, device, variants, end=end if timed else None, quick=quick)
        except torch.OutOfMemoryError as error:
            print(f"{case.id}: {error}", flush=True)
            continue
        grid.add(result, row, out)
        print(_line(row), flush=True)
    return result


@dataclass(frozen=True)
class Subject:
    """A model, what it is called with, and the gradient that comes from above."""

    model: nn.Module
    inputs: dict[str, Tensor]
    dy: Tensor

    def forward(self) -> Tensor:
        y: Tensor = self.model(**self.inputs)[0]
        return y

    def forward_backward(self) -> None:
        measure.Above.apply(self.forward(), self.dy).backward()
        self.model.zero_grad(set_to_none=True)

    def results(self) -> tuple[Tensor, Tensor]:
        """The output, and the gradients of all vectors among the parameters in one.

        These are few numbers, and stand in every layer, so that all gradients pass by one of them.
        """
        torch.manual_seed(0)  # dropout's masks are the same in each variant
        try:
            y = self.forward()
            measure.Above.apply(y, self.dy).backward()
            vectors = [p.grad for p in self.model.parameters() if p.dim() == 1 and p.grad is not None]
            return y.detach(), torch.cat([vector.float() for vector in vectors])
        finally:
            self.model.zero_grad(set_to_none=True)

    def variant(self, name: str) -> tuple["Subject | None", dict[str, int]]:
        """The same with a model that shares the parameters, and what was changed in it; None if that is nothing."""
        model = copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        places: dict[str, int] = {}
        if name == ACTIVATIONS:
            places = exchange_activations(model)
        elif name in (OURS, RECOMPUTE):
            # Two examples show what a batch does.
            examples = {key: tensor[:2] for key, tensor in self.inputs.items()}
            report = fl.fuse(model, examples, save="recompute" if name == RECOMPUTE else "auto")
            places = {}
            fused: list[Replaced | Skipped] = [*report.replaced, *report.too_small, *report.idle]
            for place in fused:
                computed = place.activation or place.pattern
                places[computed] = places.get(computed, 0) + len(place.modules)
        if not places or (name == RECOMPUTE and "mlp" not in places):
            return None, places
        return Subject(model, self.inputs, self.dy), places


def exchange_activations(model: nn.Module) -> dict[str, int]:
    """Put a drop-in that saves its output in the place of each activation module, and count them by name."""
    # A module may stand in several places.
    found = [(path, type(module).__name__) for path, module in model.named_modules(remove_duplicate=False)]
    found = [(path, name) for path, name in found if name in DROP_INS]
    for path, name in found:
        model.set_submodule(path, DROP_INS[name]())
    return dict(Counter(DROP_INS[name].__name__ for _, name in found))


def measure_case(
    case: Case, device: torch.device, variants: Iterable[str], *, end: float | None, quick: bool
) -> dict[str, Any]:
    """Return the JSON row of a case. ``end``: when timing has to be over; None for no times."""
    eager, layers = build(case, device, quick)
    start = time.monotonic()
    subjects: dict[str, Subject] = {BASELINE: eager}
    rows: dict[str, dict[str, Any]] = {BASELINE: {}}
    expected = eager.results()
    step_seconds = time.monotonic() - start
    for name in variants:
        if name == BASELINE:
            continue
        try:
            subject, places = eager.variant(name)
            if subject is None:
                rows[name] = {"skipped": "there is no MLP" if places else "there is nothing to change"}
                continue
            measure.expect_same(subject.results(), expected, _SAME[case.dtype])
            subjects[name], rows[name] = subject, {"places": places} if places else {}
        except Exception as error:
            rows[name] = grid.failed(error)
    del expected

    if end is not None:
        left = end - time.monotonic()
        if quick or (_FEWEST_ROUNDS + 1) * len(subjects) * step_seconds <= left:
            times = measure.interleave(
                {name: subject.forward_backward for name, subject in subjects.items()},
                device,
                seconds=0.0 if quick else min(left, _CASE_SECONDS[device.type]),
                min_rounds=_FEWEST_ROUNDS,
                max_rounds=_MOST_ROUNDS,
                warm_up=1,
                host=device.type == "cuda",  # whose work is not all there is to wait for
            )
            for name, values in times.items():
                rows[name]["forward_backward"] = measure.summary(values, times[BASELINE])
    for name, subject in subjects.items():
        rows[name]["saved_bytes"] = saved_bytes(subject.forward, exclude=[subject.model, subject.inputs])
        rows[name]["peak_bytes"] = peak_bytes(subject.forward_backward, device=device)
    return {
        **described(case, eager, layers),
        "parameters": sum(parameter.numel() for parameter in eager.model.parameters()),
        "target": {} if quick else dict(case.target),
        "variants": rows,
    }


def described(case: Case, subject: Subject, layers: int | None) -> dict[str, Any]:
    """What a JSON row says of the model."""
    (x,) = subject.inputs.values()
    return {"id": case.id, "model": case.model, "layers": layers, "dtype": case.dtype, "input": list(x.shape)}


def build(case: Case, device: torch.device, quick: bool) -> tuple[Subject, int | None]:
    """The eager model, and the number of its layers where the case says one."""
    if quick or not case.layers:
        return _build(case, device, quick), None
    for layers in case.layers:
        subject = _build_if_it_fits(case, device, layers)
        if subject is not None:
            return subject, layers
        gc.collect()
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(f"{case.id} does not fit, not even {layers} layers of it")


def _build_if_it_fits(case: Case, device: torch.device, layers: int) -> Subject | None:
    try:
        subject = _build(case, device, quick=False, num_hidden_layers=layers)
        subject.forward_backward()
        return subject
    except torch.OutOfMemoryError:
        return None


def _build(case: Case, device: torch.device, quick: bool, **sizes: int) -> Subject:
    import transformers as hf  # here, because the other benchmarks run without it

    options = {**case.sizes, **(case.small if quick else {}), **sizes}
    config = getattr(hf, case.config)(**options, **({} if case.tokens is None else {"use_cache": False}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with device:  # billions of random numbers take a CPU minutes
            attention = {} if case.config in _WITHOUT_ATTENTION else {"attn_implementation": "sdpa"}
            model = hf.AutoModel.from_config(config, dtype=getattr(torch, case.dtype), **attention).train()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.reset_parameters()  # to weights of 1, for which EfficientNet of transformers has N(0, .02)
        if case.tokens is None:
            pixels = _SMALL_PIXELS if quick else _PIXELS
            inputs = {"pixel_values": torch.randn(case.batch, 3, pixels, pixels).to(getattr(torch, case.dtype))}
        else:
            tokens = _SMALL_TOKENS if quick else case.tokens
            inputs = {"input_ids": torch.randint(3, config.vocab_size, (case.batch, tokens))}
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        with torch.no_grad():
            y = model(**inputs)[0]
        return Subject(model, inputs, torch.randn_like(y))


def acceptance(result: dict[str, Any]) -> list[str]:
    """A line for each case: as much less saved as is asked for, and never more than by eager."""
    lines = []
    for row in result["cases"]:
        verdicts = []
        for name in (ACTIVATIONS, OURS, RECOMPUTE):
            variant, target = row["variants"].get(name, {}), row["target"].get(name, 0.0)
            if "error" in variant:
                verdicts.append(f"{name}: MISSED: {variant['error']}")
            elif "saved_bytes" in variant:
                kept = row["variants"][BASELINE]["saved_bytes"]
                less = (kept - variant["saved_bytes"]) / kept
                asked = f" of {target:.1%}" if target else ""
                verdicts.append(f"{name} {less:.1%}{asked}: {'met' if less >= target else 'MISSED'}")
        lines.append(f"{row['id']}: saved less than by eager: {', '.join(verdicts)}")
    return lines


def _line(row: dict[str, Any]) -> str:
    cells = []
    eager = row["variants"][BASELINE]
    for name, variant in row["variants"].items():
        if "saved_bytes" not in variant:
            cells.append(f"{name}: {variant.get('error') or variant.get('skipped')}")
            continue
        saved, peak = (
            f"{variant[what] / 2**20:.1f} MiB"
            if name == BASELINE
            else f"{(variant[what] - eager[what]) / eager[what]:+.1%}"
            for what in ("saved_bytes", "peak_bytes")
        )
        time_of = variant.get("forward_backward")
        shown = "" if time_of is None else f"{time_of['ratio']:.2f}x, "
        if time_of is not None and name == BASELINE:
            shown = f"{time_of['median_us'] / 1e6:.3g} s, "
        cells.append(f"{name} {shown}saved {saved}, peak {peak}")
    return f"{row['id']:<32} {' | '.join(cells)}"
