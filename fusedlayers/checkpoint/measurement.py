"""What each child of a sequence keeps for its backward pass, and what it costs to run it again.

The children run once, one after the other, and each one's graph is dropped before the next runs, so that no more memory
is taken than the largest one needs. Costs are counted and not timed: processes that share a model must come to the same
plan, for in the second runs they meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .._torch import CPU_FLASH_ATTENTION, FLASH_ATTENTION, TorchDispatchMode, tree_leaves, tree_map_only
from ..utils.autograd_graph import attributes_of, nodes_of
from ..utils.module_state import unchanged
from ..utils.storages import strided_parts
from .selective import products
from .state_snapshot import attributes_restored, recomputed_region

#: How many operations a device does in a product while it moves a byte, about: 200 GFLOP/s and 13 GB/s of four cores,
#: 400 TFLOP/s (TF32) and 3 TB/s of an H100.
OPERATIONS_PER_BYTE = {"cpu": 16.0}
OPERATIONS_PER_BYTE_ELSEWHERE = 128.0


class ChildCosts(NamedTuple):
    """Bytes are of storages, each counted once."""

    #: Of its input.
    input_bytes: int
    #: What it keeps besides its input and its output.
    saved_bytes: int
    saves_input: bool
    saves_output: bool
    #: Results of its products, but for one that is its output.
    product_bytes: int
    #: Of these, what it keeps anyway.
    saved_product_bytes: int
    output_is_product: bool
    #: Of running it, in bytes moved; and of what is no product.
    cost: float
    cost_without_products: float
    #: Whether it writes over its input, and whether its output is its input, or a view of it.
    writes_input: bool = False
    returns_input: bool = False
    #: The same where the results of products are kept, if that was asked for: fused layers run plainly then.
    selective: ChildCosts | None = None


def measure(children: Sequence[nn.Module], inputs: tuple[Any, ...], *, is_selective: bool = False) -> list[ChildCosts]:
    """Run the children once, or once in each way; modules, inputs and random numbers are left as they were."""
    modules = [module for child in children for module in child.modules()]
    tensors = list(_tensors(inputs))
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    found = []
    # A run like those that run again: invertible modules hold nothing in it, and chains of them their output.
    with unchanged(modules, tensors, device), attributes_restored(modules), recomputed_region(), torch.enable_grad():
        for child in children:
            measured, output = _measured(child, inputs, is_selective=False)
            if is_selective:
                measured = measured._replace(selective=_measured(child, inputs, is_selective=True)[0])
            found.append(measured)
            inputs = (output,)
    return found


def _measured(child: nn.Module, inputs: tuple[Any, ...], *, is_selective: bool) -> tuple[ChildCosts, Any]:
    # Copies, for it may write over them, and be measured again.
    inputs = tree_map_only(Tensor, _detached_copy, inputs)
    versions = [tensor._version for tensor in _tensors(inputs)]
    costs = _Costs(is_selective)
    saved: list[Tensor] = []  # held, for the address of a storage tells it from others only while it lives

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), costs:
        output = child(*inputs)
    # Attributes of contexts bypass the hooks: an invertible chain holds its output so.
    saved += [tensor for node in nodes_of(_tensors(output)) for tensor in attributes_of(node)]
    owned = _sizes([*child.parameters(), *child.buffers()])
    of_inputs, of_output = _sizes(_tensors(inputs)), _sizes(_tensors(output))
    kept = {key: size for key, size in _sizes(saved).items() if key not in owned}
    results = _sizes(costs.results)
    inside = kept.keys() - of_inputs.keys() - of_output.keys()
    between = results.keys() - of_inputs.keys() - of_output.keys()
    return ChildCosts(
        input_bytes=sum(of_inputs.values()),
        saved_bytes=sum(kept[key] for key in inside),
        saves_input=not kept.keys().isdisjoint(of_inputs),
        saves_output=not kept.keys().isdisjoint(of_output.keys() - of_inputs.keys()),
        product_bytes=sum(results[key] for key in between),
        saved_product_bytes=sum(results[key] for key in between & inside),
        output_is_product=not results.keys().isdisjoint(of_output),
        cost=costs.products + costs.between,
        cost_without_products=costs.between,
        writes_input=versions != [tensor._version for tensor in _tensors(inputs)],
        returns_input=not of_inputs.keys().isdisjoint(of_output),
    ), output


def _detached_copy(tensor: Tensor) -> Tensor:
    """A copy without its graph, but as if it had one: a leaf could not be written to by a ReLU in place."""
    copy = tensor.detach().clone()
    return cast("Tensor", _NonLeaf.apply(torch.empty(0, requires_grad=True), [copy])) if tensor.requires_grad else copy


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "a tensor of the run in which SublinearSequential measures its children was kept by one of them; call the "
            "container once before the first step"
        )


class _Costs(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, keeps_results: bool) -> None:
        super().__init__()
        self.keeps_results = keeps_results  # which ``plan.py`` asks
        self.results: list[Tensor] = []
        self.products = self.between = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in products():
            found = list(_tensors(result))
            self.results += found
            self.products += _bytes_moved(args, result) + _operations(packet, args, kwargs or {}, result) / _per_byte(
                found
            )
        elif not getattr(func, "is_view", False):
            self.between += _bytes_moved(args, result)
        return result


def _operations(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    from torch.utils.flop_counter import flop_registry  # here, because it takes a while to import

    counted = FLASH_ATTENTION if packet is CPU_FLASH_ATTENTION else packet
    count = flop_registry.get(counted)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    # oneDNN's: twice the weight's elements for each element of a channel of the result.
    weight, output = args[1], next(_tensors(result))
    return 2.0 * weight.numel() * output.numel() / weight.shape[0]


def _per_byte(tensors: Iterable[Tensor]) -> float:
    kind = next((tensor.device.type for tensor in tensors), "cpu")
    return OPERATIONS_PER_BYTE.get(kind, OPERATIONS_PER_BYTE_ELSEWHERE)


def _bytes_moved(*trees: Any) -> float:
    return float(sum(tensor.nbytes for tensor in _tensors(trees) if tensor.layout == torch.strided))


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (part.untyped_storage() for tensor in tensors for part in strided_parts(tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
