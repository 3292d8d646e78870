"""Small models, and ways to train them, in which ``save_once`` gives PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fusedlayers as fl
from fusedlayers.recipes.patch import patch_of

WIDTH, CHANNELS = 32, 8


# --- models -----------------------------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    blocks = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def _convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    blocks = [
        (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), activation())
        for _ in range(3)
    ]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Conv2d(CHANNELS, 4, 1))


class Gated(nn.Module):
    """RMS norm and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(WIDTH), nn.Linear(96, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Diffusion(nn.Module):
    """Group norm, SiLU, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, CHANNELS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            h = self.convolutions[i](F.silu(self.norms[i](x)))
            x = x + self.convolutions[i + 1](F.silu(self.norms[i + 1](h)))
        return x


class Residual(nn.Module):
    """Blocks of a ResNet."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(6))
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2, 4):
            h = F.relu(self.norms[i](self.convolutions[i](x)), inplace=self.inplace)
            h = self.norms[i + 1](self.convolutions[i + 1](h))
            h = h.add_(x) if self.inplace else h + x
            x = F.relu(h, inplace=self.inplace)
        return x


class Segmentation(nn.Module):
    """Instance norms, leaky ReLU, a pooled level, a skip, a pad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.norm, self.plain = nn.InstanceNorm2d(CHANNELS, affine=True), nn.InstanceNorm2d(CHANNELS)
        self.last = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.leaky_relu(self.norm(self.first(x)), 0.01)
        below = F.leaky_relu(self.plain(self.second(F.max_pool2d(skip, 2))), 0.1, inplace=True)
        y = torch.cat([skip, F.interpolate(below, scale_factor=2.0)], 1)
        return self.last(F.pad(y, (1, 0, 1, 0)))  # type: ignore[no-any-return]


class Trained(nn.Module):
    """An activation with a trained order, in many operations, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        order = torch.sigmoid(self.order) * 1.8 + 0.1
        above = torch.where(x > 0, x, 1.0).pow(1 - order / 2) / torch.exp(torch.lgamma(2 - order / 2))
        below = torch.where(x <= 0, x, 0.0)
        return torch.where(x > 0, above, 1.76 * (torch.exp(below) - 1 + order * (torch.exp(below - 1) - 0.3)))


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


class SpelledNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return scale * x * x.abs()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (x, scale) = grads, ctx.saved_tensors
        return 2 * dy * scale * x.abs(), (dy * x * x.abs()).sum()


class OwnFunction(nn.Module):
    """A node of a user's own makes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return Squares.apply(x, self.scale)  # type: ignore[no-any-return]


class GateOfTwo(nn.Module):
    """It takes several arguments, one by its name, and a number."""

    def forward(self, x: Tensor, power: int, *, gate: Tensor) -> Tensor:
        return (x * torch.sigmoid(gate) + gate.sin().pow(power)) * (1 + torch.tanh(gate))


class Noisy(nn.Module):
    """It draws random numbers, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return x * torch.sigmoid(x + torch.rand_like(x)).exp()


class Spelled(nn.Module):
    """All of these between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm, self.act, self.own, self.gate, self.noisy = (
            kind() for kind in (SpelledNorm, NewGELU, OwnFunction, GateOfTwo, Noisy)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, fifth, last = self.linears
        h = second(self.act(first(self.norm(x))))
        h = third(self.own(self.norm(h)))
        h = fifth(self.gate(h, 2, gate=fourth(h)))
        return x + last(self.noisy(h))  # type: ignore[no-any-return]


def _rows() -> Tensor:
    return torch.randn(4, 16, WIDTH)


def _images() -> Tensor:
    return torch.randn(2, CHANNELS, 12, 12)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (_mlp, _rows),
    "gated": (Gated, _rows),
    "relu": (lambda: _convolutions(nn.ReLU), _images),
    "relu in place": (lambda: _convolutions(lambda: nn.ReLU(inplace=True)), _images),
    "silu in place": (lambda: _convolutions(lambda: nn.SiLU(inplace=True)), _images),
    "elu in place": (lambda: _convolutions(lambda: nn.ELU(inplace=True)), _images),
    "diffusion": (Diffusion, _images),
    "residual": (lambda: Residual(False), _images),
    "residual in place": (lambda: Residual(True), _images),
    "segmentation": (Segmentation, _images),
    "encoder with dropouts": (
        partial(nn.TransformerEncoderLayer, WIDTH, 2, 64, batch_first=True, activation="gelu"),
        _rows,
    ),
    "trained activations": (lambda: _convolutions(Trained), _images),
    "spelled out": (Spelled, _rows),
}


# --- contexts ---------------------------------------------------------------------------------------------------------

#: Makes the region that a model's calls are in, or nothing.
Enter = Callable[[nn.Module], AbstractContextManager[Any]]
#: Trains a model on an input, and returns what is to be the same, besides gradients, buffers and random states.
Context = Callable[[nn.Module, Tensor, Enter], list[Tensor]]


@contextmanager
def recipes(model: nn.Module) -> Iterator[None]:
    """Fuses what is entered, once, and runs it within ``save_once``; it stays fused during backward."""
    with fused(model), fl.save_once():
        yield


def fused(model: nn.Module) -> AbstractContextManager[Any]:
    """Fuses what is entered, once."""
    if patch_of(model) is None:
        fl.fuse(model)
    return nullcontext()


def eager(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def plain(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
    with enter(model):
        y = model(x)
    y.float().square().mean().backward()
    return [y, *([x.grad] if x.grad is not None else [])]


def _in_dtype(dtype: torch.dtype) -> Context:
    return lambda model, x, enter: plain(model.to(dtype), x.to(dtype), enter)


def _under(context: Callable[[], AbstractContextManager[Any]]) -> Context:
    def train(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
        with context(), enter(model):
            y = model(x)
        y.float().square().mean().backward()
        return [y]

    return train


#: torch's selective checkpoint, which keeps the results of products.
SELECTIVE: dict[str, Any] = {
    "context_fn": partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.convolution.default],
    )
}


def _checkpoint_inside(reentrant: bool, **options: Any) -> Context:
    def train(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
        x.requires_grad_()
        with enter(model):
            y = checkpoint(model, x * 1, use_reentrant=reentrant, **options)
            y = F.silu(y) * y
        y.square().mean().backward()
        return [y, x.grad]  # type: ignore[list-item]

    return train


def _checkpoint_around(reentrant: bool, **options: Any) -> Context:
    def train(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
        def run(x: Tensor) -> Tensor:
            with enter(model):
                return model(x)  # type: ignore[no-any-return]

        x.requires_grad_()
        y = checkpoint(run, x * 1, use_reentrant=reentrant, **options)
        y.square().mean().backward()
        return [y, x.grad]

    return train


def _checkpoints_across(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
    """Each part in a checkpoint, with a region inside, all in a region."""
    x.requires_grad_()
    h = x
    with enter(model):
        for part in model if isinstance(model, nn.Sequential) else [model]:

            def run(h: Tensor, part: nn.Module = part) -> Tensor:
                with enter(part):
                    return part(h)  # type: ignore[no-any-return]

            h = part(h.clone()) if getattr(part, "inplace", False) else checkpoint(run, h, use_reentrant=False)
    h.square().mean().backward()
    return [h, x.grad]  # type: ignore[list-item]


def _penalty(inside: bool) -> Context:
    def train(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
        x.requires_grad_()
        with enter(model):
            y = model(x)
            if inside:
                (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        if not inside:
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (1e-3 * g.square().sum()).backward()
        return [y, g.detach(), x.grad]  # type: ignore[list-item]

    return train


def _frozen(only_norms: bool) -> Context:
    def train(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
        norms = [p for module in model.modules() if hasattr(module, "eps") for p in module.parameters()]
        for parameter in norms if only_norms else [*model.parameters()][::2]:
            parameter.requires_grad_(False)
        return plain(model, x.requires_grad_(), enter)

    return train


def _channels_last(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
    if x.dim() == 4:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    else:
        x = x.mT.contiguous().mT
    return plain(model, x.requires_grad_(), enter)


def _backward_inside(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
    with enter(model):
        model(x).square().mean().backward()
        loss = model(x).square().mean()
    loss.backward()
    return [loss]


def _nested(model: nn.Module, x: Tensor, enter: Enter) -> list[Tensor]:
    with enter(model):
        with enter(model):
            y = model(x)
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t), enter(model):
            z = model(y if x.shape == y.shape else x)
    (y.square().mean() + z.square().mean()).backward()
    return [y, z]


@contextmanager
def _copying() -> Iterator[None]:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        yield


CONTEXTS: dict[str, Context] = {
    "plain": plain,
    "bfloat16": _in_dtype(torch.bfloat16),
    "float16": _in_dtype(torch.float16),
    "autocast": _under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast to float16": _under(lambda: torch.autocast("cpu", torch.float16)),
    "hooks that copy": _under(_copying),
    "hooks that change layouts": _under(lambda: saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t)),
    "save_on_cpu": _under(save_on_cpu),
    "checkpoint inside": _checkpoint_inside(False),
    "reentrant checkpoint inside": _checkpoint_inside(True),
    "checkpoint around": _checkpoint_around(False),
    "reentrant checkpoint around": _checkpoint_around(True),
    "selective checkpoint inside": _checkpoint_inside(False, **SELECTIVE),
    "selective checkpoint around": _checkpoint_around(False, **SELECTIVE),
    "checkpoints across": _checkpoints_across,
    "penalty": _penalty(False),
    "penalty inside": _penalty(True),
    "frozen": _frozen(False),
    "frozen norms": _frozen(True),
    "channels last": _channels_last,
    "backward inside": _backward_inside,
    "nested": _nested,
}


def trained(model: str, context: str, enter: Enter) -> list[Tensor]:
    """All that a training step leaves."""
    torch.manual_seed(0)
    make, inputs = MODELS[model]
    module, x = make().train(), inputs()
    results = CONTEXTS[context](module, x, enter)
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*(result.detach() for result in results), *gradients, *module.buffers(), torch.get_rng_state()]
