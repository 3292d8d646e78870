"""What a CPU cannot show, for ``gpu-check``: of ``fuse`` CUDA's nodes and autocast, a host that waits for nothing, and
the times of four models; of layers and fused models CUDA graphs, streams, threads, memory that runs out.
The models are PyTorch alone."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

from . import measure, zoo
from .gpu_items import Case, Findings, Wrong, device, is_fake, normal
from .measure import Setting, Variant

SECONDS_OF_A_MODEL = 8.0
#: By name: the model and its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LLaMA blocks": (lambda: _blocks(2048, 5632, True), (4, 2048, 2048)),
    "BERT blocks": (lambda: _blocks(768, 3072, False), (32, 512, 768)),
    "convolutions, batch norms, SiLU": (partial(zoo.convolutions, 64, 4), (64, 64, 112, 112)),
    "diffusion blocks": (zoo.Diffusion, (64, 64, 128, 128)),
}
#: The part of the widths without a GPU: CPUs that lack AVX-512 took minutes for a case in bfloat16.
FAKE_WIDTHS = 4
WAYS = ("float32", "bfloat16", "autocast")
#: Its norms are spelled out, and run again in backward.
SPELLED = "LLaMA blocks"
Loss = Callable[[nn.Module], Tensor]


def fuse() -> Iterator[Case]:
    for name in MODELS:
        for way in WAYS:
            yield Case(f"same bits: {name}, {way}", partial(_same_bits, name, way))
    yield Case("no waiting", _no_waiting)
    for name in MODELS:
        yield Case(f"times: {name}", partial(_times, name))


def _blocks(width: int, hidden: int, is_gated: bool) -> nn.Module:
    part = FAKE_WIDTHS if is_fake() else 1
    return nn.Sequential(*(zoo.TransformerBlock(width // part, hidden // part, is_gated) for _ in range(4)))


def _model(name: str, way: str = "bfloat16", *, small: bool = True) -> tuple[nn.Module, Loss]:
    """A model, and the loss of a model like it."""
    make, shape = MODELS[name]
    if small or is_fake():
        shape = (2, *shape[1:]) if len(shape) == 3 else (2, shape[1], 32, 32)
    if is_fake() and len(shape) == 3:
        shape = (1, 32, shape[2] // FAKE_WIDTHS)
    torch.manual_seed(0)
    model, x = make().to(device()).train(), torch.randn(shape, device=device())
    if way == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    x.requires_grad_()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16, enabled=way == "autocast"):
            y = model(x)
        found: Tensor = y.float().square().mean()
        return found

    return model, loss


def _results(model: nn.Module, loss: Loss) -> list[Tensor]:
    """The loss, the gradients and the buffers."""
    torch.manual_seed(1)
    value = loss(model)
    return [value.detach(), *torch.autograd.grad(value, [*model.parameters()]), *model.buffers()]


def _same_bits(name: str, way: str) -> Findings:
    model, loss = _model(name, way)
    before = copy.deepcopy(model)
    expected = _results(before, loss)
    eager = saved_bytes(lambda: loss(before), exclude=[before])
    fl.fuse(model)
    found = _results(model, loss)
    if is_fake():
        return {}
    wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    again = sum(not torch.equal(a, b) for a, b in zip(_results(copy.deepcopy(before), loss), expected, strict=True))
    if wrong > again:  # PyTorch's own kernels may add up in any order
        raise Wrong(f"{wrong} of {len(found)} tensors have other bits, where PyTorch differs from itself in {again}")
    return {"share": round(saved_bytes(lambda: loss(model), exclude=[model]) / eager, 3), "unstable": again}


def _no_waiting() -> Findings:
    """The host waits for nothing in a step with an optimizer."""
    model, loss = _model(SPELLED)
    fl.fuse(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if is_fake():
        return {}
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {}


def _times(name: str) -> Findings:
    model, loss = _model(name, small=False)

    def variant(mode: str) -> Variant:
        own = model
        if mode != "eager":
            own = zoo.twin(model)
            fl.fuse(own)

        def step() -> None:
            loss(own).backward()
            own.zero_grad(set_to_none=True)

        return Variant({"forward_backward": step}, forward=partial(loss, own), own=[own], step=step)

    makers = {mode: partial(variant, mode) for mode in ("eager", "fusedlayers")}
    setting = Setting(device(), SECONDS_OF_A_MODEL, quick=is_fake())
    rows = measure.compare(makers, setting, host=True)
    errors = [f"{mode}: {row['error']}" for mode, row in rows.items() if "error" in row]
    if errors:
        raise Wrong("; ".join(errors))
    return rows


# --- where kernels run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A forward and a backward pass. ``run``: its results, which may differ by ``allowed`` of their norm from run to
    run; ``x``: what they depend on."""

    run: Callable[[], list[Tensor]]
    x: Tensor
    allowed: float


def _dense(seed: int = 0) -> Step:
    rows = 512 if is_fake() else 4096  # where nothing is launched, a CPU multiplies
    shapes = ((rows, 512), (2048, 512), (2048,))
    made = (normal(*s, dtype=torch.bfloat16, seed=seed + i, scale=0.05) for i, s in enumerate(shapes))
    x, w, b = (tensor.requires_grad_() for tensor in made)

    def run() -> list[Tensor]:
        y = fl.dense_bias_act(x, w, b, "gelu")
        return [y.detach().clone(), *torch.autograd.grad(y, (x, w, b), torch.ones_like(y))]

    return Step(run, x, 0.0)


def _fused(seed: int = 0) -> Step:
    model, loss = _model(SPELLED)
    fl.fuse(model)
    parameters = [*model.parameters()]

    def run() -> list[Tensor]:
        value = loss(model)
        return [value.detach().clone(), *torch.autograd.grad(value, parameters)]

    return Step(run, parameters[0], 1e-2)


#: By name, what makes a step from a seed.
STEPS: dict[str, Callable[..., Step]] = {"dense": _dense, "fuse": _fused}


def contexts() -> Iterator[Case]:
    for name, make in STEPS.items():
        for context in (_in_a_graph, _on_a_stream, _on_threads):
            yield Case(f"{context.__name__.strip('_').replace('_', ' ')}: {name}", partial(context, make))
    yield Case("out of memory", _out_of_memory)


def _in_a_graph(make: Callable[..., Step]) -> Findings:
    step = make()
    step.run()
    if is_fake():
        return {}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    graph.replay()
    measure.expect_same(captured, step.run(), step.allowed)
    with torch.no_grad():
        step.x.mul_(0.5)
    graph.replay()
    measure.expect_same(captured, step.run(), step.allowed)
    return {}


def _on_a_stream(make: Callable[..., Step]) -> Findings:
    step = make()
    expected = step.run()
    if is_fake():
        return {}
    stream = torch.cuda.Stream()
    for _ in range(10):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step.run()
        torch.cuda.current_stream().wait_stream(stream)
        measure.expect_same(found, expected, step.allowed)
    return {}


def _on_threads(make: Callable[..., Step]) -> Findings:
    errors: list[str] = []

    def work(step: Step) -> None:
        try:
            expected = step.run()
            for _ in range(0 if is_fake() else 10):
                measure.expect_same(step.run(), expected, step.allowed)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(make(seed),)) for seed in range(1 if is_fake() else 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise Wrong("; ".join(errors))
    return {}


def _out_of_memory() -> Findings:
    step = _dense()
    expected = step.run()
    if is_fake():
        return {}
    z = torch.zeros(1 << 28, dtype=torch.bfloat16, device="cuda").requires_grad_()
    held: list[Any] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            held.append(torch.empty(256 << 20, dtype=torch.int8, device="cuda"))
    try:
        fl.bias_act(z, None, "gelu")
    except torch.OutOfMemoryError:
        held.clear()
        torch.cuda.empty_cache()
        measure.expect_same(step.run(), expected, 0.0)
        return {}
    raise Wrong("512 MiB were found where less than 256 were free")
