"""``python -m bench conv``: eager, torch.compile and this library side by side on a convolution with activation.

How is said in ``layers``. The layer behind it, for the bytes, is a 1x1 convolution. In channels_last the parameters are
so, too, as ``module.to(memory_format=...)`` makes them.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedlayers as fl

from . import layers, shapes

#: "At most this many times eager", forward+backward, per device kind and dtype. On GPUs ``gpu-check`` looks at all.
TARGETS: dict[str, dict[str, float]] = {"cpu": {"float32": 1.05}, "cuda": {}}

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def acceptance(result: dict[str, Any]) -> list[str]:
    """How many cases keep the two promises, bytes and time, and a line for each that does not."""
    missed: list[str] = []
    # The small shapes of a quick run are mostly what calls cost.
    targets = {} if result["quick"] else TARGETS[result["device"]["kind"]]
    kept = {"saved bytes at most eager's": [0, 0]}
    kept |= {f"{dtype}: at most {target}x eager": [0, 0] for dtype, target in targets.items()}

    def count(what: str, is_met: bool, found: str) -> None:
        kept[what][0] += is_met
        kept[what][1] += 1
        if not is_met:
            missed.append(f"{found}: MISSED")

    for row, ours in layers.rows_of(result):
        if "error" in ours:
            missed.append(f"{row['id']}: MISSED: {ours['error']}")
            continue
        eager = row["variants"][layers.BASELINE]
        bytes_to_eager = ours["saved_bytes"] / eager["saved_bytes"]
        found = f"{row['id']}: {bytes_to_eager:.2f}x eager's saved bytes"
        count("saved bytes at most eager's", ours["saved_bytes"] <= eager["saved_bytes"], found)
        target = targets.get(row["dtype"])
        if target is not None:
            times = ours["forward_backward"]
            found = f"{row['id']}: {times['ratio']:.2f}x eager ({times['ratio_q1']:.2f} to {times['ratio_q3']:.2f})"
            count(f"{row['dtype']}: at most {target}x eager", times["ratio"] <= target, found)
    return [*(f"{what}: {met} of {all_of_them} cases" for what, (met, all_of_them) in kept.items()), *missed]


def _build(case: shapes.ConvCase, device: torch.device, quick: bool) -> layers.Work:
    shape, dims = case.shape, len(case.shape.kernel)
    batch = 1 if quick else shape.batch[device.type]
    # No smaller than what a kernel covers.
    size = tuple(max(8, n // 8) for n in shape.size) if quick else shape.size
    inside, outside, one = shape.in_channels, shape.out_channels, (1,) * dims
    format = shapes.FORMATS[dims][case.format]
    generator = torch.Generator(device).manual_seed(0)

    def in_format(sizes: tuple[int, ...], scale: float = 1.0) -> Tensor:
        tensor = layers.randn(generator, case.dtype, sizes, scale=scale, grad=False)
        return tensor.contiguous(memory_format=format).requires_grad_()

    def bias(channels: int) -> Tensor:
        return layers.randn(generator, case.dtype, (channels,), scale=0.1)

    def gradient(function: layers.Function, *operands: Tensor) -> Tensor:
        # Like the output, whose format a convolution chooses: torch's of three dimensions may drop channels_last.
        with torch.no_grad():
            y = function(*operands)
        return y.copy_(layers.randn(generator, case.dtype, y.shape, grad=False))

    inputs = inside // shape.groups * torch.Size(shape.kernel).numel()
    x = in_format((batch, inside, *size))
    w1, b1 = in_format((outside, inside // shape.groups, *shape.kernel), inputs**-0.5), bias(outside)
    w2, b2 = in_format((inside, outside, *one), outside**-0.5), bias(inside)

    geometry: dict[str, Any] = {
        "stride": shape.stride,
        "padding": shape.padding,
        "dilation": shape.dilation,
        "groups": shape.groups,
    }
    convolution = _CONVOLUTIONS[dims - 1]
    activation = shapes.MODELS_ACTIVATIONS[case.activation]
    eager = partial(_eager, convolution=partial(convolution, **geometry), activation=activation)
    ours = partial(fl.conv_bias_act, activation=case.activation, **geometry)
    eager_block = partial(_block, layer=eager, convolution=convolution)
    layer = x, (w1, b1), gradient(eager, x, w1, b1)
    block = x, (w1, b1, w2, b2), gradient(eager_block, x, w1, b1, w2, b2)
    return layers.Work(
        operands=(layer, block),
        eager=(eager, eager_block),
        ours=(ours, partial(_block, layer=ours, convolution=convolution)),
        sizes={
            "format": case.format,
            "input": list(x.shape),
            "output": list(layer[2].shape),
            "kernel": list(shape.kernel),
            **geometry,
            "padding": list(shape.padding),
        },
        hidden_bytes=layer[2].nbytes,
    )


def _eager(x: Tensor, w: Tensor, b: Tensor, convolution: layers.Function, activation: layers.Function) -> Tensor:
    return activation(convolution(x, w, b))


def _block(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, layer: layers.Function, convolution: layers.Function
) -> Tensor:
    return convolution(layer(x, w1, b1), w2, b2)


SUBJECT = layers.Subject(
    name="conv",
    behind="a 1x1 convolution",
    cases=shapes.conv_cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=285,
    case_seconds=0.4,
    in_quick=lambda case: case.group == "model",
)
run = partial(layers.run, SUBJECT)
