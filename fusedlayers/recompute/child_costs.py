"""Measure what each child of a sequence saves for its backward pass, and what its recomputation costs.

The children run once, one after the other. Each one's graph is dropped before the next runs, so that the measurement
takes no more memory than the largest child needs.

Costs are counted and not timed: processes that share a model must come to the same plan, for they meet in the
recomputations. A product (convolution, matmul, attention) costs its operations and the bytes that it moves, another
operator its bytes.

Not counted is what operators allocate for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .._torch import CPU_FLASH_ATTENTION, FLASH_ATTENTION, TorchDispatchMode, own_hook, packet_of, tree_map_only
from ..utils.autograd_graph import attributes_of, nodes_of
from ..utils.module_state import unchanged
from ..utils.storages import sizes_of, tensors_in
from .recompute import products

#: How many operations a device does in a product while it moves a byte, about: 200 GFLOP/s and 13 GB/s of four cores,
#: 400 TFLOP/s (TF32) and 3 TB/s of an H100, as which all other devices count.
OPERATIONS_PER_BYTE = {"cpu": 16.0, "cuda": 128.0}


class ChildCosts(NamedTuple):
    """The bytes that a child saves, of storages that count once, and its cost to run, in bytes moved.

    Attributes:
        input_bytes: of its input.
        saved_bytes: what it saves besides its input and its output.
        saves_input, saves_output: whether it saves these.
        product_bytes: results of its products, except one that is its output.
        saved_product_bytes: those of these that it saves anyway.
        output_is_product: whether its output is the result of a product.
        cost: of running it.
        cost_without_products: of running what is no product.
        writes_input: whether it modifies its input in place.
        returns_input: whether its output is its input, or a view of it.
        writes_product: whether it modifies the result of a product in place.
        selective: the same where results of products are saved, if that was asked for: fused layers run layer by layer
            then.
    """

    input_bytes: int
    saved_bytes: int
    saves_input: bool
    saves_output: bool
    product_bytes: int
    saved_product_bytes: int
    output_is_product: bool
    cost: float
    cost_without_products: float
    writes_input: bool = False
    returns_input: bool = False
    writes_product: bool = False
    selective: ChildCosts | None = None


def measure(children: Sequence[nn.Module], inputs: tuple[Any, ...], *, is_selective: bool = False) -> list[ChildCosts]:
    """Run each child once, or once in each way; buffers, inputs and random numbers are put back as they were."""
    modules = [module for child in children for module in child.modules()]
    found = []
    with unchanged(modules, tensors_in(inputs)), torch.enable_grad():
        for child in children:
            costs, output = _measured(child, inputs)
            if is_selective:
                costs = costs._replace(selective=_measured(child, inputs, is_selective=True)[0])
            found.append(costs)
            inputs = (output,)
    torch.clear_autocast_cache()  # else the run that follows casts no weights, and its recomputation does
    return found


def _measured(child: nn.Module, inputs: tuple[Any, ...], *, is_selective: bool = False) -> tuple[ChildCosts, Any]:
    # Copies, for the child may overwrite them, and be measured once more.
    inputs = tree_map_only(Tensor, _detached_copy, inputs)
    versions = [tensor._version for tensor in tensors_in(inputs)]
    costs = _Costs(is_selective)
    saved: list[Tensor] = []  # alive until the end, for only then are the addresses of storages unique

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(own_hook(None, pack), lambda tensor: tensor), costs:
        output = child(*inputs)
    # Attributes of autograd contexts bypass the hooks: an invertible chain holds its output so.
    saved += [tensor for node in nodes_of(tensors_in(output)) for tensor in attributes_of(node)]
    owned = sizes_of([*child.parameters(), *child.buffers()])
    of_inputs, of_output = sizes_of(tensors_in(inputs)), sizes_of(tensors_in(output))
    of_saved = {key: size for key, size in sizes_of(saved).items() if key not in owned}
    of_products = sizes_of(result for result, _ in costs.results)
    edges = of_inputs.keys() | of_output.keys()
    return ChildCosts(
        input_bytes=sum(of_inputs.values()),
        saved_bytes=sum(of_saved[key] for key in of_saved.keys() - edges),
        saves_input=not of_saved.keys().isdisjoint(of_inputs),
        saves_output=not of_saved.keys().isdisjoint(of_output.keys() - of_inputs.keys()),
        product_bytes=sum(of_products[key] for key in of_products.keys() - edges),
        saved_product_bytes=sum(of_products[key] for key in (of_products.keys() & of_saved.keys()) - edges),
        output_is_product=not of_products.keys().isdisjoint(of_output),
        cost=costs.of_products + costs.of_others,
        cost_without_products=costs.of_others,
        writes_input=versions != [tensor._version for tensor in tensors_in(inputs)],
        returns_input=not of_inputs.keys().isdisjoint(of_output),
        writes_product=any(result._version != version for result, version in costs.results),
    ), output


def _detached_copy(tensor: Tensor) -> Tensor:
    """A copy without its graph, which is no leaf: a ReLU in place could not write to a leaf."""
    if not tensor.requires_grad:
        return tensor.detach().clone()
    leaf = tensor.detach().requires_grad_()
    leaf.register_hook(_refuse)
    return leaf.clone()


def _refuse(gradient: Tensor) -> NoReturn:
    raise RuntimeError(
        "a child of SublinearSequential kept a tensor of the run in which the container measures its children; call "
        "the container once before the first step"
    )


class _Costs(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, keeps_results: bool) -> None:
        super().__init__()
        self.keeps_results = keeps_results  # ``calls/tracers.py`` reads it
        #: Of products, with their versions.
        self.results: list[tuple[Tensor, int]] = []
        self.of_products = self.of_others = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = packet_of(func)
        if packet in products():
            found = list(tensors_in(result))
            self.results += [(tensor, tensor._version) for tensor in found]
            per_byte = OPERATIONS_PER_BYTE["cpu" if not found or found[0].is_cpu else "cuda"]
            self.of_products += _bytes_moved(args, result) + _operations(packet, args, kwargs or {}, result) / per_byte
        elif not getattr(func, "is_view", False):
            self.of_others += _bytes_moved(args, result)
        return result


def _operations(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    from torch.utils.flop_counter import flop_registry  # here, because it takes a while to import

    counted = FLASH_ATTENTION if packet is CPU_FLASH_ATTENTION else packet
    return float(flop_registry[counted](*args, **kwargs, out_val=result))


def _bytes_moved(*trees: Any) -> float:
    return float(sum(tensor.nbytes for tensor in tensors_in(trees) if tensor.layout == torch.strided))
