"""Splits the trace of a user's function in two: what depends on z, and what depends only on the function's tensors.

The *prologue* depends only on the tensors (a sigmoid of a trainable order, gamma functions of it). PyTorch runs it
before the kernel, under autograd, on tensors of one number or of one number per channel. The *body* is a pointwise
function of z and of the prologue's results, its *operands*. Fused kernels compute the body.

What it does not do: tensors that run along more than one dimension, or integer tensors combined with z, are refused,
and functions that write over their argument.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from .._torch import LOCAL_SCALAR, PRELU
from .free_variables import FreeVariables
from .tracing import COPIES, TORCH_CALLS, NotPointwise, aten_graph, name_of, simplified, to_single_results

aten = torch.ops.aten


class Split(NamedTuple):
    """A traced function in two parts: ``body(z, *prologue(*tensors))``."""

    body: Callable[..., Tensor]
    prologue: Callable[..., tuple[Tensor, ...]]
    #: For each operand the dimension of z, counted from the end, along which it runs; None for one number.
    dims: tuple[int | None, ...]
    #: The indices of the function's tensors that are the operands, if the prologue computes nothing; else None.
    direct: tuple[int, ...] | None


#: Sizes for the dimensions that no tensor of the function shares. They are even: splitting an odd dimension in halves
#: raises an error, and splitting an even one shows that the function is not pointwise.
_SIZES = range(6, 10_000, 4)


def example_shape(shape: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """A shape that stands for all shapes like this one: a size matters only where one of the tensors has it too."""
    taken = {size for tensor in tensors for size in tensor.shape if size > 1}
    free = (size for size in _SIZES if size not in taken)
    return tuple(size if size in taken else next(free) for size in shape)


def split(variables: FreeVariables, example: tuple[int, ...], dtype: torch.dtype) -> Split:
    """Trace a function for z of the shape ``example``, in the dtype that layers compute in, and split the trace.

    Raises:
        NotPointwise: the function cannot be traced, is not pointwise, has effects, or computes something else in
            ``dtype``.
    """
    wide = torch.promote_types(dtype, torch.float32)
    module = _traced(variables, example, wide)
    if wide is not dtype and _numbers(module) != _numbers(_traced(variables, example, dtype)):
        raise NotPointwise(f"it does with {dtype} something else than with {wide}, in which layers compute")
    _refuse_effects(module.graph)
    parts = _Parts(simplified(module, for_autograd=True), example)
    body, prologue = parts.finished()
    dims = _dims(prologue, [_like(tensor, wide) for tensor in variables.tensors])
    operands = [parts.tensors.index(node) for node in parts.operands if node in parts.tensors]
    return Split(body, prologue, dims, tuple(operands) if len(operands) == len(dims) else None)


def _traced(variables: FreeVariables, example: tuple[int, ...], dtype: torch.dtype) -> GraphModule:
    return aten_graph(
        lambda z, *tensors: variables.rebind(tensors)(z),
        [torch.empty(example, dtype=dtype, device="cpu"), *(_like(tensor, dtype) for tensor in variables.tensors)],
        to_single_results(),
    )


def _like(tensor: Tensor, wide: torch.dtype) -> Tensor:
    return torch.zeros(tensor.shape, dtype=wide if tensor.is_floating_point() else tensor.dtype, device="cpu")


def _numbers(module: GraphModule) -> list[tuple[str, tuple[float, ...]]]:
    """The operations of a trace, casts left out, with the numbers among their arguments."""
    return [
        (_name(node), tuple(a for a in node.args if isinstance(a, (bool, int, float))))
        for node in module.graph.nodes
        if node.op == "call_function" and node.target not in COPIES
    ]


def _refuse_effects(graph: Graph) -> None:
    nodes = list(graph.nodes)
    for node in nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotPointwise(f"it is random ({_name(node)})")
    for node in nodes:
        if node.target is LOCAL_SCALAR.default:
            raise NotPointwise("it turns a tensor into a number (item())")
        if node.target is aten.copy_.default:
            is_argument = node.args[0] is nodes[0]
            changed = "writes over its argument; use inplace=False" if is_argument else "changes a tensor that it holds"
            raise NotPointwise(f"it {changed}")


#: Pointwise operations without torch's tag ``pointwise``; leaky_relu is one of torch 2.11.
_ALSO_POINTWISE = {PRELU.default, aten.hardswish.default, aten.leaky_relu.default, aten.rsub.Tensor, *COPIES}


class _Parts:
    """The nodes of a simplified trace, copied into a body or a prologue.

    Attributes:
        body, prologue: the graphs.
        tensors: the placeholders of the function's tensors.
        operands: the nodes whose values the body takes from the prologue, with their placeholders in the body.
    """

    def __init__(self, module: GraphModule, example: tuple[int, ...]) -> None:
        self.body, self.prologue = Graph(), Graph()
        z, *self.tensors = (node for node in module.graph.nodes if node.op == "placeholder")
        self.operands: dict[Node, Node] = {}
        #: Nodes that depend on z, and on tensors only, with their copies; and the values of all others.
        self._varying: dict[Node, Node] = {z: self.body.placeholder("z")}
        self._uniform: dict[Node, Node] = {t: self.prologue.placeholder(t.name) for t in self.tensors}
        self._values: dict[Node, Tensor] = {}
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._place(node, example)
            elif node.op == "get_attr":
                value = getattr(module, str(node.target))
                self._values[node] = getattr(value, "constant", value)  # where a fake tensor holds its numbers
        (result,) = node.args  # of the last node, the output
        if not isinstance(result, Node) or result.meta["val"].shape != example:
            raise NotPointwise("it does not return one tensor of its argument's shape")
        if result not in self._varying:
            raise NotPointwise("its result does not depend on its argument")
        self.body.output(self._varying[result])
        self.prologue.output(tuple(self._uniform[node] for node in self.operands))

    def finished(self) -> tuple[GraphModule, GraphModule]:
        """The body and the prologue."""
        for node in self.prologue.nodes:  # it runs at every call of a layer
            target: Any = node.target
            node.target = TORCH_CALLS.get(getattr(target, "overloadpacket", None), target)
        for graph in (self.body, self.prologue):
            graph.eliminate_dead_code()
            graph.lint()
        return GraphModule(nn.Module(), self.body), GraphModule(nn.Module(), self.prologue)

    def _place(self, node: Node, example: tuple[int, ...]) -> None:
        target: Any = node.target
        if any(i in self._varying for i in node.all_input_nodes):
            pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ALSO_POINTWISE
            if not pointwise or getattr(node.meta.get("val"), "shape", None) != example:  # a tuple has no shape
                raise NotPointwise(f"{name_of(_name(node))} is not pointwise")
            self._varying[node] = _copied(self.body, node, self._in_body)
        elif any(i in self._uniform for i in node.all_input_nodes):
            known, prologue = self._uniform, self.prologue
            known[node] = _copied(prologue, node, lambda n: known[n] if n in known else self._constant(prologue, n))
        else:
            self._values[node] = target(*torch.fx.map_arg(node.args, self._values.__getitem__), **node.kwargs)

    def _in_body(self, node: Node) -> Node:
        if node in self._varying:
            return self._varying[node]
        return self._constant(self.body, node) if node in self._values else self._operand(node)

    def _constant(self, graph: Graph, node: Node) -> Node:
        value = self._values[node].unique()
        if value.numel() != 1:
            raise NotPointwise(
                "it makes a tensor of several numbers (or NumPy does); let it read one, such as a module's buffer"
            )
        return graph.call_function(aten.scalar_tensor.default, (value.item(),), {"dtype": value.dtype})

    def _operand(self, node: Node) -> Node:
        if node not in self.operands:
            if not node.meta["val"].is_floating_point():
                raise NotPointwise("it combines its argument with a tensor that is not floating")
            last = [node for node in self.body.nodes if node.op == "placeholder"][-1]
            with self.body.inserting_after(last):
                self.operands[node] = self.body.placeholder(f"p{len(self.operands)}")
        return self.operands[node]


def _copied(graph: Graph, node: Node, argument: Callable[[Node], Node]) -> Node:
    copied = graph.node_copy(node, argument)
    if copied.target is aten.detach_copy.default:  # detach_copy has no derivative formula, not even 0
        copied.target = aten.detach.default
    return copied


def _dims(prologue: GraphModule, tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """The ``dims`` of a split. Without expansions the prologue's results are narrower than in the trace."""
    try:
        shapes = [operand.shape for operand in prologue(*tensors)]
    except Exception as error:  # as operations raise that expect the expanded shape
        raise NotPointwise("what it makes of its tensors depends on its argument's shape") from error
    running = [[i - len(shape) for i, size in enumerate(shape) if size != 1] for shape in shapes]
    if any(len(dims) > 1 or math.prod(shape) == 0 for dims, shape in zip(running, shapes, strict=True)):
        raise NotPointwise("a tensor that it reads has more than one dimension")
    if len({dim for dims in running for dim in dims}) > 1:
        raise NotPointwise("its tensors run along several dimensions")
    return tuple(dims[0] if dims else None for dims in running)


def _name(node: Node) -> str:
    _, _, operation = str(node.target).partition(".")
    return operation.split(".")[0] or getattr(node.target, "__name__", "")  # operator.getitem has no overload
