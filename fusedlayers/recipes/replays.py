"""How the results of PyTorch's nodes are replayed: one table, by the node's name.

A row names the function and its operands: what the node has saved, or what the nodes behind it have made (``Graph``).
It returns None where a number that the result depends on is in no node: the addend of ``x + 1``, say.

Limits: results are those of the same operators on the same operands, so they are the same bits wherever an operator
gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._torch import PRELU
from .recipe import Saved, Value

#: What a module notes in the metadata of its norm's node: eps and bias, which the node need not have.
NORM_FACTS = "fusedlayers.norm"


_UNKNOWN = object()


class NormFacts(NamedTuple):
    """Of a norm, what its node need not tell. The bias is a copy, for most nodes do not save it, and it may be trained
    before backward; so is a weight that may be freed."""

    eps: float | None
    weight: Tensor | None
    bias: Tensor | None
    #: Of the weight.
    version: int


class Graph(Protocol):
    """What rows ask. A value that is not there is None."""

    def saved(self, node: Any, name: str) -> Value | None:
        """What a node has saved under this name."""

    def behind(self, node: Any, edge: int) -> Value | None:
        """What the node behind an edge has made: a value that is saved somewhere, or a recipe."""

    def parameter(self, node: Any, edge: int) -> Value | None:
        """The parameter behind an edge."""

    def read(self, node: Any, name: str, edge: int) -> Value | None:
        """What a node reads: it has saved it, or else the node behind the edge has made it."""


Parts = tuple[Callable[..., Tensor], Sequence[Value]]
"""The function and its operands."""
Row = Callable[[Graph, Any, Tensor | None], Parts | None]
"""From the graph, the node, and its result, if that is there, to what replays the result."""


def _unary(function: Callable[[Any], Callable[..., Tensor]]) -> Row:
    """``function(node)`` of the saved input."""

    def row(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
        z = graph.read(node, "self", 0)
        return None if z is None else (function(node), (z,))

    return row


def _behind(function: Callable[[Any], Callable[..., Tensor]]) -> Row:
    """``function(node)`` of all that stands behind the node, which saves nothing."""

    def row(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
        values = [graph.behind(node, edge) for edge in range(len(node.next_functions))]
        found = [value for value in values if value is not None]
        return (function(node), found) if values and len(found) == len(values) else None

    return row


def _product(function: Callable[..., Tensor]) -> Row:
    def row(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
        a = graph.read(node, "self", 0)
        b = None if a is None else graph.read(node, "other", 1)
        return None if a is None or b is None else (function, (a, b))

    return row


def _prelu(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
    z, weight = graph.saved(node, "self"), graph.saved(node, "weight")
    return None if z is None or weight is None else (PRELU, (z, weight))


def _dropout(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
    x, mask = graph.behind(node, 0), graph.saved(node, "result1")
    if x is None or mask is None or node._saved_p >= 1:
        return None
    # What it computes of a gradient is what forward computes of x: both times the mask, times the scale.
    scale = 1.0 / (1.0 - node._saved_p)
    return (lambda x, mask: torch.ops.aten.native_dropout_backward(x, mask, scale)), (x, mask)


def _pad(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
    """The number that is padded with is read off the result: it is in a corner."""
    pad, x = [_signed(number) for number in node._saved_pad], graph.behind(node, 0)
    if x is None or result is None or min(pad) < 0 or not any(pad):
        return None
    corner = [0] * result.dim()
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        corner[-1 - i] = -1 if after and not before else 0
    value = result.detach()[tuple(corner)].clone()

    def padded(x: Tensor) -> Tensor:
        sizes = [*x.shape]
        for dim in range(len(pad) // 2):
            sizes[-1 - dim] += pad[2 * dim] + pad[2 * dim + 1]
        y = x.new_empty(sizes).fill_(value)
        inside = y
        for dim in range(len(pad) // 2):
            inside = inside.narrow(-1 - dim, pad[2 * dim], x.shape[-1 - dim])
        inside.copy_(x)
        return y

    return padded, (x,)


# --- norms ------------------------------------------------------------------------------------------------------------


def is_sharded() -> bool:
    """Whether parameters may be freed behind the forward pass of their part of the model, as FSDP's are."""
    return dist.is_available() and dist.is_initialized()


def _affine(graph: Graph, node: Any, facts: NormFacts | None) -> list[Value | None] | None:
    """Weight and bias; None where one that is frozen may be unknown."""
    if facts is not None:
        if facts.weight is not None and facts.weight._version != facts.version:
            return None
        return [None if t is None else Saved(t, None, graph) for t in (facts.weight, facts.bias)]
    if is_sharded():
        return None
    w, b = graph.saved(node, "weight"), graph.parameter(node, 2) or graph.behind(node, 2)
    is_known = w is not None or node._raw_saved_weight.data is None  # else it has been written to since
    return [w, b] if is_known and b is not None else None


def _norm(make: Callable[[Any, NormFacts | None], Callable[..., Tensor] | None], statistics: Sequence[str] = ()) -> Row:
    """A norm whose node saves its input; ``make`` returns ``f(x, w, b, *statistics)``, or
    None where a number is missing."""

    def row(graph: Graph, node: Any, result: Tensor | None) -> Parts | None:
        facts = node.metadata.get(NORM_FACTS, _UNKNOWN)
        if facts is None:  # copies would be as large as the result
            return None
        facts = None if facts is _UNKNOWN else facts
        function = make(node, facts)
        x = None if function is None else graph.saved(node, "input")
        affine = None if x is None else _affine(graph, node, facts)
        if function is None or x is None or affine is None:
            return None
        w, b = affine
        if statistics and w is None and node._input_metadata[0].dtype.itemsize == 2:
            return None  # its bits depend on the dtype of the running statistics
        operands = [x, w, b, *[graph.saved(node, name) for name in statistics]]
        found = [value for value in operands if value is not None]
        if len(found) == len(operands):
            return function, found
        there = [value is not None for value in operands]

        def norm(*given: Tensor) -> Tensor:
            values = iter(given)
            return function(*[next(values) if is_there else None for is_there in there])

        return norm, found

    return row


def _layer_norm(node: Any, facts: NormFacts | None) -> Callable[..., Tensor] | None:
    if facts is None or facts.eps is None:
        return None
    shape, eps = node._saved_normalized_shape, facts.eps
    return lambda x, w, b: F.layer_norm(x, shape, w, b, eps)


def _rms_norm(node: Any, facts: NormFacts | None) -> Callable[..., Tensor] | None:
    if facts is None:
        return None
    shape, eps = node._saved_normalized_shape, facts.eps
    return lambda x, w, b: F.rms_norm(x, shape, w, eps)


def _group_norm(node: Any, facts: NormFacts | None) -> Callable[..., Tensor]:
    groups, eps = node._saved_group, node._saved_eps
    return lambda x, w, b: torch.group_norm(x, groups, w, b, eps, torch.backends.cudnn.enabled)


def _batch_norm(name: str) -> Callable[[Any, NormFacts | None], Callable[..., Tensor] | None]:
    """By the statistics that the node has saved, on CPUs; elsewhere by those of the batch, which are not counted again.
    ``name`` is that of eps."""

    def make(node: Any, facts: NormFacts | None) -> Callable[..., Tensor] | None:
        if not getattr(node, "_saved_training", True):
            return None
        eps = getattr(node, name)

        def norm(x: Tensor, w: Tensor | None, b: Tensor | None, *statistics: Tensor) -> Tensor:
            if statistics and x.is_cpu and _is_dense(x) and all(t is None or t.is_contiguous() for t in (w, b)):
                return _by_statistics(x, w, b, *statistics)
            return torch.batch_norm(x, w, b, None, None, True, 0.0, eps, torch.backends.cudnn.enabled)

        return norm

    return make


def _is_dense(t: Tensor) -> bool:
    """As PyTorch's kernel asks; of other tensors it computes something else."""
    layouts = torch.channels_last, torch.channels_last_3d
    return t.is_contiguous() or any(t.is_contiguous(memory_format=layout) for layout in layouts)


def _by_statistics(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, inverse_std: Tensor) -> Tensor:
    """One pass, an eighth of the time of training mode's two or three.

    In training as in evaluation one kernel computes ``x * scale + (b - mean * scale)``, where ``scale`` is ``w /
    sqrt(variance + eps)``. Here it gets ``scale`` as its weight, and a root of 1."""
    if mean.dtype.itemsize == 2:  # with 16-bit parameters the kernel rounds the product, without them it need not
        inverse_std = inverse_std.float()
    scale = inverse_std if w is None else inverse_std * w
    if mean.dtype.itemsize == 2:
        b = -(mean * scale) if b is None else b - mean * scale
        mean = torch.zeros_like(scale)
    return torch.native_batch_norm(x, scale, b, mean, torch.ones_like(scale), False, 0.0, 0.0)[0]


def _to_copy(node: Any) -> Callable[..., Tensor]:
    given = node._input_metadata[0]
    return lambda x: x.to(device=given.device, dtype=given.dtype)


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _max_pool(node: Any) -> Callable[..., Tensor]:
    options = node._saved_kernel_size, node._saved_stride, node._saved_padding, node._saved_dilation
    return lambda x, ceil=node._saved_ceil_mode: F.max_pool2d(x, *options, ceil_mode=ceil)


def _elu(node: Any) -> Callable[..., Tensor]:
    return lambda z, a=node._saved_alpha, s=node._saved_scale, i=node._saved_input_scale: torch.ops.aten.elu(z, a, s, i)


def _cat(node: Any) -> Callable[..., Tensor]:
    dim = _signed(node._saved_dim)
    return lambda *parts: torch.cat(parts, dim)


def _permute(node: Any) -> Callable[..., Tensor]:
    dims = [_signed(dim) for dim in node._saved_dims]
    return lambda x: x.permute(dims)


def _transpose(node: Any) -> Callable[..., Tensor]:
    dims = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return lambda x: x.transpose(*dims)


def _upsample(node: Any) -> Callable[..., Tensor]:
    given = node._saved_output_size, node._saved_scales_h, node._saved_scales_w
    return lambda x: torch.ops.aten.upsample_nearest2d(x, *given)


#: Nodes that save their input, or the two factors, or nothing that is large.
TABLE: dict[str, Row] = {
    "GeluBackward0": _unary(lambda node: partial(F.gelu, approximate=node._saved_approximate)),
    "SiluBackward0": _unary(lambda node: F.silu),
    "MishBackward0": _unary(lambda node: F.mish),
    "HardswishBackward0": _unary(lambda node: F.hardswish),
    "HardsigmoidBackward0": _unary(lambda node: F.hardsigmoid),
    "HardtanhBackward0": _unary(
        lambda node: partial(F.hardtanh, min_val=node._saved_min_val, max_val=node._saved_max_val)
    ),
    "LeakyReluBackward0": _unary(lambda node: partial(F.leaky_relu, negative_slope=node._saved_negative_slope)),
    "EluBackward0": _unary(_elu),
    "CeluBackward0": _unary(lambda node: partial(F.celu, alpha=node._saved_alpha)),
    "SoftplusBackward0": _unary(
        lambda node: partial(F.softplus, beta=node._saved_beta, threshold=node._saved_threshold)
    ),
    "LogSigmoidBackward0": _unary(lambda node: F.logsigmoid),
    "SoftshrinkBackward0": _unary(lambda node: partial(F.softshrink, lambd=node._saved_lambd)),
    "HardshrinkBackward0": _unary(lambda node: partial(F.hardshrink, lambd=node._saved_lambd)),
    "PreluKernelBackward0": _prelu,
    "PowBackward0": _unary(lambda node: lambda x, exponent=node._saved_exponent: x.pow(exponent)),
    "MaxPool2DWithIndicesBackward0": _unary(_max_pool),
    "GluBackward0": _unary(lambda node: partial(F.glu, dim=_signed(node._saved_dim))),
    "MulBackward0": _product(torch.mul),
    "DivBackward0": _product(torch.div),
    "NegBackward0": _behind(lambda node: torch.neg),
    "AddBackward0": _behind(lambda node: partial(torch.add, alpha=node._saved_alpha)),
    "SubBackward0": _behind(lambda node: partial(torch.sub, alpha=node._saved_alpha)),
    "NativeDropoutBackward0": _dropout,
    "ToCopyBackward0": _behind(_to_copy),
    "CloneBackward0": _behind(lambda node: torch.clone),
    "RepeatBackward0": _behind(lambda node: lambda x, repeats=node._saved_repeats: x.repeat(repeats)),
    "CatBackward0": _behind(_cat),
    "ConstantPadNdBackward0": _pad,
    "UpsampleNearest2DBackward0": _behind(_upsample),
    "ViewBackward0": _behind(lambda node: lambda x, shape=node._input_metadata[0].shape: x.reshape(shape)),
    "UnsafeViewBackward0": _behind(lambda node: lambda x, shape=node._input_metadata[0].shape: x.reshape(shape)),
    "PermuteBackward0": _behind(_permute),
    "TransposeBackward0": _behind(_transpose),
    "NativeLayerNormBackward0": _norm(_layer_norm),
    "FusedRmsNormBackward0": _norm(_rms_norm),
    "NativeGroupNormBackward0": _norm(_group_norm),
    "NativeBatchNormBackward0": _norm(_batch_norm("_saved_eps"), statistics=("result1", "result2")),
    "CudnnBatchNormBackward0": _norm(_batch_norm("_saved_epsilon")),
    "MiopenBatchNormBackward0": _norm(_batch_norm("_saved_epsilon")),
}

#: Nodes that save their result, and the function of what stands behind them.
RESULTS: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "ReluBackward0": lambda node: torch.relu,
    "TanhBackward0": lambda node: torch.tanh,
    "SigmoidBackward0": lambda node: torch.sigmoid,
    "ExpBackward0": lambda node: torch.exp,
    "LeakyReluBackward1": lambda node: partial(F.leaky_relu, negative_slope=node._saved_negative_slope),
    "EluBackward1": _elu,
    "CeluBackward1": lambda node: partial(F.celu, alpha=node._saved_alpha),
}
