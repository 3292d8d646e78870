"""How the results of PyTorch's nodes are replayed: one table, by the node's name.

A rule names the function and its operands: the values that the node has saved, or those that its producers have made
(``Region``). It returns None where a number that the result depends on is in no node: the addend of ``x + 1``.

Limits: results are those of the same operators on the same operands, so they are the same bits wherever an operator
gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import FORWARD_CLASS, PRELU, AccumulateGrad, results_of, saved_number
from ..ops.pointwise import BiasAct
from .norms import NORM_REPLAYS
from .recipe import Recipe, Stored, Value

if TYPE_CHECKING:
    from .region import Region

aten = torch.ops.aten

Replay = tuple[Callable[..., Tensor], Sequence[Value]]
"""The function and its operands."""
Rule = Callable[["Region", Any, Tensor | None], Replay | None]
"""From the region, the node, and its result, if that is there, to the replay of the result."""


def with_options(function: Callable[..., Tensor], node: Any, names: Sequence[str]) -> Callable[..., Tensor]:
    """The function with those of its arguments that the node has saved under their names."""
    options = {name: saved_number(node, name) for name in names}
    return partial(function, **options) if options else function


def _of(function: Callable[..., Tensor], *names: str) -> Rule:
    """A function of the input, which the node has saved as "self"."""

    def rule(region: Region, node: Any, result: Tensor | None) -> Replay | None:
        z = region.read(node, "self", 0)
        return None if z is None else (with_options(function, node, names), (z,))

    return rule


def _of_operands(function: Callable[..., Tensor], *names: str) -> Rule:
    """A function of all operands of a node, which saves none of them."""

    def rule(region: Region, node: Any, result: Tensor | None) -> Replay | None:
        values: list[Value] = []
        for edge in range(len(node.next_functions)):
            value = region.operand(node, edge)
            if value is None:  # at once: sums are residual ones as a rule, which stay; the other edge would take 7 us
                return None
            values.append(value)
        return (with_options(function, node, names), values) if values else None

    return rule


def _of_two(function: Callable[..., Tensor], second: str) -> Rule:
    """A function of the saved input and of a second tensor."""

    def rule(region: Region, node: Any, result: Tensor | None) -> Replay | None:
        a = region.read(node, "self", 0)
        b = None if a is None else region.read(node, second, 1)
        return None if a is None or b is None else (function, (a, b))

    return rule


def _reshape(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    x, shape = region.operand(node, 0), results_of(node)[0].shape
    return None if x is None else (lambda x: x.reshape(shape), (x,))


def _clone(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    """A copy of what is replayed. An operation in place saves a clone of what it then writes over."""
    x = region.operand(node, 0)
    return (torch.clone, (x,)) if isinstance(x, Recipe) else None


def _cast(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    """A tensor that was cast up from 16 bits is stored in 16 bits, where nobody else stores the source."""
    x, made = region.operand(node, 0), results_of(node)[0]
    if x is None and result is not None and made.dtype.itemsize > 2:
        source, output_nr = node.next_functions[0]
        found = () if source is None or type(source) is AccumulateGrad else results_of(source)
        narrow = found[output_nr] if output_nr < len(found) else made
        if narrow.dtype in _16_BITS and narrow.device == made.device:
            copy = result.detach().to(narrow.dtype)
            x = Stored(copy, region.hooks, region)
            region.take_for_result(source, output_nr, x, copy.stride())
    return None if x is None else (partial(Tensor.to, device=made.device, dtype=made.dtype), (x,))


def _index(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    x, indices = region.operand(node, 0), region.saved_list(node, "indices")
    return None if x is None or not indices else (lambda x, *indices: aten.index(x, indices), (x, *indices))


def _expand(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    x, shape = region.operand(node, 0), results_of(node)[0].shape
    return None if x is None else (lambda x: x.expand(shape), (x,))


def _max_pool(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    """Its indices, of eight bytes each, need no place either where its result is made again."""
    x, own = region.read(node, "self", 0), region.saved(node, "result1")
    if x is None:
        return None
    names = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
    pool: Any = with_options(F.max_pool2d_with_indices, node, names)  # type: ignore[arg-type]  # it returns two
    if isinstance(own, Stored):
        indices = Recipe(node.name(), torch.int64, lambda x: pool(x)[1], (x,), region)
        own.become(indices)
    return (lambda x: pool(x)[0]), (x,)


_16_BITS = (torch.bfloat16, torch.float16)


def _dropout(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    x, mask = region.operand(node, 0), region.saved(node, "result1")
    p = saved_number(node, "p")
    if x is None or mask is None or p >= 1:
        return None
    # What it computes of a gradient is what forward computes of x: both times the mask, times the scale. CUDA's kernel
    # divides in float32: at p = .15 the quotient in float64, rounded, is another number.
    is_cuda = results_of(node)[0].device.type == "cuda"
    scale = float(torch.tensor(1.0 - p, dtype=torch.float32).reciprocal_()) if is_cuda else 1.0 / (1.0 - p)
    return partial(aten.native_dropout_backward, scale=scale), (x, mask)


def _pad(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    """The number that is padded with is read off the result: it is in a corner."""
    pad, x = saved_number(node, "pad"), region.operand(node, 0)
    if x is None or result is None or min(pad) < 0 or not any(pad):
        return None
    ends = [(-1 - i, *pair) for i, pair in enumerate(zip(pad[::2], pad[1::2], strict=True))]
    corner = [0] * result.dim()
    for dim, before, after in ends:
        corner[dim] = -1 if after and not before else 0
    value = result.detach()[tuple(corner)].clone()

    def padded(x: Tensor) -> Tensor:
        sizes = [*x.shape]
        for dim, before, after in ends:
            sizes[dim] += before + after
        y = inside = x.new_empty(sizes).fill_(value)
        for dim, before, _ in ends:
            inside = inside.narrow(dim, before, x.shape[dim])
        inside.copy_(x)
        return y

    return padded, (x,)


def _bias_act(region: Region, node: Any, result: Tensor | None) -> Replay | None:
    """A layer by hand that saves its input; another Function of this name is left alone."""
    if getattr(type(node), FORWARD_CLASS, None) is not BiasAct or node.plan.saved != "input":
        return None
    plan, values = node.plan, region.saved_list(node, "tensors")

    def activated(z: Tensor, *operands: Tensor) -> Any:
        return plan.backend.bias_act(z, None, plan.activation, operands, dim=plan.dim, encode=False, out=None)

    return None if values is None else (activated, values)


#: Nodes that save their input, or the two factors, or nothing that is large.
REPLAYS: dict[str, Rule] = {
    "GeluBackward0": _of(F.gelu, "approximate"),
    "SiluBackward0": _of(F.silu),
    "MishBackward0": _of(F.mish),
    "HardswishBackward0": _of(F.hardswish),
    "HardsigmoidBackward0": _of(F.hardsigmoid),
    "HardtanhBackward0": _of(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _of(F.leaky_relu, "negative_slope"),
    "EluBackward0": _of(aten.elu, "alpha", "scale", "input_scale"),
    "CeluBackward0": _of(F.celu, "alpha"),
    "SoftplusBackward0": _of(F.softplus, "beta", "threshold"),
    "LogSigmoidBackward0": _of(F.logsigmoid),
    "SoftshrinkBackward0": _of(F.softshrink, "lambd"),
    "HardshrinkBackward0": _of(F.hardshrink, "lambd"),
    **({} if PRELU.default is None else {"PreluKernelBackward0": _of_two(PRELU, "weight")}),
    "PowBackward0": _of(torch.pow, "exponent"),
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "IndexBackward0": _index,
    "ExpandBackward0": _expand,
    "UnsqueezeBackward0": _of_operands(torch.unsqueeze, "dim"),
    "SelectBackward0": _of_operands(aten.select, "dim", "index"),
    "SliceBackward0": _of_operands(aten.slice, "dim", "start", "end", "step"),
    "GluBackward0": _of(F.glu, "dim"),
    "MulBackward0": _of_two(torch.mul, "other"),
    "DivBackward0": _of_two(torch.div, "other"),
    "NegBackward0": _of_operands(torch.neg),
    "AddBackward0": _of_operands(torch.add, "alpha"),
    "SubBackward0": _of_operands(torch.sub, "alpha"),
    "NativeDropoutBackward0": _dropout,
    "ToCopyBackward0": _cast,
    "CloneBackward0": _clone,
    "RepeatBackward0": _of_operands(aten.repeat, "repeats"),
    "CatBackward0": _of_operands(lambda *parts, dim: torch.cat(parts, dim), "dim"),
    "ConstantPadNdBackward0": _pad,
    "UpsampleNearest2DBackward0": _of_operands(aten.upsample_nearest2d, "output_size", "scales_h", "scales_w"),
    "ViewBackward0": _reshape,
    "UnsafeViewBackward0": _reshape,
    "BiasActBackward": _bias_act,
    "PermuteBackward0": _of_operands(torch.permute, "dims"),
    "TransposeBackward0": _of_operands(torch.transpose, "dim0", "dim1"),
    **NORM_REPLAYS,
}

#: Nodes that save their result: the function of their operand, and the names of its options.
RESULTS: dict[str, tuple[Any, ...]] = {
    "ReluBackward0": (torch.relu,),
    "TanhBackward0": (torch.tanh,),
    "SigmoidBackward0": (torch.sigmoid,),
    "ExpBackward0": (torch.exp,),
    "LeakyReluBackward1": (F.leaky_relu, "negative_slope"),
    "EluBackward1": (aten.elu, "alpha", "scale", "input_scale"),
    "CeluBackward1": (F.celu, "alpha"),
}
