"""A traced pointwise function, run block by block with little memory traffic.

Run as it was traced, each operation would allocate its result, and each ``where`` would suffer from mispredicted
branches, since torch does not vectorise it (131,072 random choices: 100 us; by bits: 37 us, and one mask serves several
choices). So

* intermediates live in buffers that are allocated once, and are reused as soon as nothing reads them any more;
* comparisons give 1.0 and 0.0, which torch vectorises, and a choice between two values is made with a bit mask;
* what depends on none of the blocks is computed once.

Limits: each operation is still a pass over the block. Results are those of the trace bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..._torch import TO_COPY, OpOverload
from ...activations.tracing import TORCH_CALLS

aten = torch.ops.aten

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
_COMPARISONS = {
    getattr(getattr(aten, name), kind) for name in ("gt", "ge", "lt", "le", "eq", "ne") for kind in ("Scalar", "Tensor")
}
_LOGICAL = {aten.logical_and.default: torch.mul, aten.logical_or.default: torch.maximum}
_LOGICAL_NOT = aten.logical_not.default


class Slot(int):
    """The number of a place that holds a tensor."""


class Step(NamedTuple):
    """``call(*arguments, **options)``; slots among the arguments stand for what they hold.

    The result is written into ``out`` by the keyword, or is put there; without either the call has written it.
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
        self._masks: dict[Node, Slot] = {}
        self._is_block: dict[Node, bool] = {}

        nodes = list(module.graph.nodes)
        (result,) = nodes[-1].args
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for i, node in enumerate(nodes):  # inputs come first
            is_block = any(self._is_block[used] for used in node.all_input_nodes)
            self._is_block[node] = i < blocks if node.op == "placeholder" else is_block
        self._truths = self._find_truths(nodes)
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

    def _find_truths(self, nodes: Sequence[Node]) -> set[Node]:
        """The truth values that can be 1.0 and 0.0: those used only to choose, to combine and to multiply."""

        def is_made(node: Node) -> bool:
            if node.target in _COMPARISONS:
                return all(n.meta["val"].dtype is self.dtype for n in node.all_input_nodes)
            return node.target in (*_LOGICAL, _LOGICAL_NOT) and all(n in truths for n in node.all_input_nodes)

        def is_taken(node: Node, user: Node) -> bool:
            if user.target is aten.where.self:
                are_numbers = all(n.meta["val"].dtype is self.dtype for n in user.all_input_nodes if n is not node)
                return self._is_block[user] and user.args[0] is node and node not in user.args[1:] and are_numbers
            if user.target in (aten.mul.Tensor, TO_COPY.default):
                return user.meta["val"].dtype is self.dtype
            return user in truths

        truths = {node for node in nodes if node.op == "call_function" and self._is_block[node]}
        while True:
            kept = {node for node in truths if is_made(node) and all(is_taken(node, user) for user in node.users)}
            if kept == truths:
                return truths
            truths = kept

    # --- placing operations -------------------------------------------------------------------------------------------

    def _place(self, node: Node, dying: Sequence[Node]) -> None:
        target: Any = node.target
        if not self._is_block[node]:
            self._slots[node] = self._new_slot()
            self.once.append(Step(target, self._arguments(node.args), dict(node.kwargs), self._slots[node], None))
        elif node in self._truths:
            if target in _LOGICAL:
                self._emit(node, _LOGICAL[target], node.args, {}, "out", self.dtype)
            elif target is _LOGICAL_NOT:
                self._emit(node, torch.eq, (*node.args, 0), {}, "out", self.dtype)
            else:
                self._emit(node, _with_out(target)[0], node.args, {}, "out", self.dtype)
        elif target is aten.where.self and node.args[0] in self._truths:
            self._choose(node)
        elif target is TO_COPY.default and node.args[0] in self._truths:
            self._emit(node, torch.mul, (*node.args, 1.0), {}, "out", self.dtype)
        else:
            call, keyword = _with_out(target)
            value = node.meta["val"]
            reuse = None
            if keyword is not None and torch.Tag.core in target.tags and target is not aten.where.self:
                reuse = next((n for n in dying if self._holds(n, value.dtype)), None)
            self._emit(node, call, node.args, dict(node.kwargs), keyword, getattr(value, "dtype", None), reuse)

    def _emit(
        self,
        node: Node,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        keyword: str | None,
        dtype: torch.dtype | None,
        reuse: Node | None = None,
    ) -> None:
        found = self._arguments(arguments)
        if keyword is None or dtype is None:
            self._slots[node] = self._new_slot()
        elif reuse is not None:
            self._slots[node] = self._slots.pop(reuse)
        else:
            self._slots[node] = self._buffer(dtype)
        self.steps.append(Step(call, found, options, self._slots[node], keyword))

    def _choose(self, node: Node) -> None:
        """``where(condition, a, b)`` as ``b ^ ((a ^ b) & mask)``, and in fewer steps where a or b is 0."""
        condition, a, b = node.args
        assert isinstance(condition, Node) and isinstance(a, Node) and isinstance(b, Node)
        mask = self._mask(condition)
        out = self._slots[node] = self._buffer(self.dtype)
        first, second = self._slots[a], self._slots[b]
        if _is_zero(b):
            self.steps.append(Step(_and, (first, mask, out), {}, out, None))
        elif _is_zero(a):
            self.steps.append(Step(_and_not, (second, mask, out), {}, out, None))
        elif not (self._is_block[a] or self._is_block[b]):
            self.steps.append(Step(_choose_of_two, (first, second, mask, out), {}, out, None))
        else:
            self.steps.append(Step(_choose, (first, second, mask, out), {}, out, None))

    def _mask(self, condition: Node) -> Slot:
        if condition not in self._masks:
            self._masks[condition] = mask = self._buffer(_BITS[self.dtype])
            self.steps.append(Step(_fill_bits, (self._slots[condition], mask), {}, mask, None))
        return self._masks[condition]

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

    def _holds(self, node: Node, dtype: torch.dtype) -> bool:
        return self._slots.get(node) in self.buffers and self.buffers[self._slots[node]] is dtype

    def _release(self, node: Node) -> None:
        for slots in (self._slots, self._masks):
            slot = slots.get(node)
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
        elif (result := call(*found, **options)) is not None:
            places[out] = result


def _with_out(target: Any) -> tuple[Callable[..., Any], str | None]:
    """The variant of an operation that writes its result into a given tensor, and the keyword for that."""
    if not isinstance(target, OpOverload):
        return target, None
    if target is aten.gelu_backward.default:
        return _gelu_backward, "grad_input"
    names = [argument.name for argument in target._schema.arguments]
    types = [str(argument.type) for argument in target._schema.arguments]
    if len(target._schema.returns) != 1 or torch.Tag.pointwise not in target.tags:
        return target, None
    for name in target.overloadpacket.overloads():
        variant = getattr(target.overloadpacket, name)
        *given, last = variant._schema.arguments
        same = [a.name for a in given] == names and [str(a.type) for a in given] == types
        if same and last.is_out:
            quick = TORCH_CALLS.get(target.overloadpacket)
            return (variant, last.name) if quick is None else (quick, "out")
    return target, None


def _gelu_backward(dy: Tensor, z: Tensor, *, grad_input: Tensor, **options: str) -> None:
    """oneDNN refuses a number for dy, which is 0 behind a step (``floor(gelu(z))``)."""
    aten.gelu_backward.grad_input(dy.expand_as(z), z, grad_input=grad_input, **options)


def _is_zero(node: Node) -> bool:
    value = node.args[0] if node.target is aten.scalar_tensor.default else None
    return isinstance(value, (int, float)) and str(float(value)) == "0.0"  # and not -0.0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.dtype])


def _fill_bits(truth: Tensor, mask: Tensor) -> None:
    """All bits for 1.0, none for 0.0."""
    mask.copy_(truth).neg_()


def _choose(a: Tensor, b: Tensor, mask: Tensor, out: Tensor) -> None:
    bits, b_bits = _bits(out), _bits(b)
    if out.shape in (a.shape, b.shape):
        torch.bitwise_xor(_bits(a), b_bits, out=bits).bitwise_and_(mask)
    else:  # between numbers, or numbers of channels, which broadcast
        torch.bitwise_and(mask, _bits(a) ^ b_bits, out=bits)
    bits.bitwise_xor_(b_bits)


def _choose_of_two(a: Tensor, b: Tensor, mask: Tensor, out: Tensor) -> None:
    """The same for a and b that are the same for all blocks, and have the blocks' shape only with the mask."""
    b_bits, bits = _bits(b), _bits(out)
    torch.bitwise_and(mask, torch.bitwise_xor(_bits(a), b_bits), out=bits).bitwise_xor_(b_bits)


def _and(a: Tensor, mask: Tensor, out: Tensor) -> None:
    torch.bitwise_and(_bits(a), mask, out=_bits(out))


def _and_not(b: Tensor, mask: Tensor, out: Tensor) -> None:
    b_bits, bits = _bits(b), _bits(out)
    torch.bitwise_and(b_bits, mask, out=bits).bitwise_xor_(b_bits)
