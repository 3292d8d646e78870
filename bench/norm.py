"""``python -m bench norm``: eager, torch.compile and this library side by side on convolution, batch norm and
activation.

How is said in ``layers``. The layer is all three, without a bias; the one behind it, for the bytes, a 1x1 convolution.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl

from . import conv, layers, shapes

#: The two promises are those of convolutions.
acceptance = conv.acceptance


def _build(case: shapes.ConvCase, device: torch.device, quick: bool) -> layers.Work:
    shape = case.shape
    batch = 1 if quick else shape.batch[device.type]
    size = tuple(n // 2 for n in shape.size) if quick else shape.size
    inside, outside = shape.in_channels, shape.out_channels
    format = shapes.FORMATS[2][case.format]
    generator = torch.Generator(device).manual_seed(0)

    def in_format(sizes: tuple[int, ...], scale: float = 1.0) -> Tensor:
        tensor = layers.randn(generator, case.dtype, sizes, scale=scale, grad=False)
        return tensor.contiguous(memory_format=format).requires_grad_()

    inputs = inside // shape.groups * torch.Size(shape.kernel).numel()
    x = in_format((batch, inside, *size))
    w1 = in_format((outside, inside // shape.groups, *shape.kernel), inputs**-0.5)
    w2 = in_format((inside, outside, 1, 1), outside**-0.5)
    # Running statistics are buffers, which torch saves, and no part of what is compared.
    norm = nn.BatchNorm2d(outside, track_running_stats=False, device=device)
    # As after some training: weights of 1 and biases of 0 would be the easiest of all.
    gamma, beta = norm.weight, norm.bias
    with torch.no_grad():
        gamma.add_(torch.randn(outside, generator=generator, device=device), alpha=0.2)
        beta.add_(torch.randn(outside, generator=generator, device=device), alpha=0.2)
    fused = fl.FusedBatchNormAct2d.from_modules(norm, case.activation)
    convolution: Any = partial(F.conv2d, stride=shape.stride, padding=shape.padding, groups=shape.groups)
    activation = shapes.NORM_ACTIVATIONS[case.activation]

    def eager(x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return activation(F.batch_norm(convolution(x, w), None, None, gamma, beta, True))

    def ours(x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        y: Tensor = fused(convolution(x, w))  # whose parameters these are
        return y

    def behind(layer: layers.Function) -> layers.Function:
        return lambda x, w1, gamma, beta, w2: F.conv2d(layer(x, w1, gamma, beta), w2)

    with torch.no_grad():
        dy, dy_behind = (torch.randn_like(f(x, w1, gamma, beta, *w)) for f, w in ((eager, ()), (behind(eager), (w2,))))
    return layers.Work(
        operands=((x, (w1, gamma, beta), dy), (x, (w1, gamma, beta, w2), dy_behind)),
        eager=(eager, behind(eager)),
        ours=(ours, behind(ours)),
        sizes={
            "format": case.format,
            "input": list(x.shape),
            "output": list(dy.shape),
            "kernel": list(shape.kernel),
            "stride": shape.stride,
            "padding": list(shape.padding),
            "groups": shape.groups,
        },
        hidden_bytes=dy.nbytes,
    )


SUBJECT = layers.Subject(
    name="norm",
    behind="a 1x1 convolution",
    cases=shapes.norm_cases,
    build=_build,
    acceptance=acceptance,
    budget_seconds=200,
    case_seconds=0.6,
    in_quick=lambda case: case.group == "model",
)
run = partial(layers.run, SUBJECT)
