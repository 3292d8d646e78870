"""Keep what is expensive to compute again: the results of products (convolutions, matmuls, attention).

Between two products most networks have norms, activations, residual sums and padding. These cost little, and keep as
much: of a convolution, a batch norm and a ReLU eager PyTorch keeps the convolution's result and ReLU's. Here the first
alone is kept, and the rest is computed again.

A dispatch mode in the first run puts the results by; one in the second hands them out instead of computing them. Unlike
``torch.utils.checkpoint``'s selective ones they allow a second backward pass, and a result that is written over (by a
ReLU in place, say) is copied before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    CPU_FLASH_ATTENTION,
    TorchDispatchMode,
    onednn_convolution,
    onednn_linear,
    tree_leaves,
    tree_map_only,
)


@functools.cache
def products() -> frozenset[Any]:
    """The operators whose results are worth keeping: those that torch counts the arithmetic of, the CPU's attention,
    and oneDNN's."""
    from torch.utils.flop_counter import flop_registry  # here, because it takes a while to import

    forward = {packet for packet in flop_registry if "backward" not in str(packet)}
    onednn = {operator for operator in (onednn_linear, onednn_convolution) if operator is not None}
    return frozenset({*forward, CPU_FLASH_ATTENTION, *onednn})


class SavedResults:
    """The results of the products of one call, in order, and of what they are the results."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._signatures: list[Any] = []

    def save(self, func: Any, args: Any, result: Any) -> None:
        self.results.append(tree_map_only(Tensor, _alias, result))
        self._signatures.append(_signature(func, args))

    def load(self, place: int, func: Any, args: Any) -> Any:
        if place >= len(self.results) or self._signatures[place] != _signature(func, args):
            raise RuntimeError(
                f"a function that runs again computes {func}, where it computed something else at first: it depends on "
                "what has changed since. Use recompute='all', or keep what changes in an attribute of a module"
            )
        return tree_map_only(Tensor, _alias, self.results[place])

    @contextmanager
    def saving(self) -> Iterator[None]:
        with _Saving(self):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        with _Loading(self):
            yield

    def copy_before_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Copy what ``func`` is about to write over."""
        written = {
            tensor.untyped_storage()._cdata
            for argument, value in _arguments(func, args, kwargs)
            if argument.is_write
            for tensor in tree_leaves(value)
            if isinstance(tensor, Tensor)
        }
        for i, result in enumerate(self.results):
            if any(t.untyped_storage()._cdata in written for t in tree_leaves(result) if isinstance(t, Tensor)):
                self.results[i] = tree_map_only(Tensor, torch.clone, result)


class _Selective(TorchDispatchMode):
    #: What ``plan.py`` asks: results are not to be written over.
    keeps_results = True
    supports_higher_order_operators = True

    def __init__(self, results: SavedResults) -> None:
        super().__init__()
        self._results = results
        self._position = 0


class _Saving(_Selective):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func) and self._results.results:
            self._results.copy_before_write(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "_overloadpacket", None) in products():
            self._results.save(func, args, result)
        return result


class _Loading(_Selective):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "_overloadpacket", None) in products():
            result = self._results.load(self._position, func, args)
            self._position += 1
            return result
        if _writes(func) and self._results.results:
            self._results.copy_before_write(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    return schema is not None and schema.is_mutable


def _signature(func: Any, args: Any) -> Any:
    return func, [(tensor.shape, tensor.dtype) for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif kwargs and argument.name in kwargs:
            yield argument, kwargs[argument.name]
