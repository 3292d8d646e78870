"""Save what is expensive to recompute: the results of products, which are convolutions, matmuls and attention.

Most networks have norms, activations, residual sums and padding between two products. These cost little, and save as
much: of a convolution, a batch norm and a ReLU, eager PyTorch saves the results of the convolution and of the ReLU.
Here only the first is saved, and the rest is recomputed.

A dispatch mode in the first run saves the results; one in the recomputation returns them instead of computing them. As
``torch.utils.checkpoint``'s selective modes do, but these allow a second backward pass, and a result that is about to
be overwritten (by a ReLU in place, say) is copied first.

The price is a Python call for every operator in both runs. Results are matched in order, so that a function that
computes other products in the recomputation raises.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._torch import CPU_FLASH_ATTENTION, TorchDispatchMode, tree_map_only
from ..utils.storages import tensors_in


@functools.cache
def products() -> frozenset[Any]:
    """The operators whose results are saved: those that torch counts the FLOPs of, and the CPU's attention."""
    from torch.utils.flop_counter import flop_registry  # here, because it takes a while to import

    forward = {packet for packet in flop_registry if "backward" not in str(packet)}
    return frozenset({*forward, CPU_FLASH_ATTENTION})


class SavedResults:
    """The results of the products of one call, in order, and the signatures of the operators that they came from."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._signatures: list[Any] = []

    def save(self, func: Any, args: Any, result: Any) -> None:
        self.results.append(_aliased(result))
        self._signatures.append(_signature(func, args))

    def load(self, position: int, func: Any, args: Any) -> Any:
        if position >= len(self.results) or self._signatures[position] != _signature(func, args):
            raise RuntimeError(
                f"a recomputed function computes {func}, where it computed something else at first: it depends on "
                "what has changed since. Use recompute='all', or keep what changes in an attribute of a module"
            )
        return _aliased(self.results[position])

    def copy_before_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy the results that ``func`` is about to overwrite."""
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        if not self.results or schema is None or not schema.is_mutable:
            return
        named = {**{a.name: v for a, v in zip(schema.arguments, args, strict=False)}, **(kwargs or {})}
        written = _storages([named[a.name] for a in schema.arguments if a.is_write and a.name in named])
        for i, result in enumerate(self.results):
            if not written.isdisjoint(_storages(result)):
                self.results[i] = tree_map_only(Tensor, torch.clone, result)


class SelectiveMode(TorchDispatchMode):
    """Saves the results of products, or, in a recomputation, loads them."""

    #: ``plan.py`` reads it: the results must not be overwritten.
    keeps_results = True
    supports_higher_order_operators = True

    def __init__(self, results: SavedResults, *, loads: bool) -> None:
        super().__init__()
        self._results, self._loads = results, loads
        self._position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = getattr(func, "_overloadpacket", None) in products()
        if is_product and self._loads:
            self._position += 1
            return self._results.load(self._position - 1, func, args)
        self._results.copy_before_write(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if is_product:
            self._results.save(func, args, result)
        return result


def _signature(func: Any, args: Any) -> Any:
    return func, [(tensor.shape, tensor.dtype) for tensor in tensors_in(args)]


def _aliased(result: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, result)


def _storages(tree: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(tree)}
