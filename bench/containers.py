"""``python -m bench containers``: deeper networks in the same memory.

ResNet-152 as a sequence, recomputed as far as each variant says: all of it in ``torch.utils.checkpoint_sequential``'s
segments, and in ours; and what lies between convolutions. For each of torch's variants one of ours is given the same
memory. And a reversible network (RevNet) of several depths: plain and invertible.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

from . import measure
from .grid import Benchmark
from .measure import Setting, Variant
from .reference import resnet

TORCH_SEGMENTS = (4, 8, 16)
#: Of what eager keeps, for the variant that runs cheap operations again.
CHEAP = 0.6
DEFINITIONS = {
    "resnet152": "ResNet-152 in training mode, float32, its parts in one sequence",
    "revnet": "additive couplings of two 3x3 convolutions with batch norm and ReLU for each stream, float32",
    "checkpoint_sequential-N": "torch.utils.checkpoint_sequential in N segments, not reentrant",
    "same-memory-N": "fl.SublinearSequential with what that keeps at its worst moment as its memory_budget_bytes",
    "sublinear": "fl.SublinearSequential as it is",
    "cheap": "the same with recompute='cheap', which keeps the results of convolutions, and 0.6 of what eager keeps as "
    "its memory_budget_bytes",
    "invertible": "fl.InvertibleSequential",
    "time": "microseconds of forward+backward: median and quartiles over interleaved rounds",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles; speed is its inverse",
    "saved_bytes": "kept from the forward pass, without images, parameters and buffers",
    "peak_bytes": "allocated at the worst moment of forward+backward over what lived before, weights and their "
    "gradients among it: so it is activations, their gradients, and temporaries",
}
#: (N, 3, H, W). 224 x 224 takes a CPU of four threads ten seconds a step, eager, and twelve variants share the time.
IMAGES = {"cpu": (16, 3, 128, 128), "cuda": (16, 3, 224, 224)}
STREAMS = {"cpu": (16, 32, 32, 32), "cuda": (64, 64, 32, 32)}
QUICK_IMAGES, QUICK_STREAMS, QUICK_WIDTHS, QUICK_DEPTH = (2, 3, 32, 32), (2, 4, 8, 8), (8, 8, 16, 16), 4
#: How far a variant may be from eager (norm of the difference over the norm) and still be worth timing: no test of
#: accuracy. 152 layers carry a rounding far.
SAME = 5e-2
Makers = dict[str, Callable[[], Variant]]


@dataclass(frozen=True)
class Case:
    """``depth``: in layers of a ResNet, or blocks of a RevNet; ``share``: of the seconds, beside the others'."""

    id: str
    depth: int
    share: float


CASES = (*(Case(f"revnet/{depth}", depth, depth / 40) for depth in (8, 32, 128)), Case("resnet152", 152, 16.0))


def measure_case(case: Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    kind = setting.device.type
    torch.manual_seed(0)
    if case.id == "resnet152":
        x = torch.randn(QUICK_IMAGES if setting.quick else IMAGES[kind]).to(setting.device)
        makers = resnets(case.depth, x, setting)
    else:
        batch, channels, *size = QUICK_STREAMS if setting.quick else STREAMS[kind]
        x = torch.randn(batch, 2 * channels, *size).to(setting.device).requires_grad_()
        makers = revnets(min(case.depth, QUICK_DEPTH) if setting.quick else case.depth, x, channels)
    found = measure.compare(makers, setting, allowed=SAME, min_rounds=3, max_rounds=30, warm_up=1)
    return {"id": case.id, "dtype": "float32", "input": list(x.shape), "layers": case.depth, "variants": found}


def variant(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Variant:
    """``dy``: the gradient from above. A step adds to gradients that are there from the comparison on."""

    def step() -> None:
        measure.Above.apply(call(x), dy).backward()  # nobody holds the output, as in a network

    def results() -> list[Tensor]:
        """The output, and the norms of all gradients, which are zero afterwards."""
        y = call(x)
        measure.Above.apply(y, dy).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norms = torch.stack([gradient.norm() for gradient in gradients])
        for gradient in gradients:
            gradient.zero_()
        return [y.detach(), norms]

    return Variant({"forward_backward": step}, results, forward=partial(call, x), own=[net, x], step=step)


def resnets(depth: int, x: Tensor, setting: Setting) -> Makers:
    def parts() -> list[nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            widths = QUICK_WIDTHS if setting.quick else (64, 128, 256, 512)
            return [part.to(setting.device).train() for part in resnet(50 if setting.quick else depth, widths=widths)]

    dy = torch.randn(len(x), 1000).to(x.device) / len(x)

    def by_torch(segments: int) -> Variant:
        net = nn.Sequential(*parts())
        return variant(net, lambda x: checkpoint_sequential(net, segments, x, use_reentrant=False), x, dy)

    def by(container: Callable[..., nn.Module], **options: Any) -> Variant:
        net = container(*parts(), **options)
        return variant(net, net, x, dy)

    kept = saved_bytes(nn.Sequential(*(children := parts())), x, exclude=[x, *children])
    makers: Makers = {"eager": partial(by, nn.Sequential)}
    ours = partial(by, fl.SublinearSequential)
    for segments in TORCH_SEGMENTS:
        makers[f"checkpoint_sequential-{segments}"] = partial(by_torch, segments)
        makers[f"same-memory-{segments}"] = partial(ours, memory_budget_bytes=at_once(children, segments, x))
    makers["sublinear"] = ours
    makers["cheap"] = partial(ours, recompute="cheap", memory_budget_bytes=int(CHEAP * kept))
    return makers


def at_once(parts: Sequence[nn.Module], segments: int, x: Tensor) -> int:
    """The bytes that ``checkpoint_sequential`` keeps at its worst moment: inputs of segments, and what one saves."""
    size, inputs, worst = len(parts) // segments, 0, 0
    for number in range(segments):
        stop = len(parts) if number == segments - 1 else (number + 1) * size
        segment = nn.Sequential(*parts[number * size : stop])
        worst = max(worst, inputs + saved_bytes(segment, x, exclude=[segment, x]))
        with torch.no_grad():
            x = segment(x)
        x = x.requires_grad_()
        inputs += x.nbytes
    return worst


def revnets(depth: int, x: Tensor, channels: int) -> Makers:
    dy = torch.randn(x.shape).to(x.device)

    def branch() -> nn.Module:
        convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        layers = [(nn.BatchNorm2d(channels), nn.ReLU(), conv) for conv in convs]
        return nn.Sequential(*(layer for block in layers for layer in block))

    def make(is_invertible: bool) -> Variant:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            couplings = [fl.AdditiveCoupling(branch(), branch()) for _ in range(depth)]
        net = fl.InvertibleSequential(*couplings).to(x.device)
        net.checkpoint = is_invertible
        return variant(net, lambda x: torch.cat(net(*x.chunk(2, 1)), 1), x, dy)

    return {"eager": partial(make, False), "invertible": partial(make, True)}


BENCHMARKS = {"containers": Benchmark("containers", DEFINITIONS, lambda kind: CASES, measure_case, case_seconds=400.0)}
