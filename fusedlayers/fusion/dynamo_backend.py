"""``torch.compile(model, backend="fusedlayers")``: Inductor, on a graph in which activations keep their outputs.

Dynamo hands over what a model calls, functions and modules alike. An activation is found as what lies between one value
and another: operations that read that value and numbers only, and that nobody else reads, through all of which
gradients flow, and which together compute a pointwise function. If that is a function of the table, in whatever words,
it is replaced by the one that keeps its output; else its operations are marked to be computed again in the backward
pass, for which its input is kept. Where an activation gates another value, as in SwiGLU, both are kept, and their
product is computed again.

Norms that matmuls read are marked too: their input is kept, and their output is computed again.

Without the mark, or the replacement, the compiler's partition keeps both sides of an activation, or of a norm, because
the next matmul needs its output in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import config
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from .._torch import InductorWrapper
from ..activations import DTYPES, KEPT_BY_TORCH, Activation
from ..ops.compiled import output_saved
from .chain import Chain, activation_of_chain, writes
from .graph_norms import PRODUCTS, norms_in, tensor_of

#: What reads an operand that must lie in memory, and keeps it for the gradient of the other.
_MATMULS = {
    *(F.linear, torch.addmm, torch.mm, torch.matmul, operator.matmul, "matmul", "mm"),
    *(F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
}
_VIEWS = {"view", "reshape", "flatten", torch.flatten, torch.reshape, "contiguous"}


def backend(module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What ``torch.compile`` calls; ``options`` are Inductor's, ``mode`` and ``options``."""
    rewrite(module.graph)
    module.recompile()
    inductor: Any = InductorWrapper(options.get("mode"), options.get("options"), None)
    # The compiler's caches know a graph by its code, which does not show the marks: without a tag it would take what
    # was compiled of the same model without them, and give to others what was compiled with them.
    marked = [str(number) for number, node in enumerate(module.graph.nodes) if "recompute" in node.meta]
    tag = f"{config.cache_key_tag}, fusedlayers computes again: {' '.join(marked)}" if marked else config.cache_key_tag
    with config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]  # torch adds it when it is imported
        compiled: Callable[..., Any] = inductor(module, example_inputs)
    return compiled


def rewrite(graph: Graph) -> None:
    """Let activations keep their outputs, and the products of gates and the outputs of norms be computed again."""
    for norm in norms_in(graph):
        y = norm[-1]
        readers = [user for node in _views(y) for user in node.users]
        # Autocast would keep a copy of y in its dtype all the same.
        dtypes = {getattr(tensor_of(reader), "dtype", None) for reader in readers if reader.target in _MATMULS}
        is_cast = dtypes != {getattr(tensor_of(y), "dtype", None)}
        is_plain = not is_cast and not any(map(writes, readers))
        if is_plain and all(map(_needs_gradient, norm)) and _is_kept(y):
            _compute_again([*norm, *_views(y)[1:]])
    for region in [*_regions(graph)]:
        y = region.nodes[-1]
        product = _product(y)
        if any(writes(user) for node in _views(y) for user in node.users):
            continue  # what is kept must stay
        if product is not None:
            _compute_again([*region.nodes, *_views(product)])
        elif not _is_kept(y):
            continue  # the compiler computes it again if that is worth it
        elif region.keeps_output:
            _replace(graph, region)
        else:
            _compute_again([*region.nodes, *_views(y)[1:]])


class Region(NamedTuple):
    """What lies between z and y, which is an activation; y is the last of the nodes."""

    z: Node
    nodes: list[Node]
    activation: Activation

    @property
    def keeps_output(self) -> bool:
        """Whether there is an activation of the table to put in its place."""
        row, dtype = self.activation.row, tensor_of(self.z).dtype
        is_of_table = row is not None and not row.is_custom and not self.activation.is_traced
        return is_of_table and self.activation.output_refusal(dtype) is None


def _regions(graph: Graph) -> Iterator[Region]:
    """The activations in a graph whose derivatives torch does not have from their outputs anyway."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    inside: set[Node] = set()
    for z in graph.nodes:
        if z in inside or z.op in ("placeholder", "get_attr", "output") or not _needs_gradient(z):
            continue
        nodes = _between(z, order)
        if not nodes:
            continue
        activation = activation_of_chain(Chain(z, nodes), tensor_of(z).dtype)
        if activation is not None and (activation.row is None or activation.row.name not in KEPT_BY_TORCH):
            inside.update(nodes)
            yield Region(z, nodes, activation)


def _between(z: Node, order: dict[Node, int]) -> list[Node]:
    """The nodes that read z and numbers only, up to the last one through which all of that goes; none if z, or what
    comes before that one, is read by others. What has no gradient is another: it may be ``no_grad`` that stops it,
    which is none of the nodes."""
    inside, pending = {z}, {*z.users}
    while pending:
        node = min(pending, key=order.__getitem__)
        pending.remove(node)
        is_new = node.op.startswith("call_") and node.target is not output_saved
        if is_new and inside.issuperset(node.all_input_nodes) and _is_like(node, z) and _needs_gradient(node):
            inside.add(node)
            pending.update(user for user in node.users if user not in inside)
    if any(writes(node) for node in inside - {z}) and not _is_alone_in_memory(z):
        return []
    nodes = sorted(inside - {z}, key=order.__getitem__)
    while nodes:
        *before, _ = nodes
        if all(user in nodes or _is_number(user) for node in (z, *before) for user in node.users):
            return nodes
        nodes = before
    return []


def _is_alone_in_memory(z: Node) -> bool:
    """Whether it is no view, by which what is written would show elsewhere."""
    tensors = [tensor_of(node) for node in (z, *z.all_input_nodes)]
    storages = [t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor)]
    return storages.count(storages[0]) == 1


def _product(y: Node) -> Node | None:
    """The product of an activation with another value, if matmuls alone read that; or None."""
    if len(y.users) != 1:
        return None
    (product,) = y.users
    if product.target not in PRODUCTS or len(product.all_input_nodes) != 2 or not _is_like(product, y):
        return None
    if not all(_is_like(node, y) and _needs_gradient(node) for node in product.all_input_nodes):
        return None
    readers = {user for node in _views(product) for user in node.users} - {*_views(product)}
    return product if readers and all(reader.target in _MATMULS for reader in readers) else None


def _is_kept(y: Node) -> bool:
    """Whether a matmul, or a convolution, reads it, which keeps it."""
    return any(user.target in _MATMULS for node in _views(y) for user in node.users)


def _views(y: Node) -> list[Node]:
    """A node, and views of it."""
    nodes = [y]
    for node in nodes:
        nodes += [user for user in node.users if user.target in _VIEWS and user not in nodes]
    return nodes


def _replace(graph: Graph, region: Region) -> None:
    y = region.nodes[-1]
    with graph.inserting_after(y):
        arguments = region.z, region.activation.name, tuple(region.activation.parameters.items())
        new = graph.call_function(output_saved, arguments)
    new.meta = {**y.meta}
    y.replace_all_uses_with(new)
    for node in reversed(region.nodes):
        graph.erase_node(node)


_count = 0


def _compute_again(nodes: Sequence[Node]) -> None:
    """Mark nodes as ``torch.utils.checkpoint`` marks what it is called for."""
    global _count
    _count += 1
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _count


def _is_number(node: Node) -> bool:
    return not isinstance(tensor_of(node), Tensor) and isinstance(tensor_of(node), int | torch.SymInt)


def _needs_gradient(node: Node) -> bool:
    tensor = tensor_of(node)
    return isinstance(tensor, Tensor) and tensor.requires_grad and tensor.dtype in DTYPES


def _is_like(node: Node, other: Node) -> bool:
    one, two = tensor_of(node), tensor_of(other)
    return isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape and one.dtype is two.dtype
