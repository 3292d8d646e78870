"""What a CPU cannot show of ``fuse``, for ``gpu-check``: CUDA's nodes and autocast, graphs, streams, a host that waits
for nothing, and the times of four models in both modes. The models are PyTorch alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import peak_bytes, saved_bytes

from . import gpu_items, measure
from .gpu_items import Case, Findings, Wrong
from .saved import Diffusion

SECONDS_OF_A_MODEL = 8.0


class SpelledNorm(nn.Module):
    """An RMS norm as transformers' models spell it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down, self.act = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """A block of a transformer: LLaMA's, or BERT's with a GELU."""

    def __init__(self, width: int, hidden: int, is_gated: bool) -> None:
        super().__init__()
        norm = SpelledNorm if is_gated else nn.LayerNorm
        self.norms = nn.ModuleList([norm(width), norm(width)])
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), width // 64
        plain = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.Dropout(0.1))
        self.mlp = GatedMLP(width, hidden) if is_gated else plain

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def _convolutions() -> nn.Module:
    layers = [(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.SiLU()) for _ in range(4)]
    return nn.Sequential(*(layer for block in layers for layer in block))


#: By name: the model and its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LLaMA blocks": (lambda: nn.Sequential(*(Block(2048, 5632, True) for _ in range(4))), (4, 2048, 2048)),
    "BERT blocks": (lambda: nn.Sequential(*(Block(768, 3072, False) for _ in range(4))), (32, 512, 768)),
    "convolutions, batch norms, SiLU": (_convolutions, (64, 64, 112, 112)),
    "diffusion blocks": (Diffusion, (64, 64, 128, 128)),
}
_WAYS = ("float32", "bfloat16", "autocast")


def items() -> Iterator[Case]:
    for name in MODELS:
        for way in _WAYS:
            yield Case(f"same bits: {name}, {way}", partial(_same_bits, name, way))
    for name in MODELS:
        yield Case(f"default: {name}", partial(_default, name))
    for exact in (True, False):
        yield Case(f"no waiting, exact={exact}", partial(_no_waiting, exact))
        yield Case(f"graph, exact={exact}", partial(_in_a_graph, exact))
        yield Case(f"side stream, exact={exact}", partial(_on_a_stream, exact))
    for name in MODELS:
        yield Case(f"times: {name}", partial(_times, name))


def _subject(
    name: str, way: str = "bfloat16", *, small: bool = True
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A model, and the loss of a model like it."""
    make, shape = MODELS[name]
    if small or gpu_items.is_fake():
        shape = (2, *shape[1:]) if len(shape) == 3 else (2, shape[1], 32, 32)
    if gpu_items.is_fake() and len(shape) == 3:
        shape = (1, 32, shape[2])
    torch.manual_seed(0)
    device = gpu_items.device()
    model, x = make().to(device).train(), torch.randn(shape, device=device)
    if way == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    x.requires_grad_()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=way == "autocast"):
            y = model(x)
        found: Tensor = y.float().square().mean()
        return found

    return model, loss


def _gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    value = loss(model)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def _same_bits(name: str, way: str) -> Findings:
    model, loss = _subject(name, way)
    before = copy.deepcopy(model)
    expected = _gradients(before, loss)
    eager = saved_bytes(lambda: loss(before), exclude=[before])
    fl.fuse(model, exact=True)
    if gpu_items.is_fake():
        _gradients(model, loss)
        return {}
    found = _gradients(model, loss)
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = sum(not torch.equal(a, b) for a, b in zip(_gradients(copy.deepcopy(before), loss), expected, strict=True))
    if wrong > again:  # PyTorch's own kernels may add up in any order
        raise Wrong(f"{wrong} of {len(found)} tensors have other bits, where PyTorch differs from itself in {again}")
    return {"share": round(saved_bytes(lambda: loss(model), exclude=[model]) / eager, 3), "unstable": again}


def _default(name: str) -> Findings:
    """Beside float64, by the rule of two times eager's error."""
    model, loss = _subject(name, "bfloat16")
    expected = _gradients(copy.deepcopy(model), loss)
    fused = copy.deepcopy(model)
    fl.fuse(fused)
    found = _gradients(fused, loss)
    if gpu_items.is_fake():
        return {}
    wide, wide_loss = _subject(name, "float32")
    wide.load_state_dict(model.state_dict())
    exact = _gradients(wide.float(), wide_loss)
    errors = [
        [float((t.float() - e).norm() / e.norm().clamp_min(1e-20)) for t, e in zip(tensors, exact, strict=True)]
        for tensors in (found, expected)
    ]
    worst = max(ours / max(theirs, 1e-3) for ours, theirs in zip(*errors, strict=True))
    if worst > 2:
        raise Wrong(f"an error is {worst:.2f} times eager's")
    return {"worst_of_eagers_error": round(worst, 2)}


def _no_waiting(exact: bool) -> Findings:
    """The host waits for nothing in a step with an optimizer."""
    model, loss = _subject("LLaMA blocks")
    fl.fuse(model, exact=exact)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if gpu_items.is_fake():
        return {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {}


def _in_a_graph(exact: bool) -> Findings:
    model, loss = _subject("LLaMA blocks")
    fl.fuse(model, exact=exact)
    expected = [t.clone() for t in _gradients(model, loss)]
    if gpu_items.is_fake():
        return {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _gradients(model, loss)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(model)
        value.backward()
    graph.replay()
    found = [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    _expect_near(found, expected, "replayed")
    return {}


def _on_a_stream(exact: bool) -> Findings:
    model, loss = _subject("LLaMA blocks")
    fl.fuse(model, exact=exact)
    expected = [t.clone() for t in _gradients(model, loss)]
    if gpu_items.is_fake():
        return {}
    stream = torch.cuda.Stream()
    for _ in range(5):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = _gradients(model, loss)
        torch.cuda.current_stream().wait_stream(stream)
        _expect_near(found, expected, "on a side stream")
    return {}


def _expect_near(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    measure.expect_same(found, expected, 1e-2)
    if not all(bool(t.isfinite().all()) for t in found):
        raise Wrong(f"numbers that are not finite, {what}")


def _times(name: str) -> Findings:
    model, loss = _subject(name, small=False)
    subjects: dict[str, nn.Module] = {"eager": model}
    for mode, exact in (("exact", True), ("fusedlayers", False)):
        subjects[mode] = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        fl.fuse(subjects[mode], exact=exact)

    def step(subject: nn.Module) -> None:
        loss(subject).backward()
        subject.zero_grad(set_to_none=True)

    found: dict[str, Any] = {}
    runs = {mode: partial(step, subject) for mode, subject in subjects.items()}
    if gpu_items.is_fake():
        for run in runs.values():
            run()
        return found
    times = measure.interleave(runs, gpu_items.device(), seconds=SECONDS_OF_A_MODEL, min_rounds=5, host=True)
    for mode, subject in subjects.items():
        found[mode] = {
            **measure.summary(times[mode], times["eager"]),
            "saved_bytes": saved_bytes(partial(loss, subject), exclude=[subject]),
            "peak_bytes": peak_bytes(runs[mode], device=gpu_items.device()),
        }
    return found
