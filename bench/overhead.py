"""``python -m bench overhead``: what a call of this library costs beyond the same call of eager PyTorch.

Small tensors in float32, on one thread unless another number is given: here time is Python, dispatch and autograd's
bookkeeping, hardly arithmetic. Groups of calls:

* ``small``: outputs so small that the call should cost what eager PyTorch's costs;
* ``fused``: 128 Ki outputs, which are not left to PyTorch, and activations that torch differentiates from one buffer
  too, so that nothing is gained but memory;
* ``folded``: the same with activations whose minimum is folded, which pay for the branch bit; without a target;
* ``region``: an activation between two dense layers of a model that ``fuse`` has seen, against the same model;
* ``bert layers``, ``llama layers``, ``autocast layers``: ``LAYERS`` fused blocks of a transformer of tiny sizes, in
  which everything that can be replayed is, however small, so that the time is the host's work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.activations import resolve
from fusedlayers.recipes import masks, region

from . import grid, measure, reference, zoo
from .grid import Benchmark
from .measure import Setting, Variant

EAGER, OURS = "eager", "fusedlayers"
DEFINITIONS = {
    "forward_backward": "microseconds of forward and backward: median and quartiles over interleaved rounds",
    "no_grad": "the same of the forward pass under torch.no_grad",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "over_eager_us": "median over rounds of time - eager's time in the same round",
}
#: Of a transformer.
LAYERS = 4
#: Group -> a call keeps its promise if it takes at most this many times eager's time, or this many microseconds more.
TARGETS = {
    **{"small": (1.10, 5.0), "fused": (1.15, 20.0), "region": (1.0, 25.0), "bert layers": (1.0, LAYERS * 250.0)},
    **{"llama layers": (1.0, LAYERS * 300.0), "autocast layers": (1.0, LAYERS * 450.0)},
}
#: The gated blocks of transformers.
GATED = {"bert": False, "llama": True}
FOLDED = ("gelu", "silu")
ACTIVATIONS = ("relu", "tanh", "sigmoid", "elu", "leaky_relu", *FOLDED)
#: Of the larger calls.
ELEMENTS = 131072
#: How far outputs and gradients may be from eager's, by their norms, and be worth timing: no test of accuracy.
SAME = 1e-4


class Own(nn.Module):
    """An activation of a user's, which is traced."""

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(1.7 * z)


#: What stands between the two layers that ``fuse`` has seen.
BETWEEN_LAYERS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU, "own": Own}


@dataclass(frozen=True)
class Case(grid.Case):
    """``elements``: of the output; of MLPs, of the hidden layer."""

    group: str
    operation: str
    activation: str
    elements: int


def cases() -> Iterator[Case]:
    for operation, activation, elements in (
        ("dense", "relu", 512),
        ("dense", "gelu", 512),
        ("conv", "relu", 1024),
        ("mlp", "gelu", 2048),
        ("gated_mlp", "silu", 2048),
        ("bias_act", "relu", 512),
        ("module", "gelu", 512),
    ):
        yield Case("small", operation, activation, elements)
    for activation in ACTIVATIONS:
        for operation in ("dense", "conv", "bias_act"):
            yield Case("folded" if activation in FOLDED else "fused", operation, activation, ELEMENTS)
    for activation, elements in (("gelu", 512), *((name, ELEMENTS) for name in BETWEEN_LAYERS)):
        yield Case("region", "fuse", activation, elements)
    for name in GATED:
        yield Case(f"{name} layers", "layers", name, 8 * 64)
        yield Case("autocast layers", "layers", name, 8 * 64)


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    eager, ours, tensors = build(case, setting.device)
    dy = torch.randn_like(eager())
    makers = {name: partial(_variant, call, tensors, dy) for name, call in ((EAGER, eager), (OURS, ours))}
    is_cuda = setting.device.type == "cuda"
    found = measure.compare(makers, setting, allowed=SAME, max_rounds=2000, host=is_cuda)
    return {"id": case.id, **vars(case), "variants": found}


def _variant(call: Callable[[], Tensor], tensors: tuple[Tensor, ...], dy: Tensor) -> Variant:
    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(measure.Above.apply(call(), dy), tensors)

    return Variant(
        {"forward_backward": forward_backward, "no_grad": torch.no_grad()(call)},
        lambda: (call().detach(), *forward_backward()),
    )


def missed(result: dict[str, Any]) -> Iterator[str]:
    """Calls that cost more than they should."""
    for row in result["cases"]:
        ours = row["variants"][OURS]
        if "error" in ours:
            yield f"{row['id']}: {ours['error']}"
        elif row["group"] in TARGETS:
            ratio, over = ours["forward_backward"]["ratio"], ours["forward_backward"]["over_eager_us"]
            most_ratio, most_over = TARGETS[row["group"]]
            if ratio > most_ratio and over > most_over:
                target = f"at most {most_ratio:.2f}x or {most_over:.0f} us"
                yield f"{row['id']}: {ratio:.2f}x eager, {over:+.1f} us, target {target}"


Built = tuple[Callable[[], Tensor], Callable[[], Tensor], tuple[Tensor, ...]]


def build(case: Case, device: torch.device) -> Built:
    """Eager's call, ours, and the tensors whose gradients are computed."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).requires_grad_()

    def both(eager: Callable[..., Tensor], ours: Callable[..., Tensor], *tensors: Tensor) -> Built:
        return partial(eager, *tensors), partial(ours, *tensors), tensors

    elements, name, is_small = case.elements, case.activation, case.group == "small"
    if case.operation == "fuse":
        x = randn(elements // 64, 64)
        model = nn.Sequential(nn.Linear(64, 64), BETWEEN_LAYERS[name](), nn.Linear(64, 64)).to(device)
        region = zoo.twin(model)
        fl.fuse(region)
        return partial(model, x), partial(region, x), (x, *model.parameters())
    if case.operation == "layers":
        x = randn(1, elements // 64, 64)
        blocks = nn.Sequential(*[zoo.TransformerBlock(64, 128, GATED[name]) for _ in range(LAYERS)]).to(device)
        for dropout in (module for module in blocks.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0  # results are compared
        fused = zoo.twin(blocks)
        fl.fuse(fused)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.group == "autocast layers")
        return autocast(partial(blocks, x)), autocast(partial(_however_small, fused, x)), (x, *blocks.parameters())
    if case.operation == "module":
        return both(nn.GELU(), fl.GELU(), randn(elements // 64, 64))
    width = 64 if is_small else 256
    if case.operation == "dense":
        tensors = [randn(elements // width, 64), randn(width, 64, scale=0.125), randn(width)]
    elif case.operation == "conv":
        channels, size = (8, 8) if is_small else (16, 16)
        x = randn(elements // (channels * size * size), 8, size, size)
        tensors = [x, randn(channels, 8, 3, 3, scale=0.1), randn(channels)]
    elif case.operation == "bias_act":
        tensors = [randn(elements // width, width), randn(width)]
    else:
        parts = 2 if case.operation == "gated_mlp" else 1
        pairs = [(randn(256, 64, scale=0.125), randn(256)) for _ in range(parts)]
        pairs.append((randn(64, 256, scale=0.0625), randn(64)))
        tensors = [randn(elements // 256, 64), *(tensor for pair in pairs for tensor in pair)]
    operation = {"dense": "dense_bias_act", "conv": "conv_bias_act"}.get(case.operation, case.operation)
    more = {"padding": 1} if case.operation == "conv" else {}
    eager = partial(getattr(reference, operation), function=resolve(name).plain, **more)
    return both(eager, partial(getattr(fl, operation), activation=name, **more), *tensors)


def _however_small(model: nn.Module, x: Tensor) -> Tensor:
    limits = region.LEAST_BYTES, region.GPU_LEAST_BYTES, masks.LEAST_BYTES
    region.LEAST_BYTES = region.GPU_LEAST_BYTES = masks.LEAST_BYTES = 0
    try:
        y: Tensor = model(x)
        return y
    finally:
        region.LEAST_BYTES, region.GPU_LEAST_BYTES, masks.LEAST_BYTES = limits


BENCHMARKS = {
    "overhead": Benchmark(
        "overhead",
        DEFINITIONS,
        cases=lambda kind: [*cases()],
        measure=measure_case,
        missed=missed,
        budget_seconds=480.0,
        case_seconds=3.0,
        threads=1,
    )
}
