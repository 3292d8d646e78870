"""What a CPU cannot show, for ``gpu-check``: after ``fuse`` the times and peaks of models at users' sizes, and CUDA's
bits; a host that waits for nothing; layers and fused models in CUDA graphs, on streams and threads, without memory.

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
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.memory import saved_bytes

from .. import measure, zoo
from ..measure import Setting, Variant
from .items import Case, Findings, Wrong, device, is_fake, normal

SECONDS_OF_A_MODEL = 8.0
#: The part of the widths without a GPU: CPUs that lack AVX-512 took minutes for a case in bfloat16.
FAKE_WIDTHS = 4
Loss = Callable[[nn.Module], Tensor]


def _blocks(width: int, hidden: int, is_gated: bool, count: int = 4) -> nn.Module:
    part, count = (FAKE_WIDTHS, 2) if is_fake() else (1, count)
    return nn.Sequential(*(zoo.TransformerBlock(width // part, hidden // part, is_gated) for _ in range(count)))


#: By name: the model and its input, of which bits are compared on fewer and smaller ones.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BERT 8 x 128": (partial(_blocks, 768, 3072, False, 12), (8, 128, 768)),
    "BERT 8 x 512": (partial(_blocks, 768, 3072, False, 12), (8, 512, 768)),
    "BERT 32 x 512": (partial(_blocks, 768, 3072, False, 12), (32, 512, 768)),
    "LLaMA 4 x 2048": (partial(_blocks, 2048, 5632, True, 8), (4, 2048, 2048)),
    "Mistral 1 x 4096": (partial(_blocks, 4096, 14336, True, 2), (1, 4096, 4096)),
    "UNet's blocks": (zoo.Diffusion, (64, 64, 128, 128)),
    "MobileNetV3's blocks": (zoo.mobile_net, (128, 3, 224, 224)),
    "convolutions, batch norms, SiLU": (partial(zoo.convolutions, 64, 4), (64, 64, 112, 112)),
}
#: Ways to save memory that are timed beside eager and ``fuse``; the compiler takes most of a minute.
COMPILED = "BERT 32 x 512"
WAYS = ("float32", "bfloat16", "autocast")
#: Its norms are spelled out, and run again in backward.
SPELLED = "LLaMA 4 x 2048"


def _model(name: str, way: str = "autocast", *, small: bool = True) -> tuple[nn.Module, Loss]:
    """A model, and the loss of a model like it."""
    make, shape = (MODELS | PARTS)[name]
    is_image = len(shape) == 4
    if small or is_fake():
        shape = (2, *shape[1:-2], *(min(size, 64) for size in shape[-2:])) if is_image else (2, *shape[1:])
    if is_fake() and not is_image:
        shape = (1, 32, shape[2] // (FAKE_WIDTHS if name in MODELS else 1))
    torch.manual_seed(0)
    model, x = make().to(device()).train(), torch.randn(shape, device=device())
    if way == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    if way == "channels_last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16, enabled=way in ("autocast", "channels_last")):
            y = model(x)
        found: Tensor = y.float().square().mean()
        return found

    return model, loss


# --- times ------------------------------------------------------------------------------------------------------------


def times() -> Iterator[Case]:
    for name in MODELS:
        yield Case(f"{name}, autocast", partial(_times, name))


def _times(name: str) -> Findings:
    model, loss = _model(name, small=False)

    def variant(way: str) -> Variant:
        own: Any = model if way == "eager" else zoo.twin(model)
        if way == "fusedlayers":
            fl.fuse(own)
        elif way == "checkpoint":
            for part in own:
                part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        elif way == "compile":
            with torch._functorch.config.patch(activation_memory_budget=0.5):
                own = measure.compiled(own)
                loss(own).backward()

        def step() -> None:
            loss(own).backward()
            model.zero_grad(set_to_none=True)

        return Variant({"forward_backward": step}, forward=partial(loss, own), own=[model], step=step)

    ways = ["eager", "fusedlayers", *["checkpoint"] * isinstance(model, nn.Sequential)]
    ways += ["compile"] * (name == COMPILED and not is_fake())
    setting = Setting(device(), SECONDS_OF_A_MODEL, quick=is_fake())
    rows = measure.compare({way: partial(variant, way) for way in ways}, setting, host=True)
    errors = [f"{way}: {row['error']}" for way, row in rows.items() if "error" in row]
    if errors:
        raise Wrong("; ".join(errors))
    return rows


# --- bits -------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two experts; each gets the rows that chose it, as transformers' mixtures do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(512, 2), nn.ModuleList(zoo.GatedMLP(512, 1024) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            found = expert(rows[places]) * weights[places, None]
            y = y.index_add(0, places, found.to(y.dtype))
        return y.view_as(x)


class Masked(nn.Module):
    """Masks of attention and of ``where``, and the trained activation of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(512, 512), nn.Linear(512, 512), zoo.Snake()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(x))
        h = torch.where(h > 0, h, 0.1 * h)
        mask = torch.ones(h.shape[-2], h.shape[-2], dtype=torch.bool, device=h.device).tril()
        scores = (h @ h.transpose(-1, -2) / 512).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.down(scores @ h)  # type: ignore[no-any-return]


def _dropouts() -> nn.Module:
    """p is a number of which CUDA's kernel has another reciprocal than float64."""
    return nn.Sequential(
        nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.15), nn.Linear(2048, 512), nn.Dropout(0.15), nn.LayerNorm(512)
    )


#: Models of a few operations, whose nodes or bits are others on CUDA.
PARTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dropouts": (_dropouts, (8, 512, 512)),
    "masks": (Masked, (8, 512, 512)),
    "experts": (Experts, (8, 512, 512)),
}


def bits() -> Iterator[Case]:
    for name in ("BERT 8 x 128", SPELLED, *list(MODELS)[5:], *PARTS):
        ways = (*WAYS, "channels_last") if len((MODELS | PARTS)[name][1]) == 4 else WAYS
        for way in ways:
            yield Case(f"{name}, {way}", partial(_same_bits, name, way))
    yield Case("two streams", _two_streams)
    yield Case("no waiting", _no_waiting)


def _results(model: nn.Module, loss: Loss) -> list[Tensor]:
    """The loss, the gradients and the buffers."""
    torch.manual_seed(1)
    value = loss(model)
    return [value.detach(), *torch.autograd.grad(value, [*model.parameters()]), *model.buffers()]


def _same_bits(name: str, way: str) -> Findings:
    """Whether bits are the same, by algorithms that repeat themselves: else PyTorch's differences from itself would
    hide ours."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model, loss = _model(name, way)
        before = copy.deepcopy(model)
        expected = _results(before, loss)
        eager = saved_bytes(lambda: loss(before), exclude=[before])
        fl.fuse(model)
        found = _results(model, loss)
        if is_fake():
            return {}
        wrong = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        # Buffers of a copy go on from where those of the other ended.
        again = sum(not torch.equal(a, b) for a, b in zip(_results(_model(name, way)[0], loss), expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    if wrong > again:
        raise Wrong(f"{wrong} of {len(found)} tensors have other bits, where PyTorch differs from itself in {again}")
    return {"share": round(saved_bytes(lambda: loss(model), exclude=[model]) / eager, 3), "unstable": again}


def _two_streams() -> None:
    """Branches on two streams read values that were made on one."""
    model, act, found = nn.Linear(2048, 2048).to(device()), zoo.Snake().to(device()), list[list[Tensor]]()
    both, x = nn.ModuleList([model, act]), normal(2048, 2048, dtype=torch.float32)
    for is_fused in (False, True):
        if is_fused:
            fl.fuse(both)
        if is_fake():
            return
        side = torch.cuda.Stream()
        with fl.save_once() if is_fused else contextlib.nullcontext():
            h = act(model(x))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = (h.tanh() @ h).sum()
            b = (h.sigmoid() @ h).sum()
            torch.cuda.current_stream().wait_stream(side)
        found.append([*torch.autograd.grad(a + b, [*both.parameters()])])
    measure.expect_same(found[1], found[0], 0.0)


def _no_waiting() -> None:
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
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def _in_a_graph(make: Callable[..., Step]) -> None:
    step = make()
    step.run()
    if is_fake():
        return
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


def _on_a_stream(make: Callable[..., Step]) -> None:
    step = make()
    expected = step.run()
    if is_fake():
        return
    stream = torch.cuda.Stream()
    for _ in range(10):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step.run()
        torch.cuda.current_stream().wait_stream(stream)
        measure.expect_same(found, expected, step.allowed)


def _on_threads(make: Callable[..., Step]) -> None:
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


def _out_of_memory() -> None:
    step = _dense()
    expected = step.run()
    if is_fake():
        return
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
        return
    raise Wrong("512 MiB were found where less than 256 were free")
