"""Layer, RMS and group norms in the graphs of dynamo, those that models spell out in plain operations too.

The backward pass of a norm reads its input, and that of the matmul behind it the norm's output. Both lie in memory
unless one is computed again; for the output that is one more pass over the input.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

_NORMS = {F.layer_norm, F.rms_norm, F.group_norm, torch.layer_norm, torch.rms_norm, torch.group_norm}
_ROOTS = {torch.rsqrt, "rsqrt"}
_CASTS = {"to", "float", "type_as"}
PRODUCTS = {operator.mul, torch.mul, torch.multiply, "mul", "multiply"}
_MEANS = {torch.mean, "mean"}
#: What lies between a norm's input and the root: ``rsqrt((x ** 2).mean(-1, keepdim=True) + eps)``.
_STATISTICS = {
    *_CASTS,
    *PRODUCTS,
    *_MEANS,
    *(operator.add, torch.add, "add", operator.pow, torch.pow, "pow", torch.square, "square"),
}


def norms_in(graph: Graph) -> Iterator[list[Node]]:
    """For each norm the nodes behind its input, in order; the last of them is its output."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    scales: set[Node] = set()  # parameters, and what is computed from parameters alone
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            is_scale = isinstance(tensor_of(node), torch.nn.Parameter)
        else:
            is_scale = bool(node.all_input_nodes) and scales.issuperset(node.all_input_nodes)
        if is_scale:
            scales.add(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _NORMS:
            yield [node]
        elif node.target in _ROOTS:
            yield from _spelled(node, order, scales)


def _spelled(root: Node, order: dict[Node, int], scales: Set[Node]) -> Iterator[list[Node]]:
    """The RMS norm that this root belongs to: ``x * root``, and what casts that or multiplies it by parameters."""
    (product,) = root.users if len(root.users) == 1 else (None,)
    if product is None or product.target not in PRODUCTS:
        return
    factors = [node for node in product.all_input_nodes if node is not root]
    if len(factors) != 1 or not isinstance(tensor_of(root), Tensor):
        return
    (wide,) = factors
    nodes = {root, product}
    x = wide
    if wide.target in _CASTS and len(wide.all_input_nodes) == 1:
        nodes.add(wide)
        (x,) = wide.all_input_nodes
    pending = [*root.all_input_nodes]
    while pending:
        node = pending.pop()
        if node is x or node in nodes:
            continue
        if node.target not in _STATISTICS or len(nodes) > 16:
            return
        nodes.add(node)
        pending += node.all_input_nodes
    if not any(node.target in _MEANS for node in nodes):
        return
    y = product
    while len(y.users) == 1:
        (user,) = y.users
        others = [node for node in user.all_input_nodes if node is not y]
        is_scaled = user.target in PRODUCTS and len(others) == 1 and others[0] in scales
        is_cast = user.target in _CASTS and user.args[:1] == (y,) and all(node is x for node in others)
        if not (is_scaled or is_cast):
            break
        nodes.add(user)
        y = user
    if _is_closed(nodes, y):
        yield sorted(nodes, key=order.__getitem__)


def _is_closed(nodes: Collection[Node], y: Node) -> bool:
    """Whether nobody else reads what lies within."""
    return all(user in nodes for node in nodes if node is not y for user in node.users)


def tensor_of(node: Node) -> Any:
    """What dynamo knows of a value: a tensor without numbers, or no tensor at all."""
    return node.meta.get("example_value")
