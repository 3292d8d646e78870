"""``python -m bench dense``, ``mlp``, ``conv``: layers and blocks, eager and by this library.

Times are of the layer alone, forward+backward (all gradients), in training mode. Bytes are of the layer
with a second one behind it, because what must be saved depends on who reads the output: eager GELU saves its input, and
the next layer saves GELU's output too. An MLP block is whole by itself. ``peers`` and ``models`` have the compiler's
figures.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl
from fusedlayers.activations import resolve

from . import measure, reference, shapes
from .grid import Benchmark
from .measure import Setting, Variant

EAGER, OURS, RECOMPUTE = "eager", "fusedlayers", "recompute"
DEFINITIONS = {
    "time": "microseconds of the layer alone in training mode: median and quartiles over interleaved rounds; "
    "as in a network, nobody but the layer holds its output during the backward pass",
    "ratio": "median over rounds of time / eager's time in the same round, with quartiles",
    "saved_bytes": "kept for the backward pass by the layer and a second one behind it (a Linear, a 1x1 convolution), "
    "or by the block, without input and parameters",
    "peak_bytes": "allocated at the worst moment of forward+backward of the same, gradients included",
}
#: How far a variant may be from eager (norm of the difference over the norm) and still be worth timing. It is no test
#: of accuracy; rounding differs between variants by about the dtype's epsilon.
SAME = {"float32": 1e-2, "bfloat16": 1e-1}

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Operands:
    x: Tensor
    parameters: tuple[Tensor, ...]
    #: The gradient that comes from above.
    dy: Tensor

    def forward(self, call: Call) -> Tensor:
        return call(self.x, *self.parameters)

    def step(self, call: Call) -> None:
        measure.step(partial(self.forward, call), self.dy, (self.x, *self.parameters))

    def results(self, call: Call) -> tuple[Tensor, ...]:
        """The output and all gradients."""
        y = self.forward(call)
        return y.detach(), *torch.autograd.grad(y, (self.x, *self.parameters), self.dy)


@dataclass(frozen=True)
class Work:
    """What is called, by variant, and with what: the layer, which is timed, and the layer with a second one behind it,
    whose bytes are counted. ``sizes``: of the shape, for the result."""

    calls: Mapping[str, tuple[Call, Call]]
    layer: Operands
    block: Operands
    #: Of the layer's output, or of what is hidden in a block.
    hidden_bytes: int
    sizes: Mapping[str, Any]

    def variant(self, name: str) -> Variant:
        layer, block = self.calls[name]
        return Variant(
            {"forward_backward": partial(self.layer.step, layer)},
            lambda: (*self.layer.results(layer), *self.block.results(block)),
            forward=partial(self.block.forward, block),
            own=[self.block.x, *self.block.parameters],
            step=partial(self.block.step, block),
        )


#: From a shape, a memory format, the device's kind, what makes random tensors, and whether it has to be quick.
Build = Callable[[Any, str, str, Call, bool], Work]


def measure_case(build: Build, case: shapes.Case, setting: Setting) -> dict[str, Any]:
    """The JSON row of a case."""
    generator = torch.Generator(setting.device).manual_seed(0)

    def randn(*sizes: int, scale: float = 1.0) -> Tensor:
        tensor = torch.randn(sizes, generator=generator, device=setting.device) * scale
        return tensor.to(getattr(torch, case.dtype)).requires_grad_()

    work = build(case.shape, case.format, setting.device.type, randn, setting.quick)
    makers = {name: partial(work.variant, name) for name in work.calls}
    return {
        "id": case.id,
        "group": "model",
        "shape": case.shape.name,
        **work.sizes,
        "activation": case.shape.activation,
        "dtype": case.dtype,
        "hidden_bytes": work.hidden_bytes,
        "variants": measure.compare(makers, setting, allowed=SAME[case.dtype]),
    }


# --- dense layers -----------------------------------------------------------------------------------------------------


def _rows(shape: shapes.Dense, kind: str, quick: bool) -> int:
    return max(4, shape.tokens[kind] // 32) if quick else shape.tokens[kind]


def build_dense(shape: shapes.Dense, format: str, kind: str, randn: Call, quick: bool) -> Work:
    tokens, width, hidden = _rows(shape, kind, quick), shape.in_features, shape.hidden_features
    x, dy, dh = randn(tokens, width), randn(tokens, width).detach(), randn(tokens, hidden).detach()
    w1, b1 = randn(hidden, width, scale=width**-0.5), randn(hidden, scale=0.1)
    w2, b2 = randn(width, hidden, scale=hidden**-0.5), randn(width, scale=0.1)
    layers = {
        EAGER: partial(reference.dense_bias_act, function=resolve(shape.activation).plain),
        OURS: partial(fl.dense_bias_act, activation=shape.activation),
    }
    sizes = {"tokens": tokens, "in_features": width, "hidden_features": hidden}
    calls = {name: (layer, partial(_before_linear, layer=layer)) for name, layer in layers.items()}
    return Work(calls, Operands(x, (w1, b1), dh), Operands(x, (w1, b1, w2, b2), dy), dh.nbytes, sizes)


def _before_linear(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, layer: Call) -> Tensor:
    return F.linear(layer(x, w1, b1), w2, b2)


# --- MLP blocks -------------------------------------------------------------------------------------------------------


def build_mlp(shape: shapes.Dense, format: str, kind: str, randn: Call, quick: bool) -> Work:
    tokens, width, hidden = _rows(shape, kind, quick), shape.in_features, shape.hidden_features
    x, dy = randn(tokens, width), randn(tokens, width).detach()
    w1, w_up = (randn(hidden, width, scale=width**-0.5) for _ in range(2))
    w2 = randn(width, hidden, scale=hidden**-0.5)
    eager, ours = (reference.gated_mlp, fl.gated_mlp) if shape.is_gated else (reference.mlp, fl.mlp)
    ours = partial(ours, activation=shape.activation)
    calls: dict[str, Call] = {
        EAGER: partial(eager, function=resolve(shape.activation).plain),
        OURS: ours,
        RECOMPUTE: partial(ours, save=RECOMPUTE),
    }
    if shape.is_gated:
        params: tuple[Tensor, ...] = (w1, w_up, w2)
        calls = {name: partial(_gated, block=call) for name, call in calls.items()}
    else:
        params = (w1, randn(hidden, scale=0.1), w2, randn(width, scale=0.1))
    operands = Operands(x, params, dy)
    sizes = {"tokens": tokens, "in_features": width, "hidden_features": hidden, "gated": shape.is_gated}
    both = {name: (call, call) for name, call in calls.items()}
    return Work(both, operands, operands, tokens * hidden * dy.element_size(), sizes)


def _gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, block: Call) -> Tensor:
    return block(x, w_gate, None, w_up, None, w_down, None)


# --- convolutions -----------------------------------------------------------------------------------------------------


def build_conv(shape: shapes.Conv, format: str, kind: str, randn: Call, quick: bool) -> Work:
    """A convolution; in channels_last its parameters are so, too, as ``module.to(memory_format=...)`` makes them."""
    dims, inside, outside = len(shape.kernel), shape.in_channels, shape.out_channels
    batch, size = (1, tuple(max(8, n // 8) for n in shape.size)) if quick else (shape.batch[kind], shape.size)
    last = torch.channels_last_3d if dims == 3 else torch.channels_last
    memory_format = last if format == "channels_last" else torch.contiguous_format
    geometry: dict[str, Any] = {
        "stride": shape.stride, "padding": shape.padding, "dilation": shape.dilation, "groups": shape.groups,
    }  # fmt: skip
    convolution = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    activation = resolve(shape.activation).plain

    def formatted(*sizes: int, scale: float = 1.0) -> Tensor:
        return randn(*sizes, scale=scale).detach().contiguous(memory_format=memory_format).requires_grad_()

    def eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return activation(convolution(x, w, b, **geometry))

    def before_another(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, layer: Call) -> Tensor:
        return convolution(layer(x, w1, b1), w2, b2)

    def operands(call: Call, *parameters: Tensor) -> Operands:
        with torch.no_grad():
            y = call(x, *parameters)  # whose format a convolution chooses: torch's of three dimensions may drop it
            return Operands(x, parameters, y.copy_(randn(*y.shape)))

    inputs = inside // shape.groups * torch.Size(shape.kernel).numel()
    x = formatted(batch, inside, *size)
    w1, b1 = formatted(outside, inside // shape.groups, *shape.kernel, scale=inputs**-0.5), randn(outside, scale=0.1)
    w2, b2 = formatted(inside, outside, *(1,) * dims, scale=outside**-0.5), randn(inside, scale=0.1)
    layers: dict[str, Call] = {EAGER: eager, OURS: partial(fl.conv_bias_act, activation=shape.activation, **geometry)}
    calls = {name: (layer, partial(before_another, layer=layer)) for name, layer in layers.items()}
    layer, block = operands(eager, w1, b1), operands(calls[EAGER][1], w1, b1, w2, b2)
    sizes = {"format": format, "input": list(x.shape), "output": list(layer.dy.shape), "kernel": list(shape.kernel)}
    return Work(calls, layer, block, layer.dy.nbytes, {**sizes, **geometry, "padding": list(shape.padding)})


def _benchmark(name: str, build: Any, of: Any, *, budget: float, case: float) -> Benchmark:
    cases, measure_one = partial(shapes.cases, of), partial(measure_case, build)
    return Benchmark(name, DEFINITIONS, cases, measure_one, budget_seconds=budget, case_seconds=case)


BENCHMARKS = {
    "dense": _benchmark("dense", build_dense, shapes.LAYERS, budget=240.0, case=6.0),
    "mlp": _benchmark("mlp", build_mlp, shapes.BLOCKS, budget=480.0, case=12.0),
    "conv": _benchmark("conv", build_conv, shapes.CONVOLUTIONS, budget=240.0, case=2.0),
}
