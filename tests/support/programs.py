"""Random programs for ``test_programs.py``: small trees of modules whose code is a list of instructions.

``Program(seed)`` says everything: how the model is built, what it is called with, and how a training step is taken. Two
builds of one program are alike to the last bit. Branches and spellings of one call are left out: they make the same
graphs. What changes behind ``fuse`` is in ``test_fuse.py``.

A block (``Steps``) carries one value, ``h``, from instruction to instruction, and others that an instruction kept. An
instruction is a tuple, the name of a function in ``INSTRUCTIONS`` and its arguments; blocks are nested as modules, and
instructions as lists.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Instruction = tuple[Any, ...]


# --- parts ------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Spelled out, as LLaMA's, Gemma's, and one without a weight."""

    def __init__(self, width: int, style: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5) if style != "bare" else None
        self.eps, self.style = 1e-5, style

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return y
        return y * (1.0 + self.weight) if self.style == "gemma" else self.weight * y.to(x.dtype)


class QuickGELU(nn.Module):
    scale = 1.702

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class Trained(nn.Module):
    """Swish with trained numbers, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.slope = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > -1, x * torch.sigmoid(self.beta * x), self.slope * x)


class Shared(nn.Module):
    """What it returns is its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _act_module(name: str) -> nn.Module:
    name, _, how = name.partition(" ")
    kind: Any = getattr(nn, name, None) or globals()[name]
    return kind(inplace=True) if how else kind()


ACT_MODULES = (
    *("GELU", "SiLU", "SiLU inplace", "ReLU", "ReLU inplace", "LeakyReLU", "LeakyReLU inplace", "ELU", "ELU inplace"),
    *("Mish", "Mish inplace", "Hardswish", "Hardswish inplace", "Softplus", "Tanh", "Sigmoid", "SELU", "CELU inplace"),
    *("ReLU6", "Hardtanh inplace", "Hardsigmoid", "LogSigmoid", "Softsign", "Tanhshrink"),
    *("QuickGELU", "TanhGELU", "Trained", "Trained", "Shared"),
)
_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in ("gelu", "silu", "relu", "leaky_relu", "elu", "mish", "hardswish", "softplus")
    },
    **{name: getattr(torch, name) for name in ("tanh", "sigmoid", "selu", "relu_", "tanh_", "sigmoid_")},
    "tanh-gelu": lambda h: F.gelu(h, approximate="tanh"),
    "leaky 0.3": lambda h: F.leaky_relu(h, 0.3),
    "spelled silu": lambda h: h * torch.sigmoid(h),
    "spelled gelu": lambda h: 0.5 * h * (1 + torch.erf(h * 0.7071067811865476)),
    "where": lambda h: torch.where(h > 0.1, h * h, h.sin()),
    "masked": lambda h: h.exp().masked_fill(h > 1, 0.5),
    "softmax": lambda h: 3 * h.softmax(-1),
    "cast": lambda h: h.to(torch.bfloat16).to(h.dtype).tanh() * h,
    "narrow": lambda h: h.to(torch.bfloat16).sigmoid().square().to(h.dtype),
    "index": lambda h: (h * 2)[torch.arange(h.shape[0]).flip(0)] * h,
    "silu_": lambda h: F.silu(h, inplace=True),
    "elu_": lambda h: F.elu_(h),
    "leaky_relu_": lambda h: F.leaky_relu(h, 0.1, inplace=True),
    "hardswish_": lambda h: F.hardswish(h, inplace=True),
    "mish_": lambda h: F.mish(h, inplace=True),
}
GATE_ACTS = ("silu", "gelu", "relu", "tanh-gelu", "sigmoid")


# --- instructions -----------------------------------------------------------------------------------------------------


class Frame:
    """What a running block holds."""

    def __init__(self, h: Tensor) -> None:
        self.h, self.kept = h, {}  # type: ignore[var-annotated]

    def alike(self, name: str) -> Tensor:
        """A value that was kept, or, where the shapes differ, h."""
        found = self.kept.get(name, self.h)
        return found if found.shape == self.h.shape else self.h


class Steps(nn.Module):
    """A block: its code is its instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Instruction] = []
        self.p = 0.1

    def forward(self, x: Tensor) -> Tensor:
        frame = Frame(x)
        self.run(self.steps, frame)
        return frame.h

    def run(self, steps: list[Instruction], frame: Frame) -> None:
        for name, *options in steps:
            INSTRUCTIONS[name](self, frame, *options)

    def section(self, steps: list[Instruction], frame: Frame) -> Callable[[Tensor], Tensor]:
        """Instructions as a function of h."""

        def run(h: Tensor) -> Tensor:
            inner = Frame(h)
            inner.kept = {**frame.kept}
            self.run(steps, inner)
            return inner.h

        return run


def _part(block: Steps, frame: Frame, name: str) -> None:
    frame.h = getattr(block, name)(frame.h)


def _act(block: Steps, frame: Frame, form: str) -> None:
    frame.h = _FORMS[form](frame.h)


def _dropout(block: Steps, frame: Frame, p: float | None, inplace: bool) -> None:
    frame.h = F.dropout(frame.h, block.p if p is None else p, block.training, inplace)


def _functional_norm(block: Steps, frame: Frame, kind: str) -> None:
    norms: dict[str, Callable[..., Tensor]] = {"layer": F.layer_norm, "rms": F.rms_norm}
    frame.h = norms[kind](frame.h, frame.h.shape[-1:]) if kind in norms else F.normalize(frame.h, dim=-1)


def _gate(block: Steps, frame: Frame, style: str, act: str, first: bool, name: str) -> None:
    """The parts ``gate``, ``up`` and ``down``, or ``packed`` and ``down``; the activation is a function or a part."""
    if style == "separate":
        gate, up = getattr(block, f"{name}_gate")(frame.h), getattr(block, f"{name}_up")(frame.h)
    else:
        packed = getattr(block, f"{name}_packed")(frame.h)
        if style == "chunk":
            gate, up = packed.chunk(2, -1)
        elif style == "up first":
            up, gate = packed.chunk(2, -1)
        elif style == "split":
            gate, up = packed.split(packed.shape[-1] // 2, -1)
        else:
            gate, up = packed[..., ::2], packed[..., 1::2]
    gated = getattr(block, act)(gate) if hasattr(block, act) else _FORMS[act](gate)
    frame.h = gated * up if first else up * gated


def _matmul(block: Steps, frame: Frame, name: str) -> None:
    frame.h = frame.h @ getattr(block, name).weight.t()


def _keep(block: Steps, frame: Frame, name: str) -> None:
    frame.kept[name] = frame.h


def _add(block: Steps, frame: Frame, name: str) -> None:
    frame.h = frame.h + frame.alike(name)


def _multiply(block: Steps, frame: Frame, name: str) -> None:
    frame.h = frame.h * frame.alike(name)


def _back(block: Steps, frame: Frame, name: str) -> None:
    """To the value that was kept; h goes into it by its mean."""
    frame.h = frame.alike(name) * (1 + 0.1 * frame.h.mean())


#: What is written over: h, by itself or a value that was kept; or such a value.
_EDITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda h, kept: h.add_(0.1),
    "mul_": lambda h, kept: h.mul_(0.7),
    "add kept": lambda h, kept: h.add_(kept.detach() * 0.5),
    "residual": lambda h, kept: h.add_(kept),
    "slice": lambda h, kept: h[..., :4].fill_(0.25),
    "kept": lambda h, kept: kept.mul_(1.5),
    "clamp_": lambda h, kept: h.clamp_(-3, 3),
}
#: Views of h, and what is read through them.
_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda h: h.flatten()[: h.numel()].view(h.shape),
    "transposed": lambda h: (h.mT * 1.1).mT,
    "swapped": lambda h: h.transpose(0, -1).contiguous().transpose(0, -1),
    "halves": lambda h: torch.cat([*h.chunk(2, -1)][::-1], -1),
    "view": lambda h: h.reshape(h.shape)[:],
    "view as": lambda h: h.view_as(h),
    "half acts": lambda h: torch.cat([F.gelu(h.chunk(2, -1)[0]), h.chunk(2, -1)[1].relu()], -1),
}


def _edit(block: Steps, frame: Frame, how: str, name: str) -> None:
    _EDITS[how](frame.h, frame.alike(name))


def _view(block: Steps, frame: Frame, how: str) -> None:
    frame.h = _VIEWS[how](frame.h)


def _detach(block: Steps, frame: Frame, how: str) -> None:
    h = frame.h
    frame.h = h + 0.5 * h.detach() if how == "half" else h * h.detach().sigmoid() if how == "gate" else h.clone()


def _without_gradients(block: Steps, frame: Frame, steps: list[Instruction]) -> None:
    with torch.no_grad():
        found = block.section(steps, frame)(frame.h.clone())
    frame.h = frame.h + found if found.shape == frame.h.shape else frame.h + found.mean()


def _autocast(block: Steps, frame: Frame, steps: list[Instruction]) -> None:
    dtype = frame.h.dtype
    with torch.autocast("cpu", torch.bfloat16):
        frame.h = block.section(steps, frame)(frame.h).to(dtype)


def _checkpoint(block: Steps, frame: Frame, what: Any, reentrant: bool) -> None:
    if reentrant:  # whose backward pass would start again at what a closure brings
        inner = Frame(frame.h)
        inner.kept = {name: value.detach() for name, value in frame.kept.items()}
    else:
        inner = frame
    function = getattr(block, what) if isinstance(what, str) else block.section(what, inner)
    frame.h = checkpoint(function, frame.h, use_reentrant=reentrant)


def _hook(block: Steps, frame: Frame, how: str) -> None:
    h = frame.h
    if not h.requires_grad or not torch.is_grad_enabled():
        return
    # The node of a view that was written to is made when it is asked for; before, torch 2.13 crashes at a hook.
    assert h.grad_fn is not None or h.is_leaf
    if how == "retain":
        h.retain_grad()
    else:
        h.register_hook(lambda g: g * 0.5 if how == "scale" else None)


INSTRUCTIONS: dict[str, Callable[..., None]] = {
    "part": _part, "act": _act, "dropout": _dropout, "functional norm": _functional_norm,
    "gate": _gate, "matmul": _matmul, "keep": _keep, "add": _add, "multiply": _multiply, "back": _back,
    "edit": _edit, "view": _view, "detach": _detach, "no_grad": _without_gradients, "autocast": _autocast,
    "checkpoint": _checkpoint, "hook": _hook,
}  # fmt: skip


# --- programs ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """The whole: images or rows in, rows out."""

    def __init__(self, body: nn.Module, head: nn.Module, is_image: bool) -> None:
        super().__init__()
        self.body, self.head, self.is_image = body, head, is_image

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h.flatten(2).mean(-1) if self.is_image else h)


@dataclass
class Program:
    """Of one seed.

    Attributes:
        outside: "plain"; "reentrant" or "checkpoint" for a checkpoint around the body; "twice" for two calls, one
            backward pass; "autocast".
        is_second: whether gradients are differentiated once more.
        x_needs_gradient: whether the input does.
    """

    seed: int
    outside: str = "plain"
    is_second: bool = False
    x_needs_gradient: bool = False
    is_image: bool = False
    is_channels_last: bool = False

    def __post_init__(self) -> None:
        rng = random.Random(f"program {self.seed}")
        self.is_image = rng.random() < 0.25
        self.is_channels_last = self.is_image and rng.random() < 0.2
        self.outside = rng.choices(("plain", "reentrant", "checkpoint", "twice", "autocast"), (12, 1, 1, 1, 1))[0]
        self.is_second = rng.random() < 0.08 and self.outside == "plain"
        self.x_needs_gradient = rng.random() < 0.5 or self.outside == "reentrant"
        self.leading = self._shape(rng)
        self.width = rng.choice((16, 32, 48, 64))

    def _shape(self, rng: random.Random) -> tuple[int, ...]:
        if self.is_image:
            return rng.choice((2, 4, 8)), rng.choice((4, 6, 8))
        rows = rng.choice((8, 16, 24, 48, 64))
        return (rows,) if rng.random() < 0.6 else (rng.choice((2, 4)), rows // 2)

    def inputs(self) -> Tensor:
        leading = self.leading
        generator = torch.Generator().manual_seed(self.seed)
        if not self.is_image:
            return torch.randn(*leading, self.width, generator=generator)
        x = torch.randn(leading[0], 3, leading[1], leading[1], generator=generator)
        return x.to(memory_format=torch.channels_last) if self.is_channels_last else x

    def build(self) -> Model:
        state = torch.get_rng_state()
        torch.manual_seed(self.seed)
        maker = _Maker(random.Random(f"model {self.seed}"), self.is_image)
        model = maker.model(self.width)
        if self.is_channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.set_rng_state(state)
        return model


#: Hooks of modules: they look, or they change what goes through.
_HOOKS: tuple[Callable[[nn.Module], Any], ...] = (
    lambda module: module.register_forward_hook(lambda m, args, y: None),
    lambda module: module.register_forward_hook(lambda m, args, y: y * 0.9),
    lambda module: module.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,)),
    lambda module: module.register_full_backward_hook(lambda m, dx, dy: None),
)


# --- the generator ----------------------------------------------------------------------------------------------------


class _Maker:
    """Makes blocks that fit one another."""

    def __init__(self, rng: random.Random, is_image: bool) -> None:
        self.rng, self.is_image, self.count = rng, is_image, 0

    def model(self, width: int) -> Model:
        rng = self.rng
        start = 3 if self.is_image else width
        body, out = self.block(start, rng.choice((0, 1, 1, 2)))
        model = Model(body, nn.Linear(out, 4), self.is_image)
        for module in model.modules():
            if rng.random() < 0.04:
                _HOOKS[rng.randrange(4)](module)
            for parameter in module._parameters.values():
                if parameter is not None and rng.random() < 0.04:
                    parameter.requires_grad_(False)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        if len(linears) > 1 and rng.random() < 0.1:
            a, b = rng.sample(linears, 2)
            if a.weight.shape == b.weight.shape:
                b.weight = a.weight
        if rng.random() < 0.06:
            for module in rng.choice([*model.modules()]).modules():
                module.eval()
        return model

    def named(self, what: str = "part") -> str:
        self.count += 1
        return f"{what}{self.count}"

    def block(self, width: int, depth: int) -> tuple[Steps, int]:
        """A block for values of this width, and the width of its result. ``depth``: of blocks within it."""
        rng = self.rng
        block = Steps()
        steps: list[Instruction] = []
        if rng.random() < 0.9 or self.is_image:
            width = self.layer(block, steps, width)
        for _ in range(rng.randint(2, 5)):
            if depth and rng.random() < 0.35:
                inner, out = self.block(width, depth - 1)
                name = self.named("inner")
                setattr(block, name, inner)
                if rng.random() < 0.12:
                    steps.append(("checkpoint", name, rng.random() < 0.4))
                else:
                    steps.append(("part", name))
                    if out == width and rng.random() < 0.15:
                        steps.append(("part", name))
                width = out
            else:
                width = self.some(block, steps, width)
        block.steps = steps
        return block, width

    def layer(self, block: Steps, steps: list[Instruction], width: int) -> int:
        """A linear layer or a convolution."""
        rng, name = self.rng, self.named("layer")
        out = rng.choice((16, 32, 48, 64)) if rng.random() < 0.5 else width
        if self.is_image:
            out = rng.choice((8, 16))
            setattr(block, name, nn.Conv2d(width, out, rng.choice((1, 3)), padding="same", bias=rng.random() < 0.5))
            steps.append(("part", name))
            return out
        setattr(block, name, nn.Linear(width, out, bias=rng.random() < 0.7))
        steps.append(("matmul", name) if rng.random() < 0.1 else ("part", name))
        return out

    def module(self, block: Steps, steps: list[Instruction], module: nn.Module, what: str = "part") -> None:
        """A part, that is called; now and then one that was there before, or this one twice."""
        name = self.named(what)
        alike = [key for key, m in block._modules.items() if type(m) is type(module) and key.startswith(what)]
        if alike and what in ("act", "drop") and self.rng.random() < 0.2:
            name = self.rng.choice(alike)
        else:
            setattr(block, name, module)
        steps.append(("part", name))

    def some(self, block: Steps, steps: list[Instruction], width: int) -> int:
        """An instruction or several; what they make the width."""
        kinds = {
            "layer": 2.0, "layer act": 4.0, "layer act drop": 3.0, "act": 2.0, "drop": 1.5, "norm": 3.0,
            "norm act": 2.0, "gate": 0.0 if self.is_image else 3.5, "residual": 1.0, "multiply": 1.0, "edit": 1.0,
            "view": 1.0, "detach": 0.4, "keep": 1.0, "use": 1.0, "hook": 0.6, "no_grad": 0.4, "autocast": 0.25,
            "checkpoint": 0.7,
        }  # fmt: skip
        kind = self.rng.choices([*kinds], [*kinds.values()])[0]
        if kind == "layer":
            return self.layer(block, steps, width)
        if kind.startswith("layer act"):
            width = self.layer(block, steps, width)
            self.act(block, steps)
            if kind.endswith("drop"):
                self.drop(block, steps)
            return width if self.rng.random() < 0.4 else self.layer(block, steps, width)
        if kind in ("no_grad", "autocast", "checkpoint", "residual"):
            return self.sections(kind, block, steps, width)
        return self.single(kind, block, steps, width)

    def single(self, kind: str, block: Steps, steps: list[Instruction], width: int) -> int:
        rng = self.rng
        kept = rng.choice("abc")
        if kind in ("act", "norm act"):
            if kind == "norm act":
                self.norm(block, steps, width)
            self.act(block, steps)
        elif kind == "drop":
            self.drop(block, steps)
        elif kind == "norm":
            self.norm(block, steps, width)
        elif kind == "gate":
            return self.gate(block, steps, width)
        elif kind == "multiply":
            steps.append(("multiply", kept))
            if rng.random() < 0.5:
                return self.layer(block, steps, width)
        elif kind == "edit":
            steps.append(("edit", rng.choice([*_EDITS]), kept))
        elif kind == "view":
            steps.append(("view", rng.choice([*_VIEWS])))
        elif kind == "detach":
            steps.append(("detach", rng.choice(("half", "gate", "clone"))))
        elif kind == "keep":
            steps.append(("keep", kept))
        elif kind == "use":
            steps.append(("add", kept) if rng.random() < 0.7 else ("back", kept))
        else:
            steps.append(("hook", rng.choice(("see", "scale", "retain"))))
        return width

    def sections(self, kind: str, block: Steps, steps: list[Instruction], width: int) -> int:
        """Instructions within instructions."""
        rng = self.rng
        inner: list[Instruction] = []
        if kind == "residual":
            steps.append(("keep", "r"))
            out = self.some(block, steps, width)
            steps.append(("add", "r") if rng.random() < 0.7 else ("edit", "residual", "r"))
            return out
        out = width
        for _ in range(rng.randint(1, 3)):
            out = self.some(block, inner, out)
        if kind == "checkpoint":
            steps.append(("checkpoint", inner, rng.random() < 0.4))
            return out
        steps.append((kind, inner))
        return width if kind == "no_grad" else out

    def act(self, block: Steps, steps: list[Instruction]) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            steps.append(("act", rng.choice([*_FORMS])))
        else:
            self.module(block, steps, _act_module(rng.choice(ACT_MODULES)), "act")
        if rng.random() < 0.1:
            steps.append(("keep", rng.choice("abc")))

    def drop(self, block: Steps, steps: list[Instruction]) -> None:
        rng = self.rng
        p, inplace = rng.choice((0.0, 0.1, 0.5)), rng.random() < 0.15
        if rng.random() < 0.5:
            steps.append(("dropout", rng.choice((p, None)), inplace))
        else:
            self.module(block, steps, nn.Dropout(p, inplace), "drop")

    def norm(self, block: Steps, steps: list[Instruction], width: int) -> None:
        rng = self.rng
        module: nn.Module
        if self.is_image:
            is_batch = rng.random() < 0.65
            module = nn.BatchNorm2d(width, affine=rng.random() < 0.9) if is_batch else nn.GroupNorm(width // 4, width)
        else:
            kind = rng.choice(("layer", "rms", "llama", "gemma", "bare", "functional", "batch"))
            if kind == "functional" or (kind == "batch" and rng.random() < 0.5):
                steps.append(("functional norm", rng.choice(("layer", "rms", "normalize"))))
                return
            if kind == "batch":
                module = Channels(nn.BatchNorm1d(width))
            elif kind == "layer":
                module = nn.LayerNorm(width, elementwise_affine=rng.random() < 0.8)
            else:
                module = nn.RMSNorm(width) if kind == "rms" else RMSNorm(width, kind)
        self.module(block, steps, module, "norm")

    def gate(self, block: Steps, steps: list[Instruction], width: int) -> int:
        rng, name = self.rng, self.named("gate")
        hidden = rng.choice((16, 32, 64))
        style = rng.choice(("separate", "separate", "chunk", "up first", "split", "interleaved"))
        if style == "separate":
            setattr(block, f"{name}_gate", nn.Linear(width, hidden))
            setattr(block, f"{name}_up", nn.Linear(width, hidden, bias=rng.random() < 0.5))
        else:
            setattr(block, f"{name}_packed", nn.Linear(width, 2 * hidden))
        act = rng.choice(GATE_ACTS)
        if rng.random() < 0.4:
            act = self.named("act")
            setattr(block, act, _act_module(rng.choice(("SiLU", "GELU", "ReLU", "QuickGELU", "TanhGELU"))))
        steps.append(("gate", style, act, rng.random() < 0.6, name))
        if rng.random() < 0.2:
            self.drop(block, steps)
        return self.layer(block, steps, hidden) if rng.random() < 0.8 else hidden


class Channels(nn.Module):
    """A batch norm over the last dimension of rows, or over the second of three by a transposed view."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT if x.dim() == 3 else self.norm(x)
