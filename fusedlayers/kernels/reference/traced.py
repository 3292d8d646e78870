"""Traced functions, which may read other tensors besides z: what a user's activation becomes.

The traced function, or its traced gradient, runs block by block as a ``Program``, so that no intermediate has the size
of the whole. The backward pass computes everything from z. Operations write into buffers, which are used again as soon
as nothing reads them any more: a new tensor for each result takes up to 1.6 times as long.

Limits: each operation is a pass over the block. torch does not vectorise ``where``: 131,072 random choices take 100 us,
where bit masks would take 37.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..._torch import OpOverload, signature_of
from ...activations import Activation, upcast
from ...activations.tracing import TORCH_CALLS, aten_graph, simplified, slow_kernels
from ...utils.caching import in_clean_state
from ...utils.layout import laid_out, layout_along
from ..interface import GradientRequest
from .chunks import blocks

aten = torch.ops.aten

#: Programs cached: one for each activation, set of gradients and dtype.
_PROGRAMS = 512


def activate(z: Tensor, y: Tensor, activation: Activation, operands: Sequence[Tensor], dim: int) -> None:
    """Write the activation's output into y, which may be z."""
    program = _program(activation, torch.promote_types(z.dtype, torch.float32))
    for _ in _walk(program, (z,), y, operands, dim):
        pass


def gradient(
    dy: Tensor,
    z: Tensor,
    dz: Tensor,
    activation: Activation,
    operands: Sequence[Tensor],
    request: GradientRequest,
    dim: int,
) -> list[Tensor | None]:
    """Write dz, and return the requested gradients of the operands, flat; z is the output if that was saved."""
    wide = torch.promote_types(z.dtype, torch.float32)
    program = _program(activation, wide, request.saved, request.needs_operands)
    needy = [p for p, need in zip(operands, request.needs_operands, strict=True) if need]
    # Summed in float64, block by block: the order is fixed, so the rounding is too.
    sums = [torch.zeros(p.numel(), dtype=torch.float64, device=z.device) for p in needy]
    for channels, (_, *shares) in _walk(program, (dy, z), dz, operands, dim):
        for total, share in zip(sums, shares, strict=True):
            if total.numel() == 1:
                total += share.sum()
            else:
                total[channels] += share.sum((0, 2))
    found = iter(sums)
    return [next(found).to(p.dtype) if need else None for p, need in zip(operands, request.needs_operands, strict=True)]


def _walk(
    program: Program, inputs: Sequence[Tensor], out: Tensor, operands: Sequence[Tensor], dim: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Run the program on all blocks of dense tensors, laid out alike, and write its first result into ``out``. Yields
    each block's channels and results."""
    layout = layout_along(inputs[0], dim)
    whole = [laid_out(tensor, layout) for tensor in (*inputs, out)]
    wide = torch.promote_types(out.dtype, torch.float32)
    others = [p.detach().to(wide).reshape(() if p.numel() == 1 else (-1, 1)) for p in operands]
    free: Buffers = defaultdict(list)
    for block in blocks(layout):
        *parts, target = (tensor[block] for tensor in whole)
        results = program([*map(upcast, parts), *(p[block[1]] if p.dim() else p for p in others)], free)
        target.copy_(results[0])  # not before all is computed: it may be one of the inputs
        yield block[1], [r.expand_as(target) for r in results]  # a constant is one number


@functools.lru_cache(_PROGRAMS)
def _program(activation: Activation, dtype: torch.dtype, given: str = "", needs: tuple[bool, ...] = ()) -> Program:
    """The program of an activation; or that of its gradients, if ``given`` says what was saved."""
    function, inputs = (activation.gradient_function(needs, given), 2) if given else (activation.function, 1)
    # All of one shape: the trace then leaves an operand's gradient as it is, element by element.
    examples = [torch.zeros(4, 6, dtype=dtype, device="cpu") for _ in range(inputs + len(activation.operand_dims))]
    return Program(simplified(aten_graph(function, examples, slow_kernels())), inputs)


# --- programs ---------------------------------------------------------------------------------------------------------

#: Buffers that nothing reads, by dtype and shape.
Buffers = dict[tuple[torch.dtype, torch.Size], list[Tensor]]


class Step(NamedTuple):
    """One operation of a program: ``call`` computes ``node``.

    Attributes:
        keyword: the argument of ``call`` that takes a buffer of a block's shape for the result, or None.
        freed: the nodes whose buffers nothing reads any more, so that this step may write into them.
    """

    node: Node
    call: Callable[..., Any]
    keyword: str | None
    freed: list[Node]


class Program:
    """A graph of pointwise ATen operations (``tracing.simplified``).

    The first ``blocks`` inputs are blocks of one shape; the others are combined with them.
    """

    def __init__(self, module: GraphModule, blocks: int) -> None:
        *nodes, output = module.graph.nodes
        (result,) = output.args
        self.results: list[Node] = list(result) if isinstance(result, (tuple, list)) else [result]
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.constants = _values([n for n in nodes if n.op == "call_function" and not n.all_input_nodes])
        self.steps: list[Step] = []
        last_use = {used: node for node in (*nodes, output) for used in node.all_input_nodes}
        of_block, buffered, unread = set(self.inputs[:blocks]), set[Node](), list[Node]()
        for node in nodes[len(self.inputs) :]:
            target: Any = node.target
            if node in self.constants:
                continue
            call, keyword, freed = target, None, unread
            unread = [used for used in node.all_input_nodes if used in buffered and last_use[used] is node]
            if not of_block.isdisjoint(node.all_input_nodes):
                of_block.add(node)
                call, keyword = _with_out(target)
            if keyword is not None:
                buffered.add(node)
                if torch.Tag.core in target.tags:  # a kernel of its own, which may write over what it reads
                    freed, unread = [*freed, *unread], []
            self.steps.append(Step(node, call, keyword, freed))
        self.held = [*unread, *buffered.intersection(self.results)]

    def __call__(self, inputs: Sequence[Tensor], free: Buffers) -> list[Tensor]:
        """The results for one block, which are valid until the next call. ``free``: buffers of earlier calls."""
        values = {**self.constants, **dict(zip(self.inputs, inputs, strict=True))}
        shape = inputs[0].shape
        for node, call, keyword, freed in self.steps:
            arguments = [values[a] if isinstance(a, Node) else a for a in node.args]
            for unread in freed:
                free[values[unread].dtype, shape].append(values[unread])
            if keyword is None:
                values[node] = call(*arguments, **node.kwargs)
                continue
            dtype = node.meta["val"].dtype
            buffers = free[dtype, shape]
            values[node] = buffers.pop() if buffers else inputs[0].new_empty(shape, dtype=dtype)
            call(*arguments, **node.kwargs, **{keyword: values[node]})
        for node in self.held:
            free[values[node].dtype, shape].append(values[node])
        return [values[node] for node in self.results]


@in_clean_state
def _values(nodes: Sequence[Any]) -> dict[Node, Tensor]:
    """The numbers of nodes without inputs, which serve calls in any mode."""
    return {node: node.target(*node.args, **node.kwargs) for node in nodes}


def _with_out(target: Any) -> tuple[Callable[..., Any], str | None]:
    """The variant of an operation that writes its result into a given tensor, and the keyword for that."""
    if not isinstance(target, OpOverload):
        return target, None
    if target is aten.gelu_backward.default:
        return _gelu_backward, "grad_input"
    names = [argument.name for argument in signature_of(target).arguments]
    types = [str(argument.type) for argument in signature_of(target).arguments]
    if len(signature_of(target).returns) != 1 or torch.Tag.pointwise not in target.tags:
        return target, None
    for name in target.overloadpacket.overloads():
        variant = getattr(target.overloadpacket, name)
        *given, last = signature_of(variant).arguments
        same = [a.name for a in given] == names and [str(a.type) for a in given] == types
        if same and last.is_out:
            quick = TORCH_CALLS.get(target.overloadpacket)
            return (variant, last.name) if quick is None else (quick, "out")
    return target, None


def _gelu_backward(dy: Tensor, z: Tensor, *, grad_input: Tensor, **options: str) -> None:
    """GELU's gradient. oneDNN refuses a number for dy, which is 0 for a step after GELU (``floor(gelu(z))``)."""
    aten.gelu_backward.grad_input(dy.expand_as(z), z, grad_input=grad_input, **options)
