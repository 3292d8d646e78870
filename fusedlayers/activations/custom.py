"""A user's own function, made into an activation.

``specialise`` takes the function apart (``capture.py``), traces it once, and splits the trace in two: what does not
depend on z (a sigmoid of a trainable order, gamma functions of it) is computed beforehand, by torch and under autograd,
on tensors of one number or one per channel; the rest is the activation, a pointwise function of z and these
``operands``. Anything else stays with plain PyTorch, with a reason that people can read.

The split function is compared with the original, values and gradients, before it is used: whatever the trace did not
see (state that changes, a backward of its own, a dependence on the shape) shows there.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ..clean import in_clean_state
from .capture import Captured, capture
from .decompositions import to_single_results
from .inverse import Analysis, analyse
from .spec import Activation, Row, Specialised, must_be_called_because
from .trace import FILLED, NotPointwise, aten_graph

aten = torch.ops.aten
_log = logging.getLogger("fusedlayers")

Dims = tuple[int | None, ...]


class Split(NamedTuple):
    """A traced function in two parts: ``body(z, *prologue(*tensors))``."""

    body: GraphModule
    prologue: GraphModule
    #: For each operand the dimension of z, from the end, along which it runs; None for one number.
    dims: Dims
    #: Where the operands are tensors of the function as they are, their numbers.
    direct: tuple[int, ...] | None


class _Entry(NamedTuple):
    """What is known of a function: how it is split, or why it is left to PyTorch."""

    activation: Activation | None
    split: Split | None
    refusal: str = ""


#: Traces kept, and how many that differ in nothing but the numbers that a function reads: each costs a tenth of a
#: second, so a function whose numbers change at every step is given up.
_ENTRIES = 512
_VARIANTS = 64
_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_analyses: OrderedDict[Hashable, Analysis] = OrderedDict()
_variants: Counter[Hashable] = Counter()
_said: set[str] = set()
_lock = threading.Lock()


def specialise(
    activation: Activation, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> Specialised:
    """The activation for ``z`` of this shape, dtype and device, for a callable that is not in the table."""
    captured = capture(activation.function)
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    example = _example_shape(shape, captured.tensors)
    key = captured.key, example, dtype, autocast
    with _lock:
        entry = _entries.get(key)
    if entry is None:
        entry = _make(activation, captured, example, dtype, autocast)
        with _lock:
            _entries[key] = entry
            if len(_entries) > _ENTRIES:
                _entries.popitem(last=False)
    if entry.activation is None:
        return Specialised(replace(activation, unfused_because=entry.refusal, is_untraced=False))
    split = entry.split
    if split is None or not split.dims:
        return Specialised(entry.activation)
    if split.direct is not None:
        operands = tuple(captured.tensors[i] for i in split.direct)
    else:
        wide = torch.promote_types(dtype, torch.float32)
        operands = split.prologue(*(t.to(wide) if t.is_floating_point() else t for t in captured.tensors))
    if device is not None:
        operands = tuple(p if p.dim() else p.to(device) for p in operands)  # as torch combines 0-d tensors with others
        if any(p.device != device for p in operands):
            reason = f"{activation.name} is left to PyTorch because its tensors are on another device"
            return Specialised(replace(activation, unfused_because=reason, is_untraced=False))
    return Specialised(entry.activation, operands, next((d for d in split.dims if d is not None), None))


def _make(
    activation: Activation, captured: Captured, example: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> _Entry:
    kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in captured.tensors)
    family = _family(captured.key), kinds, example, dtype, autocast
    with _lock:
        _variants[family] += 1
        is_restless = _variants[family] > _VARIANTS
    try:
        if is_restless:
            raise NotPointwise("numbers that it reads change from call to call; let it read tensors instead")
        _check_modules(activation.function)
        split = _split(captured, example, dtype)
        _check_call(captured, example, dtype, autocast)
        _compare(captured, split, example, dtype)
    except NotPointwise as refusal:
        reason = f"{activation.name} is left to PyTorch because {refusal}"
        if reason not in _said:
            _said.add(reason)
            _log.warning("%s", reason)
        return _Entry(None, None, reason)
    if split.dims:
        return _Entry(Activation(activation.name, split.body, operand_dims=split.dims, is_traced=True), split)
    row = activation.row or Row(activation.name, split.body)
    if row.given_output is None:
        row = replace(row, given_output=_analysis(captured.key, split.body))
    if activation.row is not None:
        return _Entry(replace(activation, row=row, is_untraced=False), None)
    return _Entry(Activation(activation.name, split.body, row=row, is_traced=True), None)


def _analysis(key: Hashable, function: Callable[[Tensor], Tensor]) -> Analysis:
    """Once for all shapes and dtypes: it takes up to a second."""
    with _lock:
        found = _analyses.get(key)
    if found is None:
        found = analyse(function)
        with _lock:
            _analyses[key] = found
            if len(_analyses) > _ENTRIES:
                _analyses.popitem(last=False)
    return found


def _family(key: Any) -> Hashable:
    """What functions that differ in the numbers that they read have in common."""
    while isinstance(key, tuple) and key[0] in ("partial", "method"):
        key = key[1][0][1]
    return key[0] if isinstance(key, tuple) else key


def _check_modules(function: object) -> None:
    if isinstance(function, nn.Module):
        for module in function.modules():
            reason = must_be_called_because(module)
            if reason is not None:
                raise NotPointwise(reason)


# --- splitting --------------------------------------------------------------------------------------------------------

#: Sizes that take the place of those that no tensor of the function shares, one for each dimension: even, because half
#: of an odd number is an error where half of an even one tells that the function is not pointwise.
_SIZES = range(6, 10_000, 4)


def _example_shape(shape: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """A shape that stands for all shapes like this one: sizes matter only where a tensor has the same."""
    taken = {size for tensor in tensors for size in tensor.shape if size > 1}
    free = (size for size in _SIZES if size not in taken)
    return tuple(size if size in taken else next(free) for size in shape)


#: Pointwise, though torch does not say so.
_ALSO_POINTWISE = {
    aten._prelu_kernel.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.expand.default,
    aten.expand_copy.default,
    aten.hardswish.default,
    aten.leaky_relu.default,  # of torch 2.11
    aten.rsub.Tensor,
    aten.view.default,
    aten.view_copy.default,
}
_EXPANDING = {aten.expand.default, aten.expand_copy.default}


def _split(captured: Captured, example: tuple[int, ...], dtype: torch.dtype) -> Split:
    wide = torch.promote_types(dtype, torch.float32)
    module = aten_graph(
        lambda z, *tensors: captured.on(tensors)(z),
        [torch.zeros(example, dtype=wide), *(_like(tensor, wide) for tensor in captured.tensors)],
        to_single_results(),
    )
    return _Splitter(module, example).split()


def _like(tensor: Tensor, wide: torch.dtype) -> Tensor:
    return torch.zeros(tensor.shape, dtype=wide if tensor.is_floating_point() else tensor.dtype, device="cpu")


class _Splitter:
    """Copies the nodes of a trace into the graph that they belong to."""

    def __init__(self, module: GraphModule, example: tuple[int, ...]) -> None:
        self.module, self.example = module, example
        self.z, *self.tensors = (node for node in module.graph.nodes if node.op == "placeholder")
        #: What depends on z, what depends on the function's tensors only, and numbers.
        self.varying: dict[Node, Node] = {}
        self.uniform: dict[Node, Node] = {}
        self.numbers: dict[Node, float | int | bool] = {}
        self.body, self.prologue = Graph(), Graph()
        self.operands: dict[Node, Node] = {}

    def split(self) -> Split:
        for node in self.module.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise NotPointwise(f"it is random ({_name(node)})")
        self.varying[self.z] = self.body.placeholder("z")
        for tensor in self.tensors:
            self.uniform[tensor] = self.prologue.placeholder(tensor.name)
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                self._place(node)
            elif node.op == "get_attr":
                self.numbers[node] = self._number(node)
            elif node.op == "output":
                (result,) = node.args
                if not isinstance(result, Node) or result.meta["val"].shape != self.example:
                    raise NotPointwise("it does not return one tensor of its argument's shape")
                if result not in self.varying:
                    raise NotPointwise("its result does not depend on its argument")
                self.body.output(self._in_body(result))
        self.prologue.output(tuple(self.uniform[node] for node in self.operands))
        dims = tuple(self._dim(node) for node in self.operands)
        if len({dim for dim in dims if dim is not None}) > 1:
            raise NotPointwise("its tensors run along several dimensions")
        whole = all(node in self.tensors for node in self.operands)
        direct = tuple(self.tensors.index(node) for node in self.operands) if whole else None
        return Split(_finished(self.body), _finished(self.prologue), dims, direct)

    def _place(self, node: Node) -> None:
        target: Any = node.target
        op = _name(node)
        inputs = node.all_input_nodes
        if target is aten.copy_.default:
            if node.args[0] is not self.z:  # the layer decides whether z is overwritten
                raise NotPointwise("it changes a tensor that it holds")
            return
        if op == "_local_scalar_dense":
            raise NotPointwise("it turns a tensor into a number (item())")
        if target in FILLED and isinstance(fill := FILLED[target](node), (bool, int, float)):
            self.numbers[node] = fill
        elif any(i in self.varying for i in inputs):
            pointwise = torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE
            if not pointwise or getattr(node.meta["val"], "shape", None) != self.example:  # several results have none
                raise NotPointwise(f"{op} is not pointwise")
            self.varying[node] = self.body.node_copy(node, self._in_body)
            if target is aten.detach_copy.default:  # which has no derivative, not even 0
                self.varying[node].target = aten.detach.default
        elif any(i in self.uniform for i in inputs):
            if target in _EXPANDING:
                self.uniform[node] = self.uniform[node.args[0]]  # type: ignore[index]  # its argument is a node
                self.numbers.pop(node, None)
                node.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
                return
            self.uniform[node] = self.prologue.node_copy(node, self._in_prologue)
        else:
            self.numbers[node] = self._number(node)

    def _in_body(self, node: Node) -> Node:
        if node in self.varying:
            return self.varying[node]
        if node in self.numbers:
            return self._constant(self.body, node)
        return self._operand(node)

    def _in_prologue(self, node: Node) -> Node:
        return self._constant(self.prologue, node) if node in self.numbers else self.uniform[node]

    def _constant(self, graph: Graph, node: Node) -> Node:
        dtype = node.meta["val"].dtype
        return graph.call_function(aten.scalar_tensor.default, (self.numbers[node],), {"dtype": dtype})

    def _operand(self, node: Node) -> Node:
        source = next((known for known in self.operands if self.uniform[known] is self.uniform[node]), node)
        if source not in self.operands:
            if not source.meta["val"].is_floating_point():
                raise NotPointwise("it combines its argument with a tensor that is not floating")
            with self.body.inserting_after(list(self.operands.values())[-1] if self.operands else self.varying[self.z]):
                self.operands[source] = self.body.placeholder(f"p{len(self.operands)}")
        return self.operands[source]

    def _dim(self, node: Node) -> int | None:
        """The dimension of z, from the end, along which a tensor runs that is combined with it."""
        shape = tuple(node.meta["val"].shape)
        running = [i - len(shape) for i, size in enumerate(shape) if size != 1]
        if len(running) > 1 or math.prod(shape) == 0:
            raise NotPointwise("a tensor that it reads has more than one dimension")
        return running[0] if running else None

    def _number(self, node: Node) -> float | int | bool:
        """What a node that depends on nothing computes."""
        value = self._evaluated(node)
        if value.numel() != 1:
            raise NotPointwise("it makes a tensor of several numbers; let it read one, such as a module's buffer")
        return value.item()

    def _evaluated(self, node: Node) -> Tensor:
        if node in self.numbers:
            return torch.tensor(self.numbers[node], dtype=node.meta["val"].dtype)
        if node.op == "get_attr":
            value: Any = getattr(self.module, str(node.target))
            real = getattr(value, "constant", None)  # of a fake tensor made from numbers
            return value if real is None else real
        target: Any = node.target
        arguments = [self._evaluated(a) if isinstance(a, Node) else a for a in node.args]
        return target(*arguments, **node.kwargs)


def _name(node: Node) -> str:
    _, _, operation = str(node.target).partition(".")
    return operation.split(".")[0] or getattr(node.target, "__name__", "")  # of a tuple's item


def _finished(graph: Graph) -> GraphModule:
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(nn.Module(), graph)


# --- comparing --------------------------------------------------------------------------------------------------------

#: Values where functions differ, and about how many values are compared in all.
_EDGES = (0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, math.inf, -math.inf, math.nan)
_SWEEP = 4096
#: The same operations on the same numbers: what differs is the order of a few sums.
_UNITS = 64


@in_clean_state
def _check_call(captured: Captured, example: tuple[int, ...], dtype: torch.dtype, autocast: bool) -> None:
    """Refuse what has a memory, or returns another dtype than its argument's, which the layers return. (Under autocast
    any may.)"""
    tensors = [torch.zeros_like(tensor, device="cpu") for tensor in captured.tensors]
    function = captured.on(tensors)
    before = capture(function).key
    try:
        result = function(torch.zeros(_sweep_shape(example, tensors), dtype=dtype))
    except Exception as error:  # whatever a user's function may raise
        raise NotPointwise(f"it raised {type(error).__name__} when it was tried: {error}") from error
    if capture(function).key != before:
        raise NotPointwise("it changes what it reads from call to call")
    if result.dtype is not dtype and not autocast:
        raise NotPointwise(f"it returns {result.dtype} for {dtype}; its tensors may have another dtype than the layer")


@in_clean_state
def _compare(captured: Captured, split: Split, example: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a function that its trace does not reproduce, in values or gradients."""
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [t.detach().to("cpu", wide if t.is_floating_point() else t.dtype) for t in captured.tensors]
    shape = _sweep_shape(example, tensors)
    count = math.prod(shape)
    steps = torch.linspace(-8, 8, max(1, count), dtype=wide)
    moderate = steps.reshape(shape)
    extreme = torch.tensor(_EDGES, dtype=wide).repeat(count // len(_EDGES) + 1)[:count].reshape(shape)
    for z, with_tensors in ((moderate, True), (extreme, False)):
        theirs = _values_and_gradients(lambda z, *t: captured.on(t)(z), z, tensors, with_tensors)
        ours = _values_and_gradients(lambda z, *t: split.body(z, *split.prologue(*t)), z, tensors, with_tensors)
        for what, a, b in zip(("value", *(len(theirs) - 1) * ("gradient",)), theirs, ours, strict=True):
            scale = a[a.isfinite()].abs().max() if bool(a.isfinite().any()) else torch.zeros(())
            tolerance = _UNITS * torch.finfo(wide).eps
            if a.shape != b.shape or not torch.allclose(
                a, b, rtol=tolerance, atol=float(scale) * tolerance, equal_nan=True
            ):
                raise NotPointwise(
                    f"its {what} is not that of the operations in it: it depends on something else "
                    "(a shape, changing state, a backward pass of its own)"
                )


def _sweep_shape(example: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Another shape of the same kind as the example, with about ``_SWEEP`` elements."""
    taken = {size for tensor in tensors for size in tensor.shape if size > 1}
    free = [i for i, size in enumerate(example) if size not in taken]
    shape = [size if size in taken else 2 for size in example]
    if free:
        shape[free[0]] = max(2, _SWEEP * 2 // max(1, math.prod(shape)))
    return tuple(shape)


def _values_and_gradients(
    function: Callable[..., Tensor], z: Tensor, tensors: Sequence[Tensor], with_tensors: bool
) -> list[Tensor]:
    leaves = [z.clone(), *(t.clone() for t in tensors)]
    wanted = [t.requires_grad_() for t in leaves if t.is_floating_point()]
    wanted = wanted if with_tensors else wanted[:1]
    try:
        y = function(leaves[0] * 1, *leaves[1:])  # an operation before it, so that it may work in place
        weight = torch.linspace(0.5, 1.5, max(1, y.numel()), dtype=y.dtype).reshape(y.shape)
        grads = torch.autograd.grad(y, wanted, weight, allow_unused=True) if y.requires_grad else [None] * len(wanted)
    except Exception as error:  # whatever a user's function may raise
        raise NotPointwise(f"it raised {type(error).__name__} when it was tried: {error}") from error
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, wanted, strict=True))]
