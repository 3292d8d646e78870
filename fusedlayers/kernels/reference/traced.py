"""Traced functions, which may read other tensors besides z: what a user's activation becomes.

The traced function, or its traced gradient, runs block by block as a ``Program``, so that no intermediate has the size
of the whole. The backward pass computes everything from z. Run as it was traced, each operation would allocate its
result. So

* intermediates live in buffers that are allocated once, and are reused as soon as nothing reads them any more;
* what depends on none of the blocks is computed once.

Limits: each operation is still a pass over the block. Results are those of the trace bit for bit. torch does not
vectorise ``where``: 131,072 random choices take 100 us, where bit masks would take 37.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..._torch import OpOverload, signature_of
from ...activations import Activation, upcast
from ...activations.tracing import TORCH_CALLS
from ...utils.layout import Layout, laid_out, layout_along
from ..interface import GradientRequest
from .chunks import blocks

aten = torch.ops.aten

#: Programs cached: one for each activation, set of gradients and dtype.
_PROGRAMS = 512


def activate(z: Tensor, y: Tensor, activation: Activation, operands: Sequence[Tensor], dim: int) -> None:
    """Write the activation's output into y, which may be z."""
    program = _forward(activation, torch.promote_types(z.dtype, torch.float32))
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
    program = _gradient(activation, request.needs_operands, request.saved, wide)
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
    others = [_spread(p.detach().to(program.dtype), layout) for p in operands]
    overlaps = any(out.data_ptr() == tensor.data_ptr() for tensor in inputs)
    run = program.bind(others)
    for block in blocks(layout):
        *parts, target = (tensor[block] for tensor in whole)
        wide = [upcast(part) for part in parts]
        if wide[0].shape[1] < layout.channels:
            run = program.bind([p[block[1]] if p.dim() else p for p in others])
        is_safe = not overlaps or wide[0] is not parts[0]
        results = run(wide, target if is_safe else None)
        if not is_safe:
            target.copy_(results[0])
        yield (
            block[1],
            [r if r.shape == target.shape else r.expand_as(target) for r in results],
        )  # a constant is one number


def _spread(operand: Tensor, layout: Layout) -> Tensor:
    """An operand, shaped to be combined with blocks."""
    if operand.numel() == 1:
        return operand.reshape(())
    column = operand.reshape(-1, 1)
    # Where few neighbours share a channel torch would start a new loop for every few numbers.
    if layout.inner in range(2, _SHORT_LOOP) and layout.outer >= _OFTEN:
        return column.expand(-1, layout.inner).contiguous()
    return column


#: Neighbours from which a loop over them is long enough, and images from which a copy for one of them is small.
_SHORT_LOOP = 256
_OFTEN = 4


@functools.lru_cache(_PROGRAMS)
def _forward(activation: Activation, dtype: torch.dtype) -> Program:
    return _program(activation.function, 1, activation, dtype)


@functools.lru_cache(_PROGRAMS)
def _gradient(activation: Activation, needs: tuple[bool, ...], given: str, dtype: torch.dtype) -> Program:
    return _program(activation.gradient_function(needs, given), 2, activation, dtype)


def _program(function: Callable[..., Any], inputs: int, activation: Activation, dtype: torch.dtype) -> Program:
    from ...activations.tracing import aten_graph, simplified, slow_kernels  # whose import takes a second

    count = inputs + len(activation.operand_dims)
    examples = [torch.zeros(_EXAMPLE, dtype=dtype, device="cpu") for _ in range(count)]
    return Program(simplified(aten_graph(function, examples, slow_kernels())), inputs, dtype)


#: All examples have one shape: the trace then leaves an operand's gradient as it is, element by element.
_EXAMPLE = (4, 6)


# --- programs ---------------------------------------------------------------------------------------------------------


class Slot(int):
    """The number of a place that holds a tensor."""


class Step(NamedTuple):
    """``call(*arguments, **options)``; slots among the arguments stand for what they hold.

    The result is written into ``out`` by the keyword, or is put there.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    out: Slot
    keyword: str | None


class Program:
    """A graph of pointwise ATen operations (``trace.simplified``), whose arithmetic is in ``dtype``.

    The first ``blocks`` inputs are blocks; the others are the same for all blocks.
    """

    def __init__(self, module: GraphModule, blocks: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.blocks = blocks
        self.once: list[Step] = []
        self.steps: list[Step] = []
        self.buffers: dict[Slot, torch.dtype] = {}
        self.count = 0
        self._free: list[Slot] = []
        self._slots: dict[Node, Slot] = {}
        self._is_block: dict[Node, bool] = {}

        nodes = list(module.graph.nodes)
        (result,) = nodes[-1].args
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for i, node in enumerate(nodes):  # inputs come first
            is_block = any(self._is_block[used] for used in node.all_input_nodes)
            self._is_block[node] = i < blocks if node.op == "placeholder" else is_block
        last_use = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
        for i, node in enumerate(nodes):
            if node.op == "placeholder":
                self._slots[node] = self._new_slot()
            elif node.op == "call_function":
                dying = [used for used in node.all_input_nodes if last_use[used] == i]
                self._place(node, dying)
                for used in dying:
                    self._release(used)
        self.results = [self._slots[node] for node in results]

    def bind(self, others: Sequence[Tensor]) -> Run:
        """The program with the inputs that are the same for all blocks; what depends only on these is computed here."""
        return Run(self, others)

    # --- placing operations -------------------------------------------------------------------------------------------

    def _place(self, node: Node, dying: Sequence[Node]) -> None:
        target: Any = node.target
        if not self._is_block[node]:
            self._slots[node] = self._new_slot()
            self.once.append(Step(target, self._arguments(node.args), dict(node.kwargs), self._slots[node], None))
            return
        call, keyword = _with_out(target)
        dtype = getattr(node.meta["val"], "dtype", None)
        reuse = None
        if keyword is not None and torch.Tag.core in target.tags:
            reuse = next((n for n in dying if self._holds(n, dtype)), None)
        arguments = self._arguments(node.args)
        if keyword is None or dtype is None:
            self._slots[node] = self._new_slot()
        elif reuse is not None:
            self._slots[node] = self._slots.pop(reuse)
        else:
            self._slots[node] = self._buffer(dtype)
        self.steps.append(Step(call, arguments, dict(node.kwargs), self._slots[node], keyword))

    def _arguments(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self._slots[a] if isinstance(a, Node) else a for a in arguments)

    def _new_slot(self) -> Slot:
        self.count += 1
        return Slot(self.count - 1)

    def _buffer(self, dtype: torch.dtype) -> Slot:
        found = next((slot for slot in reversed(self._free) if self.buffers[slot] is dtype), None)
        if found is not None:
            self._free.remove(found)
            return found
        slot = self._new_slot()
        self.buffers[slot] = dtype
        return slot

    def _holds(self, node: Node, dtype: torch.dtype | None) -> bool:
        return self._slots.get(node) in self.buffers and self.buffers[self._slots[node]] is dtype

    def _release(self, node: Node) -> None:
        slot = self._slots.get(node)
        if slot is not None and slot in self.buffers:
            self._free.append(slot)


class Run:
    """A program with its buffers and what was computed once."""

    def __init__(self, program: Program, others: Sequence[Tensor]) -> None:
        self.program = program
        self.memory: dict[Slot, Tensor] = {}
        self.shape: torch.Size | None = None
        self.places: list[Any] = [None] * program.count
        self.places[program.blocks : program.blocks + len(others)] = others
        _take(program.once, self.places)

    def __call__(self, blocks: Sequence[Tensor], out: Tensor | None) -> list[Tensor]:
        """The results for blocks of one shape, the first not being smaller than those that follow.

        The first result is written into ``out``, which no input may overlap. The others are valid until the next call.
        """
        program, places = self.program, self.places
        if blocks[0].shape != self.shape:
            self._make_room(blocks[0])
        places[: program.blocks] = blocks
        first = program.results[0]
        if out is not None and first in self.memory and out.dtype is program.dtype:
            places[first] = out
        _take(program.steps, places)
        if out is not None and places[first] is not out:
            out.copy_(places[first])
        return [places[slot] for slot in program.results]

    def _make_room(self, block: Tensor) -> None:
        self.shape = block.shape
        for slot, dtype in self.program.buffers.items():
            if slot in self.memory:
                self.places[slot] = self.memory[slot].view(-1)[: block.numel()].view(block.shape)
            else:
                self.places[slot] = self.memory[slot] = block.new_empty(block.shape, dtype=dtype)


def _take(steps: Sequence[Step], places: list[Any]) -> None:
    for call, arguments, options, out, keyword in steps:
        found = [places[a] if type(a) is Slot else a for a in arguments]
        if keyword is not None:
            call(*found, **options, **{keyword: places[out]})
        else:
            places[out] = call(*found, **options)


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
    """oneDNN refuses a number for dy, which is 0 behind a step (``floor(gelu(z))``)."""
    aten.gelu_backward.grad_input(dy.expand_as(z), z, grad_input=grad_input, **options)
